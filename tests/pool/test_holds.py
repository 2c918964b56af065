"""Holds: what keeps a block a while longer, who may end it, and what a late end does (S7 b and c).

Random operations with holds are in test_machine.py.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from blockpool.pool import (
    BlockPool,
    FenceError,
    ForeignBlockError,
    Hold,
    HoldError,
    NoClockError,
    NoFreeBlocksError,
    PoolBusyError,
    ReleaseError,
    UnknownBlockError,
)
from blockpool.pool.layout import FLAGS


def chain(*numbers: int) -> bytes:
    return b"".join(hashlib.sha256(bytes([number])).digest() for number in numbers)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def snapshot(pool: BlockPool) -> Any:
    return pool.dump(), pool.get_usage_parts(), pool.counters


def cached(pool: BlockPool, *numbers: int) -> list[int]:
    blocks = pool.get_new_blocks(len(numbers))
    pool.cache_full_blocks(blocks, chain(*numbers), 0, len(numbers), 16, 0)
    return blocks


class TestLease:
    """S7 b: a remote peer writes into the blocks of a request; the request's owner aborts meanwhile."""

    def test_it_is_not_handed_out_before_its_time_and_is_free_once(self) -> None:
        clock = Clock()
        pool = BlockPool(5, clock=clock)
        table = pool.get_new_blocks(2)
        lease = pool.hold(table[::-1], "peer", until=10)
        pool.free_blocks(table[::-1])
        for clock.now in (0.0, 9.999):
            assert pool.expire_holds() == []
            assert pool.get_num_free_blocks() == 2
            with pytest.raises(NoFreeBlocksError):
                pool.get_new_blocks(3)
        clock.now = 10
        assert pool.get_num_free_blocks() == 2, "time alone frees nothing: the owner asks"
        assert pool.expire_holds() == [lease]
        assert lease.released
        assert pool.get_num_free_blocks() == 4
        assert pool.expire_holds() == []
        assert pool.get_num_free_blocks() == 4
        assert pool.audit() == []

    @pytest.mark.parametrize("taken_again", [False, True])
    def test_a_completion_that_comes_late_is_told_and_counted(self, taken_again: bool) -> None:
        clock = Clock()
        pool = BlockPool(5, clock=clock)
        table = pool.get_new_blocks(2)
        lease = pool.hold(table, "peer", until=10)
        pool.free_blocks(table)
        clock.now = 10
        pool.expire_holds()
        assert [lease.still_holds(block) for block in table] == [True, True]
        if taken_again:
            pool.get_new_blocks(1)
        clock.now = 11
        before, version = snapshot(pool)[:2], pool.version
        assert pool.release(lease) is False
        assert (snapshot(pool)[:2], pool.version) == (before, version)
        assert pool.counters.late_releases == 1
        assert [lease.still_holds(block) for block in lease.blocks] == [not taken_again, True]
        assert lease.incarnations == [1, 1]

    @pytest.mark.parametrize("first", ["completion", "abort"])
    def test_completion_and_abort_free_once_in_either_order(self, first: str) -> None:
        """S7 c."""
        clock = Clock()
        pool = BlockPool(5, clock=clock)
        table = pool.get_new_blocks(2)
        writing = pool.hold(table, "peer", until=10)
        steps = [lambda: pool.release(writing), lambda: pool.free_blocks(table)]
        for step in steps if first == "completion" else steps[::-1]:
            assert pool.get_num_free_blocks() == 2
            step()
        assert pool.get_num_free_blocks() == 4
        with pytest.raises(ReleaseError):
            pool.free_blocks(table)
        clock.now = 99
        assert pool.expire_holds() == []
        assert pool.release(writing) is False
        assert sorted(pool.free_block_queue.get_all_free_blocks()) == [1, 2, 3, 4]
        assert pool.counters.late_releases == 1

    def test_holds_expire_in_the_order_of_their_times_then_of_their_making(self) -> None:
        clock = Clock()
        pool = BlockPool(8, clock=clock)
        tables = [cached(pool, number) for number in range(5)]
        times = [3, 2.5, 3, 1, 9]
        holds = [pool.hold(table, "x", until=time) for table, time in zip(tables, times, strict=True)]
        for table in tables:
            pool.free_blocks(table)
        clock.now = 3
        assert pool.expire_holds() == [holds[3], holds[1], holds[0], holds[2]]
        assert pool.free_block_queue.get_all_free_blocks() == [6, 7, 4, 2, 1, 3]
        assert pool.held_by() == {"x": 1}

    def test_the_next_call_ends_a_hold_until_a_time_that_has_passed(self) -> None:
        clock = Clock()
        clock.now = 5
        pool = BlockPool(3, clock=clock)
        table = pool.get_new_blocks(1)
        hold = pool.hold(table, "x", until=4)
        assert not hold.released
        assert pool.expire_holds() == [hold]
        assert pool.blocks[table[0]].ref_cnt == 1

    def test_without_a_clock_nothing_is_held_until_a_time(self) -> None:
        pool = BlockPool(3)
        table = pool.get_new_blocks(1)
        before = snapshot(pool)
        with pytest.raises(NoClockError, match="clock"):
            pool.hold(table, "x", until=4)
        assert snapshot(pool) == before
        pool.hold(table, "x")
        assert pool.expire_holds() == []

    def test_a_clock_that_fails_has_changed_nothing(self) -> None:
        def broken() -> float:
            raise OSError("no clock")

        pool = BlockPool(3, clock=broken)
        hold = pool.hold(pool.get_new_blocks(1), "x", until=0)
        before = snapshot(pool)
        with pytest.raises(OSError, match="no clock"):
            pool.expire_holds()
        assert snapshot(pool) == before
        assert not hold.released


class TestPin:
    def test_a_cached_block_leaves_the_queue_and_returns_to_its_back(self) -> None:
        pool = BlockPool(6)
        table = cached(pool, 1, 2, 3)
        pool.free_blocks(table[::-1])
        assert pool.free_block_queue.get_all_free_blocks() == [4, 5, 3, 2, 1]
        pin = pool.hold([table[1], 0, table[0]], "system prompt")
        assert pin.blocks == [2, 1]
        assert pool.free_block_queue.get_all_free_blocks() == [4, 5, 3]
        assert pool.get_new_blocks(3) == [4, 5, 3]
        assert pool.lookup_run(chain(1, 2, 3), 0, 3, 1, 0) == [1, 2]
        assert pool.release(pin) is True
        assert pool.free_block_queue.get_all_free_blocks() == [2, 1], "the order given is the order of eviction"

    def test_holding_is_a_use(self) -> None:
        pool = BlockPool(3)
        pool.free_blocks(cached(pool, 1, 2))
        pool.release(pool.hold([1], "x"))
        pool.get_new_blocks(2)
        assert (pool.counters.evicted_blocks, pool.counters.evicted_unused_blocks) == (2, 1)

    @pytest.mark.parametrize("after", [None, 5])
    def test_nobody_else_can_give_its_references_back(self, after: int | None) -> None:
        pool, other = BlockPool(5), BlockPool(5)
        (a,) = pool.get_new_blocks(1)
        (b,) = other.get_new_blocks(1)
        pool.hold([a, a], "x")
        before = snapshot(pool), snapshot(other)
        for blocks in ([a, a], [other.blocks[b], pool.blocks[a], pool.blocks[a]]):
            with pytest.raises(ReleaseError, match=r"3 references, 2 of them kept by holds"):
                pool.free_blocks(blocks, after=after)
        with pytest.raises(ReleaseError):
            pool.unpin_blocks([a, a], print)
        assert (snapshot(pool), snapshot(other)) == before
        pool.free_blocks([a], after=after)
        for blocks in ([a], (pool.blocks[a],)):
            with pytest.raises(ReleaseError, match=r"block 1 is given back more often than it is held"):
                pool.free_blocks(blocks)
        assert pool.get_num_free_blocks() == 3

    def test_the_last_plain_reference_is_the_holds_own(self) -> None:
        pool = BlockPool(3)
        (a,) = pool.get_new_blocks(1)
        hold = pool.hold([a], "x")
        pool.free_blocks([a])
        with pytest.raises(ReleaseError, match=r"1 references, 1 of them kept by holds"):
            pool.free_blocks([a])  # the commonest call, which has a way of its own
        pool.release(hold)
        assert pool.get_num_free_blocks() == 2

    def test_usage_and_owners(self) -> None:
        pool = BlockPool(10, clock=Clock())
        table = pool.get_new_blocks(4)
        pool.hold(table[:2], "a")
        pool.hold(table[:1] * 3, "a", until=4)
        late = pool.hold(table[:3], "b", after=4)
        pool.hold([], "nobody")
        assert pool.held_by() == {"a": 2, "b": 3}
        usage = pool.get_usage_parts()
        assert (usage.free, usage.deferred, usage.held, usage.pinned) == (5, 0, 4, 2)
        pool.free_blocks(table)
        usage = pool.get_usage_parts()
        assert (usage.free, usage.deferred, usage.held, usage.pinned) == (6, 1, 2, 2)
        assert pool.get_deferred_blocks() == {3: 4}
        result = pool.reset_prefix_cache()
        assert not result
        assert (result.num_blocks_in_use, result.num_blocks_deferred) == (3, 1)
        assert result.holds == {"a": 2, "b": 3}
        for hold in pool.open_holds:
            assert pool.release(hold)
        assert late.released
        assert pool.held_by() == {}
        assert pool.reset_prefix_cache().holds == {}


class TestUntilAFence:
    def test_a_fence_ends_it_in_the_order_of_the_calls(self) -> None:
        pool = BlockPool(7)
        table = cached(pool, 1, 2, 3, 4, 5, 6)
        first = pool.hold(table[4:], "x", after=3)
        pool.free_blocks(table[2:4], after=2)
        last = pool.hold(table[:2], "x", after=1)
        pool.free_blocks(table[:2] + table[4:])
        assert pool.next_fence == 1
        assert pool.get_usage_parts().deferred == 6
        pool.advance(3)
        assert pool.free_block_queue.get_all_free_blocks() == [5, 6, 3, 4, 1, 2]
        assert (first.released, last.released, pool.open_holds) == (True, True, [])
        assert pool.release(last) is False
        assert pool.audit() == []

    def test_it_may_be_released_before(self) -> None:
        pool = BlockPool(4)
        table = cached(pool, 1, 2)
        hold = pool.hold(table, "x", after=3)
        pool.free_blocks([table[0]], after=4)
        pool.free_blocks([table[1]])
        assert pool.get_deferred_blocks() == {1: 4, 2: 3}
        assert pool.release(hold) is True
        assert pool.get_deferred_blocks() == {1: 4}
        assert pool.free_block_queue.get_all_free_blocks() == [3, 2]
        pool.advance(3)
        assert pool.free_block_queue.get_all_free_blocks() == [3, 2]
        pool.advance(4)
        assert pool.free_block_queue.get_all_free_blocks() == [3, 2, 1]

    def test_a_fence_that_was_reached_keeps_nothing(self) -> None:
        pool = BlockPool(4)
        pool.free_blocks(cached(pool, 1, 2))
        pool.advance(3)
        hold = pool.hold([1], "x", after=3)
        assert hold.released
        assert pool.free_block_queue.get_all_free_blocks() == [3, 2, 1]
        assert pool.release(hold) is False
        assert pool.audit() == []

    def test_a_hold_of_nothing_ends_too_and_frees_nothing(self) -> None:
        pool = BlockPool(4)
        hold = pool.hold([0], "x", after=3)
        assert (hold.blocks, hold.released) == ([], False)
        assert pool.next_fence is None
        pool.advance(3)
        assert hold.released


REFUSED: list[tuple[type[Exception], Callable[[BlockPool, BlockPool], Any]]] = [
    (HoldError, lambda pool, other: pool.hold([1, 4], "x")),  # 4 is free and has no hash
    (HoldError, lambda pool, other: pool.hold([1], "x", until=1, after=1)),
    (HoldError, lambda pool, other: pool.hold([1], "x", until=float("nan"))),
    (HoldError, lambda pool, other: pool.hold([1], "x", until=float("inf"))),
    (HoldError, lambda pool, other: pool.hold([1], "x", until=10**400)),
    (HoldError, lambda pool, other: pool.hold([1], "x", until="5")),  # type: ignore[arg-type]
    (FenceError, lambda pool, other: pool.hold([1], "x", after=-1)),
    (UnknownBlockError, lambda pool, other: pool.hold([1, 99], "x")),
    (UnknownBlockError, lambda pool, other: pool.hold([1, None], "x")),  # type: ignore[list-item]
    (ForeignBlockError, lambda pool, other: pool.hold([pool.blocks[1], other.blocks[1]], "x")),
    (HoldError, lambda pool, other: pool.release(other.hold([1], "x"))),
    (HoldError, lambda pool, other: pool.open_holds[0].still_holds(2)),
    (HoldError, lambda pool, other: pool.open_holds[0].still_holds(0)),
    (ForeignBlockError, lambda pool, other: pool.open_holds[0].still_holds(other.blocks[1])),
    (UnknownBlockError, lambda pool, other: pool.open_holds[0].still_holds(99)),
]


@pytest.mark.parametrize(("error", "call"), REFUSED)
def test_what_is_refused_changes_nothing(error: type[Exception], call: Callable[..., Any]) -> None:
    pool, other = (BlockPool(5, clock=Clock()) for _ in range(2))
    for one in (pool, other):
        one.free_blocks(one.get_new_blocks(3)[2:])
    pool.hold([1], "owner", until=7)
    before, version = snapshot(pool), pool.version
    with pytest.raises(error):
        call(pool, other)
    assert (snapshot(pool), pool.version) == (before, version)


def test_ids_handles_and_arrays_are_all_taken() -> None:
    pool = BlockPool(5, clock=Clock())
    a, b = pool.get_new_blocks(2)
    for blocks in ([pool.blocks[a], b], (a, b), np.array([a, b]), iter([a, b])):
        assert pool.hold(blocks, "x").blocks == [a, b]
    hold = pool.hold([a], "x", until=np.float32(2.5))
    assert (hold.owner, hold.until, hold.after) == ("x", 2.5, None)
    assert hold.still_holds(pool.blocks[a])
    assert [pool.blocks[block].ref_cnt for block in (a, b)] == [6, 5]


def test_a_reuse_callback_cannot_change_holds() -> None:
    pool = BlockPool(4, clock=Clock())
    (a, b) = pool.get_new_blocks(2)
    hold = pool.hold([b], "x", until=0)
    told: list[str] = []

    def on_reuse(block: int) -> None:
        for call in (lambda: pool.hold([b], "y"), lambda: pool.release(hold), pool.expire_holds):
            with pytest.raises(PoolBusyError):
                call()
            told.append("refused")

    pool.unpin_blocks([a], on_reuse)
    pool.get_new_blocks(2)
    assert told == ["refused"] * 3
    assert pool.held_by() == {"x": 1}


def test_a_hook_that_raises_leaves_the_hold_in_the_books() -> None:
    class Failing:
        def on_allocated(self, block_id: int) -> None:
            pass

        def on_accessed(self, block_id: int) -> None:
            raise KeyError("hook")

        def on_evicted(self, block_id: int, had_hash: bool) -> None:
            pass

    pool = BlockPool(4, metrics=Failing())
    blocks = pool.get_new_blocks(2)
    with pytest.raises(KeyError) as caught:
        pool.hold(blocks, "x")
    assert caught.value.__notes__ == ["Hold('x', [1, 2]) was made all the same"]
    (hold,) = pool.open_holds
    assert pool.release(hold)
    assert pool.audit() == []


@pytest.mark.parametrize("end", [{}, {"until": 3}, {"after": 3}])
def test_an_ended_hold_leaves_no_mark_on_its_blocks(end: dict[str, Any]) -> None:
    """A marked block would be freed the slow way for ever."""
    pool = BlockPool(5, clock=Clock())
    table = pool.get_new_blocks(2)
    flags = [pool.records.get(block, FLAGS) for block in table]
    hold = pool.hold([*table, table[0]], "x", **end)
    assert [pool.records.get(block, FLAGS) for block in table] != flags
    pool.release(hold)
    assert [pool.records.get(block, FLAGS) for block in table] == flags


def test_the_dump_has_the_holds() -> None:
    pool = BlockPool(5, clock=Clock())
    table = pool.get_new_blocks(2)
    pool.hold(table[::-1], "a", until=4)
    pool.hold(table, "b", after=2)
    pool.release(pool.hold(table, "c"))
    assert json.loads(json.dumps(pool.dump()))["holds"] == [
        {"owner": "a", "until": 4.0, "after": None, "blocks": [2, 1], "incarnations": [1, 1], "released": False},
        {"owner": "b", "until": None, "after": 2, "blocks": [1, 2], "incarnations": [1, 1], "released": False},
    ]
    assert pool.dump()["pending"] == []
    assert pool.audit() == []


def test_a_hold_prints_what_it_is() -> None:
    pool = BlockPool(5, clock=Clock())
    table = pool.get_new_blocks(2)
    assert repr(pool.hold(table, "a", until=4)) == "Hold('a', [1, 2], until=4.0)"
    assert repr(pool.hold(table, "b", after=2)) == "Hold('b', [1, 2], after=2)"
    pin = pool.hold(table, "c")
    pool.release(pin)
    assert repr(pin) == "Hold('c', [1, 2], released)"


def test_a_pool_with_holds_goes_when_its_last_user_does() -> None:
    """No cycles, and no hold that keeps a pool alive."""

    def pools() -> int:
        return sum(isinstance(o, BlockPool) for o in gc.get_objects())

    def open_holds() -> int:
        return sum(isinstance(o, Hold) for o in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = pools(), open_holds()
        pool = BlockPool(8, clock=Clock())
        table = pool.get_new_blocks(2)
        kept = [pool.hold(table, "x"), pool.hold(table, "x", until=3), pool.hold(table, "x", after=3)]
        assert (pools(), open_holds()) == (before[0] + 1, before[1] + 3)
        del pool
        assert (pools(), open_holds()) == (before[0], before[1] + 3)
        assert kept[0].still_holds(1)
        kept.clear()
        assert open_holds() == before[1]
    finally:
        gc.enable()
