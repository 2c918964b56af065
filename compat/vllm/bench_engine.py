"""vLLM's scheduler, stepped as its engine does, with a model that answers every finished prefill with one token."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MODEL = "meta-llama/Llama-3.2-1B-Instruct"
BLOCK_SIZE = 16
MAX_NUM_SEQS = 256
MAX_BATCHED_TOKENS = 8_192
MAX_MODEL_LEN = 1_100_000
ANSWER = 7


@dataclass(frozen=True)
class Phase:
    """Time within schedule() and update_from_output(), from the first step of a phase to its last."""

    num_steps: int
    cpu_s: float
    wall_s: float
    longest_step_s: float


class SchedulerFactory:
    """Schedulers that differ in the size of the pool only. vLLM's configuration is made once: it takes seconds."""

    def __init__(self) -> None:
        from tests.v1.core.utils import create_scheduler

        self._first = create_scheduler(
            model=MODEL,
            skip_tokenizer_init=True,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=True,
            num_blocks=100,
            block_size=BLOCK_SIZE,
        )

    def make(self, num_blocks: int) -> Any:
        from vllm.v1.kv_cache_interface import KVCacheConfig

        first = self._first
        first.vllm_config.cache_config.num_gpu_blocks = num_blocks
        groups = first.kv_cache_config.kv_cache_groups
        return type(first)(
            vllm_config=first.vllm_config,
            kv_cache_config=KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            block_size=BLOCK_SIZE,
            log_stats=True,
            structured_output_manager=first.structured_output_manager,
        )


class Engine:
    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self._decisions = hashlib.sha256()

    @property
    def manager(self) -> Any:
        return self.scheduler.kv_cache_manager

    @property
    def pool(self) -> Any:
        return self.manager.coordinator.block_pool

    @property
    def decisions(self) -> str:
        """Digest of everything decided so far: who runs, for how many tokens, in which blocks, with which hits."""
        return self._decisions.hexdigest()

    def prefill(self, requests: list[Any]) -> Phase:
        """Add the requests, and step until every prompt is computed."""
        for request in requests:
            self.scheduler.add_request(request)
        return self._run(lambda _: any(r.num_computed_tokens < r.num_prompt_tokens for r in requests))

    def decode(self, num_steps: int) -> Phase:
        return self._run(lambda steps_done: steps_done < num_steps)

    def finish(self, requests: list[Any]) -> Phase:
        """End all requests at once; their blocks come back."""
        from vllm.v1.request import RequestStatus

        cpu, wall = time.process_time(), time.perf_counter()
        self.scheduler.finish_requests([request.request_id for request in requests], RequestStatus.FINISHED_ABORTED)
        wall_s = time.perf_counter() - wall
        return Phase(1, time.process_time() - cpu, wall_s, wall_s)

    def _run(self, go_on: Callable[[int], bool]) -> Phase:
        num_steps, cpu_s, wall_s, longest_step_s = 0, 0.0, 0.0, 0.0
        while go_on(num_steps):
            cpu, wall = time.process_time(), time.perf_counter()
            scheduled = self.scheduler.schedule()
            step_s = time.perf_counter() - wall
            cpu_s += time.process_time() - cpu

            answer = self._answer(scheduled)
            self._note(scheduled)

            cpu, wall = time.process_time(), time.perf_counter()
            self.scheduler.update_from_output(scheduled, answer)
            step_s += time.perf_counter() - wall
            cpu_s += time.process_time() - cpu

            num_steps += 1
            wall_s += step_s
            longest_step_s = max(longest_step_s, step_s)
        return Phase(num_steps, cpu_s, wall_s, longest_step_s)

    def _answer(self, scheduled: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        running = self.scheduler.requests
        ids = list(scheduled.num_scheduled_tokens)
        sampled = [[ANSWER] if running[i].num_computed_tokens >= running[i].num_tokens else [] for i in ids]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
        )

    def _note(self, scheduled: Any) -> None:
        again = scheduled.scheduled_cached_reqs
        new = [(r.req_id, r.block_ids, r.num_computed_tokens) for r in scheduled.scheduled_new_reqs]
        decided = (scheduled.num_scheduled_tokens, new, again.req_ids, again.new_block_ids, again.num_computed_tokens)
        self._decisions.update(repr(decided).encode())
