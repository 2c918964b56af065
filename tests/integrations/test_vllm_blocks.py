"""The drop-in's blocks, queue and index by themselves: what vLLM's code and tests build by hand."""

from __future__ import annotations

import gc
import hashlib
import random
import sys
import weakref
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpool.integrations.vllm import (
    BlockHashToBlockMap,
    BlockPool,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    SharedEventQueueBlockPool,
)
from blockpool.integrations.vllm.keys import Keys
from blockpool.pool import BlockHashToBlockMap as Index
from blockpool.pool import PoolBusyError, QueueError, ReleaseError
from tests.sizes import property_settings


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def linked(queue: FreeKVCacheBlockQueue) -> list[int]:
    """The queue as its links tell it, forwards, checked against them backwards."""
    forwards, block = [], queue.fake_free_list_head.next_free_block
    while block is not queue.fake_free_list_tail:
        forwards.append(block)
        block = block.next_free_block
    backwards, block = [], queue.fake_free_list_tail.prev_free_block
    while block is not queue.fake_free_list_head:
        backwards.append(block)
        block = block.prev_free_block
    assert backwards[::-1] == forwards
    return ids(forwards)


# -- stand-alone blocks -------------------------------------------------------------------------------


def test_a_block_made_by_hand_counts_and_keeps_a_key_by_itself() -> None:
    marker = object()
    assert KVCacheBlock(7, _block_hash=marker).block_hash is marker
    block = KVCacheBlock(7, ref_cnt=2)
    block.ref_cnt -= 1
    assert (block.block_id, block.ref_cnt, block.pool, block.is_null) == (7, 1, None, False)
    block.set_block_hash(b"abc\0\0\0\0", 16)
    assert (block.block_hash, block.block_hash_num_tokens) == (b"abc\0\0\0\0", 16)
    with pytest.raises(AssertionError):
        block.set_block_hash(b"abd\0\0\0\0")
    block.reset_hash()
    assert (block.block_hash, block.block_hash_num_tokens) == (None, None)


def test_blocks_with_equal_fields_are_equal_whatever_pool_they_belong_to() -> None:
    one, other = BlockPool(4, True, 16), BlockPool(4, True, 16)
    assert one.blocks[2] == other.blocks[2] == KVCacheBlock(2)
    assert one.blocks[2] is not other.blocks[2]
    one.get_new_blocks(2)
    assert one.blocks[2] != other.blocks[2]


def test_a_pools_block_tells_its_neighbours_by_id() -> None:
    pool = BlockPool(4, True, 16)
    assert repr(pool.blocks[1]) == (
        "KVCacheBlock(block_id=1, ref_cnt=0, _block_hash=None, prev_free_block=-1, next_free_block=2)"
    )


def test_the_count_of_a_held_block_can_be_set_but_not_to_or_from_0() -> None:
    pool = BlockPool(4, True, 16)
    (block,) = pool.get_new_blocks(1)
    block.ref_cnt += 1
    pool.free_blocks([block])
    assert block.ref_cnt == 1
    for one, value in ((block, 0), (block, -1), (pool.blocks[2], 1), (pool.null_block, 1)):
        with pytest.raises(AttributeError):
            one.ref_cnt = value
    assert block.ref_cnt == 1


def test_a_key_that_is_set_on_a_pools_block_is_listed() -> None:
    pool = BlockPool(4, True, 16)
    key = b"odd" + bytes(4)
    pool.blocks[2].set_block_hash(key, 16)
    assert pool.get_cached_block(b"odd", [0]) == [pool.blocks[2]]
    assert pool.cached_block_hash_to_block.get_one_block(key) is pool.blocks[2]
    pool.blocks[2]._block_hash = b"other" + bytes(4)
    assert pool.get_cached_block(b"odd", [0]) is None
    assert pool.blocks[2].block_hash == b"other" + bytes(4)
    pool.blocks[2].reset_hash()
    assert len(pool.cached_block_hash_to_block) == 0
    assert pool.books.audit() == []


# -- queues -------------------------------------------------------------------------------------------


@property_settings()
@given(seed=st.integers(0, 10**9))
def test_a_queue_of_blocks_made_by_hand_is_a_list(seed: int) -> None:
    rng = random.Random(seed)
    blocks = [KVCacheBlock(rng.randrange(50)) for _ in range(12)]
    model = rng.sample(blocks, rng.randrange(13))
    queue = FreeKVCacheBlockQueue(list(model))
    for _ in range(30):
        outside = [block for block in blocks if not any(block is queued for queued in model)]
        some = rng.sample(outside, rng.randrange(len(outside) + 1))
        operation = rng.randrange(6)
        if operation == 0:
            queue.append_n(some)
            model += some
        elif operation == 1:
            queue.prepend_n(some)
            model = some + model
        elif operation == 2 and some:
            queue.append(some[0])
            model.append(some[0])
        elif operation == 3 and model:
            assert queue.popleft() is model.pop(0)
        elif operation == 4:
            n = rng.randrange(len(model) + 1)
            assert all(a is b for a, b in zip(queue.popleft_n(n), model[:n], strict=True))
            del model[:n]
        elif model:
            gone = model.pop(rng.randrange(len(model)))
            queue.remove(gone)
            assert (gone.prev_free_block, gone.next_free_block) == (None, None)
            with pytest.raises(RuntimeError):
                queue.remove(gone)
        assert queue.num_free_blocks == len(model)
        assert linked(queue) == ids(queue.get_all_free_blocks()) == ids(model)
        if model:
            at = rng.randrange(len(model))
            assert ids(list(queue.iter_blocks_after(model[at]))) == ids(model[at + 1 :])


def test_a_queue_refuses_what_is_queued_already_and_changes_nothing() -> None:
    blocks = [KVCacheBlock(i) for i in range(4)]
    queue = FreeKVCacheBlockQueue(blocks[:2])
    for wrong in ([blocks[2], blocks[2]], [blocks[2], blocks[0]]):
        with pytest.raises(QueueError):
            queue.append_n(wrong)
    assert linked(queue) == [0, 1]
    with pytest.raises(ValueError, match="No free blocks available"):
        FreeKVCacheBlockQueue([]).popleft()


def test_the_queue_of_all_blocks_of_a_pool_is_the_pools_own() -> None:
    pool = BlockPool(5, True, 16)
    queue = FreeKVCacheBlockQueue(pool.blocks)
    pool.get_new_blocks(2)
    assert linked(queue) == linked(pool.free_block_queue) == [3, 4]
    with pytest.raises(ValueError, match="by their pool"):
        FreeKVCacheBlockQueue(pool.blocks[1:])


# -- indexes ------------------------------------------------------------------------------------------


def test_a_map_made_by_hand_takes_any_key_and_the_first_inserted_is_found() -> None:
    index = BlockHashToBlockMap()
    blocks = [KVCacheBlock(i) for i in range(3)]
    for block in blocks:
        index.insert(b"k", block)
    assert index.get_one_block(b"k") is blocks[0]
    assert index.contain(b"k", 1)
    assert index.pop(b"k", 9) is None
    assert index.pop(b"k", 0) is blocks[0]
    assert index.get_one_block(b"k") is blocks[1]
    assert len(index) == 1
    assert (index.pop(b"k", 1), index.pop(b"k", 2)) == (blocks[1], blocks[2])
    assert (len(index), index.get_one_block(b"k")) == (0, None)


def test_a_pools_map_is_a_view_of_its_books() -> None:
    pool = BlockPool(6, True, 16)
    index, key = pool.cached_block_hash_to_block, bytes(32) + b"\0\0\0\2"
    for block in (pool.blocks[3], pool.blocks[1]):
        index.insert(key, block)
    index.insert(b"more" + bytes(4), pool.blocks[3])
    assert index.get_one_block(key) is pool.blocks[3]
    assert pool.cached_block_hashes_by_block == {3: {b"more" + bytes(4)}}
    assert index.contain(key, 1)
    assert not index.contain(key, 2)
    assert index.pop(key, 3) is pool.blocks[3]
    assert pool.blocks[3].block_hash == b"more" + bytes(4)
    assert pool.cached_block_hashes_by_block == {}
    for stranger in (pool.null_block, BlockPool(6, True, 16).blocks[2]):
        with pytest.raises(ValueError, match="cannot be listed"):
            index.insert(key, stranger)
    with pytest.raises(ValueError, match="group id"):
        index.get_one_block(b"no")
    assert pool.books.audit() == []


@property_settings()
@given(st.lists(st.binary(max_size=70), unique=True, max_size=12))
def test_keys_of_every_width_come_back_as_they_were(hashes: list[bytes]) -> None:
    pool = BlockPool(20, True, 16)
    for at, one in enumerate(hashes):
        pool._insert_block_hash(one + b"\0\0\0\1", pool.blocks[at + 1], 16)
    for at, one in enumerate(hashes):
        assert pool.blocks[at + 1].block_hash == one + b"\0\0\0\1"
        assert pool.get_cached_block(one, [1]) == [pool.blocks[at + 1]]
        assert pool.get_cached_block(one, [0]) is None


def test_originals_of_odd_keys_do_not_pile_up() -> None:
    index = Index(8)
    keys = Keys(index)
    for i in range(1000):
        keys.tidy()
        digest = keys.keep(hashlib.sha256(bytes([i % 256, i // 256])).digest()[:25])
        if i % 100 == 0:
            index.insert(digest + bytes(4), 1 + i // 200)
        assert len(keys.originals) <= 2 * len(index) + 65
    assert all(len(keys.key_of(entry)) == 29 for b in range(1, 8) for entry in index.entries_of(b))


def test_many_odd_keys_at_once_are_all_kept() -> None:
    pool = BlockPool(301, True, 1)
    for turn in range(4):
        blocks = pool.get_new_blocks(300)
        hashes = [hashlib.sha256(bytes([turn, i % 256, i // 256])).digest()[:25] for i in range(300)]
        pool.cache_full_blocks(SimpleNamespace(block_hashes=hashes), blocks, 0, 300, 1, 0)
        assert [block.block_hash for block in blocks] == [one + bytes(4) for one in hashes]
        pool.free_blocks(blocks)


# -- pools --------------------------------------------------------------------------------------------


def test_blocks_of_several_pools_are_given_back_to_their_own_or_none_is() -> None:
    gpu, cpu = BlockPool(6, True, 16), BlockPool(6, True, 16)
    mine, theirs = gpu.get_new_blocks(3), cpu.get_new_blocks(2)
    with pytest.raises(ReleaseError):
        gpu.free_blocks([mine[0], theirs[0], theirs[0]])
    with pytest.raises(ReleaseError):
        gpu.free_blocks([mine[0], mine[0], theirs[0]])
    assert (gpu.get_num_free_blocks(), cpu.get_num_free_blocks()) == (2, 3)
    gpu.free_blocks([theirs[1], *reversed(mine), gpu.null_block, theirs[0]])
    assert ids(gpu.free_block_queue.get_all_free_blocks()) == [3, 2, 1, 4, 5]
    assert ids(cpu.free_block_queue.get_all_free_blocks()) == [2, 1, 3, 4, 5]


def test_a_block_that_belongs_to_no_pool_is_counted_and_never_queued() -> None:
    pool = BlockPool(4, True, 16)
    block = KVCacheBlock(2)
    pool.touch([block])
    assert block.ref_cnt == 1
    pool.free_blocks([block])
    assert block.ref_cnt == 0
    assert ids(pool.free_block_queue.get_all_free_blocks()) == [1, 2, 3]
    assert pool.blocks[2].ref_cnt == 0


def test_a_block_that_belongs_to_no_pool_can_be_registered_and_found() -> None:
    pool = BlockPool(4, True, 2, enable_kv_cache_events=True)
    request = SimpleNamespace(block_hashes=[bytes([i]) * 32 for i in range(4)], all_token_ids=list(range(8)))
    blocks = [KVCacheBlock(i) for i in range(3)]
    pool.cache_full_blocks(request, blocks[:2], 0, 1, 4, 0)
    pool.cache_full_blocks(request, [*blocks[:1], *pool.get_new_blocks(1)], 1, 2, 4, 0)
    pool._insert_block_hash(b"odd" + bytes(4), blocks[2], None)
    assert len(pool.cached_block_hash_to_block) == 3
    assert pool.get_cached_block(request.block_hashes[1], [0]) == [blocks[0]]
    assert pool.cached_block_hash_to_block.get_one_block(b"odd" + bytes(4)) is blocks[2]
    assert (blocks[0].block_hash, blocks[0].block_hash_num_tokens) == (bytes([1]) * 32 + bytes(4), 4)
    with pytest.raises(AssertionError):
        pool.cache_full_blocks(request, blocks, 0, 1, 4, 0)
    assert pool._maybe_evict_cached_block(blocks[0]) is True
    assert pool._maybe_evict_cached_block(blocks[0]) is False
    assert (pool.get_cached_block(request.block_hashes[1], [0]), blocks[0].block_hash) == (None, None)
    assert [type(event).__name__ for event in pool.take_events()] == ["BlockStored", "BlockStored", "BlockRemoved"]
    pool.free_blocks([pool.blocks[1]])
    assert pool.reset_prefix_cache()
    assert (len(pool.cached_block_hash_to_block), blocks[2].block_hash) == (0, None)


def test_a_refused_registration_leaves_nothing_behind() -> None:
    pool, other = BlockPool(6, True, 2), BlockPool(6, True, 2)
    request = SimpleNamespace(block_hashes=[bytes([i]) * 32 for i in range(4)])
    held = pool.get_new_blocks(3)
    pool.cache_full_blocks(request, [pool.null_block, held[0]], 1, 2, 2, 0)
    wrong = [
        [held[1], held[0]],  # has the hash of as many tokens
        [held[1], held[1]],  # named twice
        [held[1], other.blocks[2]],
        [held[1], 5],
        [held[1], KVCacheBlock(3, _block_hash=b"set" + bytes(4))],
    ]
    for blocks in wrong:
        with pytest.raises((ValueError, TypeError)):
            pool.cache_full_blocks(request, blocks, 0, 2, 2, 1)
        assert len(pool.cached_block_hash_to_block) == 1
    pool.cache_full_blocks(request, held[1:], 0, 2, 2, 1)
    assert len(pool.cached_block_hash_to_block) == 3


def test_a_double_free_is_refused_and_changes_nothing() -> None:
    pool = BlockPool(4, True, 16)
    held = pool.get_new_blocks(2)
    pool.free_blocks(held[:1])
    for wrong in (held[:1], [held[1], held[1]]):
        with pytest.raises(ReleaseError, match="given back more often"):
            pool.free_blocks(wrong)
    assert (held[0].ref_cnt, held[1].ref_cnt, pool.get_num_free_blocks()) == (0, 1, 2)


def test_hooks_are_called_with_the_blocks_in_order() -> None:
    class Collector:
        def __init__(self) -> None:
            self.calls: list[tuple[str, int]] = []

        def on_block_allocated(self, block: KVCacheBlock) -> None:
            self.calls.append(("allocated", block.block_id))

        def on_block_accessed(self, block: KVCacheBlock) -> None:
            self.calls.append(("accessed", block.block_id))

        def on_block_evicted(self, block: KVCacheBlock) -> None:
            self.calls.append(("evicted", block.block_id))

        def reset(self) -> None:
            self.calls.append(("reset", 0))

    collector = Collector()
    pool = BlockPool(4, True, 16, metrics_collector=collector)
    blocks = pool.get_new_blocks(2)
    pool.touch([pool.null_block, blocks[1]])
    pool.free_blocks([*blocks, blocks[1]])
    pool.evict_blocks({3})
    pool.reset_prefix_cache()
    assert collector.calls == [
        ("evicted", 1),
        ("allocated", 1),
        ("evicted", 2),
        ("allocated", 2),
        ("accessed", 2),
        ("evicted", 3),
        ("reset", 0),
    ]


def test_a_hook_that_fails_is_told_after_the_operation_and_names_the_blocks() -> None:
    class Broken:
        def on_block_evicted(self, block: KVCacheBlock) -> None:
            raise KeyError("broken")

    pool = BlockPool(4, True, 16, metrics_collector=Broken())
    with pytest.raises(KeyError) as caught:
        pool.get_new_blocks(2)
    assert caught.value.__notes__ == ["get_new_blocks handed out [1, 2] all the same"]
    assert pool.get_num_free_blocks() == 1


def test_every_reader_of_an_unpinned_block_is_told_once() -> None:
    pool = BlockPool(4, True, 16)
    told: list[tuple[str, KVCacheBlock]] = []
    (block,) = pool.get_new_blocks(1)
    pool.touch([block])
    pool.unpin_blocks([block], lambda reused: told.append(("first", reused)))
    pool.unpin_blocks([block], lambda reused: told.append(("second", reused)))
    assert ids(pool.get_new_blocks(3)) == [2, 3, 1]
    assert told == [("first", block), ("second", block)]


def test_pools_that_share_an_event_queue_tell_one_story() -> None:
    owner = BlockPool(4, True, 16, enable_kv_cache_events=True)
    owner.kv_event_queue.append("before")
    host = SharedEventQueueBlockPool(4, True, 16, enable_kv_cache_events=True, medium="CPU", event_owner=owner)
    assert owner.kv_event_queue == ["before"]
    for pool in (owner, host):
        pool._insert_block_hash(b"x" * 32 + bytes(4), pool.blocks[1], 16)
        pool._maybe_evict_cached_block(pool.blocks[1])
    before, first, second = owner.take_events()
    assert (before, first.medium, second.medium) == ("before", "GPU", "CPU")
    assert host.take_events() == []


def test_a_pool_and_its_million_blocks_go_without_the_collector() -> None:
    pool = BlockPool(1000, True, 16)
    pool.unpin_blocks(pool.get_new_blocks(1), lambda block: None)
    kept, gone = pool.blocks[5], weakref.ref(pool)
    members = weakref.ref(pool.blocks)
    gc.disable()
    try:
        del pool
        assert gone() is None
        assert members() is None
    finally:
        gc.enable()
    assert (kept.block_id, kept.pool, kept.next_free_block) == (5, None, None)


def test_the_collector_never_visits_a_block() -> None:
    pool = BlockPool(10, True, 16)
    if type(pool.blocks[1]).__basicsize__ and not hasattr(pool.blocks[1], "__dict__"):  # the compiled build
        assert not gc.is_tracked(pool.blocks[1])


def test_a_hit_is_announced_anew_as_far_as_its_hashes_go() -> None:
    request = SimpleNamespace(block_hashes=[bytes([i]) * 32 for i in range(5)], all_token_ids=list(range(11)))
    for events, asked, announced in ((True, 2, 2), (True, 3, 2), (True, 0, 0), (False, 2, 0)):
        pool = BlockPool(4, asked != 3, 2, enable_kv_cache_events=events)  # a pool without caching says it as well
        pool.emit_cached_block_events(request, asked, 4, 0)
        told = pool.take_events()
        assert [len(event.block_hashes) for event in told] == [announced] * (announced > 0)
        assert [event.token_ids for event in told] == [list(range(announced * 4))] * (announced > 0)
        assert len(pool.cached_block_hash_to_block) == 0


@pytest.mark.parametrize("events", [False, True])
def test_calls_leave_no_memory_behind(events: bool) -> None:
    pool, other = BlockPool(64, True, 4, enable_kv_cache_events=events), BlockPool(64, True, 4)
    request = SimpleNamespace(block_hashes=[i.to_bytes(32, "big") for i in range(16)], all_token_ids=list(range(64)))
    odd = KVCacheBlock(3)

    def use() -> None:
        blocks = pool.get_new_blocks(16)
        pool.cache_full_blocks(request, blocks, 0, 8, 4, 0, [True, False] * 4)
        pool.cache_full_blocks(request, blocks, 0, 8, 8, 1)
        pool.cache_partial_block(request, blocks[9], 12, 0, 16)
        pool.touch(blocks)
        pool.free_blocks(iter([*blocks, *other.get_new_blocks(2), odd]))
        pool.unpin_blocks(blocks[:2], lambda block: None)
        pool.free_blocks(blocks[2:])
        pool.free_blocks(pool.get_new_blocks(1))
        for wrong in (blocks[:1], [other.blocks[5]], [None]):
            with pytest.raises((ValueError, TypeError)):
                pool.free_blocks(wrong)
        pool.get_cached_block(request.block_hashes[1], [0, 1])
        pool.evict_blocks({1, 2, 3})
        pool.reset_prefix_cache()
        pool.take_events()

    for _ in range(20):
        use()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(200):
        use()
    gc.collect()
    assert sys.getallocatedblocks() - before < 100


def test_a_reuse_callback_cannot_register_in_its_own_pool() -> None:
    request = SimpleNamespace(block_hashes=[i.to_bytes(32, "big") for i in range(8)])
    for register in (
        lambda pool, block: pool.cache_partial_block(request, block, 4, 2, 16),
        lambda pool, block: pool._insert_block_hash(b"new" + bytes(4), block, 4),
        lambda pool, block: pool.cached_block_hash_to_block.insert(b"new" + bytes(4), block),
        lambda pool, block: block.set_block_hash(b"new" + bytes(4)),
    ):
        pool = BlockPool(30, True, 4)
        blocks = pool.get_new_blocks(6)
        pool.unpin_blocks(blocks, lambda block, pool=pool, register=register: register(pool, block))
        with pytest.raises((PoolBusyError, BaseExceptionGroup)):
            pool.get_new_blocks(29)
        assert pool.books.audit() == []
        assert [block.ref_cnt for block in pool.blocks[1:]] == [1] * 29


def test_numbers_that_a_record_cannot_hold_are_refused() -> None:
    pool = BlockPool(4, True, 4)
    (block,) = pool.get_new_blocks(1)
    for value in (2**31, 2**32 + 1, 2**70):
        with pytest.raises(AttributeError):
            block.ref_cnt = value
        with pytest.raises(ValueError, match="tokens"):
            pool._insert_block_hash(b"k" * 32 + bytes(4), block, value)
    with pytest.raises(ValueError, match="tokens"):
        block.set_block_hash(b"k" * 32 + bytes(4), -5)
    with pytest.raises(ValueError, match="null block"):
        pool.null_block.set_block_hash(b"k" * 32 + bytes(4))
    assert (block.ref_cnt, block.block_hash, pool.books.audit()) == (1, None, [])


def test_a_hook_that_fails_stops_no_eviction_and_no_reset() -> None:
    class Broken:
        def on_block_evicted(self, block: KVCacheBlock) -> None:
            raise KeyError(block.block_id)

        def reset(self) -> None:
            raise KeyError("reset")

    pool = BlockPool(6, True, 4, enable_kv_cache_events=True)
    request = SimpleNamespace(block_hashes=[i.to_bytes(32, "big") for i in range(4)], all_token_ids=list(range(16)))
    blocks = pool.get_new_blocks(4)
    pool.cache_full_blocks(request, blocks, 0, 4, 4, 0)
    pool.metrics_collector = Broken()
    with pytest.raises(KeyError):
        pool._maybe_evict_cached_block(blocks[3])
    with pytest.raises(KeyError):
        pool.evict_blocks({1, 2, 3})
    assert len(pool.cached_block_hash_to_block) == 0
    pool.free_blocks(blocks)
    with pytest.raises(KeyError):
        pool.reset_prefix_cache()
    names = [type(event).__name__ for event in pool.take_events()]
    assert names == ["BlockStored", *["BlockRemoved"] * 4, "AllBlocksCleared"]
    pool.metrics_collector = None
    odd = b"odd" * 9
    pool._insert_block_hash(odd + bytes(4), pool.blocks[1], 4)

    def fail(block: KVCacheBlock) -> None:
        raise KeyError(block.block_id)

    pool.unpin_blocks(pool.get_new_blocks(1), fail)
    with pytest.raises(KeyError):
        pool.reset_prefix_cache()
    assert [type(event).__name__ for event in pool.take_events()][-1] == "AllBlocksCleared"
    assert len(pool.get_new_blocks(5)) == 5  # nothing is raised late
