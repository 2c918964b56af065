"""A prompt whose blocks are all cached, in three groups of layers: looking it up, and giving it its blocks."""

from __future__ import annotations

import gc
import time
from typing import Any

from bench_figures import Figures
from bench_variant import installed
from bench_workload import BLOCK_SIZE, block_hasher, families_of_prompts, requests_of

NUM_TOKENS = 8_192
NUM_BLOCKS = 8 * NUM_TOKENS // BLOCK_SIZE
WINDOWS = (1_024, 4_096)


def measure_groups(figures: Figures, variant: str, repeats: int) -> None:
    """Microseconds per call, the mean over `repeats`."""
    section = f"A cached prompt of {NUM_TOKENS:,} tokens, full attention and two windows"
    with installed(variant):
        hasher = block_hasher("sha256")
        manager = make_manager()
        (prompt,) = families_of_prompts(1, NUM_TOKENS, 1, seed=6)
        (first,) = requests_of([prompt], "first", hasher)
        manager.allocate_slots(first, NUM_TOKENS)
        manager.free(first)
        requests = requests_of([prompt] * repeats, "again", hasher)
        gc.collect()
        gc.disable()
        lookup_ns = allocate_ns = free_ns = 0
        for request in requests:
            start = time.thread_time_ns()
            blocks, num_tokens, *_ = manager.get_computed_blocks(request)
            looked_up = time.thread_time_ns()
            new = manager.allocate_slots(request, NUM_TOKENS - num_tokens, num_tokens, blocks)
            allocated = time.thread_time_ns()
            manager.free(request)
            free_ns += time.thread_time_ns() - allocated
            lookup_ns += looked_up - start
            allocate_ns += allocated - looked_up
            if new is None or num_tokens != NUM_TOKENS - BLOCK_SIZE:
                raise SystemExit(f"{num_tokens} tokens were found, of {NUM_TOKENS}")
        gc.enable()
    for name, spent in (("get_computed_blocks", lookup_ns), ("allocate_slots", allocate_ns), ("free", free_ns)):
        figures.add(section, name, "µs", variant, spent / repeats / 1e3)


def make_manager() -> Any:
    import torch
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.core import kv_cache_manager

    heads = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    specs = [
        interface.FullAttentionSpec(block_size=BLOCK_SIZE, **heads),
        *(interface.SlidingWindowSpec(block_size=BLOCK_SIZE, sliding_window=window, **heads) for window in WINDOWS),
    ]
    groups = [interface.KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return kv_cache_manager.KVCacheManager(
        interface.KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=2 * NUM_TOKENS,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
    )
