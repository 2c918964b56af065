"""One run of the scheduler on one variant: many requests with shared prefixes, or one very long prompt."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from bench_engine import Engine, Phase, SchedulerFactory
from bench_variant import installed, require
from bench_watch import HASHER, Spent, Watch
from bench_workload import block_hasher, families_of_prompts, requests_of


@dataclass(frozen=True)
class Size:
    num_requests: int
    num_tokens: int
    num_families: int
    num_decode_steps: int
    num_blocks: int


@dataclass
class Run:
    """What one run took: its phases, what the watch saw in each, and the making of the requests."""

    phases: dict[str, Phase] = field(default_factory=dict)
    spent: dict[str, Spent] = field(default_factory=dict)
    make_requests_s: float = 0.0
    make_unhashed_s: float = 0.0
    hasher_s: float = 0.0
    decisions: str = ""
    """Digest of all that the scheduler decided, and of the block hashes that it decided on."""

    def end_phase(self, name: str, phase: Phase, watch: Watch) -> None:
        self.phases[name] = phase
        self.spent[name] = watch.take()


@contextmanager
def frozen_heap() -> Iterator[None]:
    """The collector leaves alone what is there already: vLLM's engine freezes its heap when it has started."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.collect()


Heap = Callable[[], AbstractContextManager[None]]


def many_requests(
    factory: SchedulerFactory, variant: str, algorithm: str, size: Size, watch: Watch, heap: Heap = frozen_heap
) -> Run:
    """A fresh pool serves one batch of prompts; then, full of their blocks, another batch, which then decodes."""
    run = Run()
    with installed(variant):
        engine = engine_of(factory, variant, size.num_blocks)
        hasher = block_hasher(algorithm)
        require(variant, hasher)
        with heap(), watch.around(engine):
            first = requests_of(prompts_of(size, seed=1), "first", watch.hasher(hasher))
            watch.take()
            run.end_phase("prefill, fresh pool", engine.prefill(first), watch)
            run.end_phase("finish, first batch", engine.finish(first), watch)

            prompts = prompts_of(size, seed=2)
            start = time.process_time()
            requests_of(prompts, "unhashed", None)
            run.make_unhashed_s = time.process_time() - start
            start = time.process_time()
            second = requests_of(prompts, "second", watch.hasher(hasher))
            run.make_requests_s = time.process_time() - start
            run.hasher_s = watch.take()[0].get(HASHER, 0.0)

            run.end_phase("prefill", engine.prefill(second), watch)
            run.end_phase("decode", engine.decode(size.num_decode_steps), watch)
            run.end_phase("finish", engine.finish(second), watch)
        run.decisions = engine.decisions + digest_of(second)
        require(variant, engine.pool)
    return run


def one_prompt(factory: SchedulerFactory, variant: str, algorithm: str, size: Size, watch: Watch) -> Run:
    """One prompt on a fresh pool, then the same prompt again, when all of it is cached."""
    run = Run()
    with installed(variant):
        engine = engine_of(factory, variant, size.num_blocks)
        hasher = block_hasher(algorithm)
        require(variant, hasher)
        with frozen_heap(), watch.around(engine):
            prompts = prompts_of(size, seed=3)
            start = time.process_time()
            first = requests_of(prompts, "first", watch.hasher(hasher))
            run.make_requests_s = time.process_time() - start
            run.hasher_s = watch.take()[0].get(HASHER, 0.0)
            run.end_phase("prefill", engine.prefill(first), watch)
            run.end_phase("decode", engine.decode(size.num_decode_steps), watch)
            run.end_phase("finish", engine.finish(first), watch)
            again = requests_of(prompts, "again", watch.hasher(hasher))
            watch.take()
            run.end_phase("the same again", engine.prefill(again), watch)
            engine.finish(again)
        run.decisions = engine.decisions + digest_of(first)
        require(variant, engine.pool)
    return run


def engine_of(factory: SchedulerFactory, variant: str, num_blocks: int) -> Engine:
    engine = Engine(factory.make(num_blocks))
    require(variant, engine.pool)
    return engine


def prompts_of(size: Size, seed: int) -> list[list[int]]:
    return families_of_prompts(size.num_requests, size.num_tokens, size.num_families, seed)


def digest_of(requests: list[Any]) -> str:
    """Digest of every block hash of every request."""
    digest = hashlib.sha256()
    for request in requests:
        digest.update(b"".join(bytes(block_hash) for block_hash in request.block_hashes))
    return digest.hexdigest()
