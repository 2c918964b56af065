"""What the scheduler costs per step, in microseconds: schedule() and update(), with many requests that decode.

    python benchmarks/scheduler_ops.py [--requests 256] [--tokens 1000] [--steps 320] [--groups 1]

Nothing is to be prefilled, and nobody computes: every request gets one token per step. "in phase": all requests fill
a block in the same step, one of 16; "spread": some fill one in each step, as in a server. Blocks have 16 tokens. "3
groups" are full attention, a window of 1,024 tokens and a state that is kept at block ends.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

from blockpool import build_info
from blockpool.cache import KVCacheConfig, KVCacheManager
from blockpool.engine import EngineRequest, Scheduler
from blockpool.hashing import BlockHasher
from blockpool.managers import FullAttentionSpec, KVCacheGroupSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec

BLOCK_SIZE = 16
HASHER = BlockHasher(hash_block_size=BLOCK_SIZE, seed="bench")


def step_times(num_requests: int, num_tokens: int, num_steps: int, num_groups: int, *, spread: bool) -> list[float]:
    """Seconds per step."""
    specs: list[KVCacheSpec] = [
        FullAttentionSpec(BLOCK_SIZE),
        SlidingWindowSpec(BLOCK_SIZE, 1_024),
        MambaSpec(BLOCK_SIZE, 0, "align"),
    ]
    groups = tuple(KVCacheGroupSpec((f"layer{at}",), spec) for at, spec in enumerate(specs[:num_groups]))
    num_blocks = num_groups * num_requests * ((num_tokens + num_steps) // BLOCK_SIZE + 4)
    manager = KVCacheManager(KVCacheConfig(num_blocks, groups))
    scheduler = Scheduler(manager, max_num_seqs=num_requests, max_num_batched_tokens=8_192)
    for at in range(num_requests):
        prompt = [at, *range(1, num_tokens + (at % BLOCK_SIZE if spread else 0))]
        scheduler.add_request(EngineRequest(f"request-{at}", prompt, max_tokens=num_steps + 99, hasher=HASHER))
    while scheduler.num_waiting or any(r.num_output_tokens < 1 for r in scheduler.requests.values()):
        output = scheduler.schedule()
        requests = scheduler.requests
        full = [i for i in output.num_scheduled_tokens if requests[i].num_computed_tokens >= requests[i].num_tokens]
        scheduler.update(output.step_id, {request_id: [7] for request_id in full})
    times = []
    gc.collect()
    for _ in range(num_steps):
        start = time.perf_counter()
        output = scheduler.schedule()
        middle = time.perf_counter()
        results = {request_id: [7] for request_id in output.num_scheduled_tokens}
        again = time.perf_counter()
        scheduler.update(output.step_id, results)
        times.append(middle - start + time.perf_counter() - again)
        assert len(results) == num_requests
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1_000)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--groups", type=int, choices=[1, 2, 3], default=1)
    options = parser.parse_args()
    print(f"{options.requests} requests decode, {options.groups} group(s), compiled: {build_info().is_compiled}")
    for spread in (False, True):
        times = step_times(options.requests, options.tokens, options.steps, options.groups, spread=spread)
        median, mean, longest = statistics.median(times), statistics.mean(times), max(times)
        print(
            f"{'spread' if spread else 'in phase':>8}: median {median * 1e6:.0f} µs, mean {mean * 1e6:.0f} µs,"
            f" longest {longest * 1e6:.0f} µs per step"
        )


if __name__ == "__main__":
    main()
