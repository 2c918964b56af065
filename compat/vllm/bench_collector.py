"""The garbage collector's pauses: a full collection beside a large pool, and the pauses while requests are served.

vLLM's engine freezes its heap once it has started; what was made by then is not looked at again. Anything else that
holds a pool (tests, a scheduler in a notebook, a router's mirror) pays in full.
"""

from __future__ import annotations

import gc
import statistics
import time
from contextlib import nullcontext

from bench_engine import SchedulerFactory
from bench_figures import DIFFERENCE, Figures
from bench_serving import Size, frozen_heap, many_requests
from bench_variant import installed, require
from bench_watch import PauseWatch
from bench_workload import BLOCK_SIZE

SECTION = "Garbage collector, full collections"
PAUSES = "Garbage collector, pauses while serving"


def measure_full_collections(figures: Figures, variant: str, num_blocks: int) -> None:
    """gc.collect() without a pool, and how much longer it takes with one: unused, and all its blocks handed out."""

    def note(what: str, seconds: float, unit: str = "ms") -> None:
        figures.add(SECTION, what, unit, variant, 1e3 * seconds)

    with installed(variant):
        from vllm.v1.core import block_pool

        without_s = full_collection_s()
        note("gc.collect(), no pool", without_s)
        pool = block_pool.BlockPool(num_blocks + 1, enable_caching=True, hash_block_size=BLOCK_SIZE)
        require(variant, pool)
        note(f"more with a pool of {num_blocks:,} blocks", full_collection_s() - without_s, DIFFERENCE)
        with frozen_heap():
            blocks = pool.get_new_blocks(num_blocks)
            note("gc.collect(), pool frozen, then all blocks handed out", full_collection_s())
        note("more with all blocks handed out, nothing frozen", full_collection_s() - without_s, DIFFERENCE)
        del pool, blocks


def full_collection_s() -> float:
    gc.collect()
    times = []
    for _ in range(3):
        start = time.thread_time()
        gc.collect()
        times.append(time.thread_time() - start)
    return statistics.median(times)


def measure_pauses(figures: Figures, factory: SchedulerFactory, variant: str, size: Size) -> None:
    """The sum and the longest of the pauses while the requests of a run are served, prefill and decode."""
    for name, heap in (("heap frozen", frozen_heap), ("heap not frozen", nullcontext)):
        run = many_requests(factory, variant, "sha256", size, PauseWatch(), heap)
        served = [run.spent["prefill"][0], run.spent["decode"][0]]
        longest_s, sum_s = max(seen["longest"] for seen in served), sum(seen["sum"] for seen in served)
        figures.add(PAUSES, f"longest, {name}", "ms", variant, 1e3 * longest_s)
        figures.add(PAUSES, f"sum, {name}", "ms", variant, 1e3 * sum_s)
