"""One process that times pool operations when told to: ours, or the rival's with the same words.

Reads lines from standard input, `ROW SEED`, and answers each with one JSON line: the median seconds of that row's
calls. The caller runs two of these side by side and interleaves their rounds. `--rival` times the BlockPool of vLLM.

Rows are those of docs/performance.md. What is random is random for both: blocks are used in shuffled order, as in a
server that has run for a while. Ours gets lists of ids, the rival lists of its block objects: what each hands out.
(The ids of one batch were made together, as in a list that the pool has just returned; which blocks they name is
random.)
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

NUM_BLOCKS = 100_000
BATCH = 1_000
BLOCK_SIZE = 16
WIDTH = 32


class Ours:
    def __init__(self, num_blocks: int, events: bool) -> None:
        from blockpool.pool import BlockPool, StorePayload

        self.pool = BlockPool(num_blocks + 1, hash_block_size=BLOCK_SIZE, events="first_last" if events else "off")
        self.payload = StorePayload(token_ids=list(range(BATCH * BLOCK_SIZE))) if events else None
        self.new: Callable[[int], Any] = self.pool.get_new_blocks
        self.free: Callable[[Any], Any] = self.pool.free_blocks
        self.touch: Callable[[Any], Any] = self.pool.touch
        self.take_events: Callable[[], Any] = self.pool.take_events

    def as_returned(self, blocks: list[Any]) -> list[Any]:
        return array("i", blocks).tolist()

    def chain(self, digests: list[bytes]) -> Any:
        return b"".join(digests)

    def cache(self, blocks: Any, chain: Any) -> None:
        self.pool.cache_full_blocks(blocks, chain, 0, len(blocks), BLOCK_SIZE, 0, payload=self.payload)

    def lookup(self, chain: Any) -> Any:
        return self.pool.lookup_run(chain, 0, len(chain) // WIDTH, 1, 0)


class Rival:
    def __init__(self, num_blocks: int, events: bool) -> None:
        from vllm.v1.core.block_pool import BlockPool

        self.pool = BlockPool(num_blocks + 1, True, BLOCK_SIZE, enable_kv_cache_events=events)
        self.new: Callable[[int], Any] = self.pool.get_new_blocks
        self.free: Callable[[Any], Any] = self.pool.free_blocks
        self.touch: Callable[[Any], Any] = self.pool.touch
        self.take_events: Callable[[], Any] = self.pool.take_events
        self.tokens = list(range(BATCH * BLOCK_SIZE))

    def as_returned(self, blocks: list[Any]) -> list[Any]:
        return blocks

    def chain(self, digests: list[bytes]) -> Any:
        return SimpleNamespace(
            block_hashes=digests,
            request_id="bench",
            lora_request=None,
            all_token_ids=self.tokens,
            mm_features=[],
            cache_salt=None,
            prompt_embeds=None,
            session_id=None,
            num_tokens=len(self.tokens),
            kv_cache_report_mode="incremental",
        )

    def cache(self, blocks: Any, chain: Any) -> None:
        self.pool.cache_full_blocks(chain, blocks, 0, len(blocks), BLOCK_SIZE, 0)

    def lookup(self, chain: Any) -> Any:
        find = self.pool.get_cached_block
        groups = [0]
        found = []
        for digest in chain.block_hashes:
            block = find(digest, groups)
            if block is None:
                break
            found.append(block[0])
        return found


def timed(call: Callable[..., Any], *arguments: Any) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def full_pool(side: Any, rng: random.Random, num_blocks: int) -> tuple[list[Any], list[Any]]:
    """Every block registered once and held: shuffled blocks, and the chains of their batches."""
    blocks = list(side.new(num_blocks))
    rng.shuffle(blocks)
    chains = []
    for at in range(0, num_blocks, BATCH):
        chain = side.chain([rng.randbytes(WIDTH) for _ in range(BATCH)])
        side.cache(blocks[at : at + BATCH], chain)
        chains.append(chain)
    side.take_events()
    return blocks, chains


def batches(side: Any, blocks: list[Any]) -> list[list[Any]]:
    return [side.as_returned(blocks[at : at + BATCH]) for at in range(0, len(blocks), BATCH)]


def alloc_free(side: Any, rng: random.Random, num_blocks: int) -> list[float]:
    def both() -> None:
        side.free(side.new(BATCH))

    return [timed(both) for _ in range(100)]


def one_block(side: Any, rng: random.Random, num_blocks: int) -> list[float]:
    def many() -> None:
        new, free = side.new, side.free
        for _ in range(BATCH):
            free(new(1))

    return [timed(many) for _ in range(10)]


def alloc_evicting(side: Any, rng: random.Random, num_blocks: int) -> list[float]:
    blocks, _ = full_pool(side, rng, num_blocks)
    for batch in batches(side, blocks):
        side.free(batch)
    return [timed(side.new, BATCH) for _ in range(num_blocks // BATCH)]


def touch(side: Any, rng: random.Random, num_blocks: int) -> list[float]:
    blocks, _ = full_pool(side, rng, num_blocks)
    for batch in batches(side, blocks):
        side.free(batch)
    rng.shuffle(blocks)
    return [timed(side.touch, batch) for batch in batches(side, blocks)]


def free_cached(side: Any, rng: random.Random, num_blocks: int) -> list[float]:
    blocks, _ = full_pool(side, rng, num_blocks)
    rng.shuffle(blocks)
    return [timed(side.free, batch) for batch in batches(side, blocks)]


def cache_full(side: Any, rng: random.Random, num_blocks: int) -> list[float]:
    blocks = list(side.new(num_blocks))
    rng.shuffle(blocks)
    chains = [side.chain([rng.randbytes(WIDTH) for _ in range(BATCH)]) for _ in range(num_blocks // BATCH)]
    return [timed(side.cache, batch, chain) for batch, chain in zip(batches(side, blocks), chains, strict=True)]


def longest_prefix(side: Any, rng: random.Random, num_blocks: int) -> list[float]:
    _, chains = full_pool(side, rng, num_blocks)
    rng.shuffle(chains)
    return [timed(side.lookup, chain) for chain in chains]


def with_events(side: Any, rng: random.Random, num_blocks: int) -> list[float]:
    """Register a batch, give it back, hand it out again (which evicts), and take the events."""
    blocks = list(side.new(num_blocks))
    rng.shuffle(blocks)
    for batch in batches(side, blocks)[1:]:
        side.cache(batch, side.chain([rng.randbytes(WIDTH) for _ in range(BATCH)]))
        side.free(batch)
    side.take_events()
    mine = blocks[:BATCH]
    times = []
    for _ in range(60):
        chain = side.chain([rng.randbytes(WIDTH) for _ in range(BATCH)])
        start = time.perf_counter()
        side.cache(mine, chain)
        events = side.take_events()
        spent = time.perf_counter() - start
        side.free(mine)
        start = time.perf_counter()
        mine = list(side.new(BATCH))
        events += side.take_events()
        times.append(spent + time.perf_counter() - start)
        assert events
    return times


ROWS: dict[str, Callable[[Any, random.Random, int], list[float]]] = {
    "allocate + free, no hash": alloc_free,
    "allocate, evicting": alloc_evicting,
    "touch, random cached": touch,
    "free, cached": free_cached,
    "cache_full_blocks": cache_full,
    "longest prefix, 1,000 cold": longest_prefix,
    "events on: cache + evict": with_events,
    "one block: allocate + free": one_block,
}


def main() -> None:
    make = Rival if "--rival" in sys.argv else Ours
    num_blocks = int(os.environ.get("BENCH_BLOCKS", NUM_BLOCKS))
    for line in sys.stdin:
        row, seed = line.rstrip("\n").rsplit(" ", 1)
        side = make(num_blocks, row.startswith("events"))
        times = ROWS[row](side, random.Random(int(seed)), num_blocks)
        print(json.dumps({"median": statistics.median(times) / BATCH, "longest": max(times)}), flush=True)


if __name__ == "__main__":
    main()
