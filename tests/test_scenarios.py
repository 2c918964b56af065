"""Faults that users of KV-cache managers have met, as exact steps (S1 to S6, S8; S9: wire, S10: hashing)."""

from __future__ import annotations

import pytest

from blockpool.cache import BlockCopy, KVCacheConfig, KVCacheManager, Refusal, RefusalReason, Request
from blockpool.hashing import BlockHasher
from blockpool.managers import FullAttentionSpec, KVCacheGroupSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from blockpool.pool import BlockPool, BlockRemoved, BlockStored, NoFreeBlocksError, ReleaseError

HASHER = BlockHasher(hash_block_size=4, seed="scenarios")


def cache(usable_blocks: int, **options: object) -> KVCacheManager:
    group = KVCacheGroupSpec(("layer",), FullAttentionSpec(4))
    return KVCacheManager(KVCacheConfig(usable_blocks + 1, (group,)), events="first_last", **options)  # type: ignore[arg-type]


def cache_of(
    num_blocks: int | tuple[int, ...], *groups: KVCacheSpec | KVCacheGroupSpec, unit: int = 4
) -> KVCacheManager:
    """Several groups; `num_blocks` with the null block, one number per pool."""
    specs = [g if isinstance(g, KVCacheGroupSpec) else KVCacheGroupSpec((str(i),), g) for i, g in enumerate(groups)]
    return KVCacheManager(KVCacheConfig(num_blocks, tuple(specs), hash_block_size=unit), events="first_last")


def request(name: str, tokens: str | list[int], hasher: BlockHasher = HASHER) -> Request:
    ids = [ord(letter) for letter in tokens] if isinstance(tokens, str) else tokens
    return Request(name, ids, hasher=hasher)


def run(manager: KVCacheManager, name: str, tokens: str | list[int], hasher: BlockHasher = HASHER) -> Request:
    """Admit a request and compute its whole prompt."""
    r = request(name, tokens, hasher)
    hit = manager.get_computed_blocks(r)
    assert manager.allocate_slots(r, r.num_tokens - hit.num_tokens, hit.num_tokens, hit) is not None
    r.num_computed_tokens = r.num_tokens
    return r


def decode(manager: KVCacheManager, r: Request, tokens: str) -> None:
    """The model has answered with these tokens, one after the other, each computed in a step."""
    for letter in tokens:
        r.append_output_tokens(ord(letter))
        assert manager.allocate_slots(r, 1) is not None
        r.num_computed_tokens += 1


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

    def test_a_full_pool_refuses_for_all_and_ids_go_back_to_their_own(self) -> None:
        manager = cache_of(
            (11, 2),
            KVCacheGroupSpec(("attention",), FullAttentionSpec(4)),
            KVCacheGroupSpec(("state",), MambaSpec(4, 0, "align"), pool=1),
        )
        attention, state = manager.pools
        first = run(manager, "first", "abcd")
        assert manager.get_block_ids(first) == ([1], [1])
        before = [pool.dump() for pool in manager.pools]
        second = request("second", "ABCD")
        assert manager.allocate_slots(second, 4) is None
        refusal = manager.last_refusal
        assert refusal is not None
        assert refusal.reason is RefusalReason.NO_ROOM
        assert [(room.needed, room.free) for room in refusal.pools] == [(1, 9), (1, 0)]
        assert [pool.dump() for pool in manager.pools] == before
        assert manager.get_block_ids(second) == ([], [])
        manager.free(first)
        assert [pool.get_num_free_blocks() for pool in manager.pools] == [10, 1]
        assert attention.free_block_queue.get_all_free_blocks() == [2, 3, 4, 5, 6, 7, 8, 9, 10, 1]
        assert state.free_block_queue.get_all_free_blocks() == [1]


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

    @pytest.mark.parametrize("second", [FullAttentionSpec(4), SlidingWindowSpec(4, 100)])
    def test_a_deferred_release_evicts_in_the_order_of_an_immediate_one(self, second: KVCacheSpec) -> None:
        orders: list[list[tuple[int, int]]] = []
        for fence in (None, 0):
            manager = cache_of(7, FullAttentionSpec(4), second)
            r = run(manager, "r", "abcdefghijkl")
            tables = manager.get_block_ids(r)
            manager.free(r, after=fence)
            if fence is not None:
                assert manager.pool.get_num_free_blocks() == 0
                manager.pool.advance(fence)
            taken = [manager.pool.get_new_blocks(1)[0] for _ in range(6)]
            assert manager.pool.counters.evicted_blocks == 6
            orders.append([next((g, t.index(b)) for g, t in enumerate(tables) if b in t) for b in taken])
        immediate, deferred = orders
        assert immediate == deferred
        for group in (0, 1):
            assert [position for g, position in immediate if g == group] == [2, 1, 0]


class TestS4PartialTailThenPromotion:
    @pytest.mark.parametrize("in_steps", [False, True])
    def test_promotion_is_told_once_and_repeats_are_silent(self, in_steps: bool) -> None:
        manager = cache_of(6, FullAttentionSpec(16))
        mirror = Mirror(manager)
        index = manager.pool.cached_block_hash_to_block
        step = 0
        if in_steps:
            manager.begin_step(step)
        r = run(manager, "r", "abcdefghij")
        if in_steps:
            assert hit(manager, "abcdefgh" + "!") == 0  # whoever reads it copies it before the forward pass
            manager.acknowledge(step)
        assert hit(manager, "abcdefgh" + "!") == 8
        assert len(mirror.follow()) == 1
        for letter in "klmnop":
            if in_steps:
                step += 1
                manager.begin_step(step)
            decode(manager, r, letter)
            if in_steps:
                manager.acknowledge(step)
        assert hit(manager, "abcdefghijklmnop" + "!") == 16
        (p,) = manager.get_block_ids(r)[0]
        chain = r.block_hashes
        assert chain is not None
        at_8, at_16 = chain[1], chain[3]
        believed = mirror.follow()
        answer = hit(manager, "abcdefgh" + "!")
        for _ in range(3):
            manager.cache_blocks(r, r.num_computed_tokens)
            assert hit(manager, "abcdefgh" + "!") == answer  # (i)
            assert manager.take_events() == []  # (ii)
            for digest in (at_8, at_16):  # (iii)
                assert (digest in believed) == (manager.pool.get_cached_block(digest, [0]) is not None)
        assert (at_16 in believed, answer) == (True, 8 if at_8 in believed else 0)

        manager.free(r)
        assert p in manager.pool.get_new_blocks(5)
        removed = [digest for event in manager.take_events() for digest in event.block_hashes]  # type: ignore[union-attr]
        assert sorted(removed) == sorted(believed)  # type: ignore[type-var]  # (iv)
        assert len(index) == 0
        for tokens in ("abcdefgh" + "!", "abcdefghijklmnop" + "!"):
            assert hit(manager, tokens) == 0


class TestS5CopyOnWrite:
    """A has computed 10 tokens in one block of 16; B shares 8 of them."""

    def start(self, usable_blocks: int = 9) -> tuple[KVCacheManager, Request, int]:
        manager = cache_of(usable_blocks + 1, FullAttentionSpec(16))
        manager.begin_step(0)
        a = run(manager, "a", "abcdefghij")
        manager.acknowledge(0)
        ((p,),) = manager.get_block_ids(a)
        manager.begin_step(1)
        return manager, a, p

    def admit(self, manager: KVCacheManager) -> tuple[Request, int]:
        b = run(manager, "b", "abcdefgh" + "XY")
        ((q,),) = manager.get_block_ids(b)
        return b, q

    def refs(self, manager: KVCacheManager, *blocks: int) -> list[int]:
        return [manager.pool.blocks[block].ref_cnt for block in blocks]

    def test_one_copy_is_ordered_and_its_ends_are_kept_until_it_is_made(self) -> None:
        manager, a, p = self.start()
        assert hit(manager, "abcdefgh" + "XY") == 8
        b, q = self.admit(manager)
        assert q != p
        assert manager.take_block_copies() == [BlockCopy(0, p, q)]
        assert manager.take_block_copies() == []
        manager.free(a)
        manager.free(b)  # aborted
        rest = manager.pool.get_new_blocks(manager.pool.get_num_free_blocks())
        assert {p, q} & set(rest) == set()
        assert len(rest) == 7
        manager.acknowledge(1)
        assert manager.pool.get_num_free_blocks() == 2
        assert manager.pool.audit() == []

    def test_afterwards_each_block_has_its_own_holder_and_identity(self) -> None:
        manager, a, p = self.start()
        b, q = self.admit(manager)
        manager.acknowledge(1)
        assert self.refs(manager, p, q) == [1, 1]
        before = manager.pool.dump()
        manager.acknowledge(1)
        assert manager.pool.dump() == before
        manager.begin_step(2)
        decode(manager, a, "klmnop")
        decode(manager, b, "STUVWZ")
        manager.acknowledge(2)
        for tokens, block in (("abcdefghijklmnop", p), ("abcdefgh" + "XYSTUVWZ", q)):
            found = manager.get_computed_blocks(request("probe", tokens + "!"))
            assert (found.num_tokens, found.blocks) == (16, ([block],))

    @pytest.mark.parametrize("usable_blocks", [1, 2])
    def test_without_a_spare_block_nothing_is_granted(self, usable_blocks: int) -> None:
        manager, a, p = self.start(usable_blocks)
        manager.pool.get_new_blocks(usable_blocks - 1)
        before = manager.pool.dump()
        b = request("b", "abcdefgh" + "XY")
        found = manager.get_computed_blocks(b)
        assert found.num_tokens == 8
        assert manager.allocate_slots(b, 2, 8, found) is None
        assert manager.pool.dump() == before
        assert self.refs(manager, p) == [1]
        assert manager.take_block_copies() == []
        assert manager.get_block_ids(a) == ([p],)


class TestS6DraftMargin:
    @pytest.mark.parametrize("widths", [(4,), (4, 6)])
    @pytest.mark.parametrize("drafting", ["no", "full", "windows", "all"])
    def test_it_is_applied_once(self, widths: tuple[int, ...], drafting: str) -> None:
        hasher = BlockHasher(hash_block_size=2, seed="scenarios")
        specs = [FullAttentionSpec(2), *(SlidingWindowSpec(2, width) for width in widths)]
        groups = [
            KVCacheGroupSpec((str(i),), spec, draft_margin=drafting in ("all", "windows" if i else "full"))
            for i, spec in enumerate(specs)
        ]
        manager = cache_of(60, *groups, unit=2)
        manager.free(run(manager, "first", "abcdefghijkl", hasher))
        expected = 12 if drafting == "no" else 10
        for _ in range(2):
            found = manager.get_computed_blocks(request("second", "abcdefghijkl" + "xyz", hasher))
            assert found.num_tokens == expected
            full, *windows = found.blocks
            assert len(full) == expected // 2
            assert all(full)
            for width, blocks in zip(widths, windows, strict=True):
                assert len(blocks) == expected // 2
                assert [bool(block) for block in blocks[-3:]] == [width == 6, True, True]
                assert not any(blocks[:-3])


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
