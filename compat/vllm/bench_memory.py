"""Memory per block: how much a process grows by a pool, measured in a child that makes nothing else."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_figures import Figures
from bench_variant import installed, require
from bench_workload import BLOCK_SIZE, requests_of

SECTION = "Memory"
BLOCKS_PER_REQUEST = 512
PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")


def measure_memory(figures: Figures, variant: str, num_requests: int) -> None:
    """Bytes per block: of a new pool, and of one whose blocks are all handed out and cached."""
    num_blocks = num_requests * BLOCKS_PER_REQUEST

    def grown() -> tuple[int, int]:
        with installed(variant):
            from vllm.v1.core import block_pool

            prompt = [0] * (BLOCKS_PER_REQUEST * BLOCK_SIZE)
            requests = requests_of([prompt] * num_requests, "memory", random_digests)
            at_start = resident_bytes()
            pool = block_pool.BlockPool(num_blocks + 1, enable_caching=True, hash_block_size=BLOCK_SIZE)
            require(variant, pool)
            new = resident_bytes()
            rows = [pool.get_new_blocks(BLOCKS_PER_REQUEST) for _ in requests]
            for request, row in zip(requests, rows, strict=True):
                pool.cache_full_blocks(request, row, 0, BLOCKS_PER_REQUEST, BLOCK_SIZE, 0)
            return new - at_start, resident_bytes() - at_start

    new, in_use = in_a_child(grown)
    figures.add(SECTION, "new pool", "bytes per block", variant, new / num_blocks)
    figures.add(SECTION, "all blocks handed out and cached", "bytes per block", variant, in_use / num_blocks)


def random_digests(request: Any) -> list[bytes]:
    return [os.urandom(32) for _ in range(request.num_tokens // BLOCK_SIZE)]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_SIZE


def in_a_child(measure: Callable[[], tuple[int, int]]) -> tuple[int, int]:
    """The answer of a forked copy of this process."""
    answer, question = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.write(question, struct.pack("qq", *measure()))
            status = 0
        finally:
            os._exit(status)
    os.close(question)
    packed = os.read(answer, 16)
    os.close(answer)
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit("the process that measures memory failed")
    first, second = struct.unpack("qq", packed)
    return first, second
