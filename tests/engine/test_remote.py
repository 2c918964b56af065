"""Requests whose KV comes from elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from blockpool.engine import (
    EngineError,
    EngineRequest,
    EngineRequestError,
    FinishReason,
    RequestState,
    Scheduler,
    SchedulerOutput,
)
from blockpool.managers import ChunkedLocalAttentionSpec, CrossAttentionSpec, SlidingWindowSpec
from tests.engine.driver import FULL, cache, prompt


class Elsewhere:
    """Has the first `num_tokens` tokens of every prompt; None: it does not know yet."""

    def __init__(self, num_tokens: int | None) -> None:
        self.num_tokens = num_tokens
        self.aborted: list[str] = []
        self.num_asked = 0

    def get_num_external_tokens(self, request: EngineRequest, num_computed_tokens: int) -> int | None:
        self.num_asked += 1
        return None if self.num_tokens is None else max(0, self.num_tokens - num_computed_tokens)

    def load_aborted(self, request_id: str) -> None:
        self.aborted.append(request_id)


def scheduler(usable_blocks: int, num_tokens: int | None, **options: object) -> Scheduler:
    lease = options.pop("lease", None)
    assert lease is None or isinstance(lease, float)
    manager = cache(usable_blocks, **options)  # type: ignore[arg-type]
    return Scheduler(manager, max_num_seqs=4, max_num_batched_tokens=64, connector=Elsewhere(num_tokens), lease=lease)


def ran(s: Scheduler, output: SchedulerOutput, **tokens: list[int]) -> None:
    s.update(output.step_id, tokens)


def test_a_request_waits_for_its_load_and_goes_on_behind_it() -> None:
    s = scheduler(10, 8)
    request = prompt("a", 11)
    s.add_request(request)
    output = s.schedule()
    assert output.num_scheduled_tokens == {}
    (load,) = output.loads
    assert (load.request_id, load.first, load.last, load.block_ids) == ("a", 0, 8, ([1, 2],))
    assert load.token_ids == list(range(8))
    assert request.state is RequestState.WAITING_FOR_REMOTE_KVS
    ran(s, output)
    assert s.schedule().step_id == -1
    assert s.manager.get_computed_blocks(prompt("b", 11)).num_tokens == 0  # nothing is there yet
    assert s.finished_recving("a")
    assert not s.finished_recving("a")
    assert s.manager.get_computed_blocks(prompt("b", 11)).num_tokens == 8
    output = s.schedule()
    assert output.num_scheduled_tokens == {"a": 3}
    assert [(r.num_computed_tokens, r.block_ids) for r in output.new_requests] == [(8, ([1, 2, 3],))]
    ran(s, output, a=[1])


def test_a_load_that_fails_is_computed() -> None:
    s = scheduler(10, 8)
    request = prompt("a", 11)
    s.add_request(request)
    ran(s, s.schedule())
    assert s.failed_recving("a")
    assert s.manager.pool.get_num_free_blocks() == 10
    output = s.schedule()
    assert (output.loads, output.num_scheduled_tokens) == ([], {"a": 11})
    ran(s, output, a=[1])


def test_the_last_token_is_computed_here() -> None:
    s = scheduler(10, 100)
    s.add_request(prompt("a", 8))
    output = s.schedule()
    assert output.loads[0].last == 7
    ran(s, output)
    s.finished_recving("a")
    assert s.schedule().num_scheduled_tokens == {"a": 1}


def test_a_connector_that_does_not_know_yet_is_asked_again() -> None:
    s = scheduler(10, None)
    s.add_request(prompt("a", 8))
    assert s.schedule().step_id == -1
    assert isinstance(s.connector, Elsewhere)
    s.connector.num_tokens = 0
    assert s.schedule().num_scheduled_tokens == {"a": 8}


def test_a_step_asks_no_more_than_may_run() -> None:
    """Whoever waits for an answer lets others pass, but a step does not go through thousands of them."""
    s = scheduler(40, None)
    assert isinstance(s.connector, Elsewhere)
    for number in range(100):
        s.add_request(prompt(f"r{number}", 8))
    assert s.schedule().step_id == -1
    assert s.connector.num_asked == 4


def test_what_is_here_is_not_loaded() -> None:
    s = scheduler(10, 8)
    s.manager.allocate_slots(prompt("before", 11), 11)
    s.add_request(prompt("a", 11))
    output = s.schedule()
    assert output.loads == []
    assert output.num_scheduled_tokens == {"a": 3}


def test_who_waits_for_a_load_is_nobodys_victim() -> None:
    s = scheduler(5, 0)
    assert isinstance(s.connector, Elsewhere)
    a, b = prompt("a", 8), prompt("b", [7] * 8)
    s.add_request(a)
    output = s.schedule()
    s.connector.num_tokens = 8
    s.add_request(b)
    ran(s, output, a=[1])
    output = s.schedule()  # a has 3 blocks, b's load 2
    assert [load.request_id for load in output.loads] == ["b"]
    ran(s, output, a=[1])
    for _ in range(3):
        output = s.schedule()
        ran(s, output, a=[1])
    assert a.num_tokens == 13
    assert s.schedule().step_id == -1  # a needs a block, and nobody can give one
    assert (a.num_preemptions, b.num_preemptions, a.state) == (0, 0, RequestState.RUNNING)
    s.finished_recving("b")
    assert s.schedule().num_scheduled_tokens == {"a": 1}
    assert (a.num_preemptions, b.num_preemptions) == (0, 1)


@pytest.mark.parametrize("in_time", [False, True])
def test_blocks_that_may_still_be_written_are_kept(in_time: bool) -> None:
    """S7 b: the owner aborts, the lease is 10: nobody gets them before, unless the load reports back."""
    now = 0.0
    s = scheduler(4, 8, clock=lambda: now, lease=10.0)
    s.add_request(prompt("a", 9))
    ran(s, s.schedule())
    assert s.abort(["a"]) == ["a"]
    pool = s.manager.pool
    assert pool.get_num_free_blocks() == 2
    assert isinstance(s.connector, Elsewhere)
    s.connector.num_tokens = 0
    s.add_request(prompt("b", [5] * 13, max_tokens=1))
    now = 9.0
    assert s.schedule().step_id == -1
    if in_time:
        assert not s.finished_recving("a")
    now = 10.0
    output = s.schedule()
    assert output.num_scheduled_tokens == {"b": 13}
    assert not s.finished_recving("a")  # too late: b has them now
    assert not s.failed_recving("a")
    ran(s, output, b=[1])
    assert pool.get_num_free_blocks() == 4
    assert pool.audit() == []


def test_a_load_may_end_a_hit_that_ends_inside_a_block() -> None:
    """The part of a block that is here is left: the load brings the whole."""
    s = scheduler(20, 12, unit=2)
    first = prompt("first", 7, unit=2)
    s.manager.allocate_slots(first, 7)
    again = prompt("a", [*range(6), *range(50, 58)], unit=2)
    assert s.manager.get_computed_blocks(again).num_tokens == 6
    s.add_request(again)
    (load,) = s.schedule().loads
    assert (load.first, load.last) == (4, 12)


def test_a_load_in_a_window() -> None:
    manager = cache(20, FULL, SlidingWindowSpec(4, 5))
    s = Scheduler(manager, max_num_seqs=4, max_num_batched_tokens=64, connector=Elsewhere(16))
    s.add_request(prompt("a", 18))
    output = s.schedule()
    assert [sum(block > 0 for block in row) for row in output.loads[0].block_ids] == [4, 1]
    ran(s, output)
    s.finished_recving("a")
    output = s.schedule()
    ran(s, output, a=[3])
    s.abort(["a"])
    assert [end.reason for end in s.take_finished()] == [FinishReason.ABORT]
    assert manager.pool.get_num_free_blocks() == 20


def test_a_load_of_which_a_part_came_is_looked_up_again_from_there() -> None:
    s = scheduler(10, 8)
    request = prompt("a", 11)
    s.add_request(request)
    output = s.schedule()
    ran(s, output)
    for bad in (9, -1, (4, 4), (-1,)):
        with pytest.raises(EngineRequestError, match="a load of 8 tokens in 1 groups"):
            s.finished_recving("a", bad)
    assert s.finished_recving("a", 4)
    assert request.state is RequestState.WAITING
    output = s.schedule()
    assert [(load.first, load.last) for load in output.loads] == [(4, 8)]
    ran(s, output)
    assert s.finished_recving("a", (4,))
    output = s.schedule()
    ran(s, output)
    assert s.finished_recving("a", 4)  # the third that failed
    output = s.schedule()
    assert (output.loads, output.num_scheduled_tokens) == ([], {"a": 7})
    ran(s, output, a=[1])
    s.abort(["a"])
    assert s.manager.pool.get_num_free_blocks() == 10


def test_a_report_of_another_load_of_the_same_id_changes_nothing() -> None:
    now = 0.0
    s = scheduler(10, 8, clock=lambda: now, lease=10.0)
    s.add_request(prompt("a", 9))
    output = s.schedule()
    old = output.loads[0].load_id
    ran(s, output)
    s.abort(["a"])
    now = 10.0
    again = prompt("a", [5] * 9)
    s.add_request(again)
    output = s.schedule()
    new = output.loads[0].load_id
    assert new != old
    ran(s, output)
    assert not s.finished_recving("a", load_id=old)
    assert not s.failed_recving("a", old)
    assert not s.finished_recving("a", 4, old)
    assert again.is_loading
    assert s.num_late_reports == 3
    assert s.finished_recving("a", load_id=new)


def test_a_load_that_never_fits_leaves_the_hit_as_it_was() -> None:
    """The hit ends inside a block that the load would bring; without the load, the request starts from it."""
    manager = cache(6, ChunkedLocalAttentionSpec(2, 11), CrossAttentionSpec(4), unit=2)
    s = Scheduler(manager, max_num_seqs=4, max_num_batched_tokens=64, connector=Elsewhere(26))
    request = prompt("a", 28, unit=2, num_encoder_tokens=4)
    assert manager.get_computed_blocks(request).num_tokens == 22
    s.add_request(request)
    for _ in range(3):
        output = s.schedule()
        if output.num_scheduled_tokens:
            break
        ran(s, output)
        s.failed_recving("a")
    assert output.num_scheduled_tokens == {"a": 6}
    assert s.take_finished() == []


# -- ids and leases ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["finished", "failed", "expired"])
def test_an_id_is_free_again_when_its_load_is_reported_or_its_lease_has_ended(how: str) -> None:
    now = 0.0
    s = scheduler(10, 8, clock=lambda: now, lease=10.0)
    for life in range(3):
        request = prompt("a", 9, max_tokens=1)
        s.add_request(request)
        ran(s, s.schedule())
        s.abort(["a"])
        with pytest.raises(EngineRequestError, match="'a': a load of an aborted request"):
            s.add_request(prompt("a", 9))
        assert s.manager.pool.get_num_free_blocks() == 8
        if how == "expired":
            now += 10.0
            s.schedule()
        else:
            assert not (s.finished_recving("a") if how == "finished" else s.failed_recving("a"))
        assert s.manager.pool.get_num_free_blocks() == 10
        again = prompt("a", 9, max_tokens=1)
        s.add_request(again)
        ran(s, s.schedule())
        assert s.finished_recving("a"), life  # it is of this load
        ran(s, s.schedule(), a=[1])
        assert not s.has_work
        s.manager.reset_prefix_cache()


# -- hooks that fail ---------------------------------------------------------------------------------


class Failing(Elsewhere):
    """Answers what `act` says for the requests in `asked_of`, and 0 for others."""

    def __init__(self, act: Callable[[], object], asked_of: str) -> None:
        super().__init__(0)
        self.act, self.asked_of = act, asked_of

    def get_num_external_tokens(self, request: EngineRequest, num_computed_tokens: int) -> int | None:
        if request.request_id in self.asked_of:
            return self.act()  # type: ignore[return-value]
        return 0


def broken() -> object:
    raise OSError("no link")


@pytest.mark.parametrize("steps_in_flight", [0, 1])
@pytest.mark.parametrize(
    "what", ["raises", 1.5, "x", "abort", "schedule", "add_request", "update", "finished_recving"]
)
def test_a_connector_that_fails_leaves_a_sound_scheduler(what: object, steps_in_flight: int) -> None:
    """In a step in which one goes on, one enters, one loads, and the fourth is asked for."""
    s = scheduler(30, 0, max_steps_in_flight=2)
    requests = {name: prompt(name, [ord(name)] * 6 + [at], max_tokens=6) for at, name in enumerate("abcd")}
    calls: dict[object, Callable[[], object]] = {
        "raises": broken,
        "abort": lambda: s.abort(["a"]),
        "schedule": s.schedule,
        "add_request": lambda: s.add_request(prompt("z", 3)),
        "update": lambda: s.update(0, {}),
        "finished_recving": lambda: s.finished_recving("c"),
    }
    s.add_request(requests["a"])
    output = s.schedule()
    if not steps_in_flight:
        ran(s, output, a=[1])

    class Mixed(Failing):
        def get_num_external_tokens(self, request: EngineRequest, num_computed_tokens: int) -> int | None:
            return 4 if request.request_id == "c" else super().get_num_external_tokens(request, num_computed_tokens)

    s.connector = Mixed(calls.get(what, lambda: what), "d")
    for name in "bcd":
        s.add_request(requests[name])
    for _ in range(3):
        with pytest.raises((OSError, EngineError)) as caught:
            s.schedule()
        assert not isinstance(caught.value, AssertionError)
        if what in (1.5, "x"):
            assert "'d'" in str(caught.value)
            assert repr(what) in str(caught.value)
        assert (s.num_running, s.num_waiting) == (0, 4)
        assert s.manager.pool.audit() == []
    if steps_in_flight:
        ran(s, output, a=[1])
    assert s.manager.pool.get_num_free_blocks() == 30
    s.connector = Elsewhere(0)
    output = s.schedule()
    assert output.preempted_ids == ["a"]
    assert [new.request_id for new in output.new_requests] == ["a", "b", "c", "d"]
    while s.has_work:
        known = {name: r.num_tokens for name, r in s.requests.items()}
        assert set(output.num_scheduled_tokens) <= set(known)
        s.update(output.step_id, {name: [1] for name in output.num_scheduled_tokens})
        output = s.schedule()
    assert all(request.num_output_tokens == 6 for request in requests.values())
    assert s.manager.pool.get_num_free_blocks() == 30
    assert s.manager.pool.audit() == []
