"""Runs vLLM's whole Scheduler, with made-up model output, once on each pool: what it tells the workers in each step
must be the same, block for block.

Little pools and long answers, so that requests are preempted and come back; with and without asynchronous scheduling
(the next step is scheduled before the last one's output is there) and draft tokens.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep import Parting, first_difference, shrink
from sides import Side
from traffic import Shape, Traffic, init_hashing

OPERATIONS_PER_SCENARIO = 120
BLOCK_SIZE = 16
MAX_MODEL_LEN = 256
NO_TOKEN = -1


@dataclass(frozen=True)
class SchedulerScenario:
    seed: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_caching: bool
    async_scheduling: bool
    num_drafts: int
    policy: str

    @classmethod
    def of(cls, seed: int) -> SchedulerScenario:
        rng = random.Random(f"scheduler {seed}")
        async_scheduling = rng.random() < 0.4
        return cls(
            seed=seed,
            num_blocks=rng.choice((18, 24, 40)),
            max_num_seqs=rng.choice((3, 6)),
            max_num_batched_tokens=rng.choice((24, 64, 256)),
            enable_caching=rng.random() < 0.9,
            async_scheduling=async_scheduling,
            num_drafts=0 if async_scheduling else rng.choice((0, 0, 2)),
            policy=rng.choice(("fcfs", "fcfs", "priority")),
        )

    def build(self) -> Any:
        """vLLM's scheduler as its own tests make it."""
        from tests.v1.core.utils import create_scheduler

        return create_scheduler(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_prefix_caching=self.enable_caching,
            num_blocks=self.num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            num_speculative_tokens=self.num_drafts or None,
            async_scheduling=self.async_scheduling,
            scheduling_policy=self.policy,
        )


class Run:
    def __init__(self, scenario: SchedulerScenario, hasher: Any) -> None:
        self.scenario = scenario
        self.scheduler = scenario.build()
        self.traffic = Traffic(random.Random(0), Shape(BLOCK_SIZE, max_tokens=150, extras=("salt",)), hasher)
        self.in_flight: deque[Any] = deque()
        self.alive: list[str] = []

    def see(self) -> dict[str, Any]:
        pool = self.scheduler.kv_cache_manager.block_pool
        return {
            "counts": [block.ref_cnt for block in pool.blocks],
            "keys": [(block.block_hash, block.block_hash_num_tokens) for block in pool.blocks],
            "free queue": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            "usage": float(self.scheduler.get_kv_cache_usage()),
            "waiting and running": self.scheduler.get_request_counts(),
        }

    def arrive(self, rng: random.Random) -> Any:
        if len(self.alive) > 12:
            return None
        self.traffic.rng = rng
        request = self.traffic.request()
        request.max_tokens = request.sampling_params.max_tokens = rng.randint(1, 60)
        request.priority = rng.randint(0, 3)
        self.scheduler.add_request(request)
        self.alive.append(request.request_id)
        return f"{request.request_id} arrives with {request.num_tokens} tokens", None

    def step(self, rng: random.Random) -> Any:
        """Schedules, and gives the output of the oldest step in flight when there is room for no more of them."""
        output = self.scheduler.schedule()
        self.in_flight.append(output)
        while len(self.in_flight) > (1 if self.scenario.async_scheduling else 0):
            self.finish_step(rng)
        new = [(r.req_id, r.block_ids, r.num_computed_tokens) for r in output.scheduled_new_reqs]
        cached = output.scheduled_cached_reqs
        told = {
            "new": new,
            "cached": (
                cached.req_ids,
                cached.new_block_ids,
                cached.num_computed_tokens,
                sorted(cached.resumed_req_ids),
            ),
            "tokens": output.num_scheduled_tokens,
            "drafts": output.scheduled_spec_decode_tokens,
            "preempted": sorted(output.preempted_req_ids or ()),
            "finished": sorted(output.finished_req_ids),
        }
        return f"a step of {output.total_num_scheduled_tokens} tokens", told

    def finish_step(self, rng: random.Random) -> None:
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

        output = self.in_flight.popleft()
        names = list(output.num_scheduled_tokens)
        sampled = [self.sampled(rng, output, name) for name in names]
        done = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=sampled
        )
        self.scheduler.update_from_output(output, done)
        if self.scenario.num_drafts:
            drafts = [[rng.randrange(3)] * self.scenario.num_drafts for _ in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
        self.alive = [name for name in self.alive if name in self.scheduler.requests]

    def sampled(self, rng: random.Random, output: Any, name: str) -> list[int]:
        """A token, and one more for each draft that was accepted; none while the prompt is not done."""
        request = self.scheduler.requests.get(name)
        drafts = output.scheduled_spec_decode_tokens.get(name, ())
        if request is None or request.num_computed_tokens < request.num_tokens - len(drafts):
            return []
        return [rng.randrange(3) for _ in range(1 + rng.randint(0, len(drafts)))]

    def abort(self, rng: random.Random) -> Any:
        from vllm.v1.request import RequestStatus

        if not self.alive:
            return None
        name = rng.choice(self.alive)
        self.alive.remove(name)
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        return f"{name} is aborted", None

    def reset(self, rng: random.Random) -> Any:
        running = rng.random() < 0.5 and not self.in_flight
        return f"reset_prefix_cache({running})", self.scheduler.reset_prefix_cache(reset_running_requests=running)


OPERATIONS = {"arrive": 12, "step": 40, "abort": 2, "reset": 1}


def record(side: Side, scenario: SchedulerScenario, planned: Sequence[tuple[str, str]]) -> list[tuple[str, Any]]:
    """What the operations showed on one side; it ends early at an error, which is the last thing shown."""
    shown: list[tuple[str, Any]] = []
    with side.installed():
        hasher = side.get_request_block_hasher(BLOCK_SIZE, init_hashing("sha256"))
        run = Run(scenario, hasher)
        for name, seed in planned:
            try:
                result = getattr(run, name)(random.Random(seed))
                if result is not None:
                    shown.append((result[0], {"told": result[1]} | run.see()))
            except Exception as error:
                shown.append((f"{name} raises", f"{type(error).__name__}: {error}"))
                break
    return shown


def compare_records(
    scenario: SchedulerScenario, theirs: list[tuple[str, Any]], ours: list[tuple[str, Any]]
) -> Parting | None:
    for i, (one, other) in enumerate(zip(theirs, ours, strict=False)):
        found = first_difference(one[0], other[0], "operation") or first_difference(one[1], other[1])
        if found:
            history = tuple(f"{n}: {text}" for n, (text, _) in enumerate(theirs[: i + 1], 1))
            return Parting(f"the Scheduler ({scenario})", scenario.seed, i + 1, *found, history)
    return None


def fuzz_scheduler(theirs: Side, ours: Side, seed: int) -> tuple[int, Parting | None]:
    """One scenario. The number of operations compared, and the first difference, shrunk."""
    scenario = SchedulerScenario.of(seed)
    rng = random.Random(f"scheduler operations {seed}")
    names = rng.choices(list(OPERATIONS), weights=list(OPERATIONS.values()), k=OPERATIONS_PER_SCENARIO)
    planned = [(name, f"scheduler {seed} {i}") for i, name in enumerate(names)]

    def replay(some: Sequence[tuple[str, str]]) -> tuple[int, Parting | None]:
        records = [record(side, scenario, some) for side in (theirs, ours)]
        return len(records[0]), compare_records(scenario, *records)

    done, parting = replay(planned)
    if parting is None:
        return done, None
    return done, shrink(planned, lambda fewer: replay(fewer)[1], parting)
