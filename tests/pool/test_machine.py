"""Random operations on a pool and on its model, compared exactly after each."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from blockpool.pool import (
    AllBlocksCleared,
    BlockPool,
    BlockPoolError,
    BlockRemoved,
    BlockStored,
    Hold,
    KVCacheEvent,
)
from tests.pool.model import ModelPool, Refused
from tests.sizes import machine_settings

UNIT = 4
SIZE = 8
CHAINS = [
    [hashlib.sha256(bytes([c if i >= fork else 0, i])).digest() for i in range(8)]
    for c, fork in ((0, 0), (1, 2), (2, 4))
]

End = tuple[float | None, int | None]  # of a hold: a time, a fence
TIMES = st.integers(0, 9) | st.floats(0, 9)
ENDS: st.SearchStrategy[End] = st.one_of(
    st.tuples(st.none(), st.none()),
    st.tuples(TIMES, st.none()),
    st.tuples(st.none(), st.integers(0, 6)),
    st.tuples(st.none() | TIMES, st.none() | st.integers(-1, 6)),
)


def flat(events: list[KVCacheEvent]) -> list[Any]:
    """Events as the model writes them: one tuple per key. `num_tokens` is where a stored block ends."""
    out: list[Any] = []
    for event in events:
        if isinstance(event, BlockStored):
            parent = event.parent_block_hash
            full = event.block_size == SIZE
            for i, digest in enumerate(event.block_hashes):
                end = event.token_ids[(i + 1) * event.block_size - 1] + 1
                out.append(("stored", digest, event.group_idx, parent if full else None, end))
                parent = digest
            assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        elif isinstance(event, BlockRemoved):
            out += [("removed", digest, event.group_idx) for digest in event.block_hashes]
        else:
            assert isinstance(event, AllBlocksCleared)
            out.append(("cleared",))
    return out


class PoolMachine(RuleBasedStateMachine):
    @initialize(n=st.integers(1, 14), events=st.sampled_from(["off", "first_last", "per_copy"]), clock=st.booleans())
    def start(self, n: int, events: str, clock: bool) -> None:
        from blockpool.pool import StorePayload

        self.now = 0
        self.clock = clock
        self.holds: list[Hold] = []
        self.pool = BlockPool(n, hash_block_size=UNIT, events=events, clock=(lambda: self.now) if clock else None)
        self.model = ModelPool(n, UNIT, events)
        self.payload = StorePayload(token_ids=range(64))
        self.fired: list[int] = []
        self.fired_in_model: list[int] = []
        self.handles: list[Any] = []

    def both(self, real: Any, model: Any) -> Any:
        """Both do it with the same answer, or both refuse it."""
        try:
            expected = model()
        except Refused:
            with pytest.raises(BlockPoolError):
                real()
            return None
        answer = real()
        assert answer == expected
        return answer

    def some(self, data: st.DataObject, most: int = 5) -> list[int]:
        return data.draw(st.lists(st.integers(0, self.model.n - 1), max_size=most))

    def as_given(self, data: st.DataObject, blocks: list[int]) -> list[Any]:
        """Ids, handles, or both."""
        if data.draw(st.booleans()):
            return blocks
        return [self.pool.blocks[b] if b % 2 else b for b in blocks]

    @rule(data=st.data())
    def get_new_blocks(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(-1, len(self.model.queue) + 1))
        self.both(lambda: self.pool.get_new_blocks(n), lambda: self.model.get_new_blocks(n))

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        blocks = self.some(data)
        given = self.as_given(data, blocks)
        self.both(lambda: self.pool.touch(given), lambda: self.model.touch(blocks))

    @rule(data=st.data(), after=st.none() | st.integers(0, 6))
    def free(self, data: st.DataObject, after: int | None) -> None:
        held = [b for b in range(1, self.model.n) if self.model.ref[b]]
        blocks = data.draw(st.lists(st.sampled_from(held), max_size=6)) if held else self.some(data)
        given = self.as_given(data, blocks)
        self.both(lambda: self.pool.free_blocks(given, after=after), lambda: self.model.free(blocks, after))

    @rule(data=st.data())
    def free_everything(self, data: st.DataObject) -> None:
        order = data.draw(st.permutations(range(self.model.n)))
        blocks = [b for b in order for _ in range(self.model.givable(b))]
        self.both(lambda: self.pool.free_blocks(blocks), lambda: self.model.free(blocks))

    @precondition(lambda self: self.model.spoken_for())
    @rule(data=st.data(), after=st.none() | st.integers(0, 6))
    def free_what_is_spoken_for(self, data: st.DataObject, after: int | None) -> None:
        block = data.draw(st.sampled_from(self.model.spoken_for()))
        blocks = [block] * (self.model.givable(block) + 1)
        self.both(lambda: self.pool.free_blocks(blocks, after=after), lambda: self.model.free(blocks, after))

    @rule(fence=st.integers(0, 6))
    def advance(self, fence: int) -> None:
        self.both(lambda: self.pool.advance(fence), lambda: self.model.advance(fence))

    @rule(data=st.data(), owner=st.sampled_from("abc"), end=ENDS)
    def hold(self, data: st.DataObject, owner: str, end: End) -> None:
        keepable = [b for b in range(self.model.n) if b == 0 or self.model.ref[b] or self.model.hashes[b]]
        any_block = data.draw(st.booleans())
        blocks = self.some(data) if any_block else data.draw(st.lists(st.sampled_from(keepable), max_size=5))
        self.hold_both(blocks, self.as_given(data, blocks), owner, end)

    @rule(data=st.data(), end=ENDS, after=st.none() | st.integers(0, 6))
    def hold_and_free(self, data: st.DataObject, end: End, after: int | None) -> None:
        """A request ends while somebody still works on its blocks."""
        mine = [b for b in range(self.model.n) if self.model.givable(b)]
        blocks = data.draw(st.lists(st.sampled_from(mine), max_size=5, unique=True)) if mine else []
        self.hold_both(blocks, blocks, "d", end)
        self.both(lambda: self.pool.free_blocks(blocks, after=after), lambda: self.model.free(blocks, after))

    def hold_both(self, blocks: list[int], given: list[Any], owner: str, end: End) -> None:
        until, after = end

        def real() -> int:
            self.holds.append(self.pool.hold(given, owner, until=until, after=after))
            return len(self.holds)

        self.both(real, lambda: self.model.hold(blocks, owner, until, after, self.clock))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.holds) - 1))
        self.both(lambda: self.pool.release(self.holds[number]), lambda: self.model.release(number))

    @rule(later=st.integers(0, 3))
    def expire_holds(self, later: int) -> None:
        self.now += later
        self.both(
            lambda: [self.holds.index(hold) for hold in self.pool.expire_holds()],
            lambda: self.model.expire(self.now),
        )

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        blocks = self.some(data, 3)

        def real() -> None:
            self.handles.append(self.pool.unpin_blocks(blocks, self.fired.append))

        self.both(real, lambda: self.model.unpin(blocks, self.fired_in_model.append))

    @rule()
    def all_done(self) -> None:
        for handle in self.handles:
            handle.done()
        self.model.armed = []

    @rule(
        data=st.data(),
        chain=st.sampled_from(CHAINS),
        group=st.integers(0, 1),
        span=st.tuples(st.integers(0, 4), st.integers(0, 4)).map(sorted),
    )
    def cache_full(self, data: st.DataObject, chain: list[bytes], group: int, span: list[int]) -> None:
        first, last = span
        table = data.draw(st.lists(st.integers(0, self.model.n - 1), min_size=last, max_size=4))
        mask = data.draw(st.none() | st.lists(st.booleans(), min_size=last - first, max_size=last - first))
        seen = list(table)
        if mask is not None:
            for i, keep in zip(range(first, last), mask, strict=True):
                if not keep:
                    seen[i] = 0
        self.both(
            lambda: self.pool.cache_full_blocks(
                table, b"".join(chain), first, last, SIZE, group, block_mask=mask, payload=self.payload
            ),
            lambda: self.model.cache_full(seen, chain, first, last, SIZE, group),
        )

    @rule(
        data=st.data(),
        chain=st.sampled_from(CHAINS),
        at=st.integers(1, 8),
        group=st.integers(0, 1),
        replace=st.booleans(),
    )
    def cache_partial(self, data: st.DataObject, chain: list[bytes], at: int, group: int, replace: bool) -> None:
        block = data.draw(st.integers(0, self.model.n - 1))
        self.both(
            lambda: self.pool.cache_partial_block(
                block, chain[at - 1], at * UNIT, group, SIZE, replace, payload=self.payload
            ),
            lambda: self.model.cache_partial(block, chain[at - 1], at * UNIT, group, replace),
        )

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        src = data.draw(st.integers(0, self.model.n - 1))
        dst = data.draw(st.integers(0, self.model.n - 1))
        self.both(lambda: self.pool.move_block_hashes(src, dst), lambda: self.model.move(src, dst))

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        blocks = self.some(data)
        self.both(lambda: self.pool.evict_blocks(blocks), lambda: self.model.evict(blocks))

    @rule()
    def reset(self) -> None:
        self.both(lambda: bool(self.pool.reset_prefix_cache()), lambda: self.model.reset())

    @rule(data=st.data(), bad=st.sampled_from([-1, 99, 2**40, 2**80, "x", None, 1.5]))
    def unknown_blocks_are_refused(self, data: st.DataObject, bad: Any) -> None:
        blocks = [*self.some(data), bad]
        for call in (self.pool.touch, self.pool.free_blocks, self.pool.evict_blocks):
            with pytest.raises(BlockPoolError):
                call(blocks)

    @precondition(lambda self: self.model.n > 1)
    @rule(data=st.data())
    def foreign_blocks_are_refused(self, data: st.DataObject) -> None:
        other = BlockPool(2)
        with pytest.raises(BlockPoolError):
            self.pool.touch([*self.some(data), other.blocks[1]])
        with pytest.raises(BlockPoolError):
            self.pool.free_blocks([*self.some(data), other.blocks[1]])

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool, model = self.pool, self.model
        assert pool.free_block_queue.get_all_free_blocks() == model.queue
        assert pool.get_num_free_blocks() == len(model.queue)
        assert [b.ref_cnt for b in pool.blocks] == model.ref
        assert [b.incarnation for b in pool.blocks] == model.turn
        for block in range(model.n):
            keys = [(digest + group.to_bytes(4, "big"), n) for (digest, group), n in model.hashes[block]]
            assert pool.get_block_hashes(block) == keys
        for chain in CHAINS:
            for group in (0, 1):
                for stride in (1, 2):
                    picked = chain[stride - 1 :: stride]
                    raw = b"".join(chain)
                    assert pool.lookup_run(raw, stride - 1, 8, stride, group) == model.lookup(picked, group)
                    assert pool.lookup_run(raw, 7, -1, stride, group) == model.lookup(chain[7::-stride], group)
        assert len(pool.cached_block_hash_to_block) == len(model.index)
        assert flat(pool.take_events()) == model.events
        model.events = []
        assert self.fired == self.fired_in_model
        counters = pool.counters
        assert (counters.evicted_blocks, counters.evicted_unused_blocks) == (model.evicted, model.evicted_unused)
        assert counters.late_releases == model.late
        assert counters.evicted_by_group == model.evicted_by_group
        assert pool.get_cached_by_group() == model.cached_by_group()
        usage = pool.get_usage_parts()
        assert usage.free == len(model.queue)
        assert usage.cached == sum(1 for b in model.queue if model.hashes[b])
        assert usage.deferred == model.deferred()
        assert usage.free + usage.deferred + usage.held == model.n - 1
        assert usage.pinned == model.pinned()
        assert usage.pinned <= usage.held
        assert pool.held_by() == model.held_by()
        assert [hold.released for hold in self.holds] == [hold.released for hold in model.holds]
        assert pool.open_holds == [hold for hold in self.holds if not hold.released]
        for hold, modelled in zip(self.holds, model.holds, strict=True):
            assert (hold.blocks, hold.incarnations) == (modelled.blocks, modelled.turns)
            for block, turn in zip(modelled.blocks, modelled.turns, strict=True):
                assert hold.still_holds(block) == (model.turn[block] == turn)
        assert pool.audit() == []


PoolMachine.TestCase.settings = machine_settings()
TestPoolMachine = PoolMachine.TestCase
