"""A scheduler and a worker over a memory of fingerprints; results of steps in flight are told when a test says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blockpool.cache import KVCacheConfig, KVCacheManager
from blockpool.engine import (
    EngineRequest,
    FinishedRequest,
    FinishReason,
    Scheduler,
    SchedulerOutput,
    ShadowModel,
    ShadowStore,
    Worker,
)
from blockpool.hashing import BlockHasher
from blockpool.managers import FullAttentionSpec, KVCacheGroupSpec, KVCacheSpec

UNIT = 4
HASHERS = {unit: BlockHasher(hash_block_size=unit, seed="engine") for unit in (2, 4)}
FULL = FullAttentionSpec(4)


def cache(
    usable_blocks: int, *specs: KVCacheSpec, unit: int = UNIT, interval: int | None = None, **options: Any
) -> KVCacheManager:
    """A cache with a group per spec; `usable_blocks` without the null block."""
    groups = tuple(KVCacheGroupSpec((f"layer{at}",), spec) for at, spec in enumerate(specs or (FULL,)))
    config = KVCacheConfig(usable_blocks + 1, groups, hash_block_size=unit, retention_interval=interval)
    return KVCacheManager(config, **options)


def prompt(name: str, tokens: int | Sequence[int], unit: int = UNIT, **options: Any) -> EngineRequest:
    """A request; a number n stands for the tokens 0 .. n-1."""
    ids = list(range(tokens)) if isinstance(tokens, int) else list(tokens)
    return EngineRequest(name, ids, hasher=HASHERS[unit], **options)


class Driver:
    """`steps`: what was scheduled; `pending`: results, by step, that were not told yet."""

    def __init__(self, manager: KVCacheManager, *, num_seqs: int = 8, num_tokens: int = 64, **options: Any) -> None:
        self.manager = manager
        self.scheduler = Scheduler(manager, max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens, **options)
        self.model = ShadowModel(manager.config, vocab_size=50)
        self.worker = Worker(manager.config, ShadowStore(manager.config), self.model)
        self.num_free_at_first = [pool.get_num_free_blocks() for pool in manager.pools]
        self.steps: list[SchedulerOutput] = []
        self.pending: dict[int, dict[str, list[int]]] = {}
        self.ended: dict[str, FinishedRequest] = {}

    def add(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.scheduler.add_request(request)

    def schedule(self) -> SchedulerOutput:
        """Plan a step and run it; its result waits in `pending`."""
        output = self.scheduler.schedule()
        if output.step_id >= 0:
            self.steps.append(output)
            self.pending[output.step_id] = self.worker.execute(output)
        self.check(output)
        return output

    def tell(self, step_id: int | None = None) -> dict[str, list[int]]:
        """The result of a step, by default the oldest."""
        number = min(self.pending) if step_id is None else step_id
        tokens = self.scheduler.update(number, self.pending.pop(number))
        self.take()
        return tokens

    def step(self) -> SchedulerOutput:
        output = self.schedule()
        if output.step_id >= 0:
            self.tell(output.step_id)
        self.take()
        return output

    def run(self, most_steps: int = 500) -> None:
        """To the end, one step after another."""
        while self.pending:
            self.tell()
        for _ in range(most_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        self.take()
        assert not self.scheduler.has_work

    def take(self) -> None:
        for ended in self.scheduler.take_finished():
            assert ended.request_id not in self.ended
            self.ended[ended.request_id] = ended

    def reason(self, request: EngineRequest) -> FinishReason:
        return self.ended[request.request_id].reason

    # -- what is always so ---------------------------------------------------------------------------

    def check(self, output: SchedulerOutput) -> None:
        scheduler = self.scheduler
        assert sum(output.num_scheduled_tokens.values()) <= scheduler.max_num_batched_tokens
        assert scheduler.num_running <= scheduler.max_num_seqs
        assert scheduler.num_steps_in_flight <= scheduler.limits.max_steps_in_flight
        for request_id, count in output.num_scheduled_tokens.items():
            assert count > len(output.draft_token_ids.get(request_id, []))
            row = self.worker.requests[request_id].row
            tables = [table.row(row).tolist() for table in self.worker.tables]
            assert tables == list(self.manager.get_block_ids(request_id))
        for pool in self.manager.pools:
            assert pool.audit() == []

    def all_free(self) -> None:
        for pool, free in zip(self.manager.pools, self.num_free_at_first, strict=True):
            assert pool.get_num_free_blocks() == free
            assert pool.audit() == []


def alone(manager: KVCacheManager, request: EngineRequest, num_tokens: int = 64) -> list[int]:
    """What a request gives if nobody else is there."""
    driver = Driver(manager, num_tokens=num_tokens)
    driver.add(request)
    driver.run()
    assert driver.reason(request) in (FinishReason.STOP, FinishReason.LENGTH)
    return request.output_token_ids
