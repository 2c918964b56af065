"""Drives vLLM's KVCacheManager with random requests, once on each pool, and compares everything visible after each
operation: hits, tables, order of the free queue, events, copies, statistics.

The two runs follow each other, because the pool is chosen by what vLLM's modules hold while a manager is built and
used. Both are given the same operations, so their records can be laid side by side up to the first difference.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deliberate import Deliberate, sibling_keys
from lockstep import Parting, first_difference, shrink
from manager_scenario import MAX_MODEL_LEN, ManagerScenario
from pool_world import fields
from sides import Side
from traffic import Shape, Traffic, init_hashing

OPERATIONS_PER_SCENARIO = 150


class Engine:
    """A scheduler in miniature: enough of one to call the manager in the order that vLLM's does."""

    def __init__(self, scenario: ManagerScenario, hasher: Any) -> None:
        self.scenario = scenario
        self.manager = scenario.build()
        shape = Shape(
            scenario.hash_block_size,
            lookahead=scenario.num_hash_lookahead,
            max_tokens=48,
            min_tokens=scenario.min_prompt,
        )
        self.traffic = Traffic(random.Random(0), shape, hasher)
        self.waiting: list[Any] = []
        self.running: list[Any] = []

    def see(self) -> dict[str, Any]:
        manager = self.manager
        pool = manager.block_pool
        copies, endpoints = manager.take_kv_cache_block_copies()
        seen = {
            "tables": {request.request_id: manager.get_block_ids(request.request_id) for request in self.running},
            "usage": manager.usage,
            "free queue": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            "number of keys": len(pool.cached_block_hash_to_block),
            "counts": [block.ref_cnt for block in pool.blocks],
            "keys": [(block.block_hash, block.block_hash_num_tokens) for block in pool.blocks],
            "new blocks": manager.take_new_block_ids(),
            "copies": [tuple(copy) for copy in copies],
            "endpoints": [block.block_id for block in endpoints],
            "states for a connector": manager.take_boundary_state_offloads(),
        }
        pool.free_blocks(reversed(endpoints))
        return seen

    # operations: each returns its text and what it showed, or None when there is nothing to do

    def arrive(self, rng: random.Random) -> Any:
        if len(self.waiting) > 3:
            return None
        self.traffic.rng = rng
        request = self.traffic.request()
        if self.scenario.reports_all:
            request.kv_cache_report_mode = "full"
        request.skip_reading_prefix_cache = rng.random() < 0.05
        self.waiting.append(request)
        return f"{request.request_id} arrives with {request.num_tokens} tokens", None

    def admit(self, rng: random.Random) -> Any:
        """Looks the prefix up and allocates the first chunk; a refused request goes on waiting."""
        if not self.waiting:
            return None
        manager = self.manager
        request = self.waiting[0]
        if rng.random() < 0.7:
            manager.new_step_starts()
        hit, num_hit, boundary = manager.get_computed_blocks(request)
        request.shared_prefix_boundary = boundary
        loaded = self.loaded_from_elsewhere(rng, request, num_hit)
        is_async = loaded > 0 and rng.random() < 0.6
        chunk = 0 if is_async else self.scenario.chunk(rng, num_hit + loaded, request)
        new = manager.allocate_slots(
            request,
            chunk,
            num_new_computed_tokens=num_hit,
            new_computed_blocks=hit,
            num_lookahead_tokens=0 if is_async else rng.choice((0, 0, 2)),
            num_external_computed_tokens=loaded,
            delay_cache_blocks=is_async,
            num_encoder_tokens=rng.randint(1, 9) if "encoder" in self.scenario.names else 0,
            full_sequence_must_fit=rng.random() < 0.5,
            reserved_blocks=rng.choice((0, 0, 3)),
            has_scheduled_reqs=bool(self.running),
            skip_zeroing_group_ids=(0,) if is_async and rng.random() < 0.5 else (),
        )
        shown = (hit.get_block_ids(), num_hit, boundary, None if new is None else new.get_block_ids())
        if new is not None:
            manager.record_prefix_cache_stats(request, num_hit)
            self.waiting.pop(0)
            self.running.append(request)
            request.num_computed_tokens = num_hit + loaded + chunk
            if is_async and rng.random() < 0.5:
                manager.cache_blocks(request, request.num_computed_tokens)  # the load has come to its end
        return f"{request.request_id} is admitted with {chunk} tokens after {num_hit} + {loaded}", shown

    def loaded_from_elsewhere(self, rng: random.Random, request: Any, num_hit: int) -> int:
        """Tokens that a connector would load, in whole blocks; 0 mostly."""
        size = self.scenario.scheduler_block_size
        blocks = (request.num_tokens - 1 - num_hit) // size
        if num_hit % size or blocks < 1 or rng.random() < 0.8:
            return 0
        if self.scenario.has_states and self.manager.block_pool.get_num_free_blocks() < MAX_MODEL_LEN // size + 8:
            return 0  # vLLM counts the state that is loaded as none, and fails when it is one too many
        return rng.randint(1, blocks) * size

    def advance(self, rng: random.Random) -> Any:
        """The next chunk of a prompt, or a few output tokens and their slots."""
        from vllm.v1.request import RequestStatus

        if not self.running:
            return None
        self.manager.new_step_starts()
        request = rng.choice(self.running)
        request.status = RequestStatus.RUNNING
        missing = request.num_tokens - request.num_computed_tokens
        if missing == 0:
            if request.num_tokens > MAX_MODEL_LEN - 8:
                return None
            self.traffic.rng = rng
            self.traffic.grow(request)
            missing = request.num_tokens - request.num_computed_tokens
        chunk = self.scenario.chunk(rng, request.num_computed_tokens, request)
        request.num_in_flight_tokens = rng.choice((0, 0, min(3, request.num_computed_tokens)))
        new = self.manager.allocate_slots(request, chunk, num_lookahead_tokens=rng.choice((0, 0, 2)))
        if new is not None:
            request.num_computed_tokens += chunk
        return f"{request.request_id} gets {chunk} tokens", None if new is None else new.get_block_ids()

    def finish(self, rng: random.Random) -> Any:
        if not self.running:
            return None
        request = self.running.pop(rng.randrange(len(self.running)))
        if rng.random() < 0.3:
            blocks = self.manager.pop_blocks_for_free(request)
            self.manager.block_pool.free_blocks(reversed(blocks))
        else:
            self.manager.free(request)
        return f"{request.request_id} ends", None

    def preempt(self, rng: random.Random) -> Any:
        from vllm.v1.request import RequestStatus

        if not self.running:
            return None
        request = self.running.pop()
        self.manager.free(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.waiting.insert(0, request)
        return f"{request.request_id} is preempted", None

    def reset(self, rng: random.Random) -> Any:
        while self.running and rng.random() < 0.8:
            self.preempt(rng)
        return "reset_prefix_cache()", self.manager.reset_prefix_cache()

    def evict(self, rng: random.Random) -> Any:
        block_id = rng.randrange(1, self.scenario.num_blocks)
        if self.manager.block_pool.blocks[block_id].ref_cnt and self.scenario.has_states:
            return None  # vLLM registers the tail of a prompt again when its key has gone; ours does not
        self.manager.evict_blocks({block_id})
        return f"evict_blocks({{{block_id}}})", None

    def drop_skipped(self, rng: random.Random) -> Any:
        if not self.running:
            return None
        request = rng.choice(self.running)
        self.manager.remove_skipped_blocks(request.request_id, request.num_computed_tokens, request.num_prompt_tokens)
        return f"remove_skipped_blocks({request.request_id}, {request.num_computed_tokens})", None

    def cache_again(self, rng: random.Random) -> Any:
        if not self.running:
            return None
        request = rng.choice(self.running)
        self.manager.cache_blocks(request, request.num_computed_tokens)
        return f"cache_blocks({request.request_id}, {request.num_computed_tokens})", None

    def estimate(self, rng: random.Random) -> Any:
        if not self.running:
            return None
        request = rng.choice(self.running)
        shown = (
            self.manager.estimate_cached_tokens(request),
            self.manager.get_block_ids_for_computed_tokens(request.request_id, request.num_computed_tokens),
        )
        return f"estimate_cached_tokens({request.request_id})", shown

    def statistics(self, rng: random.Random) -> Any:
        stats = self.manager.make_prefix_cache_stats()
        return "make_prefix_cache_stats()", repr(stats)


@dataclass(frozen=True)
class Shown:
    """One operation's text and what could be seen after it."""

    text: str
    seen: Any
    events: tuple[Any, ...] = ()
    siblings: frozenset[tuple[Any, int]] = frozenset()


OPERATIONS: dict[str, int] = {
    "arrive": 10, "admit": 12, "advance": 40, "finish": 6, "preempt": 3, "reset": 1, "evict": 2, "drop_skipped": 4,
    "cache_again": 3, "estimate": 2, "statistics": 1,
}  # fmt: skip


def record(side: Side, scenario: ManagerScenario, planned: Sequence[tuple[str, str]]) -> list[Shown]:
    """What the operations showed on one side, in order; it ends early at an error, which is the last thing shown."""
    shown: list[Shown] = []
    siblings: set[tuple[Any, int]] = set()
    with side.installed():
        function = init_hashing(scenario.hash_name)
        hasher = side.get_request_block_hasher(scenario.hash_block_size, function, scenario.num_hash_lookahead)
        engine = Engine(scenario, hasher)
        for name, seed in planned:
            try:
                result = getattr(engine, name)(random.Random(seed))
                if result is None:
                    continue
                text, returned = result
                events = tuple(fields(event) for event in engine.manager.take_events())
                siblings |= sibling_keys(engine.manager.block_pool)
                shown.append(Shown(text, {"returned": returned} | engine.see(), events, frozenset(siblings)))
            except Exception as error:
                shown.append(Shown(f"{name} raises", f"{type(error).__name__}: {error}"))
                break
    return shown


def compare_records(
    scenario: ManagerScenario, theirs: list[Shown], ours: list[Shown], deliberate: Deliberate
) -> Parting | None:
    for i, (one, other) in enumerate(zip(theirs, ours, strict=False)):
        found = (
            first_difference(one.text, other.text, "operation")
            or first_difference(one.seen, other.seen)
            or deliberate.difference(one.events, other.events, theirs[i - 1].siblings if i else frozenset())
        )
        if found:
            history = tuple(f"{n}: {shown.text}" for n, shown in enumerate(theirs[: i + 1], 1))
            return Parting(f"KVCacheManager ({scenario.kind})", scenario.seed, i + 1, *found, history)
    return None


def fuzz_manager(theirs: Side, ours: Side, seed: int, deliberate: Deliberate) -> tuple[int, Parting | None]:
    """One scenario. The number of operations compared, and the first difference, shrunk."""
    scenario = ManagerScenario.of(seed)
    rng = random.Random(f"manager operations {seed}")
    names = rng.choices(list(OPERATIONS), weights=list(OPERATIONS.values()), k=OPERATIONS_PER_SCENARIO)
    planned = [(name, f"manager {seed} {i}") for i, name in enumerate(names)]

    def replay(some: Sequence[tuple[str, str]], counting: Deliberate) -> tuple[int, Parting | None]:
        records = [record(side, scenario, some) for side in (theirs, ours)]
        return len(records[0]), compare_records(scenario, *records, counting)

    done, parting = replay(planned, deliberate)
    if parting is None:
        return done, None
    return done, shrink(planned, lambda fewer: replay(fewer, Deliberate())[1], parting)
