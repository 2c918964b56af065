"""Admission never lies: what was promised can be had, and what is refused for ever could never be."""

from __future__ import annotations

import pytest

from blockpool.cache import AllocationPlan, KVCacheManager, Refusal, RefusalReason, Request, RequestError
from blockpool.managers import FullAttentionSpec, MambaSpec
from tests.cache.groups import FULL, STATE, audit, cache, compute, group, hit_length, request, window


def reason_of(plan: AllocationPlan | Refusal) -> RefusalReason:
    assert isinstance(plan, Refusal)
    return plan.reason


def test_a_full_sequence_does_not_count_on_blocks_that_others_hold_as_well() -> None:
    manager = cache((50, 2), FULL, group(STATE, pool=1), max_in_flight_tokens=4)
    a = request("a", 9)
    compute(manager, a, 8)
    b = request("b", [*range(8), *[70] * 28])
    hit = manager.get_computed_blocks(b)
    assert hit.num_tokens == 8
    # its state at 8 is a's: when b drops it nothing is free, and b needs two at a time
    assert reason_of(manager.plan(b, 4, hit=hit, full_sequence_must_fit=True)) is RefusalReason.NO_ROOM
    manager.free(a)
    assert manager.plan(b, 4, hit=hit, full_sequence_must_fit=True)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_full_sequence_counts_the_states_of_all_steps_in_flight(steps: int) -> None:
    def run(usable: int) -> bool:
        manager = cache(usable, STATE, max_in_flight_tokens=8 * steps, max_steps_in_flight=steps)
        r = request("r", 80)
        if not manager.plan(r, 8, full_sequence_must_fit=True):
            return False
        for step in range(10):
            manager.begin_step(step)
            assert manager.allocate_slots(r, 8) is not None, manager.last_refusal
            r.num_computed_tokens += 8
            r.num_in_flight_tokens += 8
            if step >= steps - 1:
                manager.acknowledge(step - steps + 1)
                r.num_in_flight_tokens -= 8
        audit(manager)
        return True

    assert [run(usable) for usable in (steps, steps + 1)] == [False, True]


def test_a_running_request_is_not_rejected_for_blocks_that_it_will_drop() -> None:
    manager = cache(3, window(5))
    r = request("r", 40)
    manager.begin_step(0)
    compute(manager, r, 8)
    r.num_in_flight_tokens = 8
    manager.begin_step(1)
    assert reason_of(manager.plan(r, 8)) is RefusalReason.NO_ROOM
    manager.acknowledge(0)
    r.num_in_flight_tokens = 0
    assert manager.plan(r, 8)


def test_a_request_goes_on_without_its_cache_entry_where_there_can_be_no_copy() -> None:
    manager = cache((9, 1), FullAttentionSpec(8), group(MambaSpec(8, 0, "align"), pool=1), unit=4)
    r = request("r", 5)
    compute(manager, r, 4)
    assert hit_length(manager, 5) == 4
    compute(manager, r)  # overwrites the state after 4 tokens
    assert (hit_length(manager, 5), manager.take_block_copies()) == (0, [])
    assert r.num_computed_tokens == 5
    audit(manager)


@pytest.mark.parametrize("late", [False, True])
def test_the_same_while_the_entry_still_waits(late: bool) -> None:
    manager = cache((9, 1), FullAttentionSpec(8), group(MambaSpec(8, 0, "align"), pool=1), unit=4)
    r = request("r", 5)
    manager.begin_step(0)
    compute(manager, r, 4, delay_cache_blocks=late)
    if late:
        manager.cache_blocks(r, 4)
    manager.begin_step(1)
    compute(manager, r)
    manager.acknowledge(0)
    manager.acknowledge(1)
    assert (hit_length(manager, 5), manager.take_block_copies()) == (0, [])
    audit(manager)


class TestCheckpoints:
    """Where a step should end, so that states are kept for those who come later."""

    def run(self, manager: KVCacheManager, r: Request, chunk: int) -> list[int]:
        ends = []
        hit = manager.get_computed_blocks(r)
        while r.num_computed_tokens < r.num_tokens:
            adopted = None if ends else hit
            computed = r.num_computed_tokens + (adopted.num_tokens if adopted else 0)
            end = min(computed + chunk, r.num_tokens)
            stop = manager.next_checkpoint(r, adopted)
            end = end if stop is None else min(end, stop)
            assert manager.allocate_slots(r, end - computed, new_computed_blocks=adopted) is not None
            r.num_computed_tokens = end
            ends.append(end)
        return ends

    def test_the_replay_boundary_is_kept(self) -> None:
        manager = cache(60, FULL, STATE, retention_interval=0)
        assert self.run(manager, request("a", 41), 100) == [40, 41]
        assert hit_length(manager, 41) == 40

    def test_a_junction_is_kept(self) -> None:
        manager = cache(200, FULL, STATE, retention_interval=0)
        self.run(manager, request("a", 41), 100)
        assert self.run(manager, request("b", [*range(22), *[70] * 19]), 100) == [20, 40, 41]
        assert hit_length(manager, [*range(22), *[80] * 19]) == 20

    def test_each_interval_is_kept(self) -> None:
        manager = cache(60, FULL, STATE, retention_interval=16)
        assert self.run(manager, request("a", 41), 12) == [12, 16, 28, 32, 40, 41]
        assert hit_length(manager, range(34)) == 32

    def test_there_is_none_without_states(self) -> None:
        manager = cache(60, FULL, window(5), retention_interval=16)
        assert self.run(manager, request("a", 41), 100) == [41]


def test_a_pin_is_verified_too() -> None:
    manager = cache(60, FULL, verify_hashes=True)
    a = request("a", 9)
    compute(manager, a)
    impostor = request("b", 9)
    impostor.all_token_ids = [*range(50, 59)]
    assert manager.pin(impostor, "owner").num_tokens == 0
    assert manager.num_collisions == 1
    assert manager.pin(a, "owner").num_tokens == 8


def test_another_request_of_the_same_id_is_refused() -> None:
    manager = cache(20, FULL)
    compute(manager, request("a", 9), 4)
    with pytest.raises(RequestError, match="another request of that id"):
        manager.plan(request("a", 9), 5)


class Broken:
    """A metrics hook that fails at every touch."""

    def on_allocated(self, block_id: int) -> None: ...

    def on_evicted(self, block_id: int, had_hash: bool) -> None: ...

    def on_accessed(self, block_id: int) -> None:
        raise KeyError(block_id)


def test_a_commit_with_a_copy_is_whole_when_a_hook_fails() -> None:
    manager = cache(20, FullAttentionSpec(8), unit=2, metrics=Broken())
    compute(manager, request("a", 7, 2))
    b = request("b", [*range(6), 50], 2)
    hit = manager.get_computed_blocks(b)
    with pytest.raises(BaseExceptionGroup, match="callbacks"):
        manager.allocate_slots(b, 1, new_computed_blocks=hit)
    assert [(copy.src_block_id, copy.dst_block_id) for copy in manager.take_block_copies()] == [(1, 2)]
    assert manager.free("a")
    assert manager.free("b")
    assert manager.pool.get_num_free_blocks() == 20
    audit(manager)
