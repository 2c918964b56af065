"""Pauses at one million blocks: the longest single operation of a batch of 1,000, and the garbage collector.

Prints one JSON line. Every number is the least of several runs: a pause that the code causes is there each time.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import time

from blockpool.pool import BlockPool

NUM_BLOCKS = 1_000_000
BATCH = 1_000


def longest_operations(rng: random.Random) -> dict[str, float]:
    """Longest call per operation over 3 million blocks of steady work: cache, free, hit, evict, and the sweeps."""
    pool = BlockPool(NUM_BLOCKS + 1)
    longest: dict[str, float] = {}

    def timed(name: str, call: object, *arguments: object) -> object:
        start = time.perf_counter()
        answer = call(*arguments)  # type: ignore[operator]
        longest[name] = max(longest.get(name, 0.0), time.perf_counter() - start)
        return answer

    chains: list[bytes] = []
    for _ in range(NUM_BLOCKS // BATCH):
        blocks = timed("get_new_blocks", pool.get_new_blocks, BATCH)
        chain = rng.randbytes(32 * BATCH)
        chains.append(chain)
        timed("cache_full_blocks", pool.cache_full_blocks, blocks, chain, 0, BATCH, 16, 0)
        timed("free_blocks", pool.free_blocks, blocks[::-1])  # type: ignore[index]
    for _ in range(2 * NUM_BLOCKS // BATCH):
        chain = rng.choice(chains)
        hit = timed("lookup_run", pool.lookup_run, chain, 0, BATCH, 1, 0)
        timed("touch", pool.touch, hit)
        timed("free_blocks", pool.free_blocks, hit[::-1])  # type: ignore[index]
    for _ in range(NUM_BLOCKS // BATCH):
        timed("get_new_blocks", pool.get_new_blocks, BATCH)
    return longest


def collections() -> tuple[float, float]:
    """Median seconds of gc.collect(): without, and with a pool of a million cached blocks, in turns."""
    rng = random.Random(1)
    without: list[float] = []
    with_pool: list[float] = []

    def collect(times: list[float]) -> None:
        for _ in range(5):
            start = time.perf_counter()
            gc.collect()
            times.append(time.perf_counter() - start)

    for _ in range(5):
        gc.collect()
        collect(without)
        pool = BlockPool(NUM_BLOCKS + 1)
        for _ in range(NUM_BLOCKS // BATCH):
            blocks = pool.get_new_blocks(BATCH)
            pool.cache_full_blocks(blocks, rng.randbytes(32 * BATCH), 0, BATCH, 16, 0)
            pool.free_blocks(blocks[::-1])
        gc.collect()
        collect(with_pool)
        del pool, blocks
    return statistics.median(without), statistics.median(with_pool)


def main() -> None:
    runs = [longest_operations(random.Random(seed)) for seed in range(3)]
    without, with_pool = collections()
    print(
        json.dumps(
            {
                "longest_ms": {name: round(1e3 * min(run[name] for run in runs), 3) for name in runs[0]},
                "gc_collect_ms": {"without": round(1e3 * without, 3), "with": round(1e3 * with_pool, 3)},
            }
        )
    )


if __name__ == "__main__":
    main()
