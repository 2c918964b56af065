"""The block pool's own methods, called as vLLM's managers call them, on blocks in random order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from bench_figures import Figures
from bench_variant import installed, require
from bench_workload import BLOCK_SIZE, block_hasher, families_of_prompts, requests_of

SECTION = "Block pool, by itself"
BLOCKS_PER_REQUEST = 512
UNIT = "ns per block"
#: What vLLM reads of every block of a row, and how.
READS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "block_id": lambda row: [block.block_id for block in row],
    "is_null": lambda row: [block.is_null for block in row],
    "ref_cnt": lambda row: [block.ref_cnt for block in row],
    "block_hash_num_tokens": lambda row: [block.block_hash_num_tokens for block in row],
}


def measure_pool(figures: Figures, variant: str, num_requests: int) -> None:
    """One life of a pool of `num_requests` times 512 blocks: handed out, cached, freed, hit, and handed out again."""
    with installed(variant):
        from vllm.v1.core import block_pool

        num_blocks = num_requests * BLOCKS_PER_REQUEST
        pool = block_pool.BlockPool(num_blocks + 1, enable_caching=True, hash_block_size=BLOCK_SIZE)
        require(variant, pool)
        prompts = families_of_prompts(num_requests, BLOCKS_PER_REQUEST * BLOCK_SIZE, num_requests, seed=4)
        requests = requests_of(prompts, "pool", block_hasher("sha256"))

        def note(row: str, per_call_s: list[float], num_blocks_each: int) -> None:
            per_block_s = sum(per_call_s) / len(per_call_s) / num_blocks_each
            figures.add(SECTION, row, UNIT, variant, 1e9 * per_block_s)

        rng = random.Random(5)
        batch = [spent(lambda: pool.free_blocks(pool.get_new_blocks(1_000))) for _ in range(100)]
        note("get_new_blocks(1000) and free_blocks, no hash", batch, 1_000)
        note("get_new_blocks(1) and free_blocks, no hash", [spent(one_by_one, pool, 1_000) for _ in range(10)], 1_000)
        note("get_num_free_blocks, per call", [spent(count_free, pool, 1_000) for _ in range(10)], 1_000)
        blocks = pool.get_new_blocks(BLOCKS_PER_REQUEST)
        note("cache_full_blocks, one block", [spent(cache_one_by_one, pool, requests[0], blocks)], BLOCKS_PER_REQUEST)
        pool.free_blocks(blocks)

        blocks = list(pool.get_new_blocks(num_blocks))
        rng.shuffle(blocks)
        rows = split(blocks, BLOCKS_PER_REQUEST)
        calls = [
            spent(pool.cache_full_blocks, request, row, 0, BLOCKS_PER_REQUEST, BLOCK_SIZE, 0)
            for request, row in zip(requests, rows, strict=True)
        ]
        note("cache_full_blocks, 512 blocks", calls, BLOCKS_PER_REQUEST)
        for attribute, read in READS.items():
            note(f"reading {attribute}", [spent(read, row) for row in rows], BLOCKS_PER_REQUEST)

        rng.shuffle(blocks)
        note("free_blocks of 256, cached", [spent(pool.free_blocks, some) for some in split(blocks, 256)], 256)
        rng.shuffle(requests)
        calls = [spent(look_up, pool, request.block_hashes) for request in requests]
        note("get_cached_block, hit", calls, BLOCKS_PER_REQUEST)
        rng.shuffle(blocks)
        note("touch of 256, cached and free", [spent(pool.touch, some) for some in split(blocks, 256)], 256)
        pool.free_blocks(blocks)
        calls = [spent(pool.get_new_blocks, 1_000) for _ in range(num_blocks // 1_000)]
        note("get_new_blocks(1000), evicting", calls, 1_000)


def one_by_one(pool: Any, times: int) -> None:
    new, free = pool.get_new_blocks, pool.free_blocks
    for _ in range(times):
        free(new(1))


def count_free(pool: Any, times: int) -> None:
    for _ in range(times):
        pool.get_num_free_blocks()


def cache_one_by_one(pool: Any, request: Any, blocks: list[Any]) -> None:
    for at in range(len(blocks)):
        pool.cache_full_blocks(request, blocks, at, at + 1, BLOCK_SIZE, 0)


def look_up(pool: Any, block_hashes: list[Any]) -> None:
    find, groups = pool.get_cached_block, [0]
    for block_hash in block_hashes:
        if find(block_hash, groups) is None:
            raise SystemExit("a cached block was not found")


def split(blocks: list[Any], size: int) -> list[list[Any]]:
    return [blocks[at : at + size] for at in range(0, len(blocks), size)]


def spent(call: Callable[..., Any], *args: Any) -> float:
    start = time.thread_time()
    call(*args)
    return time.thread_time() - start
