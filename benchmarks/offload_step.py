"""What lower tiers cost the thread of the steps, per block moved: gathering, guarding, finding, and telling the end.

    python benchmarks/offload_step.py [--rounds N] [--blocks N] [--json FILE]

Threads move nothing here: what is queued is carried out between the measured calls, so that they are the step's own.
"store" is all that `poll` does for blocks that a step has filled, from their registration to the end of their copy;
"load" is the lookup, the start and the end of a load. Processor time, medians of the rounds, microseconds per block.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

from blockpool import build_info
from blockpool.cache import KVCacheConfig, KVCacheManager
from blockpool.engine import EngineRequest, Scheduler
from blockpool.hashing import BlockHasher
from blockpool.managers import FullAttentionSpec, KVCacheGroupSpec
from blockpool.offload import HostTier, Namespace, Offloader

BLOCK_SIZE = 16
PAGE = 64
HASHER = BlockHasher(hash_block_size=BLOCK_SIZE, seed="bench")


class Nowhere:
    """A memory whose pages cost nothing."""

    def page_bytes(self, group_id: int) -> int:
        return PAGE

    def read_page(self, group_id: int, block_id: int, page: memoryview) -> None:
        pass

    def write_page(self, group_id: int, block_id: int, page: memoryview) -> None:
        pass


def carry_out(offloader: Offloader) -> None:
    transfers: Any = offloader.transfers
    for queue in (transfers._loads, transfers._stores):
        while not queue.empty():
            queue.get()()


def measure(num_blocks: int, rounds: int, chunk_blocks: int) -> dict[str, float]:
    """`chunk_blocks`: that a step fills at a time."""
    num_tokens = num_blocks * BLOCK_SIZE + 1
    groups = (KVCacheGroupSpec(("layer",), FullAttentionSpec(BLOCK_SIZE)),)
    config = KVCacheConfig(2 * num_blocks + 8, groups, hash_block_size=BLOCK_SIZE)
    manager = KVCacheManager(config, tells_stored=True)
    tier = HostTier(4 * num_blocks * PAGE, PAGE)
    offloader = Offloader(
        manager, Nowhere(), [tier], namespace=Namespace(model="bench"), num_threads=0, most_pages=num_blocks
    )
    scheduler = Scheduler(
        manager, max_num_seqs=1, max_num_batched_tokens=chunk_blocks * BLOCK_SIZE, connector=offloader
    )
    store, load = [], []
    gc.collect()
    for number in range(rounds):
        prompt = [number, *range(1, num_tokens)]
        scheduler.add_request(EngineRequest(f"s{number}", prompt, max_tokens=1, hasher=HASHER))
        spent = 0.0
        while scheduler.has_work:
            output = scheduler.schedule()
            offloader.step_has_run(output)
            samples = scheduler.requests[f"s{number}"].num_computed_tokens >= num_tokens
            scheduler.update(output.step_id, {f"s{number}": [7]} if samples else {})
            start = time.thread_time()
            offloader.poll(scheduler)
            spent += time.thread_time() - start
            carry_out(offloader)
        start = time.thread_time()
        offloader.poll(scheduler)
        spent += time.thread_time() - start
        store.append(spent / num_blocks)
        assert tier.lookup([Namespace(model="bench").key(b"", 0)]) == [False]

        assert manager.reset_prefix_cache()
        request = EngineRequest(f"l{number}", prompt, max_tokens=1, hasher=HASHER)
        start = time.thread_time()
        found = offloader.get_num_external_tokens(request, 0)
        spent = time.thread_time() - start
        assert found == num_blocks * BLOCK_SIZE
        scheduler.add_request(request)
        output = scheduler.schedule()
        (planned,) = output.loads
        assert planned.last == found
        start = time.thread_time()
        offloader.step_has_run(output)
        spent += time.thread_time() - start
        scheduler.update(output.step_id, {})
        carry_out(offloader)
        start = time.thread_time()
        offloader.poll(scheduler)
        spent += time.thread_time() - start
        load.append(spent / num_blocks)
        scheduler.abort([request.request_id])
        carry_out(offloader)
        offloader.poll(scheduler)
        assert manager.reset_prefix_cache()
    return {"store": statistics.median(store) * 1e6, "load": statistics.median(load) * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description="the cost of lower tiers to the thread of the steps")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(f"{arguments.blocks} blocks, medians of {arguments.rounds} rounds, compiled: {build_info().is_compiled}")
    figures: dict[str, dict[str, float]] = {}
    for chunk in (512, 32, 8):
        figures[str(chunk)] = measure(arguments.blocks, arguments.rounds, chunk)
        print(
            f"{chunk:4} blocks a step: store {figures[str(chunk)]['store']:5.2f} us a block,"
            f" load {figures[str(chunk)]['load']:5.2f} us a block"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
