"""Requests as they overlap: the scheduler over the cache, arrivals of the trace, and time that is computed."""

from collections.abc import Callable

import msgspec
import numpy as np

from blockpool.cache import KVCacheConfig, KVCacheManager
from blockpool.engine import EngineRequest, FinishReason, Scheduler, SchedulerOutput
from blockpool.hashing import BlockHashes

from .digests import DigestedTrace
from .drive import DEFAULT_BATCHED_TOKENS
from .errors import ReplayError
from .expand import DIGEST_BYTES
from .step_cost import StepCost

DEFAULT_NUM_SEQS = 256
# Often enough for a progress bar, rarely enough to cost nothing.
PROGRESS_EVERY = 64
PERCENTILES = (50, 90, 99)

Progress = Callable[[int], None]
ANY_TOKEN = [0]


def _no_progress(num_done: int) -> None:
    pass


class Percentiles(msgspec.Struct, frozen=True):
    """Of a time, in seconds; NaN-free: all 0.0 when there is nothing to measure."""

    p50: float
    p90: float
    p99: float


class ConcurrentRun(msgspec.Struct, frozen=True, kw_only=True):
    """What one pool did with the whole trace. Times are in seconds of the trace's own clock."""

    num_blocks: int
    with_cache: bool
    requests: int
    refused_requests: int
    """Requests that no pool of this size can hold, or that the scheduler had to end with an error."""
    prompt_tokens: int
    """Of those that were admitted, counted once each."""
    hit_tokens: int
    """Prompt tokens found in the cache at the first admission."""
    computed_tokens: int
    """Tokens that steps computed: prompts, answers, and what was computed again after a preemption."""
    preemptions: int
    """How often a request lost its blocks and computed again; of those that ended well."""
    evicted_blocks: int
    steps: int
    seconds: float
    """From the first arrival to the last answer."""
    busy_seconds: float
    """Of these, spent in steps."""
    most_running: int
    most_waiting: int
    queueing: Percentiles
    """From arrival to the first step that computes for a request."""
    first_token: Percentiles
    """From arrival to the first token; times are those of requests that ended well."""
    last_token: Percentiles
    """From arrival to the last token."""

    @property
    def replayed_requests(self) -> int:
        """Requests that ended well."""
        return self.requests - self.refused_requests

    @property
    def hit_rate(self) -> float:
        """Hit tokens / prompt tokens; 0.0 when there were none."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def replay_concurrently(
    digested: DigestedTrace,
    config: KVCacheConfig,
    cost: StepCost,
    *,
    max_num_seqs: int = DEFAULT_NUM_SEQS,
    max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS,
    num_encoder_tokens: int = 0,
    enable_caching: bool = True,
    on_progress: Progress = _no_progress,
) -> ConcurrentRun:
    """Run the trace's requests as they arrive, first come first served, one step after the other.

    Each step computes what the scheduler puts into it and lasts as long as `cost` says; requests that have arrived
    by then compete for the next one. What is generated is unknown to the trace, so it is computed and held, but not
    found again; a trace's answer of 0 tokens counts as 1. `on_progress` is told now and then how many requests have
    ended. Raises `ReplayError` when config and digests do not fit.
    """
    if config.unit != digested.hash_block_size or config.digest_size != DIGEST_BYTES:
        raise ReplayError(
            f"the trace has digests of {DIGEST_BYTES} bytes per {digested.hash_block_size} tokens, the cache"
            f" {config.digest_size} bytes per {config.unit}"
        )
    manager = KVCacheManager(config, max_in_flight_tokens=max_num_batched_tokens, enable_caching=enable_caching)
    scheduler = Scheduler(manager, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    return _Clockwork(digested, scheduler, cost, num_encoder_tokens, enable_caching, on_progress).run()


class _Clockwork:
    """The trace, the scheduler, and the time."""

    def __init__(
        self,
        digested: DigestedTrace,
        scheduler: Scheduler,
        cost: StepCost,
        num_encoder_tokens: int,
        with_cache: bool,
        on_progress: Progress,
    ) -> None:
        self._digested = digested
        self._scheduler = scheduler
        self._cost = cost
        self._num_encoder_tokens = num_encoder_tokens
        self._with_cache = with_cache
        self._on_progress = on_progress
        self._arrivals = enumerate(digested)
        self._next: tuple[float, EngineRequest] | None = None
        self._now = 0.0
        self._busy = 0.0
        self._num_steps = self._num_ended = self._num_refused = self._num_computed = 0
        self._most_running = self._most_waiting = 0
        self._num_preemptions = 0
        self._arrived: dict[str, float] = {}
        self._began: dict[str, float] = {}
        self._spoke: dict[str, float] = {}
        self._live: dict[str, EngineRequest] = {}
        self._queueing: list[float] = []
        self._first: list[float] = []
        self._last: list[float] = []

    def run(self) -> ConcurrentRun:
        """To the end of the last request."""
        self._advance()
        start = self._now = 0.0 if self._next is None else self._next[0]
        while self._next is not None or self._scheduler.has_work:
            self._arrive()
            output = self._scheduler.schedule()
            self._most_waiting = max(self._most_waiting, self._scheduler.num_waiting)
            if output.step_id >= 0:
                self._most_running = max(self._most_running, self._scheduler.num_running)
                self._step(output)
            elif self._next is not None:
                self._now = max(self._now, self._next[0])
            elif self._scheduler.has_work:
                raise AssertionError("the scheduler has work, nothing in flight, and nothing to run")
            self._end()
        return self._result(start)

    def _advance(self) -> None:
        """The trace's next request."""
        for number, (traced, chain) in self._arrivals:
            hash_block_size = self._digested.hash_block_size
            request = EngineRequest(
                str(number),
                num_prompt_tokens=traced.num_prompt_tokens,
                block_hashes=BlockHashes.from_digests(
                    chain, digest_size=DIGEST_BYTES, hash_block_size=hash_block_size
                ),
                max_tokens=max(1, traced.num_output_tokens),
                arrival=traced.arrival_s,
                num_encoder_tokens=self._num_encoder_tokens,
            )
            self._next = traced.arrival_s, request
            return
        self._next = None

    def _arrive(self) -> None:
        while self._next is not None and self._next[0] <= self._now:
            arrival, request = self._next
            self._arrived[request.request_id] = arrival
            self._live[request.request_id] = request
            self._scheduler.add_request(request)
            self._advance()

    def _step(self, output: SchedulerOutput) -> None:
        for new in output.new_requests:
            self._began.setdefault(new.request_id, self._now)
        results: dict[str, list[int]] = {}
        num_prefill = num_decodes = 0
        firsts: list[str] = []
        for request_id, count in output.num_scheduled_tokens.items():
            request = self._live[request_id]
            samples = request.num_computed_tokens == request.num_tokens
            if samples:
                results[request_id] = ANY_TOKEN
                if request.num_output_tokens == 0:
                    firsts.append(request_id)
            if samples and count == 1 and request.num_output_tokens:
                num_decodes += 1
            else:
                num_prefill += count
        seconds = self._cost.seconds(num_prefill, num_decodes)
        self._now += seconds
        self._busy += seconds
        self._num_steps += 1
        self._num_computed += num_prefill + num_decodes
        self._spoke.update(dict.fromkeys(firsts, self._now))
        self._scheduler.update(output.step_id, results)

    def _end(self) -> None:
        for finished in self._scheduler.take_finished():
            request_id = finished.request_id
            arrived = self._arrived.pop(request_id)
            request = self._live.pop(request_id)
            began, spoke = self._began.pop(request_id, None), self._spoke.pop(request_id, None)
            self._num_ended += 1
            if finished.reason is FinishReason.ERROR or began is None or spoke is None:
                self._num_refused += 1
            else:
                self._num_preemptions += request.num_preemptions
                self._queueing.append(began - arrived)
                self._first.append(spoke - arrived)
                self._last.append(self._now - arrived)
            if self._num_ended % PROGRESS_EVERY == 0:
                self._on_progress(self._num_ended)

    def _result(self, start: float) -> ConcurrentRun:
        manager = self._scheduler.manager
        stats = manager.stats.total
        self._on_progress(self._num_ended)
        return ConcurrentRun(
            num_blocks=manager.pool.num_gpu_blocks,
            with_cache=self._with_cache,
            requests=self._num_ended,
            refused_requests=self._num_refused,
            prompt_tokens=stats.queries,
            hit_tokens=stats.hits,
            computed_tokens=self._num_computed,
            preemptions=self._num_preemptions,
            evicted_blocks=manager.pool.counters.evicted_blocks,
            steps=self._num_steps,
            seconds=self._now - start,
            busy_seconds=self._busy,
            most_running=self._most_running,
            most_waiting=self._most_waiting,
            queueing=percentiles(self._queueing),
            first_token=percentiles(self._first),
            last_token=percentiles(self._last),
        )


def percentiles(times: list[float]) -> Percentiles:
    """The smallest time that so many percent of them do not exceed."""
    if not times:
        return Percentiles(0.0, 0.0, 0.0)
    return Percentiles(*(float(value) for value in np.percentile(times, PERCENTILES, method="inverted_cdf")))
