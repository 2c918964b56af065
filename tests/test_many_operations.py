"""A hundred thousand random operations on pool and cache, then the audit: in both builds, the same outcome."""

from __future__ import annotations

import hashlib
import random

from blockpool.cache import KVCacheConfig, KVCacheManager, Request
from blockpool.hashing import BlockHasher
from blockpool.managers import FullAttentionSpec, KVCacheGroupSpec
from blockpool.pool import BlockPool, BlockPoolError
from tests.sizes import LONG

OPERATIONS = 1_000_000 if LONG else 100_000


def test_pool() -> None:
    rng = random.Random(7)
    pool = BlockPool(300, hash_block_size=4, events="first_last")
    chains = [[hashlib.sha256(bytes([c * (i >= c % 7), i])).digest() for i in range(16)] for c in range(40)]
    raws = [b"".join(chain) for chain in chains]
    held: list[list[int]] = []
    fence = 0
    refused = 0
    for _ in range(OPERATIONS):
        kind = rng.randrange(11)
        raw = rng.choice(raws)
        try:
            if kind <= 2:
                hit = pool.lookup_run(raw, 1, rng.randrange(2, 17), 2, 0)
                pool.touch(hit)
                held.append(hit)
                held[-1] = hit + pool.get_new_blocks(rng.randrange(8))
                last = min(len(held[-1]), 8)
                if last > len(hit):
                    pool.cache_full_blocks(held[-1], raw, len(hit), last, 8, 0)
            elif kind <= 6 and held:
                blocks = held.pop(rng.randrange(len(held)))
                after = rng.choice([None, None, fence + rng.randrange(4)])
                pool.free_blocks(blocks[::-1], after=after)
            elif kind == 7:
                fence += 1
                pool.advance(fence)
            elif kind == 8:
                pool.evict_blocks([rng.randrange(-1, 301) for _ in range(2)])
            elif kind == 9 and held:
                pool.cache_partial_block(held[-1][-1] if held[-1] else 0, rng.choice(chains)[0], 4, 1, 8)
            elif kind == 10 and rng.random() < 0.02:
                pool.reset_prefix_cache()
        except BlockPoolError:
            refused += 1
    assert 0 < refused < OPERATIONS / 2
    assert pool.counters.evicted_blocks > OPERATIONS / 100
    assert pool.audit() == []
    pool.advance(fence + 10)
    for blocks in held:
        pool.free_blocks(blocks)
    assert pool.get_num_free_blocks() == 299
    assert pool.audit() == []


def test_cache() -> None:
    rng = random.Random(8)
    hasher = BlockHasher(hash_block_size=4, seed="many")
    group = KVCacheGroupSpec(("layer",), FullAttentionSpec(4))
    manager = KVCacheManager(KVCacheConfig(120, (group,)), events="first_last")
    running: list[Request] = []
    for number in range(OPERATIONS // 20):
        shared = rng.randrange(6)
        tokens = [shared] * rng.randrange(1, 40) + [number % 50] * rng.randrange(20)
        request = Request(f"r{number}", tokens, hasher=hasher)
        hit = manager.get_computed_blocks(request)
        if manager.allocate_slots(request, request.num_tokens - hit.num_tokens, hit.num_tokens, hit) is not None:
            request.num_computed_tokens = request.num_tokens
            running.append(request)
        for request in list(running):
            if rng.random() < 0.25:
                manager.free(request)
                running.remove(request)
            elif rng.random() < 0.5:
                request.append_output_tokens(rng.randrange(50))
                if manager.allocate_slots(request, 1) is None:
                    manager.free(request)
                    running.remove(request)
                else:
                    request.num_computed_tokens += 1
    assert manager.stats.total.hits > 0
    assert manager.pool.audit() == []
    for request in running:
        manager.free(request)
    assert manager.pool.get_num_free_blocks() == 119
    assert manager.pool.audit() == []
