"""Faults that users of KV-cache managers have met, as exact steps (S1, S2, S3 a b d, S8; S10 is under hashing)."""

from __future__ import annotations

import pytest

from blockpool.cache import KVCacheConfig, KVCacheManager, Refusal, RefusalReason, Request
from blockpool.hashing import BlockHasher
from blockpool.managers import FullAttentionSpec, KVCacheGroupSpec
from blockpool.pool import BlockPool, BlockRemoved, BlockStored, NoFreeBlocksError, ReleaseError

HASHER = BlockHasher(hash_block_size=4, seed="scenarios")


def cache(usable_blocks: int, **options: object) -> KVCacheManager:
    group = KVCacheGroupSpec(("layer",), FullAttentionSpec(4))
    return KVCacheManager(KVCacheConfig(usable_blocks + 1, (group,)), events="first_last", **options)  # type: ignore[arg-type]


def request(name: str, tokens: str | list[int]) -> Request:
    ids = [ord(letter) for letter in tokens] if isinstance(tokens, str) else tokens
    return Request(name, ids, hasher=HASHER)


def run(manager: KVCacheManager, name: str, tokens: str) -> Request:
    """Admit a request and compute its whole prompt."""
    r = request(name, tokens)
    hit = manager.get_computed_blocks(r)
    assert manager.allocate_slots(r, r.num_tokens - hit.num_tokens, hit.num_tokens, hit) is not None
    r.num_computed_tokens = r.num_tokens
    return r


def finish(manager: KVCacheManager, name: str, tokens: str) -> None:
    manager.free(run(manager, name, tokens))


def hit(manager: KVCacheManager, tokens: str) -> int:
    return manager.get_computed_blocks(request("probe", tokens)).num_tokens


class Mirror:
    """What a reader of nothing but the events believes."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.keys: set[bytes | int] = set()

    def follow(self) -> set[bytes | int]:
        for event in self.manager.take_events():
            if isinstance(event, BlockStored):
                self.keys |= set(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.keys -= set(event.block_hashes)
            else:
                self.keys.clear()
        return self.keys


class TestS1FreeListIntegrity:
    def test_takes(self) -> None:
        pool = BlockPool(11)
        assert pool.get_new_blocks(0) == []
        assert pool.get_num_free_blocks() == 10
        for n in (-1, 11):
            with pytest.raises(NoFreeBlocksError):
                pool.get_new_blocks(n)
            assert pool.get_num_free_blocks() == 10
        assert pool.counters.evicted_blocks == 0

    def test_releases(self) -> None:
        pool = BlockPool(11)
        (x,) = pool.get_new_blocks(1)
        with pytest.raises(ReleaseError, match=rf"block {x}\b"):
            pool.free_blocks([x, x])
        assert (pool.get_num_free_blocks(), pool.blocks[x].ref_cnt) == (9, 1)
        pool.free_blocks([x])
        assert pool.get_num_free_blocks() == 10
        with pytest.raises(ReleaseError):
            pool.free_blocks([x])
        pool.free_blocks([0, pool.null_block])
        assert pool.get_num_free_blocks() == 10
        assert pool.null_block.ref_cnt == 0

    def test_ten_single_takes_are_distinct(self) -> None:
        pool = BlockPool(11)
        taken = [pool.get_new_blocks(1)[0] for _ in range(10)]
        assert sorted(taken) == list(range(1, 11))
        with pytest.raises(NoFreeBlocksError):
            pool.get_new_blocks(1)
        assert pool.audit() == []

    def test_freeing_a_request_twice_leaves_its_sibling_alone(self) -> None:
        manager = cache(10)
        first = run(manager, "first", "abcdefgh")
        second = run(manager, "second", "abcdefgh")
        shared = manager.get_block_ids(second)[0][0]
        assert manager.pool.blocks[shared].ref_cnt == 2
        assert manager.free(first) is True
        assert manager.free(first) is False
        assert manager.pool.blocks[shared].ref_cnt == 1
        rest = manager.pool.get_new_blocks(manager.pool.get_num_free_blocks())
        assert shared not in rest


class TestS2AdmissionIsAtomic:
    def test_hits_that_stand_in_the_queue_are_counted_once(self) -> None:
        manager = cache(5)
        finish(manager, "r1", "abcdefghijkl")
        order = manager.pool.free_block_queue.get_all_free_blocks()
        before = (manager.stats.total, manager.pool.version, manager.pool.counters)
        r2 = request("r2", "abcdefghijkl" + "ABCDEFGHIJKL")
        plan = manager.plan(r2, 12, hit=manager.get_computed_blocks(r2))
        assert isinstance(plan, Refusal)
        assert (plan.reason, plan.pools[0].needed, plan.pools[0].free) == (RefusalReason.NEVER_FITS, 6, 5)
        assert manager.allocate_slots(r2, 12, 12, manager.get_computed_blocks(r2)) is None
        assert manager.pool.get_num_free_blocks() == 5
        assert [block.ref_cnt for block in manager.pool.blocks] == [0] * 6
        assert hit(manager, "abcdefghijkl" + "x") == 12
        assert manager.pool.free_block_queue.get_all_free_blocks() == order
        assert (manager.stats.total, manager.pool.version, manager.pool.counters) == before

        r3 = request("r3", "abcdefghijkl" + "ABCDEFGH")
        found = manager.get_computed_blocks(r3)
        assert found.num_tokens == 12
        assert manager.allocate_slots(r3, 8, 12, found) is not None
        assert manager.pool.get_num_free_blocks() == 0
        assert manager.pool.audit() == []


class TestS3EvictionOrder:
    def test_the_deepest_block_goes_first(self) -> None:
        manager = cache(3)
        finish(manager, "r1", "abcdefghijkl")
        run(manager, "r2", "xyz")
        assert hit(manager, "abcdefghijkl" + "!") == 8

    def test_plain_blocks_are_used_again_before_any_eviction(self) -> None:
        manager = cache(3)
        finish(manager, "r1", "abcdefgh")
        for i in range(101):
            finish(manager, f"r{i + 2}", "xyz")
        assert manager.pool.counters.evicted_blocks == 0
        assert hit(manager, "abcdefgh" + "!") == 8

    def test_a_hit_refreshes_a_lookup_does_not(self) -> None:
        manager = cache(4)
        finish(manager, "p", "aaaabbbb")
        finish(manager, "q", "ccccdddd")
        assert hit(manager, "aaaabbbb" + "!") == 8  # looks, takes nothing
        assert manager.pool.free_block_queue.get_all_free_blocks() == [2, 1, 4, 3]
        p = request("p2", "aaaabbbb" + "!")
        found = manager.get_computed_blocks(p)
        manager.pool.touch(found.blocks[0])
        manager.pool.free_blocks(found.blocks[0][::-1])
        manager.pool.get_new_blocks(1)
        assert hit(manager, "aaaabbbb" + "!") == 8
        assert hit(manager, "ccccdddd" + "!") == 4


class TestS8TwoCopiesOfOneHash:
    def test_the_other_copy_is_still_found_and_still_announced(self) -> None:
        manager = cache(4)
        mirror = Mirror(manager)
        finish(manager, "r1", "aaaabbbb")
        r2 = run(manager, "r2", "aaaabbbb")
        assert r2.block_hashes is not None
        first, second = r2.block_hashes[0], r2.block_hashes[1]
        manager.free(r2)
        index = manager.pool.cached_block_hash_to_block
        assert len(index.get_blocks(second + bytes(4))) == 2
        assert mirror.follow() == {first, second}
        steps = [(2, 8, {first, second}), (1, 4, {first}), (1, 0, set())]
        for take, expected_hit, expected_keys in steps:
            manager.pool.get_new_blocks(take)
            assert hit(manager, "aaaabbbb" + "!") == expected_hit
            assert mirror.follow() == expected_keys == {key[:-4] for key in index.keys()}  # noqa: SIM118
        assert manager.pool.audit() == []
