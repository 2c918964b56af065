"""Rules of the pool that random operations cannot state: callbacks, several pools, metrics, words of an event."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import random
from typing import Any

import numpy as np
import pytest

from blockpool.pool import (
    AllBlocksCleared,
    AlreadyHashedError,
    BlockHashToBlockMap,
    BlockPool,
    BlockRemoved,
    BlockStored,
    BoundaryError,
    CachingDisabledError,
    DigestError,
    FenceError,
    ForeignBlockError,
    GroupError,
    KVCacheBlock,
    MaskError,
    NoFreeBlocksError,
    NullBlockError,
    PoolBusyError,
    ReleaseError,
    StorePayload,
    UnknownBlockError,
)


def digest(i: int) -> bytes:
    return hashlib.sha256(i.to_bytes(4, "big")).digest()


def chain(*numbers: int) -> bytes:
    return b"".join(map(digest, numbers))


def snapshot(pool: BlockPool) -> Any:
    state = pool.dump()
    return state, pool.get_usage_parts(), pool.counters


class TestDoor:
    def test_ids_handles_and_arrays_are_all_taken(self) -> None:
        pool = BlockPool(10)
        a = pool.get_new_blocks(4)
        pool.touch([pool.blocks[a[0]], a[1]])
        pool.touch(tuple(a))
        pool.touch(np.array(a, dtype=np.int64))
        pool.touch(np.array(a, dtype=np.int32)[::2])
        pool.touch([np.int64(a[0]), np.int32(a[1])])
        pool.touch(iter(a))
        assert [pool.blocks[b].ref_cnt for b in a] == [7, 6, 5, 4]

    @pytest.mark.parametrize("bad", [-1, 10, 2**31, 2**32 + 1, 2**63, -(2**70), "1", None, 1.0, [1]])
    @pytest.mark.parametrize("wrap", [list, tuple, iter])
    def test_what_is_not_a_block_is_refused_by_every_call(self, bad: Any, wrap: Any) -> None:
        pool = BlockPool(10)
        pool.get_new_blocks(3)
        before = snapshot(pool)
        for call in (
            lambda: pool.touch(wrap([1, bad])),
            lambda: pool.free_blocks(wrap([1, bad])),
            lambda: pool.free_blocks(wrap([1, bad]), after=3),
            lambda: pool.evict_blocks(wrap([1, bad])),
            lambda: pool.unpin_blocks(wrap([1, bad]), print),
            lambda: pool.is_block_writable(bad),
            lambda: pool.cache_full_blocks([1, bad], chain(1, 2), 0, 2, 16, 0),
            lambda: pool.cache_partial_block(bad, digest(1), 16, 0, 16),
            lambda: pool.move_block_hashes(1, bad),
        ):
            with pytest.raises(UnknownBlockError):
                call()
            assert snapshot(pool) == before

    def test_numbers_may_be_of_any_integer_kind_and_nothing_else(self) -> None:
        pool = BlockPool(10)
        assert pool.get_new_blocks(np.int64(2)) == [1, 2]
        pool.free_blocks([1, 2], after=np.int32(3))
        pool.advance(np.int64(3))
        before = snapshot(pool)
        for bad in (1.0, "1", None, [1]):
            with pytest.raises(NoFreeBlocksError):
                pool.get_new_blocks(bad)
            with pytest.raises(FenceError):
                pool.advance(bad)
            assert snapshot(pool) == before

    def test_a_foreign_handle_is_refused_where_only_own_blocks_make_sense(self) -> None:
        pool, other = BlockPool(4), BlockPool(4)
        mine, theirs = pool.get_new_blocks(1)[0], other.get_new_blocks(1)[0]
        for call in (
            lambda: pool.touch([mine, other.blocks[theirs]]),
            lambda: pool.unpin_blocks([mine, other.blocks[theirs]], print),
            lambda: pool.evict_blocks([other.blocks[theirs]]),
        ):
            with pytest.raises(ForeignBlockError):
                call()
        assert pool.blocks[mine].ref_cnt == other.blocks[theirs].ref_cnt == 1

    def test_equality_of_handles_is_pool_and_id(self) -> None:
        pool, other = BlockPool(4), BlockPool(4)
        assert pool.blocks[1] == pool.blocks[1]
        assert hash(pool.blocks[1]) == hash(pool.blocks[1])
        assert pool.blocks[1] != pool.blocks[2]
        assert pool.blocks[1] != other.blocks[1]
        assert pool.blocks[1] != 1
        assert pool.blocks[-1].block_id == 3
        assert [b.block_id for b in pool.blocks] == [0, 1, 2, 3]
        assert pool.blocks[1].pool is pool
        with pytest.raises(IndexError):
            pool.blocks[4]
        assert "block_id=1" in repr(pool.blocks[1])

    def test_a_pool_of_nothing_but_the_null_block(self) -> None:
        pool = BlockPool(1)
        assert pool.get_usage() == 0.0
        assert pool.get_num_free_blocks() == 0
        assert pool.get_new_blocks(0) == []
        assert pool.reset_prefix_cache()
        assert pool.null_block.is_null
        assert pool.audit() == []

    @pytest.mark.parametrize(
        "options",
        [
            {"num_gpu_blocks": 0},
            {"num_gpu_blocks": -1},
            {"num_gpu_blocks": 2**40},
            {"hash_block_size": 0},
            {"digest_size": 7},
            {"digest_size": 64},
            {"digest_size": 0},
            {"events": "on"},
        ],
    )
    def test_a_pool_that_cannot_be_is_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"must be"):
            BlockPool(**{"num_gpu_blocks": 4, **options})


class TestPoolsTogether:
    def test_handles_of_two_pools_return_to_their_own(self) -> None:
        attention, state = BlockPool(6), BlockPool(6)
        a, s = attention.get_new_blocks(2), state.get_new_blocks(2)
        assert a == s  # the same ids
        mixed = [attention.blocks[a[0]], state.blocks[s[1]], a[1], state.blocks[s[0]]]
        attention.free_blocks(mixed)
        assert attention.get_num_free_blocks() == state.get_num_free_blocks() == 5
        assert attention.free_block_queue.get_all_free_blocks()[:2] == [a[0], a[1]]
        assert state.free_block_queue.get_all_free_blocks()[:2] == [s[1], s[0]]

    @pytest.mark.parametrize("after", [None, 5])
    def test_all_pools_are_checked_before_any_changes(self, after: int | None) -> None:
        pools = [BlockPool(6) for _ in range(3)]
        blocks = [pool.blocks[pool.get_new_blocks(1)[0]] for pool in pools]
        before = [snapshot(pool) for pool in pools]
        for wrong in (
            [*blocks, blocks[2]],
            [blocks[0], blocks[1], blocks[1], blocks[2]],
            [*blocks, pools[1].blocks[4]],
        ):
            with pytest.raises(ReleaseError):
                pools[0].free_blocks(wrong, after=after)
            assert [snapshot(pool) for pool in pools] == before


class TestFences:
    def test_a_deferred_block_is_used_and_can_be_hit(self) -> None:
        pool = BlockPool(5)
        (b,) = pool.get_new_blocks(1)
        pool.cache_full_blocks([b], chain(1), 0, 1, 16, 0)
        pool.free_blocks([b], after=7)
        assert pool.get_usage_parts().deferred == 1
        assert pool.next_fence == 7
        pool.touch(pool.lookup_run(chain(1), 0, 1, 1, 0))
        assert pool.get_usage_parts().deferred == 0
        with pytest.raises(ReleaseError):
            pool.free_blocks([b, b])
        pool.advance(7)
        assert pool.blocks[b].ref_cnt == 1
        assert pool.next_fence is None
        pool.free_blocks([b], after=7)  # reached already
        assert pool.get_num_free_blocks() == 4

    def test_a_reference_that_waits_cannot_be_given_back_again(self) -> None:
        pool = BlockPool(5)
        a, b = pool.get_new_blocks(2)
        pool.free_blocks([a], after=3)
        for blocks in ([a], [a, b], [b, a], (a,), [pool.blocks[a]]):
            for after in (None, 5):
                with pytest.raises(ReleaseError):
                    pool.free_blocks(blocks, after=after)
        assert [pool.blocks[i].ref_cnt for i in (a, b)] == [1, 1]
        pool.advance(3)
        assert pool.free_block_queue.get_all_free_blocks() == [1, 3, 4]

    def test_release_order_is_call_by_call(self) -> None:
        def play(deferred: bool) -> list[int]:
            pool = BlockPool(7)
            a, b = pool.get_new_blocks(3), pool.get_new_blocks(3)
            pool.cache_full_blocks(a, chain(1, 2, 3), 0, 3, 16, 0)
            for blocks in (a[::-1], b[::-1]):
                pool.free_blocks(blocks, after=1 if deferred else None)
            pool.advance(1)
            return pool.free_block_queue.get_all_free_blocks()

        assert play(True) == play(False) == [6, 5, 4, 3, 2, 1]

    def test_negative_fences_are_refused(self) -> None:
        pool = BlockPool(5)
        blocks = pool.get_new_blocks(1)
        with pytest.raises(FenceError):
            pool.free_blocks(blocks, after=-1)
        with pytest.raises(FenceError):
            pool.advance(-1)
        assert pool.blocks[blocks[0]].ref_cnt == 1


class TestReuseCallbacks:
    def test_it_fires_once_before_the_hash_goes(self) -> None:
        pool = BlockPool(4)
        blocks = pool.get_new_blocks(3)
        pool.cache_full_blocks(blocks, chain(1, 2, 3), 0, 3, 16, 0)
        seen: list[tuple[int, bool]] = []
        pool.unpin_blocks([blocks[1]], lambda b: seen.append((b, pool.blocks[b].block_hash is not None)))
        assert pool.get_num_free_blocks() == 1
        pool.touch([blocks[1]])  # a hit in between leaves it armed
        pool.free_blocks([blocks[1]])
        assert seen == []
        assert pool.get_new_blocks(1) == [blocks[1]]
        assert seen == [(blocks[1], True)]
        pool.free_blocks([blocks[1]])
        pool.get_new_blocks(1)
        assert len(seen) == 1

    def test_every_reader_is_told_and_done_disarms_the_rest(self) -> None:
        pool = BlockPool(4)
        (b,) = pool.get_new_blocks(1)
        pool.touch([b, b])
        told: list[str] = []
        pool.unpin_blocks([b], lambda _: told.append("one"))
        second = pool.unpin_blocks([b], lambda _: told.append("two"))
        pool.unpin_blocks([b], lambda _: (told.append("three"), second.done()))
        second.done()
        second.done()
        pool.get_new_blocks(3)
        assert told == ["one", "three"]
        assert pool.audit() == []

    def test_one_call_arms_a_block_once(self) -> None:
        pool = BlockPool(4)
        (b,) = pool.get_new_blocks(1)
        pool.touch([b])
        told: list[int] = []
        handle = pool.unpin_blocks([b, b], told.append)
        assert pool.dump()["watchers"] == [{"block": b, "incarnation": 1, "callbacks": 1}]
        handle.done()
        assert pool.dump()["watchers"] == []
        pool.get_new_blocks(3)
        assert told == []

    def test_one_block_by_itself_fires_too(self) -> None:
        """The short way for one plain block knows of callbacks."""
        pool = BlockPool(2)
        told: list[int] = []
        pool.unpin_blocks(pool.get_new_blocks(1), told.append)
        pool.get_new_blocks(1)
        assert told == [1]

    def test_done_from_within_a_callback_spares_a_later_one(self) -> None:
        pool = BlockPool(4)
        a, b = pool.get_new_blocks(2)
        told: list[int] = []
        later = pool.unpin_blocks([b], told.append)
        pool.unpin_blocks([a], lambda block: (told.append(block), later.done()))
        pool.get_new_blocks(1)
        pool.free_blocks([3])
        assert told == []
        pool.get_new_blocks(3)
        assert told == [b, a]

    def test_reset_fires_what_is_armed(self) -> None:
        pool = BlockPool(4)
        blocks = pool.get_new_blocks(2)
        told: list[int] = []
        pool.unpin_blocks(blocks, told.append)
        assert pool.reset_prefix_cache()
        assert told == blocks
        pool.get_new_blocks(3)
        assert told == blocks

    def test_what_it_raises_comes_after_the_operation(self) -> None:
        pool = BlockPool(4)
        a, b = pool.get_new_blocks(2)

        def fail(block: int) -> None:
            raise KeyError(block)

        pool.unpin_blocks([a], fail)
        with pytest.raises(KeyError) as caught:
            pool.get_new_blocks(2)
        assert "handed out [3, 1]" in caught.value.__notes__[0]
        assert [pool.blocks[i].ref_cnt for i in (1, 2, 3)] == [1, 1, 1]
        pool.unpin_blocks([a, b], fail)
        with pytest.raises(ExceptionGroup):
            pool.get_new_blocks(2)
        assert pool.audit() == []

    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
    def test_even_an_interrupt_comes_after_the_operation(self, error: type[BaseException]) -> None:
        def stop(block: int) -> None:
            raise error

        for act in (lambda pool: pool.get_new_blocks(3), lambda pool: pool.reset_prefix_cache()):
            pool = BlockPool(4)
            pool.unpin_blocks(pool.get_new_blocks(3), stop)
            with pytest.raises(BaseExceptionGroup) as caught:
                act(pool)
            assert len(caught.value.exceptions) == 3
            assert pool.audit() == []
            pool.evict_blocks([1])  # not refused as if the callback still ran

    def test_what_is_no_callback_is_refused_at_once(self) -> None:
        pool = BlockPool(4)
        blocks = pool.get_new_blocks(1)
        with pytest.raises(TypeError):
            pool.unpin_blocks(blocks, 5)  # type: ignore[arg-type]
        assert pool.blocks[blocks[0]].ref_cnt == 1

    def test_it_may_call_nothing_of_its_pool(self) -> None:
        for call in (
            lambda: pool.get_new_blocks(1),
            lambda: pool.free_blocks([3]),
            lambda: pool.touch([3]),
            lambda: pool.evict_blocks([3]),
            lambda: pool.advance(1),
            lambda: pool.reset_prefix_cache(),
            lambda: pool.unpin_blocks([3], print),
            lambda: pool.move_block_hashes(2, 3),
            lambda: pool.cache_partial_block(3, digest(1), 16, 0, 16),
        ):
            pool = BlockPool(4)
            pool.get_new_blocks(3)
            pool.unpin_blocks([1], lambda _, call=call: call())
            with pytest.raises(PoolBusyError):
                pool.get_new_blocks(1)
            assert pool.audit() == []

    def test_the_null_block_and_free_blocks_are_refused(self) -> None:
        pool = BlockPool(4)
        (a,) = pool.get_new_blocks(1)
        for blocks, error in (([a, 0], NullBlockError), ([a, 2], ReleaseError), ([a, a], ReleaseError)):
            with pytest.raises(error):
                pool.unpin_blocks(blocks, print)
            assert pool.blocks[a].ref_cnt == 1
        assert pool.dump()["watchers"] == []


class TestRegistering:
    def test_calls_that_contradict_themselves_change_nothing(self) -> None:
        pool = BlockPool(8, hash_block_size=4)
        blocks = pool.get_new_blocks(4)
        pool.cache_full_blocks(blocks, chain(1, 2), 0, 1, 8, 0)
        before = snapshot(pool)
        full, partial = pool.cache_full_blocks, pool.cache_partial_block
        for call, error in (
            (lambda: full(blocks, chain(1, 2), 0, 1, 8, 0), AlreadyHashedError),
            (lambda: full([0, blocks[0]], chain(1, 2, 3, 4), 1, 2, 8, 0), AlreadyHashedError),
            (lambda: full([blocks[1], blocks[1]], chain(1, 2, 3, 4), 0, 2, 8, 0), AlreadyHashedError),
            (lambda: full(blocks, chain(1, 2), 0, 2, 8, 0), DigestError),
            (lambda: full(blocks, b"x" * 33, 0, 0, 8, 0), DigestError),
            (lambda: full(blocks, chain(1, 2), 0, 1, 6, 0), BoundaryError),
            (lambda: full(blocks, chain(1, 2), 0, 1, 0, 0), BoundaryError),
            (lambda: full(blocks, chain(1, 2), 1, 0, 8, 0), BoundaryError),
            (lambda: full(blocks, chain(1, 2), -1, 1, 8, 0), BoundaryError),
            (lambda: full(blocks, chain(*range(9)), 0, 5, 8, 0), BoundaryError),
            (lambda: full(blocks[1:], chain(1, 2), 0, 1, 8, 0, block_mask=[True, True]), MaskError),
            (lambda: full(blocks[1:], chain(1, 2), 0, 1, 8, -1), GroupError),
            (lambda: full(blocks[1:], chain(1, 2), 0, 1, 8, 2**23), GroupError),
            (lambda: partial(blocks[1], digest(1), 3, 0, 8), BoundaryError),
            (lambda: partial(blocks[1], digest(1), 0, 0, 8), BoundaryError),
            (lambda: partial(blocks[1], digest(1), 4, 0, 6), BoundaryError),
            (lambda: partial(blocks[1], b"short", 4, 0, 8), DigestError),
            (lambda: pool.move_block_hashes(blocks[1], blocks[0]), AlreadyHashedError),
            (lambda: pool.move_block_hashes(0, blocks[1]), NullBlockError),
            (lambda: pool.lookup_run(chain(1), 0, 2, 1, 0), DigestError),
            (lambda: pool.lookup_run(chain(1), 0, 1, 0, 0), DigestError),
            (lambda: pool.lookup_run(chain(1), -1, 1, 1, 0), DigestError),
            (lambda: pool.get_cached_block(b"short", [0]), DigestError),
        ):
            with pytest.raises(error):
                call()
            assert snapshot(pool) == before

    @pytest.mark.parametrize("huge", [2**31, 16 * 2**58, 2**63, 2**70, -(2**70)])
    def test_numbers_beyond_every_limit_are_named_and_change_nothing(self, huge: int) -> None:
        pool = BlockPool(8)
        blocks = pool.get_new_blocks(2)
        before = snapshot(pool)
        raw = chain(1, 2)
        for call, error in (
            (lambda: pool.get_new_blocks(huge), NoFreeBlocksError),
            (lambda: pool.cache_full_blocks(blocks, raw, 0, 2, huge, 0), BoundaryError),
            (lambda: pool.cache_full_blocks(blocks, raw, 0, 2, 16, huge), GroupError),
            (lambda: pool.cache_full_blocks(blocks, raw, huge, huge, 16, 0), BoundaryError),
            (lambda: pool.cache_partial_block(blocks[0], digest(1), 16 * huge, 0, 16), BoundaryError),
            (lambda: pool.cache_partial_block(blocks[0], digest(1), 16, 0, huge), BoundaryError),
            (lambda: pool.lookup_run(raw, huge, 2, 1, 0), DigestError),
            (lambda: pool.lookup_run(raw, 0, huge, 1, 0), DigestError),
            (lambda: pool.lookup_run(raw, 0, 2, huge, 0), DigestError),
            (lambda: pool.lookup_run(raw, 0, 2, 1, huge), GroupError),
            (lambda: pool.get_cached_block(digest(1), [huge]), GroupError),
            (lambda: pool.free_block_queue.append(huge), UnknownBlockError),
            (lambda: pool.free_block_queue.popleft_n(huge), NoFreeBlocksError),
            (lambda: pool.cached_block_hash_to_block.insert(digest(1) + bytes(4), huge), UnknownBlockError),
            (lambda: KVCacheBlock(pool, huge), UnknownBlockError),
            (lambda: BlockPool(huge), ValueError),
            (lambda: BlockPool(4, digest_size=huge), DigestError),
            (lambda: BlockPool(4, hash_block_size=huge), BoundaryError),
        ):
            with pytest.raises(error):
                call()
            assert snapshot(pool) == before
        pool.cache_full_blocks(blocks, raw, 0, 2, 16, 0)
        assert huge not in pool.free_block_queue

    def test_a_mask_is_anything_that_is_true_or_not(self) -> None:
        for mask in ((1, 0), np.array([True, False]), [True, False]):
            pool = BlockPool(8)
            blocks = pool.get_new_blocks(2)
            pool.cache_full_blocks(blocks, chain(1, 2), 0, 2, 16, 0, block_mask=mask)
            assert [pool.blocks[b].block_hash is not None for b in blocks] == [True, False]

    def test_with_caching_off_there_are_no_hashes(self) -> None:
        pool = BlockPool(4, enable_caching=False)
        blocks = pool.get_new_blocks(2)
        with pytest.raises(CachingDisabledError):
            pool.cache_full_blocks(blocks, chain(1), 0, 1, 16, 0)
        pool.free_blocks(blocks)
        assert pool.free_block_queue.get_all_free_blocks() == [1, 2, 3]
        assert pool.get_cached_block(digest(1), [0]) is None

    def test_a_block_for_every_group_or_none(self) -> None:
        pool = BlockPool(6)
        a, b = pool.get_new_blocks(2)
        pool.cache_full_blocks([a], chain(1), 0, 1, 16, 3)
        assert pool.get_cached_block(digest(1), [3]) == [a]
        assert pool.get_cached_block(digest(1), [3, 5]) is None
        pool.cache_full_blocks([b], chain(1), 0, 1, 16, 5)
        assert pool.get_cached_block(digest(1), [5, 3]) == [b, a]
        assert pool.get_cached_block(digest(1), []) == []

    def test_many_copies_of_one_key_cost_no_more_than_few(self) -> None:
        """Every registration and removal is O(1) in the number of copies: counted in table places looked at."""
        pool = BlockPool(20_001)
        blocks = pool.get_new_blocks(20_000)
        for b in blocks:
            pool.cache_full_blocks([b], chain(1), 0, 1, 16, 0)
        assert len(pool.cached_block_hash_to_block) == 1
        assert sum(1 for slot in pool.index.slots if slot) == 1
        pool.free_blocks(blocks[::-1])
        order = pool.free_block_queue.get_all_free_blocks()
        for b in order[:-1]:
            assert pool.get_new_blocks(1) == [b]
            pool.free_blocks([b])
            pool.touch([b])
        assert pool.lookup_run(chain(1), 0, 1, 1, 0) == [order[-1]]

    def test_digest_widths(self) -> None:
        for width in (8, 16, 24, 32):
            pool = BlockPool(5, digest_size=width)
            blocks = pool.get_new_blocks(3)
            raw = b"".join(bytes([i]) * width for i in (1, 2, 3))
            pool.cache_full_blocks(blocks, raw, 0, 3, 16, 1)
            assert pool.lookup_run(raw, 0, 3, 1, 1) == blocks
            assert pool.blocks[2].block_hash == bytes([2]) * width + (1).to_bytes(4, "big")
            assert pool.blocks[2].block_hash_num_tokens == 32
            assert pool.audit() == []

    def test_poor_digests_do_not_crowd_the_table(self) -> None:
        """Counters instead of hashes, in any byte order or place, stay findable in about one step."""
        for make in (
            lambda i: i.to_bytes(32, "big"),
            lambda i: i.to_bytes(32, "little"),
            lambda i: i.to_bytes(4, "big") * 8,
            lambda i: b"\xff" * 20 + i.to_bytes(12, "big"),
            lambda i: i.to_bytes(4, "little") + b"\x00" * 24 + i.to_bytes(4, "little"),
        ):
            pool = BlockPool(4001)
            blocks = pool.get_new_blocks(4000)
            raw = b"".join(map(make, range(4000)))
            pool.cache_full_blocks(blocks, raw, 0, 4000, 16, 0)
            slots = list(pool.index.slots)
            away = [(i - (slot >> 32)) & pool.index.mask for i, slot in enumerate(slots) if slot]
            assert sum(away) / len(away) < 2
            assert pool.lookup_run(raw, 0, 4000, 1, 0) == blocks


class TestEvents:
    def payload(self) -> StorePayload:
        return StorePayload(
            token_ids=list(range(100, 164)),
            extra_keys=lambda start, end: ("salt",) if start == 0 else None,
            lora_id=3,
            lora_name="x",
            session_id="s",
        )

    def test_a_range_is_split_where_blocks_are_skipped_or_known(self) -> None:
        pool = BlockPool(20, hash_block_size=4, events="first_last")
        b = pool.get_new_blocks(8)
        pool.cache_full_blocks([b[7]], chain(0, 1), 0, 1, 8, 0, payload=self.payload())
        pool.take_events()
        table = [b[0], b[1], 0, b[2], b[3], b[4], b[5]]
        mask = [True, True, True, True, False, True, True]
        pool.cache_full_blocks(table, chain(*range(14)), 0, 7, 8, 0, block_mask=mask, payload=self.payload())
        events = pool.take_events()
        assert [e.block_hashes for e in events] == [[digest(3)], [digest(7)], [digest(11), digest(13)]]
        assert [e.parent_block_hash for e in events] == [digest(1), digest(5), digest(9)]
        assert [e.token_ids for e in events] == [
            list(range(108, 116)),
            list(range(124, 132)),
            list(range(140, 156)),
        ]
        assert {(e.block_size, e.lora_id, e.lora_name, e.session_id, e.medium, e.group_idx) for e in events} == {
            (8, 3, "x", "s", "GPU", 0)
        }
        assert [e.extra_keys for e in events] == [None, None, None]

    def test_extra_keys_one_per_hash_or_none_at_all(self) -> None:
        pool = BlockPool(20, hash_block_size=8, events="first_last")
        b = pool.get_new_blocks(2)
        pool.cache_full_blocks(b, chain(1, 2), 0, 2, 8, 0, payload=self.payload())
        (event,) = pool.take_events()
        assert isinstance(event, BlockStored)
        assert event.extra_keys == [("salt",), None]
        assert event.parent_block_hash is None

    def test_promotion_announces_the_removal_first(self) -> None:
        pool = BlockPool(4, hash_block_size=4, events="first_last")
        (b,) = pool.get_new_blocks(1)
        payload = StorePayload(token_ids=range(8), parent=None)
        pool.cache_partial_block(b, digest(0), 4, 0, 8, payload=payload)
        pool.cache_full_blocks([b], chain(0, 1), 0, 1, 8, 0, payload=payload)
        stored, removed, grown = pool.take_events()
        assert isinstance(stored, BlockStored)
        assert (stored.block_hashes, stored.token_ids, stored.block_size) == ([digest(0)], [0, 1, 2, 3], 4)
        assert isinstance(removed, BlockRemoved)
        assert removed.block_hashes == [digest(0)]
        assert isinstance(grown, BlockStored)
        assert grown.block_hashes == [digest(1)]

    def test_removals_of_one_call_share_an_event_per_group(self) -> None:
        pool = BlockPool(5, events="first_last", medium="CPU")
        b = pool.get_new_blocks(4)
        pool.cache_full_blocks(b[:2], chain(1, 2), 0, 2, 16, 0)
        pool.cache_full_blocks(b[2:], chain(1, 2), 0, 2, 16, 1)
        pool.take_events()
        pool.free_blocks(b)
        pool.get_new_blocks(4)
        assert pool.take_events() == [
            BlockRemoved(block_hashes=[digest(1), digest(2)], medium="CPU", group_idx=0),
            BlockRemoved(block_hashes=[digest(1), digest(2)], medium="CPU", group_idx=1),
        ]
        pool.free_blocks(b)
        assert pool.reset_prefix_cache()
        assert pool.take_events() == [AllBlocksCleared(medium="CPU")]

    def test_a_payload_that_raises_does_so_before_anything_is_registered(self) -> None:
        def fail(*_: int) -> Any:
            raise RuntimeError("payload")

        pool = BlockPool(8, hash_block_size=4, events="first_last")
        blocks = pool.get_new_blocks(4)
        before = snapshot(pool)
        for payload in (
            StorePayload(token_ids=range(16), extra_keys=fail),
            StorePayload(token_ids=range(16), lookahead=fail),
            StorePayload(token_ids=["x"] * 16),  # type: ignore[list-item]
        ):
            for call in (
                lambda: pool.cache_full_blocks(blocks, chain(1, 2), 0, 2, 4, 0, payload=payload),
                lambda: pool.cache_partial_block(blocks[0], digest(1), 4, 0, 8, payload=payload),
            ):
                with pytest.raises((RuntimeError, ValueError)):
                    call()
                assert snapshot(pool) == before
        assert pool.take_events() == []

    def test_off_means_none(self) -> None:
        pool = BlockPool(5)
        b = pool.get_new_blocks(4)
        pool.cache_full_blocks(b, chain(1, 2, 3, 4), 0, 4, 16, 0)
        pool.free_blocks(b)
        pool.get_new_blocks(4)
        assert pool.take_events() == []


class Collector:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_allocated(self, block_id: int) -> None:
        self.calls.append(("allocated", block_id))

    def on_accessed(self, block_id: int) -> None:
        self.calls.append(("accessed", block_id))

    def on_evicted(self, block_id: int, had_hash: bool) -> None:
        self.calls.append(("evicted", block_id, had_hash))


def test_a_pool_goes_when_its_last_user_does() -> None:
    """No cycles: a large pool must not wait for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(o, BlockPool) for o in gc.get_objects())
        pool = BlockPool(8)
        pool.free_blocks(pool.get_new_blocks(2), after=3)
        handle = pool.blocks[3]
        pool.audit()
        assert sum(isinstance(o, BlockPool) for o in gc.get_objects()) == before + 1
        del pool, handle
        assert sum(isinstance(o, BlockPool) for o in gc.get_objects()) == before
    finally:
        gc.enable()


def test_metrics_hooks() -> None:
    seen = Collector()
    pool = BlockPool(3, metrics=seen)
    a, b = pool.get_new_blocks(2)
    pool.cache_full_blocks([a], chain(1), 0, 1, 16, 0)
    pool.touch([a, 0])
    pool.evict_blocks([a, b])
    assert seen.calls == [
        ("evicted", 1, False),
        ("allocated", 1),
        ("evicted", 2, False),
        ("allocated", 2),
        ("accessed", 1),
        ("evicted", 1, True),
    ]
    seen.calls.clear()
    pool.cache_full_blocks([b], chain(1), 0, 1, 16, 0)
    pool.free_blocks([b])
    pool.get_new_blocks(1)
    assert seen.calls == [("evicted", 2, True), ("allocated", 2)]


def test_a_hook_that_raises_does_so_after_the_operation() -> None:
    class Failing(Collector):
        failing = False

        def fail(self) -> None:
            if self.failing:
                raise KeyError("hook")

        def on_allocated(self, block_id: int) -> None:
            self.fail()

        def on_accessed(self, block_id: int) -> None:
            self.fail()

    hooks = Failing()
    pool = BlockPool(6, metrics=hooks)
    blocks = pool.get_new_blocks(2)
    hooks.failing = True
    with pytest.raises(KeyError) as caught:
        pool.get_new_blocks(2)
    assert "handed out [3, 4]" in caught.value.__notes__[0]
    with pytest.raises(KeyError):
        pool.touch(blocks)
    assert [pool.blocks[b].ref_cnt for b in range(6)] == [0, 2, 2, 1, 1, 0]
    assert pool.audit() == []
    hooks.failing = False
    assert pool.get_new_blocks(1) == [5]


def test_a_reset_names_what_stands_in_the_way() -> None:
    pool = BlockPool(6)
    a, b, c = pool.get_new_blocks(3)
    pool.free_blocks([a], after=4)
    result = pool.reset_prefix_cache()
    assert not result
    assert (result.num_blocks_in_use, result.num_blocks_deferred) == (3, 1)
    pool.free_blocks([b, c])
    pool.advance(4)
    order = pool.free_block_queue.get_all_free_blocks()
    assert pool.reset_prefix_cache()
    assert pool.free_block_queue.get_all_free_blocks() == order


class TestIndexByItself:
    def test_several_blocks_per_key_and_keys_per_block(self) -> None:
        index = BlockHashToBlockMap(10)
        one, two = digest(1) + bytes(4), digest(1) + (7).to_bytes(4, "big")
        index.insert(one, 3)
        index.insert(one, 2)
        index.insert(one, 2)
        index.insert(two, 2)
        index.insert(digest(2) + bytes(4), 2)
        assert index.get_blocks(one) == [3, 2]
        assert index.get_one_block(one) == 3
        assert index.get_one_block(two) == 2
        assert len(index) == 3
        assert index.contain(one, 2)
        assert not index.contain(two, 3)
        assert index.pop(one, 3) == 3
        assert index.pop(one, 3) is None
        assert index.get_one_block(one) == 2
        assert index.pop(one, 2) == 2
        assert index.get_one_block(one) is None
        assert index.get_blocks(one) == []
        assert sorted(index.keys()) == sorted([two, digest(2) + bytes(4)])

    def test_more_additional_keys_than_blocks(self) -> None:
        index = BlockHashToBlockMap(3)
        keys = [digest(i) + bytes(4) for i in range(500)]
        for key in keys:
            index.insert(key, 1)
        assert len(index) == 500
        assert all(index.get_one_block(key) == 1 for key in keys)
        random.Random(1).shuffle(keys)
        for n, key in enumerate(keys):
            assert index.pop(key, 1) == 1
            assert len(index) == 499 - n
        assert index.get_blocks(keys[0]) == []

    def test_bad_keys_are_named(self) -> None:
        index = BlockHashToBlockMap(3)
        with pytest.raises(DigestError):
            index.insert(b"short", 1)
        with pytest.raises(GroupError):
            index.insert(digest(1) + b"\xff\xff\xff\xff", 1)
        with pytest.raises(UnknownBlockError):
            index.insert(digest(1) + bytes(4), 0)
