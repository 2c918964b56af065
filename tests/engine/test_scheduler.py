"""The rules of the scheduler, one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blockpool.cache import EMPTY_PLAN
from blockpool.engine import (
    EngineConfigError,
    EngineRequest,
    EngineRequestError,
    FinishReason,
    RequestState,
    ResultError,
    Scheduler,
)
from blockpool.hashing import BlockHashes
from blockpool.managers import MambaSpec, SlidingWindowSpec
from tests.engine.driver import FULL, HASHERS, Driver, alone, cache, prompt

# -- a step ------------------------------------------------------------------------------------------


def test_a_request_is_told_in_full_then_only_what_is_new() -> None:
    driver = Driver(cache(10))
    driver.add(prompt("a", 7, max_tokens=4))
    first = driver.step()
    assert [(r.request_id, r.num_computed_tokens, r.block_ids) for r in first.new_requests] == [("a", 0, ([1, 2],))]
    assert first.num_scheduled_tokens == {"a": 7}
    second = driver.step()
    assert second.new_requests == []
    assert [(r.num_computed_tokens, r.new_block_ids, r.nulled) for r in second.running] == [(7, ([],), ([],))]
    third = driver.step()
    assert third.running[0].new_block_ids == ([3],)
    assert len(third.running[0].new_token_ids) == 1
    driver.run()
    driver.all_free()


def test_a_worker_hears_once_who_has_ended() -> None:
    driver = Driver(cache(10))
    driver.add(prompt("a", 3, max_tokens=1), prompt("b", 3, max_tokens=3))
    driver.step()
    assert driver.step().finished_ids == ["a"]
    assert driver.step().finished_ids == []


def test_prompts_are_computed_in_chunks_within_the_budget() -> None:
    driver = Driver(cache(40), num_tokens=10)
    driver.add(prompt("a", 25, max_tokens=2), prompt("b", range(100, 108), max_tokens=2))
    counts = [driver.step().num_scheduled_tokens for _ in range(4)]
    assert counts == [{"a": 10}, {"a": 10}, {"a": 5, "b": 5}, {"a": 1, "b": 3}]


def test_those_that_run_come_before_those_that_wait() -> None:
    driver = Driver(cache(40), num_tokens=4)
    driver.add(prompt("a", 4))
    driver.step()
    driver.add(prompt("b", range(50, 60)))
    assert driver.step().num_scheduled_tokens == {"a": 1, "b": 3}


def test_at_most_so_many_run() -> None:
    driver = Driver(cache(40), num_seqs=2)
    driver.add(*[prompt(f"r{at}", [at] * 3, max_tokens=2) for at in range(3)])
    driver.step()
    assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (2, 1)
    driver.run()
    assert all(ended.reason is FinishReason.LENGTH for ended in driver.ended.values())


def test_nothing_to_run_is_no_step() -> None:
    driver = Driver(cache(10))
    assert driver.schedule().step_id == -1
    driver.add(prompt("a", 3, max_tokens=1))
    assert driver.schedule().step_id == 0
    assert driver.schedule().step_id == -1  # one step may be in flight
    driver.tell()
    assert not driver.scheduler.has_work


def test_a_decode_that_needs_no_block_gets_the_shared_plan() -> None:
    driver = Driver(cache(10))
    request = prompt("a", 4)
    driver.add(request)
    driver.step()
    driver.step()
    assert driver.manager.plan(request, 1) is EMPTY_PLAN
    before = driver.manager.version
    output = driver.schedule()
    assert output.num_scheduled_tokens == {"a": 1}
    assert driver.manager.version == before


# -- the order of those that wait --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "order"), [("fcfs", ["r0", "r1", "r2", "r3"]), ("priority", ["r3", "r2", "r1", "r0"])]
)
def test_who_comes_first(policy: str, order: list[str]) -> None:
    driver = Driver(cache(40), num_seqs=1, policy=policy)
    ranks = [(2, 0.0), (1, 5.0), (1, 4.0), (0, 9.0)]
    for at, (priority, arrival) in enumerate(ranks):
        driver.add(prompt(f"r{at}", [at] * 3, max_tokens=1, priority=priority, arrival=arrival))
    driver.run()
    assert list(driver.ended) == order


# -- preemption --------------------------------------------------------------------------------------


def test_the_last_one_gives_way_and_finds_its_prefix_again() -> None:
    driver = Driver(cache(6))
    a, b = prompt("a", 8, max_tokens=8), prompt("b", range(50, 58), max_tokens=8)
    driver.add(a, b)
    driver.step()  # 2 blocks each
    driver.step()  # 3 each: all are taken
    for _ in range(4):
        output = driver.step()
    assert output.preempted_ids == ["b"]
    assert (b.state, b.num_computed_tokens, b.num_preemptions) == (RequestState.PREEMPTED, 0, 1)
    assert [r.request_id for r in driver.scheduler.waiting.requests] == ["b"]
    driver.run()
    resumed = next(r for step in driver.steps[6:] for r in step.new_requests)
    assert resumed.request_id == "b"
    assert resumed.num_computed_tokens > 0
    assert len(resumed.token_ids) > resumed.num_prompt_tokens
    for request, tokens in ((a, range(8)), (b, range(50, 58))):
        assert request.output_token_ids == alone(cache(20), prompt("x", list(tokens), max_tokens=8))
    driver.all_free()


def test_the_least_important_gives_way() -> None:
    driver = Driver(cache(6), policy="priority")
    a, b = prompt("a", 8, max_tokens=8, priority=1), prompt("b", range(50, 58), max_tokens=8, priority=0)
    driver.add(a, b)
    while not driver.scheduler.num_preemptions:
        driver.step()
    assert (a.num_preemptions, b.num_preemptions) == (1, 0)


def test_who_was_preempted_stands_before_all_that_came_later() -> None:
    driver = Driver(cache(6), num_seqs=2)
    driver.add(prompt("a", 8, max_tokens=8), prompt("b", range(50, 58), max_tokens=8), prompt("c", [9] * 3))
    while not driver.scheduler.num_preemptions:
        driver.step()
    assert [r.request_id for r in driver.scheduler.waiting.requests] == ["b", "c"]


# -- what can never be -------------------------------------------------------------------------------


def test_what_can_never_fit_is_ended_and_blocks_nobody() -> None:
    driver = Driver(cache(4))
    huge, small = prompt("huge", 17), prompt("small", 5, max_tokens=2)
    driver.add(huge, small)
    output = driver.step()
    assert output.num_scheduled_tokens == {"small": 5}
    assert driver.reason(huge) is FinishReason.ERROR
    assert "never_fits" in driver.ended["huge"].message
    driver.run()
    assert driver.reason(small) is FinishReason.LENGTH


def test_a_request_that_outgrows_the_pool_is_ended() -> None:
    driver = Driver(cache(3))
    request = prompt("a", 8, max_tokens=9)
    driver.add(request)
    driver.run()
    assert driver.reason(request) is FinishReason.ERROR
    assert request.num_tokens == 13  # the last was sampled, and cannot be computed
    driver.all_free()


def test_a_hit_that_makes_it_too_large_is_left_out() -> None:
    """A hit inside a block costs a copy beside it."""
    manager = cache(2, unit=2)
    driver = Driver(manager)
    driver.add(prompt("a", 7, unit=2, max_tokens=1))
    driver.run()
    again = prompt("b", 7, unit=2, max_tokens=1)
    hit = manager.get_computed_blocks(again)
    assert hit.num_tokens == 6
    driver.add(again)
    driver.run()
    assert driver.reason(again) is FinishReason.LENGTH


@pytest.mark.parametrize(("usable_blocks", "reason"), [(2, FinishReason.LENGTH), (1, FinishReason.ERROR)])
def test_a_long_prompt_passes_through_a_small_window(usable_blocks: int, reason: FinishReason) -> None:
    """Its whole does not fit at once; piece by piece it does, as long as a window does."""
    driver = Driver(cache(usable_blocks, SlidingWindowSpec(4, 5), max_steps_in_flight=3))
    request = prompt("a", 60, max_tokens=6)
    driver.add(request)
    driver.run()
    assert driver.reason(request) is reason
    driver.all_free()


def test_a_prompt_without_room_for_an_answer_is_ended() -> None:
    driver = Driver(cache(10, max_model_len=12))
    request = prompt("a", 12)
    driver.add(request)
    driver.take()
    assert driver.reason(request) is FinishReason.ERROR
    assert not driver.scheduler.has_work


# -- ends --------------------------------------------------------------------------------------------


def test_why_requests_end() -> None:
    tokens = alone(cache(20), prompt("a", 6, max_tokens=9))
    stop = tokens[3]
    cut = tokens.index(stop) + 1
    for options, reason, length in (
        ({"max_tokens": 5}, FinishReason.LENGTH, 5),
        ({"max_tokens": 9, "stop_token_ids": [stop]}, FinishReason.STOP, cut),
    ):
        driver = Driver(cache(20))
        request = prompt("b", 6, **options)
        driver.add(request)
        driver.run()
        assert (driver.reason(request), request.output_token_ids) == (reason, tokens[:length])
        assert request.state is RequestState.FINISHED
    driver = Driver(cache(20, max_model_len=10))
    request = prompt("c", 6, max_tokens=9)
    driver.add(request)
    driver.run()
    assert (driver.reason(request), request.num_tokens) == (FinishReason.LENGTH, 10)


def test_aborts_where_a_request_stands() -> None:
    driver = Driver(cache(6), num_seqs=2)
    running, waiting = prompt("a", 8), prompt("w", [3] * 5)
    driver.add(running, prompt("b", [2] * 8), waiting)
    driver.step()
    assert driver.scheduler.abort(["a", "w", "nobody"]) == ["a", "w"]
    assert driver.scheduler.abort(["a"]) == []
    driver.take()
    assert {driver.reason(running), driver.reason(waiting)} == {FinishReason.ABORT}
    assert driver.step().finished_ids == ["a"]  # the worker never knew the other
    driver.scheduler.abort(["b"])
    driver.run()
    driver.all_free()


# -- several steps in flight -------------------------------------------------------------------------


def test_a_token_is_computed_before_it_is_known() -> None:
    expected = alone(cache(20), prompt("x", 6, max_tokens=9))
    driver = Driver(cache(20, max_steps_in_flight=3))
    request = prompt("a", 6, max_tokens=9)
    driver.add(request)
    for count in (6, 1, 1):
        assert driver.schedule().num_scheduled_tokens == {"a": count}
    assert (request.num_tokens, request.num_computed_tokens, request.num_in_flight_tokens) == (6, 8, 8)
    assert driver.schedule().step_id == -1
    while driver.scheduler.has_work:
        driver.tell()
        driver.schedule()
    assert request.output_token_ids == expected
    assert driver.steps[-1].step_id == 8  # nobody computed a token behind the last
    driver.all_free()


def test_what_was_computed_ahead_is_found_as_soon_as_it_is_known() -> None:
    driver = Driver(cache(20, max_steps_in_flight=2))
    request = prompt("a", 6, max_tokens=8)
    driver.add(request)
    while driver.scheduler.has_work:
        driver.schedule()
        driver.schedule()
        driver.tell()
    again = prompt("b", request.tokens)
    assert driver.manager.get_computed_blocks(again).num_tokens == 12


def test_a_block_computed_ahead_is_found_with_its_last_token() -> None:
    driver = Driver(cache(20, max_steps_in_flight=2))
    request = prompt("a", 6)
    driver.add(request)
    driver.schedule()
    driver.schedule()
    driver.tell()
    driver.schedule()  # token 8
    for known, found in ((8, 4), (9, 8)):
        driver.tell()
        assert request.num_tokens == known
        assert driver.manager.get_computed_blocks(prompt("b", [*request.tokens, 0])).num_tokens == found


def test_results_out_of_order_are_held_back() -> None:
    driver = Driver(cache(20, max_steps_in_flight=3))
    request = prompt("a", 6)
    driver.add(request)
    for _ in range(3):
        driver.schedule()
    assert driver.tell(2) == {}
    assert driver.tell(1) == {}
    assert request.num_output_tokens == 0
    assert driver.scheduler.update(1, {"a": [0]}) == {}  # twice is once
    assert len(driver.tell(0)["a"]) == 3
    assert driver.scheduler.update(0, {}) == {}
    assert driver.scheduler.num_steps_in_flight == 0


def test_results_that_cannot_be_are_refused() -> None:
    driver = Driver(cache(20, max_steps_in_flight=2), num_tokens=4)
    driver.add(prompt("a", 6))
    driver.schedule()
    driver.schedule()
    for step_id, results in ((7, {}), (0, {"a": [1]}), (1, {}), (1, {"a": [1, 2]}), (1, {"a": [1], "b": [1]})):
        with pytest.raises(ResultError):
            driver.scheduler.update(step_id, results)
    assert driver.scheduler.num_steps_in_flight == 2
    driver.tell()
    driver.tell()


def test_blocks_wait_for_the_step_that_works_on_them() -> None:
    """S7 a: the result of step 0 ends the request, step 1 still reads its blocks."""
    driver = Driver(cache(4, max_steps_in_flight=2))
    expected = alone(cache(20), prompt("x", 5, max_tokens=1))
    driver.add(prompt("a", 5, max_tokens=4, stop_token_ids=expected))
    driver.schedule()
    driver.schedule()
    driver.tell(0)
    parts = driver.manager.pool.get_usage_parts()
    assert (driver.ended["a"].reason, parts.free, parts.deferred) == (FinishReason.STOP, 2, 2)
    assert driver.tell(1) == {}
    assert driver.manager.pool.get_num_free_blocks() == 4


def test_no_second_victim_for_one_shortage() -> None:
    """S7 d: both in flight, one needs a block: the other gives way, and the answer is to wait for the fence."""
    driver = Driver(cache(6, max_steps_in_flight=4))
    a, b, c = (prompt(name, [at] * 7, max_tokens=9) for at, name in enumerate("abc"))
    driver.add(a, b, c)
    driver.schedule()  # 2 blocks each
    driver.schedule()  # token 8 of each
    for _ in range(2):  # token 9 needs a block
        assert "a" not in driver.schedule().num_scheduled_tokens
        assert [r.num_preemptions for r in (a, b, c)] == [0, 0, 1]
    driver.tell(0)
    assert "a" not in driver.schedule().num_scheduled_tokens
    driver.tell(1)  # the fence
    assert driver.manager.pool.get_usage_parts().deferred == 0
    assert driver.schedule().num_scheduled_tokens == {"a": 1, "b": 1}
    assert [r.num_preemptions for r in (a, b, c)] == [0, 0, 1]
    driver.run()
    driver.all_free()


@pytest.mark.parametrize("free", [0, 1])
def test_what_a_shortage_waits_for_is_nobody_elses(free: int) -> None:
    """The first needs two blocks, its victim has one, which comes at a fence: it takes neither a second victim, nor
    may others take what is free.
    """
    driver = Driver(cache(5 + free, max_steps_in_flight=4, max_in_flight_tokens=8))
    a, *others = (prompt(name, [at] * (3 if at else 17), max_tokens=9) for at, name in enumerate("abcd"))
    driver.add(a, *others)
    assert driver.schedule().num_scheduled_tokens == {"a": 8, "b": 3, "c": 3, "d": 3}
    assert driver.schedule().num_scheduled_tokens == {"b": 1, "c": 1, "d": 1}
    driver.tell(0)
    for _ in range(2):  # everybody needs blocks now
        assert driver.schedule().step_id == -1
        assert [r.num_preemptions for r in others] == [0, 0, 1]
    driver.tell(1)
    assert "a" in driver.schedule().num_scheduled_tokens
    assert [r.num_preemptions for r in others] == [1 - free, 1, 1]  # now for what each lacks itself
    driver.run()
    driver.all_free()


def test_nobody_is_preempted_for_what_a_step_in_flight_will_free() -> None:
    driver = Driver(cache(4, SlidingWindowSpec(4, 5), max_steps_in_flight=3))
    a, b = prompt("a", 8, max_tokens=9), prompt("b", [5] * 3, max_tokens=9)
    driver.add(a, b)
    driver.schedule()
    driver.schedule()
    assert driver.schedule().num_scheduled_tokens == {"a": 1}  # b has no block for token 5
    driver.tell(0)
    driver.tell(1)
    assert driver.schedule().num_scheduled_tokens == {"a": 1, "b": 1}
    assert (a.num_preemptions, b.num_preemptions) == (0, 0)


def test_a_freed_victim_comes_after_it_is_told() -> None:
    """S7 c: completion before the abort, and abort before completion: freed once."""
    for abort_first in (False, True):
        driver = Driver(cache(4, max_steps_in_flight=2))
        driver.add(prompt("a", 5, max_tokens=1))
        driver.schedule()
        if abort_first:
            driver.scheduler.abort(["a"])
            assert driver.manager.pool.get_usage_parts().deferred == 2
        driver.tell()
        assert driver.scheduler.abort(["a"]) == []
        driver.take()
        assert driver.ended["a"].reason is (FinishReason.ABORT if abort_first else FinishReason.LENGTH)
        driver.all_free()
        assert driver.manager.pool.counters.late_releases == 0


# -- drafts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_drafts_are_accepted_as_far_as_they_are_right(num_right: int) -> None:
    expected = alone(cache(20), prompt("x", 6, max_tokens=9))
    driver = Driver(cache(20, max_steps_in_flight=2))
    request = prompt("a", 6, max_tokens=9)
    driver.add(request)
    driver.step()
    drafts = [*expected[1 : 1 + num_right], *[99] * (3 - num_right)]
    assert driver.scheduler.set_drafts("a", drafts)
    output = driver.schedule()
    assert (output.num_scheduled_tokens, output.draft_token_ids) == ({"a": 4}, {"a": drafts})
    assert request.num_computed_tokens == 10
    assert driver.schedule().step_id == -1  # where it goes on is not known
    assert driver.tell() == {"a": expected[1 : 2 + num_right]}
    assert request.num_computed_tokens == 7 + num_right
    driver.run()
    assert request.output_token_ids == expected


def test_drafts_are_cut_to_what_may_come() -> None:
    driver = Driver(cache(20), num_tokens=6)
    driver.add(prompt("a", 6, max_tokens=4))
    driver.step()
    driver.scheduler.set_drafts("a", [1] * 9)
    assert driver.schedule().num_scheduled_tokens == {"a": 3}  # 3 tokens are left of its answer
    assert not driver.scheduler.set_drafts("nobody", [1])


def test_drafts_take_nobodys_blocks() -> None:
    driver = Driver(cache(4))
    a, b = prompt("a", 7, max_tokens=9), prompt("b", [5] * 7, max_tokens=9)
    driver.add(a, b)
    driver.step()
    driver.scheduler.set_drafts("a", [1, 2, 3])
    assert driver.step().num_scheduled_tokens == {"a": 1, "b": 1}
    assert b.num_preemptions == 0


def test_as_many_drafts_as_there_are_states_for() -> None:
    driver = Driver(cache(20, FULL, MambaSpec(4, 2, "align")))
    request = prompt("a", 6, max_tokens=9)
    driver.add(request)
    driver.step()  # up to the state at 4
    driver.step()
    expected = alone(cache(20), prompt("x", 6, max_tokens=9))
    driver.scheduler.set_drafts("a", [*expected[1:3], 99])
    assert driver.step().draft_token_ids == {"a": expected[1:3]}
    driver.run()
    assert request.output_token_ids == expected


# -- states ------------------------------------------------------------------------------------------


def test_chunks_end_where_states_are_kept() -> None:
    driver = Driver(cache(40, FULL, MambaSpec(4, 0, "align"), interval=8))
    driver.add(prompt("a", 23, max_tokens=1))
    counts = [driver.step().num_scheduled_tokens.get("a") for _ in range(4)]
    assert counts == [8, 8, 4, 3]  # every 8 tokens, and where an equal prompt would resume
    assert driver.manager.get_computed_blocks(prompt("b", 23)).num_tokens == 20


def test_who_can_use_a_state_soon_waits_and_lets_others_pass() -> None:
    driver = Driver(cache(40, FULL, MambaSpec(4, 0, "align"), max_steps_in_flight=3))
    driver.add(prompt("a", 9, max_tokens=1))
    driver.schedule()  # up to the state at 8
    driver.add(prompt("b", [*range(8), 70, 71], max_tokens=1), prompt("c", [9] * 3, max_tokens=1))
    assert driver.schedule().num_scheduled_tokens == {"a": 1, "c": 3}
    driver.tell()
    output = driver.schedule()
    assert [(r.request_id, r.num_computed_tokens) for r in output.new_requests] == [("b", 8)]
    driver.run()


def test_a_running_state_alone_cannot_be_hit() -> None:
    with pytest.raises(EngineConfigError, match="enable_caching"):
        Driver(cache(20, FULL, MambaSpec(4, 0, "none")))
    Driver(cache(20, FULL, MambaSpec(4, 0, "none"), enable_caching=False))


# -- misuse ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [{"max_num_seqs": 0}, {"max_num_batched_tokens": 0}, {"policy": "lifo"}])
def test_schedulers_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(EngineConfigError):
        Scheduler(cache(4), **{"max_num_seqs": 1, "max_num_batched_tokens": 1, **wrong})  # type: ignore[arg-type]


def test_requests_that_cannot_be() -> None:
    for wrong in ({"max_tokens": 0}, {"num_encoder_tokens": -1}):
        with pytest.raises(EngineRequestError):
            EngineRequest("a", [1], **wrong)  # type: ignore[arg-type]
    driver = Driver(cache(4))
    request = prompt("a", 3, max_tokens=1)
    driver.add(request)
    with pytest.raises(EngineRequestError):
        driver.add(prompt("a", 3))
    driver.run()
    with pytest.raises(EngineRequestError):
        driver.add(request)
    driver.add(prompt("a", 3, max_tokens=1))


def test_tokens_go_into_the_chain_block_by_block() -> None:
    request = prompt("a", 3)
    request.append_output_tokens(3)
    request.append_output_tokens([4, 5])
    request.append([6, 7, 8])
    assert request.output_token_ids == [3, 4, 5, 6, 7, 8]
    assert request.digests(0, 2) == HASHERS[4].start(range(9)).raw(0, 2)
    assert request.num_hashes() == 2


# -- requests known by their hashes alone ----------------------------------------------------------------


def test_a_prompt_known_by_hashes_is_found_and_its_answer_only_counted() -> None:
    manager = cache(20)
    scheduler = Scheduler(manager, max_num_seqs=4, max_num_batched_tokens=64)
    size = manager.pool.hash_block_size
    tokens = list(range(2 * size + 1))
    known = HASHERS[size].start(tokens)
    steps = []
    for name in ("a", "b"):
        hashes = BlockHashes.from_digests(known.raw(), digest_size=manager.pool.digest_size, hash_block_size=size)
        request = EngineRequest(name, num_prompt_tokens=len(tokens), block_hashes=hashes, max_tokens=2 * size)
        scheduler.add_request(request)
        while scheduler.has_work:
            output = scheduler.schedule()
            steps.append(output)
            whole = request.num_computed_tokens == request.num_tokens
            scheduler.update(output.step_id, {name: [0]} if whole else {})
    assert [ended.reason for ended in scheduler.take_finished()] == [FinishReason.LENGTH] * 2
    starts = [new.num_computed_tokens for output in steps for new in output.new_requests]
    assert starts == [0, 2 * size]
    assert all(new.token_ids == [] for output in steps for new in output.new_requests)
    assert all(one.new_token_ids == [] for output in steps for one in output.running)
    # The prompt's two blocks; nothing of the answers.
    assert sum(manager.pool.get_cached_by_group().values()) == 2
    assert manager.pool.get_num_free_blocks() == manager.pool.num_gpu_blocks - 1


def test_a_chunk_that_the_budget_cuts_off_ends_where_a_state_can_be_found() -> None:
    driver = Driver(cache(40, FULL, MambaSpec(8, mamba_cache_mode="align")), num_tokens=13)
    driver.add(prompt("a", 40, max_tokens=2))
    assert driver.manager.alignment == 4  # inside the blocks too
    counts = [driver.step().num_scheduled_tokens["a"] for _ in range(4)]
    assert counts == [12, 12, 12, 4]


# -- what is refused ---------------------------------------------------------------------------------

NO_TOKEN = [-1, 1 << 32, None, "x", 1.5]


def steps(driver: Driver, *names: str) -> int:
    for at, name in enumerate(names):
        driver.add(prompt(name, [at] * 3, max_tokens=9))
    return driver.scheduler.schedule().step_id


@pytest.mark.parametrize("wrong", [*[[token] for token in NO_TOKEN], None, 5, "x", {1}, [], [1, 2]])
def test_results_that_are_no_tokens_change_nothing(wrong: object) -> None:
    driver = Driver(cache(20))
    step_id = steps(driver, "a", "b")
    s = driver.scheduler
    for given in ({"a": [1], "b": wrong}, {"a": wrong, "b": [1]}):
        with pytest.raises(ResultError, match=f"step {step_id}, request '"):
            s.update(step_id, given)  # type: ignore[arg-type]
        assert (s.requests["a"].num_tokens, s.requests["b"].num_tokens, s.num_steps_in_flight) == (3, 3, 1)
    assert s.update(step_id, {"a": [1], "b": [2]}) == {"a": [1], "b": [2]}


@pytest.mark.parametrize("wrong", [None, [], "a", [("a", [1])]])
def test_results_are_a_dict(wrong: object) -> None:
    driver = Driver(cache(20))
    step_id = steps(driver, "a")
    with pytest.raises(ResultError, match="a dict of lists"):
        driver.scheduler.update(step_id, wrong)  # type: ignore[arg-type]
    assert driver.scheduler.update(step_id, {"a": [1]}) == {"a": [1]}


def test_numbers_of_other_kinds_and_tuples_become_lists_of_ints() -> None:
    driver = Driver(cache(20))
    step_id = steps(driver, "a", "b")
    tokens = driver.scheduler.update(step_id, {"a": [np.int64(7)], "b": (np.uint32((1 << 32) - 1),)})
    assert tokens == {"a": [7], "b": [(1 << 32) - 1]}
    assert all(type(row) is list and type(row[0]) is int for row in tokens.values())
    assert [type(token) for token in driver.scheduler.requests["a"].tokens] == [int] * 4


def test_results_that_wait_for_their_turn_are_copied() -> None:
    driver = Driver(cache(20, max_steps_in_flight=2))
    first = steps(driver, "a")
    second = driver.scheduler.schedule().step_id
    buffer = [5]
    assert driver.scheduler.update(second, {"a": buffer}) == {}
    buffer[0] = 6
    assert driver.scheduler.update(first, {"a": buffer}) == {"a": [6, 5]}


@pytest.mark.parametrize("tokens", [[8, 1], [7, 9, 1], [8, 8, 1], [7, 8, 1, 1]])
def test_only_drafts_that_were_sent_can_be_accepted(tokens: list[int]) -> None:
    driver = Driver(cache(20))
    s = driver.scheduler
    s.update(steps(driver, "a"), {"a": [1]})
    s.set_drafts("a", [7, 8])
    output = s.schedule()
    assert output.draft_token_ids == {"a": [7, 8]}
    with pytest.raises(ResultError, match="'a'"):
        s.update(output.step_id, {"a": tokens})
    assert s.requests["a"].num_tokens == 4
    assert s.update(output.step_id, {"a": [7, 3]}) == {"a": [7, 3]}
    s.set_drafts("a", [2])
    assert s.update(s.schedule().step_id, {"a": [2, 2]}) == {"a": [2, 2]}


@pytest.mark.parametrize("step_id", [-1, -7, 1, 100])
def test_a_step_that_was_never_scheduled(step_id: int) -> None:
    driver = Driver(cache(20))
    steps(driver, "a")
    with pytest.raises(ResultError, match=f"step {step_id} was never scheduled"):
        driver.scheduler.update(step_id, {})


@pytest.mark.parametrize("lease", [0.0, -1.0, float("nan"), float("inf")])
def test_a_lease_is_a_time(lease: float) -> None:
    with pytest.raises(EngineConfigError, match="finite"):
        Driver(cache(20, clock=lambda: 0.0), lease=lease)


def test_a_lease_needs_a_clock() -> None:
    with pytest.raises(EngineConfigError, match="clock"):
        Driver(cache(20), lease=1.0)


@pytest.mark.parametrize(
    "wrong",
    [{"priority": 0.5}, {"priority": "x"}, {"arrival": float("nan")}, {"arrival": float("inf")}, {"arrival": "1"}],
)
def test_what_orders_requests_are_numbers(wrong: dict[str, Any]) -> None:
    with pytest.raises(EngineRequestError, match=f"'a': {next(iter(wrong))} "):
        EngineRequest("a", [1], **wrong)


@pytest.mark.parametrize("token", NO_TOKEN)
def test_drafts_are_tokens(token: object) -> None:
    driver = Driver(cache(20))
    steps(driver, "a")
    driver.scheduler.set_drafts("a", [4])
    with pytest.raises(EngineRequestError, match="'a': draft"):
        driver.scheduler.set_drafts("a", [1, token])  # type: ignore[list-item]
    assert driver.scheduler.requests["a"].drafts == [4]


def test_abort_takes_ids() -> None:
    driver = Driver(cache(20))
    steps(driver, "a", "b")
    with pytest.raises(EngineRequestError, match="a list of ids"):
        driver.scheduler.abort("ab")
    assert driver.scheduler.abort(name for name in driver.scheduler.requests) == ["a", "b"]


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("enters", [False, True])
def test_a_callback_of_the_pool_that_raises_leaves_a_sound_scheduler(in_flight: bool, enters: bool) -> None:
    """It is raised while a request gets blocks that were given back with a callback: one that enters, or one that
    goes on beside another that has its part already.
    """
    driver = Driver(cache(8, max_steps_in_flight=2), num_tokens=16)
    s, pool = driver.scheduler, driver.manager.pool
    requests = [prompt("a", [1] * 6, max_tokens=3), prompt("b", [2] * 4, max_tokens=6)]
    requests.append(prompt("c", [3] * 5, max_tokens=2))
    driver.add(*requests[:2])
    driver.schedule()
    if not in_flight:
        driver.tell()
    if enters:
        driver.add(requests[2])

    def fail(block: int) -> None:
        raise OSError(f"block {block}")

    blocks = pool.get_new_blocks(pool.get_num_free_blocks())
    pool.unpin_blocks(blocks, fail)
    with pytest.raises((OSError, BaseExceptionGroup)):
        s.schedule()
    assert pool.audit() == []
    if in_flight:
        driver.tell()
    assert pool.get_num_free_blocks() >= 6
    for _ in range(10):  # each block calls once
        try:
            driver.run()
        except (OSError, BaseExceptionGroup):
            assert pool.audit() == []
    driver.all_free()
    assert all(r.num_output_tokens == r.max_tokens for r in requests if enters or r.request_id != "c")
