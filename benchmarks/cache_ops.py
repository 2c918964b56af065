"""One process that times calls of the cache manager when told to.

Reads row names from standard input and answers each with one JSON line, the median seconds per call. "3 groups" are
full attention, a window of 1,024 tokens and a state that is kept at block ends, all in blocks of 16 tokens.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

from blockpool.cache import EMPTY_PLAN, KVCacheConfig, KVCacheManager, Request
from blockpool.hashing import BlockHasher
from blockpool.managers import FullAttentionSpec, KVCacheGroupSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec

BLOCK_SIZE = 16
NUM_BLOCKS = 20_000
PROMPT = 8_192
HASHER = BlockHasher(hash_block_size=BLOCK_SIZE, seed="bench")

ROWS = [
    "decode step, 1 group, 1,000 tokens",
    "decode step, 1 group, 100,000 tokens",
    "decode step, 3 groups, 1,000 tokens",
    "decode step, 3 groups, 100,000 tokens",
    "lookup of 8,192 tokens, 1 group",
    "lookup of 8,192 tokens, 3 groups",
    "admit and free 8,192 tokens, 1 group",
    "admit and free 8,192 tokens, 3 groups",
]


def manager_of(row: str) -> KVCacheManager:
    specs: list[KVCacheSpec] = [FullAttentionSpec(BLOCK_SIZE)]
    if "3 groups" in row:
        specs += [SlidingWindowSpec(BLOCK_SIZE, 1_024), MambaSpec(BLOCK_SIZE, 0, "align")]
    groups = tuple(KVCacheGroupSpec((f"layer{at}",), spec) for at, spec in enumerate(specs))
    return KVCacheManager(KVCacheConfig(NUM_BLOCKS, groups))


def compute(manager: KVCacheManager, request: Request, chunk: int) -> None:
    while request.num_computed_tokens < request.num_tokens:
        new = min(chunk, request.num_tokens - request.num_computed_tokens)
        assert manager.allocate_slots(request, new) is not None
        request.num_computed_tokens += new


def decode(row: str) -> Callable[[], object]:
    """A step that fills no block: what 15 of 16 steps are."""
    manager = manager_of(row)
    length = int(row.split()[-2].replace(",", "")) // BLOCK_SIZE * BLOCK_SIZE + 1
    request = Request("decode", [at % 50_000 for at in range(length)], hasher=HASHER)
    compute(manager, request, 4_096)
    request.append_output_tokens(1)
    compute(manager, request, 1)  # drops what the last chunk was the last to read
    request.append_output_tokens(1)
    assert manager.plan(request, 1) is EMPTY_PLAN
    return lambda: manager.allocate_slots(request, 1)


def cached(row: str) -> tuple[KVCacheManager, Request]:
    manager = manager_of(row)
    first = Request("first", range(PROMPT + 1), hasher=HASHER)
    compute(manager, first, BLOCK_SIZE)
    manager.free(first)
    second = Request("second", [*range(PROMPT), 5], hasher=HASHER)
    assert manager.get_computed_blocks(second).num_tokens == PROMPT
    return manager, second


def lookup(row: str) -> Callable[[], object]:
    manager, request = cached(row)
    return lambda: manager.get_computed_blocks(request)


def admission(row: str) -> Callable[[], object]:
    manager, request = cached(row)

    def admit() -> None:
        hit = manager.get_computed_blocks(request)
        manager.allocate_slots(request, 1, new_computed_blocks=hit)
        manager.free(request)

    return admit


def main() -> None:
    for line in sys.stdin:
        row = line.strip()
        make = decode if row.startswith("decode") else lookup if row.startswith("lookup") else admission
        call = make(row)
        times = []
        for _ in range(25):
            start = time.perf_counter()
            for _ in range(200):
                call()
            times.append((time.perf_counter() - start) / 200)
        print(json.dumps({"median": statistics.median(times), "longest": max(times)}), flush=True)


if __name__ == "__main__":
    main()
