"""What a run is watched with: nothing, or timers around KVCacheManager, the block pool, or the garbage collector.

Two kinds of timers never run together, so that neither is measured within the other. While they run, the garbage
collector is off: its pauses would be booked under whichever method they happen to hit. They are measured apart.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench_engine import Engine
from bench_meter import Meter
from bench_workload import Hasher

#: Public methods of vLLM's KVCacheManager that a scheduler calls, beside allocate_slots.
MANAGER_METHODS = (
    "cache_blocks",
    "create_kv_cache_blocks",
    "estimate_cached_tokens",
    "free",
    "get_block_ids",
    "get_blocks",
    "get_computed_blocks",
    "get_num_common_prefix_blocks",
    "make_prefix_cache_stats",
    "new_step_starts",
    "pop_blocks_for_free",
    "prefix_cache_lookup_enabled",
    "record_prefix_cache_stats",
    "remove_skipped_blocks",
    "take_boundary_state_offloads",
    "take_events",
    "take_kv_cache_block_copies",
    "take_new_block_ids",
)
POOL_METHODS = (
    "cache_full_blocks",
    "free_blocks",
    "get_cached_block",
    "get_new_blocks",
    "get_num_free_blocks",
    "get_usage",
    "take_events",
    "touch",
)
HASHER = "hasher"
ONE_TOKEN = ", one token"
PROMPT = ", prompt"

Spent = tuple[dict[str, float], dict[str, int], float]
"""Seconds by name, calls by name, seconds that the timers added."""


@contextmanager
def collector_off() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Unwatched:
    def hasher(self, hasher: Hasher) -> Hasher:
        return hasher

    @contextmanager
    def around(self, engine: Engine) -> Iterator[None]:
        yield

    def take(self) -> Spent:
        return {}, {}, 0.0


class ManagerWatch:
    """Times KVCacheManager as the scheduler calls it, KVCacheBlocks.get_block_ids, and the request hasher.

    What is done for one new token of a running request and what is done for prompts is booked apart.
    """

    def __init__(self) -> None:
        self._meter = Meter(None, 1, num_lookahead_tokens=0, num_external_computed_tokens=0, has_scheduled_reqs=True)

    def hasher(self, hasher: Hasher) -> Hasher:
        return self._meter.timed(HASHER, hasher)

    @contextmanager
    def around(self, engine: Engine) -> Iterator[None]:
        from vllm.v1.core.kv_cache_manager import KVCacheBlocks

        manager, timed = engine.manager, self._meter.timed
        for name in MANAGER_METHODS:
            setattr(manager, name, timed(name, getattr(manager, name)))
        allocate_one = timed("allocate_slots" + ONE_TOKEN, manager.allocate_slots)
        allocate_many = timed("allocate_slots" + PROMPT, manager.allocate_slots)

        def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
            allocate = allocate_one if num_new_tokens == 1 else allocate_many
            return allocate(request, num_new_tokens, *args, **kwargs)

        get_block_ids = KVCacheBlocks.get_block_ids
        ids_of_few = timed("get_block_ids" + ONE_TOKEN, get_block_ids)
        ids_of_many = timed("get_block_ids" + PROMPT, get_block_ids)

        def get_new_block_ids(blocks: Any, *args: Any, **kwargs: Any) -> Any:
            ids_of = ids_of_few if len(blocks.blocks[0]) <= 1 else ids_of_many
            return ids_of(blocks, *args, **kwargs)

        manager.allocate_slots = allocate_slots
        KVCacheBlocks.get_block_ids = get_new_block_ids
        try:
            with collector_off():
                yield
        finally:
            KVCacheBlocks.get_block_ids = get_block_ids
            for name in (*MANAGER_METHODS, "allocate_slots"):
                delattr(manager, name)

    def take(self) -> Spent:
        return self._meter.take()


class PoolWatch:
    """Times the block pool's public methods."""

    def __init__(self) -> None:
        self._meter = Meter(None, None)

    def hasher(self, hasher: Hasher) -> Hasher:
        return hasher

    @contextmanager
    def around(self, engine: Engine) -> Iterator[None]:
        pool = engine.pool
        for name in POOL_METHODS:
            setattr(pool, name, self._meter.timed(name, getattr(pool, name)))
        try:
            with collector_off():
                yield
        finally:
            for name in POOL_METHODS:
                delattr(pool, name)

    def take(self) -> Spent:
        return self._meter.take()


class PauseWatch:
    """Times the garbage collector's pauses: `sum` and `longest` in seconds, and how many there were."""

    def __init__(self) -> None:
        self._pauses: list[float] = []
        self._start = 0.0

    def hasher(self, hasher: Hasher) -> Hasher:
        return hasher

    @contextmanager
    def around(self, engine: Engine) -> Iterator[None]:
        gc.callbacks.append(self._note)
        try:
            yield
        finally:
            gc.callbacks.remove(self._note)

    def take(self) -> Spent:
        pauses, self._pauses = self._pauses, []
        return {"sum": sum(pauses), "longest": max(pauses, default=0.0)}, {"sum": len(pauses)}, 0.0

    def _note(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._start = time.thread_time()
        else:
            self._pauses.append(time.thread_time() - self._start)


Watch = Unwatched | ManagerWatch | PoolWatch | PauseWatch
