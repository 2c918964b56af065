"""Who runs in the next step, for how many tokens, and in which blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from operator import index
from typing import Any, Final, SupportsIndex, cast

from blockpool.cache import EMPTY_PLAN, AllocationPlan, Hit, KVCacheManager, Refusal, RefusalReason
from blockpool.engine.connector import Connector
from blockpool.engine.errors import EngineConfigError, EngineError, EngineRequestError, ResultError
from blockpool.engine.in_flight import Step
from blockpool.engine.limits import Limits
from blockpool.engine.loads import Leases
from blockpool.engine.output import CachedRequestData, LoadData, NewRequestData, SchedulerOutput
from blockpool.engine.request import NO_TOKENS, EngineRequest, Part
from blockpool.engine.request_queue import RequestQueue
from blockpool.engine.states import FinishedRequest, FinishReason, RequestState
from blockpool.engine.told import ToldTable

AT_REST: Final = EMPTY_PLAN  # no lookup of a name in the hottest path
MOST_TOKEN: Final = (1 << 32) - 1
MOST_LOADS: Final = 3  # of one request that come to nothing, or to a part


class Scheduler:
    """Continuous batching over one cache: running requests first, then waiting ones, within a budget of tokens.

    `max_num_seqs`: requests that hold blocks at a time. `max_num_batched_tokens`: tokens of a step, drafts included;
    prompts are computed in chunks of what is left. `policy`: "fcfs", or "priority" by the requests' `priority`.
    As many steps may be in flight as the cache allows (its `max_steps_in_flight`). `connector`: who brings KV from
    elsewhere. `lease`: how long, by the clock of the cache, blocks are kept that a connector may still be writing
    when their request is aborted.

    What a hook raises, the connector's or one of the pools', comes out of the call that ran it; a step that was being
    planned then never was, and the requests that had a part in it wait again. While a step is planned, no hook may
    call the scheduler: EngineError. Raises EngineConfigError.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: str = "fcfs",
        connector: Connector | None = None,
        lease: float | None = None,
    ) -> None:
        if max_num_seqs < 1:
            raise EngineConfigError(f"max_num_seqs must be at least 1 request, not {max_num_seqs}")
        if max_num_batched_tokens < 1:
            raise EngineConfigError(f"max_num_batched_tokens must be at least 1 token, not {max_num_batched_tokens}")
        if policy not in ("fcfs", "priority"):
            raise EngineConfigError(f'policy must be "fcfs" or "priority", not {policy!r}')
        if lease is not None:
            if not isfinite(lease) or lease <= 0:
                raise EngineConfigError(f"lease must be a finite time above 0, not {lease}")
            if any(pool.clock is None for pool in manager.pools):
                raise EngineConfigError("a lease ends by the clock of the cache: give the cache a clock")
        for at, kind in enumerate(manager.managers):
            if kind.is_state and not kind.prefix_cacheable and manager.enable_caching:
                raise EngineConfigError(
                    f"group {at} keeps only the running state, which no hit of the other groups can start from: make"
                    " the cache with enable_caching=False"
                )
        self.manager = manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.policy = policy
        self.connector = connector
        self.limits = Limits(manager)
        self.requests: dict[str, EngineRequest] = {}
        self.waiting = RequestQueue()
        self.running = RequestQueue()
        self.num_preemptions = 0
        self.num_late_reports = 0  # of loads that nobody waited for any more
        self._leases = Leases(manager, lease)
        self._is_planning = False
        self._failure: BaseException | None = None  # of a hook, while steps are settled
        self._num_added = 0
        self._num_loads = 0
        self._next_step = 0
        self._acknowledged = -1
        self._victims_fence = -1  # the last at which blocks of a preempted request come
        self._steps: deque[Step] = deque()  # in flight, oldest first
        self._late: set[int] = set()  # steps whose results came before their turn
        self._finished: list[FinishedRequest] = []
        self._ended: list[str] = []  # the worker is to forget them
        self._preempted: list[str] = []
        self._changed: type[CachedRequestData] = CachedRequestData
        self._no_blocks: tuple[list[int], ...] = tuple([[] for _ in manager.managers])

    # -- requests ------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended, or any step not been acknowledged."""
        return bool(self.requests or self._steps)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks, those that wait for remote KV included."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_steps_in_flight(self) -> int:
        return len(self._steps)

    def add_request(self, request: EngineRequest) -> None:
        """Let a request wait for its turn. A prompt that leaves no room for an answer ends with an error.

        Raises EngineRequestError for an id that is in use, a request that was added before, and an id whose earlier
        request was aborted while it was loaded, until that load is reported or its lease has ended: a report names
        the id alone.
        """
        self._must_not_be_planning("add_request")
        request_id = request.request_id
        if request_id in self.requests:
            raise EngineRequestError(f"request {request_id!r}: a request of that id has not ended yet")
        self._leases.expire()
        if request_id in self._leases.holds:
            raise EngineRequestError(
                f"request {request_id!r}: a load of an aborted request of that id has not been reported yet"
            )
        if request.order[2] >= 0:
            raise EngineRequestError(f"request {request_id!r} was added before: make a new one")
        request.must_fit(self.manager.pool)
        number = self._num_added
        self._num_added += 1
        if self.policy == "priority":
            request.order = (request.priority, request.arrival, number)
        else:
            request.order = (0, 0.0, number)
        most = self.limits.max_model_len
        request.most_tokens = min(request.most_tokens, most)
        request.told = [ToldTable(only_grows) for only_grows in self.limits.only_grows]
        if request.num_prompt_tokens >= most:
            length = request.num_prompt_tokens
            self._close(
                request, FinishReason.ERROR, f"a prompt of {length} tokens leaves no room for an answer: {most} fit"
            )
            return
        self.requests[request_id] = request
        self.waiting.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End these requests now, wherever they stand; those that had not ended already.

        Raises EngineRequestError for a single str.
        """
        self._must_not_be_planning("abort")
        if isinstance(request_ids, str):
            raise EngineRequestError(f"abort takes a list of ids, not the str {request_ids!r}")
        aborted: list[str] = []
        for request_id in list(request_ids):
            request = self.requests.get(request_id)
            if request is not None:
                was_loading = request.is_loading
                if was_loading:
                    self._leases.take(request)
                self._end(request, FinishReason.ABORT, "")
                aborted.append(request_id)
                if was_loading and self.connector is not None:
                    connector: Any = self.connector
                    connector.load_aborted(request_id)
        return aborted

    def set_drafts(self, request_id: str, draft_token_ids: Iterable[SupportsIndex]) -> bool:
        """Tokens that may follow the last known one, to be verified in the next step. False, and nothing happens,
        for a request that has ended.

        They hold until the request gets a token. With some of them in flight it is not scheduled ahead. More than
        fit its length, the step or the states of a model are left out. Raises EngineRequestError for
        what is no token.
        """
        request = self.requests.get(request_id)
        if request is None:
            return False
        drafts: list[int] = []
        for given in draft_token_ids:
            token = token_of(given)
            if token < 0:
                raise EngineRequestError(
                    f"request {request_id!r}: draft {given!r}, where tokens are 0 to {MOST_TOKEN}"
                )
            drafts.append(token)
        request.drafts = drafts
        return True

    def take_finished(self) -> list[FinishedRequest]:
        """The requests that have ended since the last call, for whatever reason."""
        finished = self._finished
        self._finished = []
        return finished

    # -- a step --------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. It has to be run, and its results given to `update`, unless its `step_id` is -1: there
        is nothing to run now, for want of requests, of blocks, or of results of the steps in flight.
        """
        self._must_not_be_planning("schedule")
        manager = self.manager
        self._leases.expire()
        if len(self._steps) >= self.limits.max_steps_in_flight or not self.requests:
            return self._nothing()
        step_id = self._next_step
        manager.begin_step(step_id)
        step = Step(step_id, self.max_num_batched_tokens)
        self._is_planning = True
        try:
            self._go_on(step)
            if not step.is_short:
                self._admit(step)
        except BaseException:
            self._abandon(step)
            raise
        finally:
            self._is_planning = False
        if not step.parts and not step.loads:
            manager.cancel_step(step_id)
            return self._nothing()
        self._next_step = step_id + 1
        self._steps.append(step)
        output = SchedulerOutput(
            step_id,
            step.new_requests,
            step.running,
            step.num_scheduled_tokens,
            step.draft_token_ids,
            manager.take_block_copies(),
            manager.take_blocks_to_clear(),
            step.loads,
            self._ended,
            self._preempted,
        )
        self._ended = []
        self._preempted = []
        step.told()
        return output

    def _must_not_be_planning(self, call: str) -> None:
        if self._is_planning:
            raise EngineError(f"{call} was called by a hook while schedule plans a step: only afterwards")

    def _abandon(self, step: Step) -> None:
        """Planning a step has failed: it never was, and all who had a part in it wait again."""
        step_id = step.step_id
        try:
            self.manager.cancel_step(step_id)
        finally:
            requests: list[EngineRequest] = []
            for part in step.parts:
                if part.epoch == part.request.epoch:
                    requests.append(part.request)
            requests += step.loading
            changing = step.changing
            if changing is not None and changing not in requests:
                requests.append(changing)
            fresh = [told.request_id for told in step.new_requests]
            for request in requests:
                self._put_back(request, request.request_id in fresh)

    def _put_back(self, request: EngineRequest, is_fresh: bool) -> None:
        """`is_fresh`: the worker would only have been told of it."""
        if is_fresh:
            request.is_told = False
        request.last_step = self._last_in_flight(request)
        if request.state is RequestState.RUNNING or request.state is RequestState.WAITING_FOR_REMOTE_KVS:
            self._preempt(request)
        else:
            self.manager.free(request)  # it had not entered yet

    def _last_in_flight(self, request: EngineRequest) -> int:
        """The newest step in flight that works on a request's blocks; -1: none."""
        last = -1
        for step in self._steps:
            if request in step.loading:
                last = step.step_id
            for part in step.parts:
                if part.request is request and part.epoch == request.epoch:
                    last = step.step_id
        return last

    def _nothing(self) -> SchedulerOutput:
        return SchedulerOutput(-1, [], [], {}, {}, [], tuple([[] for _ in self._no_blocks]), [], [], [])

    def _go_on(self, step: Step) -> None:
        """Those that run already."""
        running = self.running.requests
        at = 0
        while at < len(running) and step.budget > 0:
            request = running[at]
            if not request.is_loading and request.num_drafts_in_flight == 0:
                self._continue(step, request)
            if at < len(running) and running[at] is request:
                at += 1

    def _continue(self, step: Step, request: EngineRequest) -> None:
        computed = request.num_computed_tokens
        promised = request.num_promised
        known = request.num_tokens + promised
        new = known - computed
        if new < 1 or known >= request.most_tokens:
            return  # what is in flight comes first, or is all that it needs
        room = min(step.budget, self.limits.max_in_flight_tokens - request.num_in_flight_tokens)
        if room < 1:
            return
        drafts = NO_TOKENS
        if new > 1:
            new = self.limits.next_chunk(request, min(new, room))
        elif request.drafts and promised == 0:
            most = min(room - 1, self.limits.most_drafts, request.most_tokens - known - 1)
            if most > 0:
                drafts = request.drafts[:most]
        plan = self.manager.plan(
            request, new, num_lookahead_tokens=len(drafts), num_encoder_tokens=request.num_encoder_tokens
        )
        if plan is not AT_REST:
            if isinstance(plan, Refusal):
                drafts = NO_TOKENS
                found = self._make_room(step, request, new)
                if found is None:
                    return
                plan, new = found
            if step.is_short and any(plan.num_new_blocks):
                return
            step.changing = request
            self.manager.commit(plan)
            step.changing = None
            self._tell_change(step, request)
        elif request.is_told:
            step.running.append(
                self._changed(request.request_id, computed, request.untold(), self._no_blocks, self._no_blocks)
            )
        else:
            self._tell_all(step, request)
        self._take_part(step, request, new, drafts)

    def _take_part(self, step: Step, request: EngineRequest, new: int, drafts: list[int]) -> None:
        """The request computes `new` tokens and verifies drafts in this step."""
        request_id = request.request_id
        num_drafts = len(drafts)
        total = new + num_drafts
        end = request.num_computed_tokens + new
        samples = end == request.num_tokens + request.num_promised
        part = request.part()
        part.epoch = request.epoch
        part.num_tokens = total
        part.num_drafts = num_drafts
        part.drafts = drafts
        part.samples = samples
        part.ahead = end > request.num_tokens
        part.counts = False
        step.parts.append(part)
        step.num_scheduled_tokens[request_id] = total
        step.budget -= total
        request.num_computed_tokens = end + num_drafts
        request.num_in_flight_tokens += total
        request.last_step = step.step_id
        if samples:
            request.num_promised += 1
        if num_drafts:
            request.num_drafts_in_flight = num_drafts
            step.draft_token_ids[request_id] = list(drafts)

    def _tell_change(self, step: Step, request: EngineRequest) -> None:
        """A request whose table may have changed."""
        if not request.is_told:
            self._tell_all(step, request)
            return
        request_id = request.request_id
        appended: list[list[int]] = []
        nulled: list[list[int]] = []
        for at, manager in enumerate(self.manager.managers):
            gone: list[int] = []
            appended.append(request.told[at].tell(manager, request_id, gone))
            nulled.append(gone)
        step.running.append(
            CachedRequestData(
                request_id, request.num_computed_tokens, request.untold(), tuple(appended), tuple(nulled)
            )
        )

    def _tell_all(self, step: Step, request: EngineRequest) -> None:
        """A request that the worker does not know."""
        request_id = request.request_id
        tables: list[list[int]] = []
        for at, manager in enumerate(self.manager.managers):
            tables.append(request.told[at].tell_all(manager, request_id))
        request.is_told = True
        request.num_told = request.num_tokens
        step.new_requests.append(
            NewRequestData(
                request_id,
                list(request.tokens),
                request.num_prompt_tokens,
                request.num_computed_tokens,
                tuple(tables),
            )
        )

    # -- room ----------------------------------------------------------------------------------------

    def _make_room(self, step: Step, request: EngineRequest, new: int) -> tuple[AllocationPlan, int] | None:
        """A plan for a running request that was refused one, by preempting those behind it, the last one first.

        None when there is no room now: enough is to come at a fence, or nobody is left; then the step is short.
        """
        while True:
            plan = self.manager.plan(request, new, num_encoder_tokens=request.num_encoder_tokens)
            if not isinstance(plan, Refusal):
                return plan, new
            if plan.reason is RefusalReason.NEVER_FITS:
                if new > 1:
                    new //= 2
                    continue
                if request.num_in_flight_tokens:
                    break
                if request.restarted_at == request.num_tokens:
                    self._end(request, FinishReason.ERROR, str(plan))
                else:  # blocks that rejected drafts have left may be what is too much
                    request.restarted_at = request.num_tokens
                    self._preempt(request)
                return None
            if plan.reason is RefusalReason.WAIT_FOR_FENCE or step.is_short:
                break
            if self._victims_fence > self._acknowledged:
                break  # a second victim for one shortage would not come sooner than the first
            if self.limits.drops and request.num_in_flight_tokens:
                break  # it will give blocks back itself when that has run
            victim = self._last_running()
            if victim is request:
                if not self._runs_alone(request):
                    self._preempt(request)
                break
            self._preempt(victim)
        step.is_short = True
        return None

    def _last_running(self) -> EngineRequest:
        """Of those that run, the one that came last or matters least; nobody can stop a load."""
        at = len(self.running) - 1
        while self.running.requests[at].is_loading:
            at -= 1
        return self.running.requests[at]

    def _runs_alone(self, request: EngineRequest) -> bool:
        """Whether nobody would gain by its blocks now: the others, if any, are being loaded."""
        for other in self.running.requests:
            if other is not request and not other.is_loading:
                return False
        return True

    def _preempt(self, request: EngineRequest) -> None:
        """Take a request's blocks; it will compute again what is evicted meanwhile."""
        fence = self._release(request)
        if fence is not None:
            self._victims_fence = max(self._victims_fence, fence)
        request.state = RequestState.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        if request.is_told:
            self._preempted.append(request.request_id)
            request.is_told = False
        self.waiting.add(request)

    def _release(self, request: EngineRequest) -> int | None:
        """A running request loses its blocks: now, or at the fence returned, if a step in flight works on them."""
        fence = request.last_step if request.last_step > self._acknowledged else None
        self.manager.free(request, after=fence)
        self.running.remove(request)
        request.epoch += 1
        request.num_computed_tokens = 0
        request.num_in_flight_tokens = 0
        request.num_promised = 0
        request.num_drafts_in_flight = 0
        request.drafts = NO_TOKENS
        request.is_loading = False
        return fence

    def _end(self, request: EngineRequest, reason: FinishReason, message: str) -> None:
        if request.state is RequestState.RUNNING or request.state is RequestState.WAITING_FOR_REMOTE_KVS:
            computed = request.num_computed_tokens
            self._release(request)
            request.num_computed_tokens = computed
        else:
            self.waiting.remove(request)
        del self.requests[request.request_id]
        if request.is_told:
            self._ended.append(request.request_id)
            request.is_told = False
        self._close(request, reason, message)

    def _close(self, request: EngineRequest, reason: FinishReason, message: str) -> None:
        request.state = RequestState.FINISHED
        request.spare = None
        self._finished.append(FinishedRequest(request.request_id, reason, message))

    # -- admission -----------------------------------------------------------------------------------

    def _admit(self, step: Step) -> None:
        """Those that wait, in their order; who can never run is ended, and who waits for others' states, or for a
        connector's answer, lets those behind him pass: as many as may run at all, or each step would ask thousands.
        """
        waiting = self.waiting.requests
        at = 0
        while at < min(len(waiting), self.max_num_seqs) and step.budget > 0 and len(self.running) < self.max_num_seqs:
            request = waiting[at]
            if not self._enter(step, request):
                break
            if at < len(waiting) and waiting[at] is request:
                at += 1

    def _enter(self, step: Step, request: EngineRequest) -> bool:
        """Admit a request if it can be; False if those behind it must not be tried."""
        hit = self.manager.get_computed_blocks(request)
        if self.connector is not None and request.may_load:
            aligned = hit.num_tokens - hit.num_tokens % self.limits.largest_block
            connector: Any = self.connector
            answer_given: Any = connector.get_num_external_tokens(request, aligned)
            if answer_given is None:
                return True
            external = min(num_external(request, answer_given), request.num_tokens - 1 - aligned)
            if aligned + external > hit.num_tokens:
                start = hit  # what is loaded begins at a block, the hit that stays without a load may end inside one
                if aligned < hit.num_tokens:
                    start = self.manager.get_computed_blocks(request, aligned)
                external = aligned + external - start.num_tokens
                answer = self._enter_loading(step, request, start, external)
                if answer is not None:
                    return answer
        plan = self._first_plan(step.budget, request, hit)
        if isinstance(plan, Refusal):
            if plan.reason is RefusalReason.STATE_NOT_READY:
                return True
            if plan.reason is RefusalReason.NEVER_FITS:
                if step.budget < self.max_num_batched_tokens:  # cut into smaller pieces than it would be alone
                    alone = self._first_plan(self.max_num_batched_tokens, request, hit)
                    if not isinstance(alone, Refusal) or alone.reason is not RefusalReason.NEVER_FITS:
                        return False
                self._end(request, FinishReason.ERROR, str(plan))
                return True
            return False
        step.changing = request
        self.manager.commit(plan)
        step.changing = None
        self._has_entered(request, RequestState.RUNNING)
        request.num_computed_tokens = plan.num_computed_tokens
        self._tell_all(step, request)
        self._take_part(step, request, plan.num_tokens - plan.num_computed_tokens, NO_TOKENS)
        return True

    def _has_entered(self, request: EngineRequest, state: RequestState) -> None:
        self.waiting.remove(request)
        self.running.add(request)
        request.state = state

    def _first_plan(self, budget: int, request: EngineRequest, hit: Hit) -> AllocationPlan | Refusal:
        """All of its known tokens must fit, or it would be preempted before it gives a token."""
        plan = self._plan_whole(budget, request, hit)
        if isinstance(plan, Refusal) and plan.reason is RefusalReason.NEVER_FITS and hit.num_tokens:
            plan = self._plan_whole(budget, request, None)  # what a hit needs beside it is spared
        if isinstance(plan, Refusal) and plan.reason is RefusalReason.NEVER_FITS and self.limits.keeps_states:
            plan = self._plan_whole(budget, request, None, request.num_tokens)  # and states on the way
        if not isinstance(plan, Refusal) or plan.reason is not RefusalReason.NEVER_FITS:
            return plan
        if not self.limits.drops or not self.limits.fits_in_pieces(request):
            return plan
        new = self.limits.first_chunk(request, None, budget)
        while True:
            piece = self.manager.plan(
                request,
                new,
                num_encoder_tokens=request.num_encoder_tokens,
                has_scheduled_reqs=len(self.running) > 0,
            )
            if not isinstance(piece, Refusal) or piece.reason is not RefusalReason.NEVER_FITS or new == 1:
                return piece
            new //= 2

    def _plan_whole(
        self, budget: int, request: EngineRequest, hit: Hit | None, most: int = 0
    ) -> AllocationPlan | Refusal:
        """`most`: tokens to compute at once, whatever states could be kept on the way; 0: as many as may be."""
        return self.manager.plan(
            request,
            min(most, budget) if most else self.limits.first_chunk(request, hit, budget),
            hit=hit,
            num_encoder_tokens=request.num_encoder_tokens,
            full_sequence_must_fit=True,
            has_scheduled_reqs=len(self.running) > 0,
        )

    # -- KV from elsewhere ---------------------------------------------------------------------------

    def _enter_loading(self, step: Step, request: EngineRequest, hit: Hit, external: int) -> bool | None:
        """Give a request its blocks and have them filled; None if that can never be, so that it computes them."""
        plan = self.manager.plan(
            request,
            0,
            hit=hit,
            num_external_computed_tokens=external,
            num_encoder_tokens=request.num_encoder_tokens,
            full_sequence_must_fit=True,
            delay_cache_blocks=True,
            has_scheduled_reqs=len(self.running) > 0,
        )
        if isinstance(plan, Refusal):
            if plan.reason is RefusalReason.NEVER_FITS:
                return None
            return plan.reason is RefusalReason.STATE_NOT_READY
        step.changing = request
        self.manager.commit(plan)
        step.changing = None
        step.loading.append(request)
        self._has_entered(request, RequestState.WAITING_FOR_REMOTE_KVS)
        request.is_loading = True
        request.num_computed_tokens = hit.num_tokens + external
        request.last_step = step.step_id
        first, last = hit.num_tokens, request.num_computed_tokens
        blocks = self.manager.get_block_ids(request)
        request.load_id = self._num_loads
        self._num_loads += 1
        step.loads.append(LoadData(request.request_id, first, last, request.tokens[:last], blocks, request.load_id))
        return True

    def finished_recving(
        self, request_id: str, num_tokens: int | tuple[int, ...] | None = None, load_id: int = -1
    ) -> bool:
        """A load is complete: the request runs from the next step on, and others find what it brought. False for one
        that is not awaited (`num_late_reports`): blocks that were kept for it are given back.

        `num_tokens`: as far as all is there, in one number or per group, if that is not all: others find that, and
        the request looks again from there. Nothing is written any more in any case. A request of which three loads
        have failed is computed. `load_id`: which load it was; a report without it is of the newest one. Raises
        EngineRequestError for numbers that the load cannot have reached.
        """
        self._must_not_be_planning("finished_recving")
        request = self.requests.get(request_id)
        is_newest = request is not None and request.is_loading and load_id in (-1, request.load_id)
        if request is not None and is_newest and num_tokens is not None:
            reached = num_tokens if isinstance(num_tokens, tuple) else (num_tokens,) * len(self.manager.managers)
            most = request.num_computed_tokens
            if len(reached) != len(self.manager.managers) or min(reached) < 0 or max(reached) > most:
                raise EngineRequestError(
                    f"request {request_id!r}: a load of {most} tokens in {len(self.manager.managers)} groups cannot"
                    f" have reached {num_tokens}"
                )
            if min(reached) < most:
                self.manager.cache_blocks(request, reached)
                self._load_again(request)
                return True
        if not self._is_awaited(request_id, load_id) or request is None:
            return False
        request.is_loading = False
        request.state = RequestState.RUNNING
        self.manager.cache_blocks(request, request.num_computed_tokens)
        return True

    def failed_recving(self, request_id: str, load_id: int = -1) -> bool:
        """A load has failed, and nothing is written any more: the request waits again, and computes all itself."""
        self._must_not_be_planning("failed_recving")
        request = self.requests.get(request_id)
        if not self._is_awaited(request_id, load_id) or request is None:
            return False
        request.num_failed_loads = MOST_LOADS
        self._load_again(request)
        return True

    def _is_awaited(self, request_id: str, load_id: int) -> bool:
        """Whether somebody waits for a load; one of an aborted request has ended now, a late one is counted."""
        request = self.requests.get(request_id)
        if not self._leases.end(request_id, load_id) and request is not None and request.is_loading:
            if load_id in (-1, request.load_id):
                return True
        self.num_late_reports += 1
        return False

    def _load_again(self, request: EngineRequest) -> None:
        """The request gives its blocks back, and looks for its prefix once more."""
        self._release(request)
        request.num_failed_loads += 1
        request.may_load = request.num_failed_loads < MOST_LOADS
        request.state = RequestState.WAITING
        self.waiting.add(request)

    # -- results -------------------------------------------------------------------------------------

    def update(self, step_id: int, results: Mapping[str, Sequence[SupportsIndex]]) -> dict[str, list[int]]:
        """A step has run: acknowledge it. `results`: a dict of lists or tuples, the tokens it gave per request that
        had none left to compute: the drafts that were accepted, then one more.

        The tokens per request that count, those of this step and of the steps behind it whose results came before; {}
        while an older step is in flight. Twice is once.

        Raises ResultError for a step that was never scheduled, and for results that cannot be the step's.
        """
        self._must_not_be_planning("update")
        if step_id < 0:
            raise ResultError(f"step {step_id} was never scheduled")
        if step_id <= self._acknowledged or step_id in self._late:
            return {}
        step = self._find(step_id)
        if not isinstance(results, dict):
            raise ResultError(f"step {step_id}: results are a dict of lists of tokens, not {results!r}")
        are_lists = check_results(step, results)
        if step is not self._steps[0]:
            for part in step.parts:
                part.tokens = list(part.tokens)  # the caller may use its lists again
            self._late.add(step_id)
            return {}
        if self._settle(step) and are_lists and not self._late and self._failure is None:
            return cast(dict[str, list[int]], results)  # as they are
        new_tokens: dict[str, list[int]] = {}
        add_tokens(new_tokens, step)
        while self._steps and self._steps[0].step_id in self._late:
            step = self._steps[0]
            self._late.remove(step.step_id)
            self._settle(step)
            add_tokens(new_tokens, step)
        failure = self._failure
        if failure is not None:  # all is settled, and the requests have their tokens
            self._failure = None
            raise failure
        return new_tokens

    def _find(self, step_id: int) -> Step:
        for step in self._steps:
            if step.step_id == step_id:
                return step
        raise ResultError(f"step {step_id} was never scheduled")

    def _settle(self, step: Step) -> bool:
        """The step has run. Whether all of its results count, to the last token."""
        self._steps.popleft()
        self._acknowledged = step.step_id
        try:
            self.manager.acknowledge(step.step_id)
        except BaseException as error:  # of a hook: the step has run all the same
            self._failure = error
        all_count = True
        for part in step.parts:
            request = part.request
            if request.epoch == part.epoch:  # it has not ended, nor been preempted, since
                request.num_in_flight_tokens -= part.num_tokens
                request.spare = part
                if part.samples:
                    tokens = part.tokens
                    self._take_tokens(request, part)
                    all_count = all_count and part.tokens is tokens
                else:
                    all_count = False
            else:
                all_count = False
        return all_count

    def _take_tokens(self, request: EngineRequest, part: Part) -> None:
        tokens = part.tokens
        if part.num_drafts:
            request.num_computed_tokens -= part.num_drafts + 1 - len(tokens)
            request.num_drafts_in_flight = 0
        request.num_promised -= 1
        request.drafts = NO_TOKENS
        reason: FinishReason | None = None
        if request.stop_token_ids:
            for at, token in enumerate(tokens):
                if token in request.stop_token_ids:
                    if at + 1 < len(tokens):
                        tokens = tokens[: at + 1]
                        part.tokens = tokens
                    reason = FinishReason.STOP
                    break
        request.append(tokens)
        if reason is None and request.num_tokens >= request.most_tokens:
            reason = FinishReason.LENGTH
        part.counts = True
        if (part.ahead or part.num_drafts) and not (part.num_drafts and self.limits.has_states):
            self._register(request, part.num_tokens)
        if reason is not None:
            self._end(request, reason, "")

    def _register(self, request: EngineRequest, num_tokens: int) -> None:
        """What was computed before its tokens were known can be found now: blocks that the last `num_tokens` filled.

        Not states after drafts: the newest stands in a block of its own, which the table names for another token.
        """
        settled = request.num_computed_tokens - request.num_in_flight_tokens
        unit = self.limits.hash_block_size
        if settled // unit > max(0, settled - num_tokens) // unit:
            self.manager.cache_blocks(request, settled)


def add_tokens(new_tokens: dict[str, list[int]], step: Step) -> None:
    """What requests got from a step that has run."""
    for part in step.parts:
        if part.counts:
            request_id = part.request.request_id
            earlier = new_tokens.get(request_id)
            new_tokens[request_id] = part.tokens if earlier is None else earlier + part.tokens


def check_results(step: Step, results: dict[str, Sequence[SupportsIndex]]) -> bool:
    """Each request that samples has its accepted drafts and one token; nobody else has any. Whether all are lists of
    plain ints, as they are to be.
    """
    num_given = 0
    are_lists = True
    for part in step.parts:
        given = results.get(part.request.request_id)
        count = 0
        if given is not None:
            num_given += 1
            if not isinstance(given, (list, tuple)):
                raise ResultError(
                    f"step {step.step_id}, request {part.request.request_id!r}: tokens are a list, not {given!r}"
                )
            count = len(given)
        elif part.request.request_id in results:
            raise ResultError(
                f"step {step.step_id}, request {part.request.request_id!r}: tokens are a list, not None"
            )
        if part.epoch != part.request.epoch:
            part.tokens = NO_TOKENS
            continue  # nobody waits for them
        if part.samples:
            if given is None or not 1 <= count <= part.num_drafts + 1:
                raise ResultError(
                    f"step {step.step_id}, request {part.request.request_id!r}: {count} tokens, where 1 to"
                    f" {part.num_drafts + 1} are possible"
                )
            tokens = plain_tokens(step, part, given)
            if tokens is not given:
                are_lists = False
            if count > 1 and tokens[: count - 1] != part.drafts[: count - 1]:
                raise ResultError(
                    f"step {step.step_id}, request {part.request.request_id!r}: tokens {tokens}, where the drafts"
                    f" were {part.drafts}"
                )
            part.tokens = tokens
        elif count:
            raise ResultError(
                f"step {step.step_id}, request {part.request.request_id!r}: {count} tokens, where its prompt was not"
                " all computed yet"
            )
    if num_given != len(results):
        known = {part.request.request_id for part in step.parts}
        unknown = [request_id for request_id in results if request_id not in known]
        raise ResultError(f"step {step.step_id}: tokens of {unknown}, which had no part in it")
    return are_lists


def plain_tokens(step: Step, part: Part, given: Sequence[SupportsIndex]) -> list[int]:
    """A part's tokens as a list of ints: the list itself, if it is one."""
    if isinstance(given, list):
        for token in given:
            if type(token) is not int or not 0 <= token <= MOST_TOKEN:
                break
        else:
            return cast(list[int], given)
    tokens: list[int] = []
    for one in given:
        number = token_of(one)
        if number < 0:
            raise ResultError(
                f"step {step.step_id}, request {part.request.request_id!r}: {one!r}, where tokens are"
                f" 0 to {MOST_TOKEN}"
            )
        tokens.append(number)
    return tokens


def token_of(given: SupportsIndex) -> int:
    """A token as an int; -1: it is none."""
    try:
        token = index(given)
    except TypeError:
        return -1
    return token if 0 <= token <= MOST_TOKEN else -1


def num_external(request: EngineRequest, answer: Any) -> int:
    """What a connector said that it can bring."""
    try:
        return index(answer)
    except TypeError:
        raise EngineRequestError(
            f"request {request.request_id!r}: the connector must answer an int or None, not {answer!r}"
        ) from None
