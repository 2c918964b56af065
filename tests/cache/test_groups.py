"""The promises for several groups, each by name: external tokens, room, order, copies, steps, storing, control."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import pytest

from blockpool.cache import (
    AllocationPlan,
    BlockCopy,
    ConfigError,
    KVCacheConfig,
    KVCacheManager,
    Refusal,
    RefusalReason,
    Request,
    RequestError,
    StalePlan,
    StepError,
    WhyNotMore,
)
from blockpool.hashing import BlockHasher, BlockHashes
from blockpool.managers import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    SinkFullAttentionManager,
    SlidingWindowSpec,
)
from blockpool.pool import BlockPool, BlockRemoved, BlockStored
from tests.cache.groups import (
    FULL,
    SINK,
    STATE,
    audit,
    cache,
    compute,
    drain,
    group,
    hit_length,
    refs,
    request,
    state_of,
    window,
)


def planned(answer: AllocationPlan | Refusal) -> AllocationPlan:
    assert isinstance(answer, AllocationPlan), answer
    return answer


def refused(answer: AllocationPlan | Refusal) -> Refusal:
    assert isinstance(answer, Refusal), answer
    return answer


def shape(table: list[int]) -> str:
    """Where a table has blocks."""
    return "".join("x" if block else "." for block in table)


class TestExternalTokens:
    def test_inside_the_window_they_get_blocks_outside_they_are_null(self) -> None:
        manager = cache(30, FULL, window(9), STATE)
        r = request("r", 25)
        plan = planned(manager.plan(r, 5, num_external_computed_tokens=20))
        assert plan.num_new_blocks == (7, 4, 2)  # the state: what is loaded, and the running one
        blocks = manager.commit(plan)
        assert [shape(table) for table in manager.get_block_ids(r)] == ["xxxxxxx", "...xxxx", "....x.x"]
        assert blocks.get_block_ids() == manager.get_block_ids(r)
        assert manager.pool.get_num_free_blocks() == 30 - 13

    def test_all_of_them_may_lie_outside(self) -> None:
        manager = cache(30, FULL, ChunkedLocalAttentionSpec(4, 8))
        r = request("r", 25)
        assert planned(manager.plan(r, 9, num_external_computed_tokens=16)).num_new_blocks == (7, 3)
        assert manager.allocate_slots(r, 9, num_external_computed_tokens=16) is not None
        assert [shape(table) for table in manager.get_block_ids(r)] == ["xxxxxxx", "....xxx"]

    def test_behind_a_local_hit(self) -> None:
        manager = cache(40, FULL, window(9))
        first = request("first", 9)
        compute(manager, first)
        second = request("second", 41)
        hit = manager.get_computed_blocks(second)
        assert hit.num_tokens == 8
        plan = planned(manager.plan(second, 1, hit=hit, num_external_computed_tokens=20))
        # 29 tokens; what is read from token 28 on begins at token 20
        assert plan.num_new_blocks == (6, 3)
        manager.commit(plan)
        table, windowed = manager.get_block_ids(second)
        assert table[:2] == manager.get_block_ids(first)[0][:2]
        assert shape(windowed)[2:] == "...xxx"
        audit(manager)

    def test_loaded_blocks_are_found_when_their_step_has_run(self) -> None:
        manager = cache(30, FULL, window(9), STATE)
        manager.begin_step(0)
        r = request("r", 25)
        assert manager.allocate_slots(r, 5, num_external_computed_tokens=20) is not None
        r.num_computed_tokens = 25
        assert hit_length(manager, 25) == 0
        assert manager.take_events() == []
        manager.acknowledge(0)
        # the last state stood still at 25, the loaded one at 20
        assert hit_length(manager, 25) == 20
        assert hit_length(manager, 21) == 20

    def test_what_is_computed_behind_them_waits_with_them(self) -> None:
        manager = cache(30, FULL, window(9))
        manager.begin_step(0)
        r = request("r", 25)
        assert manager.allocate_slots(r, 5, num_external_computed_tokens=20) is not None
        hit = manager.get_computed_blocks(request("probe", 25))
        assert (hit.num_tokens, hit.ready_length) == (0, 24)
        manager.acknowledge(0)
        assert hit_length(manager, 25) == 24

    def test_without_steps_they_are_found_at_once(self) -> None:
        manager = cache(30, FULL, window(9))
        r = request("r", 25)
        assert manager.allocate_slots(r, 5, num_external_computed_tokens=20) is not None
        assert hit_length(manager, 25) == 24

    def test_a_load_that_computes_nothing_and_registers_later(self) -> None:
        manager = cache(30, FULL, window(9))
        r = request("r", 25)
        assert manager.allocate_slots(r, 0, num_external_computed_tokens=20, delay_cache_blocks=True) is not None
        assert hit_length(manager, 25) == 0
        r.num_computed_tokens = 20
        manager.cache_blocks(r, 20)
        assert hit_length(manager, 25) == 20
        assert manager.allocate_slots(r, 5) is not None
        r.num_computed_tokens = 25
        assert hit_length(manager, 25) == 24
        assert [shape(table) for table in manager.get_block_ids(r)] == ["xxxxxxx", "...xxxx"]

    def test_rings_and_encoders_have_what_they_always_have(self) -> None:
        manager = cache(40, FULL, CircularBufferSpec(4), CrossAttentionSpec(4), MambaSpec(4, 1, "none"))
        r = request("r", 25)
        plan = planned(manager.plan(r, 5, num_external_computed_tokens=20, num_encoder_tokens=9))
        assert plan.num_new_blocks == (7, 1, 3, 2)
        manager.commit(plan)
        r.num_computed_tokens = 25
        r.append_output_tokens(range(8))
        assert planned(manager.plan(r, 8, num_encoder_tokens=9)).num_new_blocks == (2, 0, 0, 0)


class TestLookahead:
    def test_attention_gets_slots_for_it_a_state_does_not(self) -> None:
        manager = cache(30, FULL, window(9), STATE, MambaSpec(4, 2, "align"))
        r = request("r", 4)
        plan = planned(manager.plan(r, 4, num_lookahead_tokens=8))
        assert plan.num_new_blocks == (3, 3, 1, 3)
        manager.commit(plan)
        assert [shape(table) for table in manager.get_block_ids(r)] == ["xxx", "xxx", "x", "xxx"]

    def test_a_running_state_takes_nothing_for_it(self) -> None:
        manager = cache(30, FULL, STATE)
        r = request("r", 8)
        compute(manager, r, 2)
        assert planned(manager.plan(r, 1, num_lookahead_tokens=4)).num_new_blocks == (1, 0)
        compute(manager, r, 3, num_lookahead_tokens=4)
        assert [shape(table) for table in manager.get_block_ids(r)] == ["xx", "x"]

    def test_what_was_taken_ahead_is_used_later(self) -> None:
        manager = cache(30, FULL, window(9))
        r = request("r", 4)
        compute(manager, r, num_lookahead_tokens=8)
        r.append_output_tokens(range(50, 58))
        assert planned(manager.plan(r, 8)).num_new_blocks == (0, 0)
        assert planned(manager.plan(r, 8, num_lookahead_tokens=1)).num_new_blocks == (1, 1)


class TestRoom:
    def test_a_whole_prompt_is_checked_against_what_recycling_saves(self) -> None:
        def answer(usable: int, **options: int) -> AllocationPlan | Refusal:
            manager = cache(usable, window(5), max_model_len=100, **options)
            return manager.plan(request("r", 40), 4, full_sequence_must_fit=True)

        assert answer(3, max_in_flight_tokens=4)  # 4 read tokens and 4 in flight, wherever they start
        refusal = refused(answer(2, max_in_flight_tokens=4))
        assert refusal.reason is RefusalReason.NEVER_FITS
        assert refused(answer(9)).reason is RefusalReason.NEVER_FITS  # all may be in flight at a time
        assert answer(10)

    def test_a_kind_that_keeps_all_needs_it_all(self) -> None:
        def answer(usable: int) -> AllocationPlan | Refusal:
            manager = cache(usable, FULL, window(5), max_model_len=100, max_in_flight_tokens=4)
            return manager.plan(request("r", 40), 4, full_sequence_must_fit=True)

        assert answer(13)
        assert refused(answer(12)).reason is RefusalReason.NEVER_FITS
        manager = cache(12, FULL, window(5), max_model_len=100, max_in_flight_tokens=4)
        assert planned(manager.plan(request("r", 40), 4)).num_new_blocks == (1, 1)

    def test_the_whole_prompt_is_checked_beside_what_others_hold(self) -> None:
        manager = cache(16, FULL, window(5), max_model_len=100, max_in_flight_tokens=4)
        compute(manager, request("other", range(100, 108)))
        refusal = refused(manager.plan(request("r", 40), 4, full_sequence_must_fit=True))
        assert refusal.reason is RefusalReason.NO_ROOM
        assert (refusal.pools[0].needed, refusal.pools[0].free) == (13, 12)

    def two_pools(self, **options: Any) -> KVCacheManager:
        return cache((9, 19), FULL, group(window(9), pool=1), **options)

    def test_the_watermark_is_a_part_of_each_pool(self) -> None:
        manager = self.two_pools(watermark=0.2)
        r = request("r", 36)
        refusal = refused(manager.plan(r, 36))
        assert [room.withheld for room in refusal.pools] == [2, 4]
        assert [(room.needed, room.free) for room in refusal.pools] == [(9, 9), (9, 19)]
        assert manager.plan(r, 28)
        assert manager.plan(r, 36, has_scheduled_reqs=False)
        compute(manager, r, 28)
        assert manager.plan(r, 8)  # it runs already

    def test_the_reserve_is_for_every_pool_or_one_for_each(self) -> None:
        manager = self.two_pools()
        r = request("r", 36)
        assert manager.plan(r, 36, reserved_blocks=0)
        refusal = refused(manager.plan(r, 36, reserved_blocks=3))
        assert [room.withheld for room in refusal.pools] == [3, 3]
        assert manager.plan(r, 36, reserved_blocks=(0, 10))
        refusal = refused(manager.plan(r, 36, reserved_blocks=(0, 11)))
        assert [room.withheld for room in refusal.pools] == [0, 11]
        for reserved in ((0,), (0, 0, 0), (0, -1), -1):
            with pytest.raises(RequestError):
                manager.plan(r, 36, reserved_blocks=reserved)

    def test_blocks_of_one_pool_are_no_room_in_the_other(self) -> None:
        manager = self.two_pools()
        compute(manager, request("a", 24))
        refusal = refused(manager.plan(request("b", range(100, 116)), 16))
        assert refusal.reason is RefusalReason.NO_ROOM
        assert [(room.needed, room.free, room.held) for room in refusal.pools] == [(4, 3, 6), (4, 13, 6)]

    def test_what_is_dropped_is_room(self) -> None:
        manager = cache(2, window(5))
        r = request("r", 16)
        compute(manager, r, 4)
        compute(manager, r, 8)
        assert manager.pool.get_num_free_blocks() == 0
        plan = planned(manager.plan(r, 4))
        assert (plan.num_dropped_blocks, plan.num_new_blocks) == ((1,), (1,))
        first, second = manager.get_block_ids(r)[0]
        assert manager.commit(plan).get_block_ids() == ([first],)
        assert manager.get_block_ids(r) == ([0, second, first],)

    def test_a_refusal_counts_what_would_be_dropped_as_free(self) -> None:
        manager = cache(2, window(5))
        r = request("r", 24)
        compute(manager, r, 4)
        compute(manager, r, 8)
        refusal = refused(manager.plan(r, 8))
        assert (refusal.pools[0].needed, refusal.pools[0].free) == (2, 1)
        assert all(manager.get_block_ids(r)[0])

    def test_what_others_hold_is_dropped_but_is_no_room(self) -> None:
        manager = cache(2, window(5))
        r = request("r", 16)
        compute(manager, r, 4)
        compute(manager, r, 8)
        manager.pool.touch(manager.get_block_ids(r)[0][:1])
        assert refused(manager.plan(r, 4)).reason is RefusalReason.NO_ROOM

    def test_what_a_fence_keeps_is_dropped_but_is_no_room(self) -> None:
        manager = cache(2, window(5))
        r = request("r", 16)
        compute(manager, r, 4)
        compute(manager, r, 8)
        first = manager.get_block_ids(r)[0][0]
        manager.pool.touch([first])
        manager.pool.free_blocks([first], after=7)
        refusal = refused(manager.plan(r, 4))
        assert refusal.reason in (RefusalReason.NO_ROOM, RefusalReason.WAIT_FOR_FENCE)
        assert refusal.pools[0].free == 0
        manager.acknowledge(7)
        assert planned(manager.plan(r, 4)).num_dropped_blocks == (1,)


class TestRefusals:
    def test_waiting_for_a_fence_must_be_enough_in_every_pool(self) -> None:
        manager = cache((4, 4), FULL, group(FULL, pool=1))
        a = request("a", 16)
        compute(manager, a)
        held = manager.get_block_ids(a)
        manager.pools[1].touch(held[1][:1])
        manager.free(a, after=5)
        b = request("b", range(100, 112))
        refusal = refused(manager.plan(b, 12))
        assert refusal.reason is RefusalReason.WAIT_FOR_FENCE
        assert [room.next_fence for room in refusal.pools] == [5, 5]
        assert [(room.deferred, room.held) for room in refusal.pools] == [(4, 0), (3, 1)]
        c = request("c", range(100, 116))
        assert refused(manager.plan(c, 16)).reason is RefusalReason.NO_ROOM
        manager.acknowledge(5)
        assert manager.plan(b, 12)

    def test_never_is_said_of_this_hit_and_this_chunk(self) -> None:
        manager = cache((20, 2), FULL, group(window(5), pool=1))
        r = request("r", 40)
        assert refused(manager.plan(r, 12)).reason is RefusalReason.NEVER_FITS
        assert manager.plan(r, 8)
        assert refused(manager.plan(r, 8, reserved_blocks=1)).reason is RefusalReason.NO_ROOM

    def test_sinks_leave_less_of_the_pool(self) -> None:
        manager = cache(6, SINK)
        assert manager.plan(request("r", 16), 16)
        assert refused(manager.plan(request("r", 20), 20)).reason is RefusalReason.NEVER_FITS

    def test_a_state_that_is_being_computed_is_worth_waiting_for(self) -> None:
        manager = cache(30, FULL, STATE)
        manager.begin_step(0)
        compute(manager, request("a", 8))
        b = request("b", [*range(8), *range(50, 55)])
        hit = manager.get_computed_blocks(b)
        assert (hit.num_tokens, hit.ready_length) == (0, 8)
        before = state_of(manager, b)
        refusal = refused(manager.plan(b, 13, hit=hit))
        assert refusal.reason is RefusalReason.STATE_NOT_READY
        assert manager.plan(b, 13)  # or compute it all the same
        assert state_of(manager, b) == before
        manager.begin_step(1)
        assert manager.get_computed_blocks(b).ready_length == 8
        manager.acknowledge(0)
        hit = manager.get_computed_blocks(b)
        assert (hit.num_tokens, hit.ready_length) == (8, 8)
        assert manager.plan(b, 5, hit=hit)

    def test_a_tail_that_is_being_computed_is_worth_waiting_for(self) -> None:
        manager = cache(30, FullAttentionSpec(16))
        manager.begin_step(0)
        compute(manager, request("a", 26))
        b = request("b", [*range(24), *range(50, 55)])
        hit = manager.get_computed_blocks(b)
        assert (hit.num_tokens, hit.ready_length) == (16, 24)
        assert refused(manager.plan(b, 13, hit=hit)).reason is RefusalReason.STATE_NOT_READY
        assert manager.plan(b, 29)
        manager.acknowledge(0)
        assert hit_length(manager, [*range(24), 50]) == 24

    def test_a_tail_whose_block_is_full_by_then_is_not(self) -> None:
        """The block is registered as a whole, and the boundary inside it is none any more."""
        manager = cache(30, FullAttentionSpec(16))
        a = request("a", 26)
        b = request("b", [*range(24), *range(50, 55)])
        manager.begin_step(0)
        compute(manager, a)
        assert manager.get_computed_blocks(b).ready_length == 24
        a.append_output_tokens(range(60, 66))
        manager.begin_step(1)
        compute(manager, a, 32)
        hit = manager.get_computed_blocks(b)
        assert (hit.num_tokens, hit.ready_length) == (16, 16)
        assert manager.plan(b, 13, hit=hit)
        manager.acknowledge(1)
        assert manager.get_computed_blocks(b).num_tokens == 16

    def test_a_hit_inside_a_full_block_waits_for_what_it_copies(self) -> None:
        """With a margin a block that is full serves boundaries inside it, but only when it is written."""
        manager = cache(30, group(FullAttentionSpec(8), draft_margin=True), unit=2)
        manager.begin_step(0)
        compute(manager, request("a", 8, 2))
        b = request("b", [*range(8), 50], 2)
        hit = manager.get_computed_blocks(b)
        assert (hit.num_tokens, hit.ready_length) == (0, 6)
        manager.acknowledge(0)
        assert manager.get_computed_blocks(b).num_tokens == 6

    def test_blocks_that_write_before_they_read_are_shared_at_once(self) -> None:
        manager = cache(60, FULL, window(9), ChunkedLocalAttentionSpec(4, 8), group(FULL, draft_margin=True))
        manager.begin_step(0)
        assert [compute(manager, request(f"r{i}", 17)) for i in range(3)] == [0, 12, 12]

    def test_a_hit_that_lost_a_block_in_the_second_group_is_stale(self) -> None:
        for loss in ("handed out", "forgotten"):
            manager = cache((20, 4), FULL, group(window(9), pool=1))
            a = request("a", 16)
            compute(manager, a)
            (lost,) = manager.get_block_ids(a)[1][2:3]
            manager.free(a)
            b = request("b", 17)
            hit = manager.get_computed_blocks(b)
            assert hit.num_tokens == 16
            if loss == "handed out":
                while lost not in manager.pools[1].get_new_blocks(1):
                    pass
            else:
                manager.pools[1].evict_blocks([lost])
            before = state_of(manager, b)
            assert refused(manager.plan(b, 1, hit=hit)).reason is RefusalReason.STALE_HIT
            assert manager.allocate_slots(b, 1, 16, hit) is None
            assert state_of(manager, b) == before

    def test_a_hit_on_a_state_that_has_moved_is_stale(self) -> None:
        """Its block has a hash again, but holds another state."""
        manager = cache(30, FullAttentionSpec(8), MambaSpec(8, 0, "align"), unit=2)
        a = request("a", 13, 2)
        compute(manager, a, 12)
        b = request("b", [*range(12), 50], 2)
        hit = manager.get_computed_blocks(b)
        assert hit.num_tokens == 12
        a.append_output_tokens(range(13, 16))
        compute(manager, a, 16)
        assert refused(manager.plan(b, 1, hit=hit)).reason is RefusalReason.STALE_HIT

    def test_a_hit_that_still_holds_may_be_older(self) -> None:
        manager = cache((20, 20), FULL, group(window(9), pool=1))
        a = request("a", 16)
        compute(manager, a)
        b = request("b", 17)
        hit = manager.get_computed_blocks(b)
        manager.free(a)
        manager.pools[1].get_new_blocks(1)
        assert manager.plan(b, 1, hit=hit)

    def test_a_plan_is_stale_when_any_pool_has_changed(self) -> None:
        manager = cache((20, 20), FULL, group(window(9), pool=1))
        for pool in manager.pools:
            plan = planned(manager.plan(request("r", 16), 16))
            pool.get_new_blocks(1)
            with pytest.raises(StalePlan):
                manager.commit(plan)

    def test_every_number_of_every_pool(self) -> None:
        manager = cache((6, 8), FULL, group(window(5), pool=1), watermark=0.2)
        a = request("a", 16)
        compute(manager, a, has_scheduled_reqs=False)
        b = request("b", [*range(16), *range(50, 62)])
        manager.free(a)
        manager.pools[1].get_new_blocks(3)
        hit = manager.get_computed_blocks(b)
        assert hit.num_tokens == 16
        refusal = refused(manager.plan(b, 12, hit=hit, reserved_blocks=(1, 2)))
        attention, windowed = refusal.pools
        assert (attention.needed, attention.withheld, attention.free, attention.held) == (4 + 3, 1 + 1, 6, 0)
        assert (windowed.needed, windowed.withheld, windowed.free, windowed.held) == (1 + 3, 1 + 2, 5, 3)
        assert "b" in str(refusal)


class TestOrderOfACommit:
    def test_all_hits_are_touched_before_anything_is_taken(self) -> None:
        """The second group's hit is what the first group's new block would be taken from."""
        manager = cache(6, FULL, FULL)
        compute(manager, request("a", 8))
        manager.free("a")
        compute(manager, request("junk", range(50, 54)))
        manager.free("junk")
        assert manager.pool.free_block_queue.get_all_free_blocks() == [2, 1, 4, 3, 5, 6]
        b = request("b", [*range(8), *range(20, 24)])
        assert compute(manager, b) == 8
        first, second = manager.get_block_ids(b)
        assert (first[:2], second[:2]) == ([1, 2], [3, 4])
        assert {first[2], second[2]} == {5, 6}
        audit(manager)

    def test_the_copies_of_all_groups_come_after_the_hits_of_all(self) -> None:
        manager = cache(6, FullAttentionSpec(8), FullAttentionSpec(8))
        compute(manager, request("a", 6))
        manager.free("a")
        compute(manager, request("junk", range(50, 58)))
        manager.free("junk")
        drain_plain = manager.pool.get_new_blocks(2)
        assert drain_plain == [5, 6]
        b = request("b", [*range(4), *range(20, 22)])
        assert compute(manager, b) == 4
        assert manager.take_block_copies() == [
            BlockCopy(0, 1, manager.get_block_ids(b)[0][0]),
            BlockCopy(1, 2, manager.get_block_ids(b)[1][0]),
        ]
        audit(manager)

    def test_what_is_dropped_is_taken_again_at_once(self) -> None:
        manager = cache(20, window(9))
        r = request("r", 32)
        compute(manager, r, 20)
        first, second, third = manager.get_block_ids(r)[0][:3]
        manager.pool.evict_blocks([first, second, third])  # plain again: reused first
        plan = planned(manager.plan(r, 12))
        assert (plan.num_dropped_blocks, plan.num_new_blocks) == ((3,), (3,))
        # deepest first: so the deepest is the first to be handed out again
        assert manager.commit(plan).get_block_ids() == ([third, second, first],)

    def test_ids_come_per_group_and_only_what_was_appended(self) -> None:
        manager = cache(30, FULL, window(9), STATE)
        r = request("r", 20)
        compute(manager, r, 8)
        before = manager.get_block_ids(r)
        blocks = manager.allocate_slots(r, 12)
        assert blocks is not None
        assert [len(ids) for ids in blocks.get_block_ids()] == [3, 3, 3]
        for old, new, table in zip(before, blocks.get_block_ids(), manager.get_block_ids(r), strict=True):
            assert table[len(old) :] == new


class TestContradictions:
    def test_tokens_that_were_dropped_cannot_be_computed_again(self) -> None:
        manager = cache(30, window(5))
        r = request("r", 24)
        compute(manager, r, 16)
        compute(manager, r, 20)
        r.num_computed_tokens = 4
        before = state_of(manager, r)
        with pytest.raises(RequestError, match="'r'"):
            manager.plan(r, 4)
        assert state_of(manager, r) == before

    def test_tokens_that_a_hit_did_not_bring_cannot_be_computed(self) -> None:
        manager = cache(30, window(5))
        compute(manager, request("a", 16))
        b = request("b", 17)
        assert compute(manager, b) == 16
        b.num_computed_tokens = 0
        with pytest.raises(RequestError, match="'b'"):
            manager.plan(b, 4)

    def test_drafts_are_lookahead_for_a_state(self) -> None:
        manager = cache(30, MambaSpec(4, 0, "align"))
        r = request("r", 8)
        compute(manager, r)
        r.append_output_tokens(8)
        assert manager.allocate_slots(r, 12) is not None  # a token and eleven drafts
        r.num_computed_tokens = 9  # all of which were rejected
        with pytest.raises(RequestError, match="'r'"):
            manager.plan(r, 1)

    def test_another_request_of_the_same_name(self) -> None:
        manager = cache(30, FULL)
        r = request("r", 8)
        compute(manager, r)
        other = request("r", 8)
        other.num_computed_tokens = 8
        with pytest.raises(RequestError, match="'r'"):
            manager.plan(other, 1)

    def test_a_negative_length(self) -> None:
        with pytest.raises(RequestError):
            cache(30, FULL).get_computed_blocks(request("r", 8), max_length=-1)

    def test_a_most_for_the_hit(self) -> None:
        manager = cache(30, FULL, window(5))
        compute(manager, request("r", 17))
        probe = request("probe", 17)
        lengths = [manager.get_computed_blocks(probe, max_length=n).num_tokens for n in (0, 3, 4, 11, 12, 99)]
        assert lengths == [0, 0, 4, 8, 12, 16]


class TestDrops:
    def test_only_settled_tokens_let_go(self) -> None:
        """A rejected draft finds its window."""
        manager = cache(30, window(5))
        r = request("r", 8)
        compute(manager, r)
        r.append_output_tokens(8)
        r.num_in_flight_tokens = 4
        r.num_computed_tokens = 12  # one token and three drafts, being verified
        plan = planned(manager.plan(r, 1))
        assert plan.num_dropped_blocks == (1,)  # what 8 settled tokens no longer read
        manager.commit(plan)
        assert [shape(table) for table in manager.get_block_ids(r)] == [".xxx"]
        r.num_computed_tokens = 9  # the drafts were rejected
        r.num_in_flight_tokens = 0
        assert shape(manager.get_block_ids(r)[0])[1:] == "xxx"
        r.append_output_tokens(9)
        plan = manager.plan(r, 1)
        assert plan
        assert manager.commit(plan).num_blocks == 0

    def test_in_every_group_that_has_something_to_drop(self) -> None:
        manager = cache(60, FULL, window(9), ChunkedLocalAttentionSpec(4, 8), STATE, CircularBufferSpec(4))
        r = request("r", 28)
        compute(manager, r, 20)
        plan = planned(manager.plan(r, 8))
        assert plan.num_dropped_blocks == (0, 3, 4, 0, 0)
        manager.commit(plan)
        r.num_computed_tokens = 28
        assert [shape(table) for table in manager.get_block_ids(r)] == ["x" * 7, "...xxxx", "....xxx", "....x.x", "x"]
        r.append_output_tokens(1)
        plan = planned(manager.plan(r, 1))
        assert plan.num_dropped_blocks == (0, 2, 2, 1, 0)
        manager.commit(plan)
        audit(manager)

    def test_a_refusal_drops_nothing(self) -> None:
        manager = cache(5, window(5))
        r = request("r", 44)
        compute(manager, r, 20)
        before = state_of(manager, r)
        assert manager.allocate_slots(r, 24) is None
        assert state_of(manager, r) == before


class TestCopies:
    """Blocks of 8, digests of 2: a prompt of 13 tokens can be resumed at 12."""

    def start(self, usable_blocks: int = 20, **options: Any) -> tuple[KVCacheManager, Request]:
        manager = cache(usable_blocks, FullAttentionSpec(8), MambaSpec(8, 0, "align"), unit=2, **options)
        manager.begin_step(0)
        r = request("r", 13, 2)
        compute(manager, r, 12)
        assert manager.get_block_ids(r) == ([1, 2], [0, 3])
        assert hit_length(manager, 13, 2) == 0
        manager.acknowledge(0)
        assert manager.get_computed_blocks(request("probe", 13, 2)).blocks == ([1, 2], [0, 3])
        return manager, r

    def test_a_producer_keeps_its_state_and_the_entry_moves(self) -> None:
        manager, r = self.start()
        manager.begin_step(1)
        plan = planned(manager.plan(r, 1))
        assert (plan.num_new_blocks, plan.num_copies) == ((0, 1), 1)
        assert manager.commit(plan).get_block_ids() == ([], [])
        r.num_computed_tokens = 13
        assert manager.get_block_ids(r) == ([1, 2], [0, 3])  # it appends to 2, and overwrites 3
        assert manager.take_block_copies() == [BlockCopy(1, 3, 4)]
        assert refs(manager, 3, 4) == [2, 1]
        assert manager.get_computed_blocks(request("probe", 13, 2)).blocks == ([1, 2], [0, 4])
        manager.acknowledge(1)
        assert refs(manager, 3, 4) == [1, 0]
        assert manager.pool.free_block_queue.get_all_free_blocks()[-1] == 4
        assert manager.pool.get_block_hashes(3) == []
        r.append_output_tokens(99)
        assert manager.plan(r, 1).num_copies == 0  # type: ignore[union-attr]
        audit(manager)

    def test_a_consumer_writes_into_copies_of_its_own(self) -> None:
        manager, r = self.start()
        manager.begin_step(1)
        compute(manager, r)
        manager.take_block_copies()
        manager.acknowledge(1)
        manager.begin_step(2)
        other = request("other", [*range(12), 50, 51, 52], 2)
        hit = manager.get_computed_blocks(other)
        assert hit.num_tokens == 12
        plan = planned(manager.plan(other, 1, hit=hit))
        assert (plan.num_new_blocks, plan.num_copies) == ((1, 1), 2)
        free = manager.pool.get_num_free_blocks()
        assert manager.commit(plan).get_block_ids() == ([], [])
        assert manager.pool.get_num_free_blocks() == free - 3  # the entry's block stood in the queue
        (first, private), (null, running) = manager.get_block_ids(other)
        assert (first, null) == (1, 0)
        assert manager.take_block_copies() == [BlockCopy(0, 2, private), BlockCopy(1, 4, running)]
        assert refs(manager, 2, 4, private, running) == [2, 1, 2, 2]
        assert manager.get_computed_blocks(request("probe", 13, 2)).blocks == ([1, 2], [0, 4])
        manager.acknowledge(2)
        assert refs(manager, 2, 4, private, running) == [1, 0, 1, 1]
        audit(manager)

    def test_both_ends_outlive_the_request(self) -> None:
        manager, r = self.start()
        manager.begin_step(1)
        compute(manager, r)
        manager.free(r)
        assert not {3, 4} & set(drain(manager))
        assert manager.take_block_copies() == [BlockCopy(1, 3, 4)]
        assert not manager.pool.get_num_free_blocks()
        manager.acknowledge(1)
        assert manager.pool.free_block_queue.get_all_free_blocks() == [3, 4]
        audit(manager)

    def test_without_steps_they_are_kept_until_the_worker_has_the_list(self) -> None:
        manager = cache(20, FullAttentionSpec(8), MambaSpec(8, 0, "align"), unit=2)
        r = request("r", 13, 2)
        compute(manager, r, 12)
        compute(manager, r)
        assert refs(manager, 3, 4) == [2, 1]
        assert manager.take_block_copies() == [BlockCopy(1, 3, 4)]
        assert refs(manager, 3, 4) == [1, 0]
        assert manager.take_block_copies() == []

    def test_no_room_for_a_copy_is_no_room(self) -> None:
        manager, r = self.start(4)
        manager.pool.get_new_blocks(1)  # somebody else's: alone, the request would go on without its entry
        before = state_of(manager, r)
        assert refused(manager.plan(r, 1)).pools[0].needed == 1
        other = request("other", [*range(12), 50], 2)
        hit = manager.get_computed_blocks(other)
        refusal = refused(manager.plan(other, 1, hit=hit))
        assert refusal.pools[0].needed == 2
        assert state_of(manager, r, other) == (*before[:4], [*before[4], ([], [])])

    def test_a_hit_on_whole_blocks_copies_nothing(self) -> None:
        manager = cache(20, FullAttentionSpec(8), unit=2)
        compute(manager, request("a", 17, 2))
        b = request("b", 17, 2)
        assert compute(manager, b) == 16
        assert manager.take_block_copies() == []

    def test_a_cancelled_step_puts_its_copies_back_for_the_next(self) -> None:
        manager, _ = self.start()
        other = request("other", [*range(12), 50, 51, 52], 2)
        manager.begin_step(1)
        assert compute(manager, other, 13) == 12
        copies = manager.take_block_copies()
        assert len(copies) == 2
        manager.cancel_step(1)
        other.num_computed_tokens = 12
        manager.begin_step(1)
        assert manager.allocate_slots(other, 1) is not None
        assert manager.take_block_copies() == copies
        ends = [end for copy in copies for end in (copy.src_block_id, copy.dst_block_id)]
        assert refs(manager, *ends) == [2, 2, 2, 2]
        manager.acknowledge(1)
        assert refs(manager, *ends) == [1, 1, 1, 1]
        audit(manager)

    def test_a_cancelled_step_puts_a_moved_entry_back(self) -> None:
        manager, r = self.start()
        manager.begin_step(1)
        compute(manager, r)
        manager.cancel_step(1)
        r.num_computed_tokens = 12
        assert manager.get_computed_blocks(request("probe", 13, 2)).blocks == ([1, 2], [0, 3])
        manager.begin_step(1)
        compute(manager, r)
        ((_, source, copy),) = [(c.group_id, c.src_block_id, c.dst_block_id) for c in manager.take_block_copies()]
        assert source == 3
        assert manager.get_computed_blocks(request("probe", 13, 2)).blocks == ([1, 2], [0, copy])
        manager.acknowledge(1)
        assert refs(manager, 3, copy) == [1, 0]
        manager.free(r)
        assert manager.pool.get_num_free_blocks() == 20
        audit(manager)

    def test_what_a_cancelled_step_moved_is_not_put_back_into_another_life(self) -> None:
        manager, r = self.start()
        manager.begin_step(1)
        compute(manager, r)  # moves the entry of the state after 12 tokens
        manager.free(r)
        r.num_computed_tokens = 0
        compute(manager, r)  # a hit on that entry, with a copy of its own
        manager.cancel_step(1)
        r.num_computed_tokens = 12
        manager.begin_step(1)
        assert manager.managers[1].tables["r"].tail_block == 0
        plan = manager.plan(r, 1)
        assert isinstance(plan, AllocationPlan)
        assert plan.num_copies == 0

    def test_the_tail_is_registered_where_hits_may_end_inside_blocks_only(self) -> None:
        manager = cache(30, FullAttentionSpec(8), window(9, 8), unit=4)
        assert manager.alignment == 8
        compute(manager, request("r", 14))
        assert len(manager.pool.cached_block_hash_to_block) == 2
        assert hit_length(manager, 14) == 8
        assert manager.take_block_copies() == []

    def test_a_tail_is_registered_by_a_step_that_takes_no_block(self) -> None:
        manager = cache(20, MambaSpec(8, 0, "align"), unit=2)
        r = request("r", 13, 2)
        compute(manager, r, 11)
        compute(manager, r, 12)
        assert hit_length(manager, 13, 2) == 12

    def test_a_promoted_tail_serves_its_block(self) -> None:
        manager = cache(30, FullAttentionSpec(8), MambaSpec(8, 0, "align"), unit=2)
        r = request("r", 13, 2)
        compute(manager, r, 12)
        compute(manager, r)
        manager.take_block_copies()
        r.append_output_tokens(range(13, 16))
        compute(manager, r)
        probe = manager.get_computed_blocks(request("probe", 17, 2))
        assert probe.num_tokens == 16
        assert probe.blocks == manager.get_block_ids(r)
        audit(manager)


class TestLists:
    def test_blocks_to_clear_are_the_new_ones_of_their_groups_once(self) -> None:
        manager = cache(40, FULL, group(window(9), clear_new_blocks=True), group(STATE, clear_new_blocks=True))
        r = request("r", 13)
        compute(manager, r, 12)
        _, windowed, states = manager.get_block_ids(r)
        cleared = manager.take_blocks_to_clear()
        assert cleared == ([], windowed, [block for block in states if block])
        assert manager.take_blocks_to_clear() == ([], [], [])
        other = request("other", [*range(12), *range(50, 55)])
        assert compute(manager, other) == 12
        _, windowed, states = manager.get_block_ids(other)
        assert manager.take_blocks_to_clear() == ([], windowed[3:], states[3:][-1:])

    def test_draft_states_that_move_along_are_not_cleared_again(self) -> None:
        manager = cache(30, group(MambaSpec(4, 2, "align"), clear_new_blocks=True))
        r = request("r", 30)
        compute(manager, r, 4)
        assert manager.take_blocks_to_clear() == ([1, 2, 3],)
        compute(manager, r, 16)
        assert manager.get_block_ids(r) == ([1, 0, 0, 2, 3, 4],)
        assert manager.take_blocks_to_clear() == ([4],)

    def test_a_request_that_is_gone_is_cleared_for_if_its_step_runs(self) -> None:
        manager = cache(10, group(window(9), clear_new_blocks=True))
        manager.begin_step(0)
        compute(manager, request("r", 8))
        manager.free("r", after=0)
        compute(manager, request("other", range(50, 54)))
        manager.free("other")
        assert manager.take_blocks_to_clear() == ([1, 2],)

    def test_what_is_filled_from_elsewhere_is_not_cleared(self) -> None:
        manager = cache(40, group(FULL, clear_new_blocks=True))
        assert manager.allocate_slots(request("r", 21), 9, num_external_computed_tokens=8) is not None
        assert manager.take_blocks_to_clear() == ([3, 4, 5],)

    def test_a_cancelled_step_puts_its_clears_back(self) -> None:
        manager = cache(40, group(window(9), clear_new_blocks=True))
        manager.begin_step(0)
        r = request("r", 12)
        compute(manager, r)
        assert manager.take_blocks_to_clear() == ([1, 2, 3],)
        manager.cancel_step(0)
        r.num_computed_tokens = 0
        manager.begin_step(0)
        assert manager.allocate_slots(r, 12) is not None
        assert manager.take_blocks_to_clear() == ([1, 2, 3],)
        assert manager.take_blocks_to_clear() == ([],)

    def test_a_cancelled_step_leaves_what_was_not_taken_once(self) -> None:
        manager = cache(40, group(window(9), clear_new_blocks=True))
        manager.begin_step(0)
        compute(manager, request("r", 12))
        manager.cancel_step(0)
        assert manager.take_blocks_to_clear() == ([1, 2, 3],)


class TestSteps:
    def test_states_become_findable_oldest_step_first(self) -> None:
        manager = cache(30, FULL, STATE)
        manager.begin_step(0)
        r = request("r", 16)
        compute(manager, r, 4)
        manager.begin_step(1)
        compute(manager, r, 8)
        assert hit_length(manager, 9) == 0
        manager.acknowledge(0)
        assert hit_length(manager, 9) == 4
        assert manager.get_computed_blocks(request("probe", 9)).ready_length == 8
        manager.acknowledge(1)
        assert hit_length(manager, 9) == 8
        manager.acknowledge(1)
        audit(manager)

    def test_one_acknowledgement_for_several_steps(self) -> None:
        manager = cache(30, FULL, STATE)
        r = request("r", 16)
        for step, end in enumerate((4, 8, 12)):
            manager.begin_step(step)
            compute(manager, r, end)
        manager.acknowledge(2)
        assert [hit_length(manager, n) for n in (5, 9, 13)] == [4, 8, 12]

    def test_a_state_that_waits_is_not_handed_out(self) -> None:
        manager = cache(2, STATE)
        manager.begin_step(0)
        r = request("r", 4)
        compute(manager, r)
        (state,) = manager.get_block_ids(r)[0]
        assert refs(manager, state) == [2]
        manager.begin_step(1)
        manager.free(r)
        assert drain(manager) == [3 - state]
        manager.acknowledge(0)
        assert hit_length(manager, 5) == 4
        assert manager.pool.get_num_free_blocks() == 1

    def test_then_the_events_then_the_fences(self) -> None:
        """A block whose state becomes findable and whose last reference is due: it goes to the back, cached."""
        manager = cache(4, STATE)
        manager.begin_step(0)
        r = request("r", 4)
        compute(manager, r)
        (state,) = manager.get_block_ids(r)[0]
        manager.free(r, after=0)
        assert manager.take_events() == []
        manager.acknowledge(0)
        assert [len(event.block_hashes) for event in manager.take_events()] == [1]  # type: ignore[union-attr]
        assert manager.pool.free_block_queue.get_all_free_blocks()[-1] == state
        assert hit_length(manager, 5) == 4

    def test_a_cancelled_step_drops_what_would_have_become_findable(self) -> None:
        manager = cache(30, FULL, STATE)
        manager.begin_step(0)
        r = request("r", 9)
        compute(manager, r, 8)
        manager.cancel_step(0)
        r.num_computed_tokens = 0
        assert manager.get_computed_blocks(request("probe", 9)).ready_length == 0
        assert manager.get_block_ids(r) == ([1, 2], [])  # the table of states is as it was
        assert refs(manager, 1, 2) == [1, 1]
        assert manager.pool.get_num_free_blocks() == 28
        manager.begin_step(0)
        assert manager.take_events() == []
        assert manager.allocate_slots(r, 8) is not None
        r.num_computed_tokens = 8
        manager.acknowledge(0)
        assert hit_length(manager, 9) == 8
        audit(manager)

    def test_after_a_cancelled_step_a_shorter_one_finds_a_block_for_its_state(self) -> None:
        manager = cache(30, MambaSpec(4, 1, "align"))
        r = request("r", 40)
        compute(manager, r, 8)
        before = manager.get_block_ids(r)
        assert before == ([0, 1, 2],)
        manager.begin_step(0)
        compute(manager, r, 24)
        assert [shape(table) for table in manager.get_block_ids(r)] == [".x...xx"]
        manager.cancel_step(0)
        r.num_computed_tokens = 8
        assert manager.get_block_ids(r) == before
        assert manager.pool.get_num_free_blocks() == 28
        manager.begin_step(1)
        compute(manager, r, 11)
        assert [shape(table) for table in manager.get_block_ids(r)] == [".xxx"]
        manager.acknowledge(1)
        audit(manager)

    @pytest.mark.parametrize("interval", [None, 16])
    def test_after_a_cancelled_step_shorter_ends_are_registered(self, interval: int | None) -> None:
        manager = cache(30, STATE, retention_interval=interval)
        r = request("r", 24)
        compute(manager, r, 8)
        manager.begin_step(0)
        compute(manager, r, 24)
        manager.cancel_step(0)
        r.num_computed_tokens = 8
        manager.begin_step(0)
        compute(manager, r, 20)  # where a replay of the prompt resumes
        manager.acknowledge(0)
        assert hit_length(manager, 24) == 20

    @pytest.mark.parametrize("older", [False, True])
    def test_the_fence_of_a_cancelled_step_does_not_wait_for_ever(self, older: bool) -> None:
        manager = cache(10, FULL)
        compute(manager, request("r", 8))
        if older:
            manager.begin_step(4)
        manager.begin_step(5)
        manager.free("r", after=5)
        manager.cancel_step(5)
        assert manager.pool.get_num_free_blocks() == (8 if older else 10)
        if older:
            manager.acknowledge(4)
        assert manager.pool.get_num_free_blocks() == 10

    def test_a_step_id_is_never_used_twice(self) -> None:
        manager = cache(10, FULL)
        manager.begin_step(3)
        manager.acknowledge(3)
        with pytest.raises(StepError):
            manager.begin_step(3)
        manager.begin_step(4)

    def test_a_cancelled_step_leaves_what_older_steps_wait_for(self) -> None:
        manager = cache(30, FULL, STATE)
        manager.begin_step(0)
        r = request("r", 16)
        compute(manager, r, 4)
        manager.begin_step(1)
        compute(manager, r, 8)
        manager.cancel_step(1)
        r.num_computed_tokens = 4
        manager.acknowledge(0)
        assert hit_length(manager, 9) == 4
        assert manager.get_computed_blocks(request("probe", 9)).ready_length == 4
        audit(manager)

    def test_a_tail_that_waits_moves_with_its_producer(self) -> None:
        manager = cache(30, FullAttentionSpec(8), MambaSpec(8, 0, "align"), unit=2)
        manager.begin_step(0)
        r = request("r", 13, 2)
        compute(manager, r, 12)
        manager.begin_step(1)
        compute(manager, r)
        (copy,) = manager.take_block_copies()
        assert (copy.group_id, copy.src_block_id) == (1, 3)
        assert hit_length(manager, 13, 2) == 0
        manager.acknowledge(0)
        probe = manager.get_computed_blocks(request("probe", 13, 2))
        assert probe.blocks == ([1, 2], [0, copy.dst_block_id])
        manager.acknowledge(1)
        manager.free(r)
        assert manager.pool.get_num_free_blocks() == 30
        assert hit_length(manager, 13, 2) == 12
        audit(manager)

    def test_a_tail_that_waits_adds_nothing_to_a_block_that_is_full_by_then(self) -> None:
        manager = cache(9, FullAttentionSpec(4), unit=2)
        r = request("r", 15, 2)
        manager.begin_step(0)
        compute(manager, r)
        manager.begin_step(1)
        r.append_output_tokens(15)
        compute(manager, r)
        manager.acknowledge(1)
        ((last,),) = [table[-1:] for table in manager.get_block_ids(r)]
        assert [num_tokens for _, num_tokens in manager.pool.get_block_hashes(last)] == [16]

    def test_two_may_wait_for_one_key(self) -> None:
        manager = cache(30, FULL, STATE)
        manager.begin_step(0)
        for name in ("a", "b"):
            r = request(name, 4)
            assert manager.allocate_slots(r, 4) is not None
            r.num_computed_tokens = 4
        manager.acknowledge(0)
        keys = [key for block in range(31) for key, _ in manager.pool.get_block_hashes(block)]
        assert len(keys) == 4
        assert [len(event.block_hashes) for event in manager.take_events()] == [1, 1]  # type: ignore[union-attr]
        audit(manager)


class TestAborts:
    """A request that is given back within its own step, at once: it will not be computed."""

    def test_what_it_registered_is_never_found(self) -> None:
        manager = cache(30, FULL, window(9), STATE)
        manager.begin_step(0)
        r = request("r", 8)
        compute(manager, r)
        assert manager.get_computed_blocks(request("probe", 9)).ready_length == 8
        manager.free(r)
        hit = manager.get_computed_blocks(request("probe", 9))
        assert (hit.num_tokens, hit.ready_length) == (0, 0)
        manager.acknowledge(0)
        assert manager.pool.get_num_free_blocks() == 30
        assert hit_length(manager, 9) == 0
        believed = set()
        for event in manager.take_events():
            if isinstance(event, BlockRemoved):
                believed -= set(event.block_hashes)
            else:
                believed |= set(event.block_hashes)  # type: ignore[union-attr]
        assert believed == set()
        audit(manager)

    def test_with_the_fence_of_its_step_it_is_computed_and_found(self) -> None:
        manager = cache(30, FULL, window(9), STATE)
        manager.begin_step(0)
        compute(manager, request("r", 8))
        manager.free("r", after=0)
        manager.acknowledge(0)
        assert hit_length(manager, 9) == 8
        assert manager.pool.get_num_free_blocks() == 30

    def test_not_when_somebody_shares_it_already(self) -> None:
        manager = cache(30, FULL, window(9))
        manager.begin_step(0)
        r = request("r", 8)
        compute(manager, r)
        sharer = request("sharer", 12)
        assert compute(manager, sharer) == 8
        before = state_of(manager, r, sharer)
        with pytest.raises(RequestError, match="'r'"):
            manager.free(r)
        assert state_of(manager, r, sharer) == before
        assert manager.free(r, after=0)
        manager.acknowledge(0)
        assert hit_length(manager, 13) == 12
        audit(manager)

    def test_not_when_a_sharer_that_is_gone_is_computed_still(self) -> None:
        manager = cache(30, FULL)
        manager.begin_step(0)
        r, sharer = request("r", 8), request("sharer", 12)
        compute(manager, r)
        compute(manager, sharer)
        manager.free(sharer, after=0)
        with pytest.raises(RequestError, match="'r'"):
            manager.free(r)
        manager.free(r, after=0)
        manager.acknowledge(0)
        assert hit_length(manager, 13) == 12

    @pytest.mark.parametrize("again", ["in the same step", "in a cancelled step", "in a step before a cancelled one"])
    def test_an_earlier_life_in_the_same_step_is_kept(self, again: str) -> None:
        manager = cache(30, FULL, STATE)
        manager.begin_step(1)
        r = request("r", 8)
        compute(manager, r)
        if again == "in a step before a cancelled one":
            manager.begin_step(2)
            manager.free(r, after=2)
        else:
            manager.free(r, after=1)
        r.num_computed_tokens = 0
        if again == "in a cancelled step":
            manager.begin_step(2)
        compute(manager, r)
        if again != "in the same step":
            manager.cancel_step(2)
        assert manager.free(r)
        manager.acknowledge(1)
        assert hit_length(manager, 9) == 8
        assert manager.pool.get_num_free_blocks() == 30

    def test_a_pin_is_a_sharer(self) -> None:
        manager = cache(30, FULL)
        manager.begin_step(0)
        r = request("r", 9)
        compute(manager, r)
        assert manager.pin(r, "owner").num_tokens == 8
        with pytest.raises(RequestError, match="'r'"):
            manager.free(r)
        manager.free(r, after=0)
        manager.acknowledge(0)
        assert hit_length(manager, 9) == 8
        assert (manager.unpin("owner"), manager.pool.get_num_free_blocks()) == (2, 30)

    def test_what_was_computed_before_stays(self) -> None:
        manager = cache(30, FULL)
        r = request("r", 9)
        compute(manager, r, delay_cache_blocks=True)
        manager.begin_step(0)
        manager.cache_blocks(r, 8)
        assert manager.pin(r, "owner").num_tokens == 8
        manager.free(r)
        assert hit_length(manager, 9) == 8

    def test_a_second_free_changes_nothing(self) -> None:
        manager = cache(30, FULL, STATE)
        manager.begin_step(0)
        compute(manager, request("r", 8))
        assert manager.free("r", after=0) is True
        assert manager.free("r") is False
        manager.acknowledge(0)
        assert hit_length(manager, 9) == 8

    def test_the_copy_that_it_goes_on_in_is_not_shared(self) -> None:
        manager = cache(20, FullAttentionSpec(16))
        compute(manager, request("first", 10))
        manager.begin_step(0)
        r = request("r", [*range(8), *range(50, 58)])
        assert compute(manager, r) == 8
        assert hit_length(manager, [*range(8), *range(50, 58), 1]) == 16
        assert manager.free(r)
        assert hit_length(manager, [*range(8), *range(50, 58), 1]) == 8
        manager.acknowledge(0)
        assert manager.pool.get_num_free_blocks() == 19
        audit(manager)

    def test_what_older_steps_registered_stays(self) -> None:
        manager = cache(30, FULL, STATE)
        manager.begin_step(0)
        r = request("r", 16)
        compute(manager, r, 8)
        manager.begin_step(1)
        compute(manager, r, 16)
        manager.free(r)
        manager.acknowledge(1)
        assert hit_length(manager, 17) == 8
        audit(manager)


class TestStoring:
    def test_a_junction_that_a_lookup_has_shown_is_kept(self) -> None:
        """Replay only: a prompt of 40 keeps its window at 36, a sibling that shares 24 shows where they part."""
        manager = cache(60, FULL, window(5), retention_interval=0)
        first = request("first", 40)
        compute(manager, first, 16)
        compute(manager, first)
        manager.free(first)
        assert hit_length(manager, 40) == 36
        sibling = request("sibling", [*range(24), *range(100, 116)])
        hit = manager.get_computed_blocks(sibling)
        assert (hit.num_tokens, hit.junction, hit.vetoed_by, hit.own_lengths[0]) == (0, 24, 1, 24)
        compute(manager, sibling)
        third = request("third", [*range(24), *range(200, 216)])
        hit = manager.get_computed_blocks(third)
        assert (hit.num_tokens, hit.junction) == (24, 0)

    def test_a_state_is_kept_at_a_junction_too(self) -> None:
        manager = cache(60, FULL, STATE, retention_interval=0)
        compute(manager, request("first", 40))
        sibling = request("sibling", [*range(24), *range(100, 116)])
        assert manager.get_computed_blocks(sibling).junction == 24
        compute(manager, sibling, 16)
        compute(manager, sibling, 24)  # the engine ends a chunk there
        compute(manager, sibling)
        assert hit_length(manager, [*range(24), *range(200, 216)]) == 24

    def test_replay_only_keeps_the_replay(self) -> None:
        manager = cache(60, FULL, window(5), retention_interval=0)
        compute(manager, request("r", 40))
        assert [hit_length(manager, n) for n in (41, 40, 36, 24)] == [36, 36, 0, 0]

    def test_every_so_many_tokens(self) -> None:
        manager = cache(60, FULL, window(5), retention_interval=8)
        compute(manager, request("r", 39))
        assert [hit_length(manager, n) for n in (39, 37, 36, 33, 29, 25)] == [36, 36, 32, 32, 24, 24]

    def test_dense_keeps_every_boundary(self) -> None:
        manager = cache(60, FULL, window(5))
        compute(manager, request("r", 40))
        assert [hit_length(manager, n) for n in (41, 40, 37, 36, 6)] == [40, 36, 36, 32, 4]

    def test_a_replay_with_a_margin(self) -> None:
        manager = cache(60, FULL, group(window(5), draft_margin=True), retention_interval=0)
        compute(manager, request("r", 40))
        assert hit_length(manager, 40) == 36
        assert hit_length(manager, 41) == 36

    def test_a_replay_is_the_least_of_all_groups(self) -> None:
        """With a margin the prompt of 38 replays at 32, so the other group keeps its window there."""
        manager = cache(60, window(5), group(FULL, draft_margin=True), retention_interval=0)
        compute(manager, request("r", 38))
        assert hit_length(manager, 38) == 32

    @pytest.mark.parametrize("interval", [-4, 3, 2])
    def test_an_interval_that_hits_cannot_end_at_is_refused(self, interval: int) -> None:
        with pytest.raises((ConfigError, ValueError), match="interval"):
            cache(60, FULL, window(5), retention_interval=interval)


class TestControl:
    def test_no_store_leaves_nothing_in_any_group(self) -> None:
        manager = cache(60, FullAttentionSpec(8), MambaSpec(8, 0, "align"), unit=2)
        compute(manager, request("a", 9, 2), 8)
        manager.begin_step(0)
        b = request("b", 29, 2, no_store=True)
        assert compute(manager, b, 16) == 8
        compute(manager, b, 28)
        manager.acknowledge(0)
        manager.begin_step(1)
        compute(manager, b)
        manager.cache_blocks(b, 29)
        manager.acknowledge(1)
        manager.free(b)
        assert manager.take_block_copies() == []
        assert hit_length(manager, 29, 2) == 8
        audit(manager)

    def test_skip_reading_stops_reading_only(self) -> None:
        manager = cache(60, FULL, window(9))
        compute(manager, request("a", 17))
        b = request("b", 25, skip_reading_prefix_cache=True)
        hit = manager.get_computed_blocks(b)
        assert (hit.num_tokens, hit.ready_length, hit.why_not_more) == (0, 0, WhyNotMore.SKIP_READING)
        assert compute(manager, b) == 0
        assert hit_length(manager, 25) == 24
        assert manager.stats.total.requests == 1

    def test_caching_off_in_every_group(self) -> None:
        manager = cache(60, FULL, window(9), STATE, enable_caching=False)
        assert compute(manager, request("a", 17)) == 0
        hit = manager.get_computed_blocks(request("b", 17))
        assert (hit.num_tokens, hit.why_not_more) == (0, WhyNotMore.CACHING_OFF)
        manager.free("a")
        assert manager.pool.get_num_free_blocks() == 60

    def test_freed_group_by_group_deepest_first(self) -> None:
        manager = cache(8, FULL, window(9))
        r = request("r", 16)
        compute(manager, r)
        first, second = manager.get_block_ids(r)
        manager.free(r)
        order = manager.pool.free_block_queue.get_all_free_blocks()
        assert [block for block in order if block in first] == first[::-1]
        assert [block for block in order if block in second] == second[::-1]

    def test_a_refused_free_changes_no_group(self) -> None:
        manager = cache((20, 20), FULL, group(window(9), pool=1))
        r = request("r", 16)
        compute(manager, r)
        before = state_of(manager, r)
        with pytest.raises(Exception, match="fence"):
            manager.free(r, after=-1)
        assert state_of(manager, r) == before
        assert manager.free(r) is True
        assert manager.free(r) is False

    def test_pools_may_be_given(self) -> None:
        pool = BlockPool(30, hash_block_size=4)
        config = KVCacheConfig(30, (group(FULL), group(window(9))), hash_block_size=4)
        manager = KVCacheManager(config, pools=[pool])
        assert manager.pools == (pool,)
        assert manager.pool is pool
        compute(manager, request("r", 16))
        assert pool.get_num_free_blocks() == 29 - 8


class TestReset:
    def test_sinks_do_not_stand_in_the_way_and_stay(self) -> None:
        manager = cache(20, SINK, window(9))
        (sinks,) = [m for m in manager.managers if isinstance(m, SinkFullAttentionManager)]
        reserved = sinks.sink_block_ids
        compute(manager, request("r", 16))
        answer = manager.reset_prefix_cache()
        assert not answer
        assert answer.requests == {"r": 8}
        assert sinks.sink_block_ids == reserved
        assert hit_length(manager, 17) == 16
        manager.free("r")
        assert manager.reset_prefix_cache()
        assert hit_length(manager, 17) == 0
        assert len(sinks.sink_block_ids) == 2
        assert refs(manager, *sinks.sink_block_ids) == [1, 1]
        assert manager.pool.get_num_free_blocks() == 18
        audit(manager)

    def test_nothing_is_reset_when_one_pool_refuses(self) -> None:
        manager = cache((20, 20), FULL, group(window(9), pool=1))
        compute(manager, request("r", 16))
        manager.free("r")
        held = manager.pools[1].get_new_blocks(1)
        assert not manager.reset_prefix_cache()
        assert hit_length(manager, 17) == 16
        manager.pools[1].free_blocks(held)
        assert manager.reset_prefix_cache()
        assert [len(pool.cached_block_hash_to_block) for pool in manager.pools] == [0, 0]

    def test_states_that_wait_and_copies_stand_in_the_way(self) -> None:
        manager = cache(30, FULL, STATE)
        manager.begin_step(0)
        compute(manager, request("r", 16))
        manager.free("r")
        assert not manager.reset_prefix_cache()
        manager.acknowledge(0)
        assert manager.reset_prefix_cache()
        audit(manager)


class TestVerifiedHashes:
    def collide(self, name: str, tokens: list[int], unit: int = 4) -> Request:
        """A request whose digests say nothing of its tokens."""
        digests = b"".join(hashlib.sha256(bytes([i])).digest() for i in range(len(tokens) // unit))
        chain = BlockHashes.from_digests(digests, digest_size=32, hash_block_size=unit)
        return Request(name, tokens, block_hashes=chain)

    def test_a_window_falls_back_to_what_is_true(self) -> None:
        manager = cache(30, window(5), verify_hashes=True)
        compute(manager, self.collide("a", list(range(18))))
        same = manager.get_computed_blocks(self.collide("b", list(range(18))))
        assert (same.num_tokens, manager.num_collisions) == (16, 0)
        other = manager.get_computed_blocks(self.collide("c", [*range(12), *range(50, 56)]))
        assert (other.num_tokens, other.why_not_more) == (12, WhyNotMore.COLLISION)
        assert manager.num_collisions == 1

    def test_all_groups_fall_back_together(self) -> None:
        manager = cache(40, FULL, window(5), verify_hashes=True)
        compute(manager, self.collide("a", list(range(18))))
        hit = manager.get_computed_blocks(self.collide("b", [*range(8), *range(50, 60)]))
        assert (hit.num_tokens, hit.why_not_more) == (8, WhyNotMore.COLLISION)
        assert [shape(blocks) for blocks in hit.blocks] == ["xx", ".x"]
        assert manager.num_collisions >= 1
        stranger = manager.get_computed_blocks(self.collide("c", list(range(50, 68))))
        assert (stranger.num_tokens, stranger.why_not_more) == (0, WhyNotMore.COLLISION)

    def test_a_tail_inside_a_block_is_compared_as_far_as_it_goes(self) -> None:
        manager = cache(30, FullAttentionSpec(16), verify_hashes=True)
        compute(manager, self.collide("a", list(range(10))))
        assert manager.get_computed_blocks(self.collide("b", [*range(8), 50, 51])).num_tokens == 8
        hit = manager.get_computed_blocks(self.collide("c", [*range(7), 50, 51]))
        assert (hit.num_tokens, hit.why_not_more) == (0, WhyNotMore.COLLISION)
        assert manager.num_collisions == 1

    def test_content_moves_with_an_entry(self) -> None:
        manager = cache(30, FullAttentionSpec(8), MambaSpec(8, 0, "align"), unit=2, verify_hashes=True)
        r = request("r", 13, 2)
        compute(manager, r, 12)
        compute(manager, r)
        assert hit_length(manager, 13, 2) == 12
        assert manager.num_collisions == 0

    def test_content_of_loaded_and_waiting_blocks(self) -> None:
        manager = cache(30, FULL, STATE, verify_hashes=True)
        manager.begin_step(0)
        r = self.collide("r", list(range(17)))
        assert manager.allocate_slots(r, 8, num_external_computed_tokens=8) is not None
        r.num_computed_tokens = 16
        manager.acknowledge(0)
        assert manager.get_computed_blocks(self.collide("b", list(range(17)))).num_tokens == 16
        hit = manager.get_computed_blocks(self.collide("c", list(range(50, 67))))
        assert (hit.num_tokens, hit.why_not_more) == (0, WhyNotMore.COLLISION)

    def test_a_true_hit_of_all_kinds(self) -> None:
        manager = cache(90, FULL, window(9), ChunkedLocalAttentionSpec(4, 8), STATE, SINK, verify_hashes=True)
        r = request("r", 17)
        compute(manager, r, 16)
        assert hit_length(manager, 17) == 16
        assert manager.num_collisions == 0


class TestConfig:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: KVCacheConfig((9, 9), (group(FULL),)),  # nobody uses the second pool
            lambda: KVCacheConfig(9, (group(FULL), group(FULL, pool=1))),
            lambda: KVCacheConfig((9, 9), (group(FULL), group(FULL, pool=2))),
            lambda: KVCacheConfig((9, 0), (group(FULL), group(FULL, pool=1))),
            lambda: KVCacheConfig((), (group(FULL),)),
            lambda: KVCacheConfig(9, (group(FULL), group(FullAttentionSpec(6))), hash_block_size=4),
            lambda: cache(1, SINK),  # no room for the sinks
            lambda: KVCacheManager(KVCacheConfig(9, (group(FULL),)), pools=[]),
            lambda: KVCacheManager(
                KVCacheConfig(9, (group(FULL),), hash_block_size=4), pools=[BlockPool(9, hash_block_size=2)]
            ),
            lambda: cache(9, FULL, max_in_flight_tokens=0),
            lambda: cache(9, FULL, pin_cap=1.5),
        ],
    )
    def test_a_cache_that_cannot_be_is_refused(self, make: Any) -> None:
        with pytest.raises(ValueError):  # noqa: PT011
            make()

    def test_the_hash_unit_is_that_of_the_groups_that_are_cached(self) -> None:
        config = KVCacheConfig(9, (group(FullAttentionSpec(16)), group(SlidingWindowSpec(24, 9))))
        assert KVCacheManager(config).pool.hash_block_size == 8
        config = KVCacheConfig(9, (group(FullAttentionSpec(16)), group(CircularBufferSpec(5))))
        assert KVCacheManager(config).pool.hash_block_size == 16

    def test_the_alignment_is_that_of_all_groups(self) -> None:
        assert cache(9, FULL, FullAttentionSpec(12)).alignment == 4
        assert cache(9, window(5), window(5, 12)).alignment == 12
        assert cache(9, window(5), FullAttentionSpec(12)).alignment == 4
        assert cache(9, window(5, 8), FullAttentionSpec(12)).alignment == 24
        assert cache(9, FULL, CircularBufferSpec(5)).alignment == 4


class TestStats:
    def test_external_hits_count_against_what_remained(self) -> None:
        manager = cache(60, FULL, window(9))
        compute(manager, request("a", 9))
        before = manager.stats.total
        b = request("b", 30)
        hit = manager.get_computed_blocks(b)
        assert hit.num_tokens == 8
        assert manager.allocate_slots(b, 10, 8, hit, num_external_computed_tokens=12) is not None
        added = manager.stats.total - before
        assert (added.requests, added.queries, added.hits) == (1, 30, 8)
        assert (added.external_queries, added.external_hits) == (22, 12)

    def test_without_a_connector_nobody_was_asked(self) -> None:
        manager = cache(60, FULL, window(9))
        compute(manager, request("a", 9))
        assert manager.stats.total.external_queries == 0
        b = request("b", range(50, 59))
        assert manager.allocate_slots(b, 9, num_external_computed_tokens=0) is not None
        total = manager.stats.total
        assert (total.external_queries, total.external_hits) == (9, 0)

    def test_a_refusal_and_a_lookup_count_nothing(self) -> None:
        manager = cache(4, FULL, window(9))
        manager.get_computed_blocks(request("a", 9))
        assert manager.allocate_slots(request("a", 9), 9, num_external_computed_tokens=0) is None
        assert manager.stats.total.requests == 0
        assert manager.stats.total.external_queries == 0


class TestPins:
    def start(self, **options: Any) -> tuple[KVCacheManager, Request]:
        manager = cache((10, 10), FULL, group(window(9), pool=1), **options)
        r = request("r", 16)
        compute(manager, r)
        manager.free(r)
        return manager, r

    def test_what_is_pinned_stays(self) -> None:
        manager, r = self.start()
        answer = manager.pin(r, "system prompt")
        assert answer.reason is None
        assert answer.num_tokens >= 12
        assert answer.num_blocks[0] >= 3
        for pool in (0, 1):
            drain(manager, pool)
        assert hit_length(manager, 17) == answer.num_tokens
        reset = manager.reset_prefix_cache()
        assert not reset
        assert "system prompt" in reset.pins
        assert manager.unpin("system prompt") == sum(answer.num_blocks)
        assert manager.unpin("system prompt") == 0
        assert manager.pools[0].get_num_free_blocks() == answer.num_blocks[0]
        audit(manager)

    def test_a_pin_ends_with_its_time(self) -> None:
        now = [0.0]
        manager, r = self.start(clock=lambda: now[0])
        answer = manager.pin(r, "chat", until=10.0)
        free = manager.pools[0].get_num_free_blocks()
        now[0] = 9.0
        manager.expire_pins()
        assert manager.pools[0].get_num_free_blocks() == free
        now[0] = 10.0
        manager.expire_pins()
        assert manager.pools[0].get_num_free_blocks() == free + answer.num_blocks[0]
        assert manager.unpin("chat") == 0

    def test_no_more_than_a_part_of_a_pool_can_be_pinned(self) -> None:
        manager, r = self.start(pin_cap=0.2)
        answer = manager.pin(r, "greedy")
        assert answer.reason is RefusalReason.PIN_CAP
        assert all(count <= 2 for count in answer.num_blocks)
        assert answer.num_tokens < 16
        audit(manager)

    def test_the_cap_is_for_all_pins_of_a_pool(self) -> None:
        manager, r = self.start()
        assert manager.pin(r, "first").reason is None
        other = request("other", range(50, 66))
        compute(manager, other)
        assert manager.pin(other, "second").reason is RefusalReason.PIN_CAP
        manager.unpin("first")
        assert manager.pin(other, "second").reason is None

    def test_a_pinned_state_stays_findable_when_its_producer_goes_on(self) -> None:
        manager = cache(20, FullAttentionSpec(8), MambaSpec(8, 0, "align"), unit=2)
        r = request("r", 13, 2)
        compute(manager, r, 12)
        assert manager.pin(r, "owner").num_tokens == 12
        compute(manager, r)
        manager.take_block_copies()
        manager.free(r)
        drain(manager)
        assert hit_length(manager, 13, 2) == 12
        manager.unpin("owner")
        audit(manager)

    def test_pins_of_several_owners_and_of_shared_blocks(self) -> None:
        manager, r = self.start()
        first = manager.pin(r, "first")
        again = manager.pin(request("longer", [*range(16), 99]), "second")
        assert first.num_blocks == again.num_blocks  # the cap counts a block once
        manager.unpin("first")
        drain(manager)
        drain(manager, 1)
        assert hit_length(manager, 17) == again.num_tokens
        manager.unpin("second")
        assert manager.pools[0].get_num_free_blocks() == again.num_blocks[0]
        audit(manager)

    def test_an_unknown_prefix_pins_nothing(self) -> None:
        manager, _ = self.start()
        answer = manager.pin(request("other", range(50, 66)), "owner")
        assert (answer.num_tokens, answer.num_blocks, answer.reason) == (0, (0, 0), None)


class TestEvents:
    @pytest.mark.parametrize("acknowledged", [(0, 1), (1,)])
    def test_a_key_that_comes_back_while_its_removal_is_held_back(self, acknowledged: tuple[int, ...]) -> None:
        """Step 0 computes a state that is known already, step 1 takes the block of the known one."""
        manager = cache(3, STATE)
        compute(manager, request("old", 4))
        manager.free("old")
        (stored,) = manager.take_events()
        believed = set(stored.block_hashes)  # type: ignore[union-attr]
        (known,) = believed
        manager.begin_step(0)
        compute(manager, request("r", 4, skip_reading_prefix_cache=True))
        manager.begin_step(1)
        drain(manager)
        assert manager.pool.get_cached_block(known, [0]) is None  # type: ignore[arg-type]
        for step in acknowledged:
            manager.acknowledge(step)
            for event in manager.take_events():
                if isinstance(event, BlockRemoved):
                    believed -= set(event.block_hashes)
                else:
                    believed |= set(event.block_hashes)  # type: ignore[union-attr]
        assert manager.pool.get_cached_block(known, [0]) is not None  # type: ignore[arg-type]
        assert believed == {known}

    def test_each_group_speaks_for_itself(self) -> None:
        manager = cache(30, FULL, window(5))
        compute(manager, request("r", 8))
        stored = manager.take_events()
        assert [event.group_idx for event in stored] == [0, 1]  # type: ignore[union-attr]
        manager.free("r")
        manager.pool.get_new_blocks(30)
        removed: Counter[int | None] = Counter()
        for event in manager.take_events():
            assert isinstance(event, BlockRemoved)
            removed[event.group_idx] += len(event.block_hashes)
        assert removed == {0: 2, 1: 2}


def test_kinds_of_groups_in_every_pool() -> None:
    """All kinds at a time, over three pools: admitted, grown and given back."""
    groups = (
        group(FULL),
        group(window(9), pool=1),
        group(ChunkedLocalAttentionSpec(4, 8)),
        group(STATE, pool=2),
        group(MambaSpec(4, 1, "none"), pool=2),
        group(CircularBufferSpec(6), pool=1),
        KVCacheGroupSpec(("cross",), CrossAttentionSpec(4), pool=2),
        group(SINK, pool=1),
    )
    manager = cache((40, 40, 40), *groups)
    assert [pool.get_num_free_blocks() for pool in manager.pools] == [40, 38, 40]
    r = request("r", 20)
    compute(manager, r, num_encoder_tokens=5)
    tables = manager.get_block_ids(r)
    assert [shape(t) for t in tables] == ["xxxxx", "xxxxx", "xxxxx", "....x", "xx", "x", "xx", "xxxxx"]
    r.append_output_tokens(range(4))
    compute(manager, r, num_encoder_tokens=5)
    tables = manager.get_block_ids(r)
    assert [shape(t) for t in tables] == ["xxxxxx", "...xxx", "....xx", "....xx", "xx", "x", "xx", "xxxxxx"]
    manager.free(r)
    assert [pool.get_num_free_blocks() for pool in manager.pools] == [40, 38, 40]
    audit(manager)


def test_events_say_the_kind_of_their_group() -> None:
    """Who reads them must know what a hit needs there."""
    specs = (FullAttentionSpec(4), SlidingWindowSpec(4, 6), ChunkedLocalAttentionSpec(4, 8), MambaSpec(4, 0, "align"))
    groups = tuple(KVCacheGroupSpec((str(at),), spec) for at, spec in enumerate(specs))
    manager = KVCacheManager(KVCacheConfig(40, groups, hash_block_size=4), events="first_last")
    request = Request("a", range(9), hasher=BlockHasher(hash_block_size=4, seed="kinds"))
    manager.allocate_slots(request, 8)  # where a state is kept
    said = {
        (event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
        for event in manager.take_events()
        if isinstance(event, BlockStored)
    }
    assert said == {
        (0, "full_attention", None),
        (1, "sliding_window", 6),
        (2, "chunked_local_attention", None),
        (3, "mamba", None),
    }
