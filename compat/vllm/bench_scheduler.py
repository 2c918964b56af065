"""A step of our scheduler and a step of vLLM's, side by side: many requests that decode, nobody that computes.

    compat/vllm/in_peer PEER compat/vllm/bench_scheduler.py [--requests 256] [--tokens 1000] [--rounds 9]

Both schedulers have the same requests, block size and budget, and one request fills a block in some steps and many in
others, as in a server. They take turns, some steps each: a row is the median over all steps, the ratio the median of
the rounds' ratios. Times are processor time of schedule() and of the call that takes the step's results.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

from bench_engine import BLOCK_SIZE, MAX_BATCHED_TOKENS, MAX_NUM_SEQS, Engine, SchedulerFactory
from bench_workload import block_hasher, requests_of

from blockpool import build_info
from blockpool.cache import KVCacheConfig, KVCacheManager
from blockpool.engine import EngineRequest, Scheduler
from blockpool.hashing import BlockHasher
from blockpool.managers import FullAttentionSpec, KVCacheGroupSpec

ANSWER = [7]
STEPS_PER_ROUND = 32
ALGORITHM = "sha256_cbor"


def prompts(num_requests: int, num_tokens: int) -> list[list[int]]:
    return [[at, *range(1, num_tokens + at % BLOCK_SIZE)] for at in range(num_requests)]


class Ours:
    """Our scheduler over our cache, all prompts computed."""

    def __init__(self, num_requests: int, num_tokens: int, num_blocks: int) -> None:
        group = KVCacheGroupSpec(("layer",), FullAttentionSpec(BLOCK_SIZE))
        manager = KVCacheManager(KVCacheConfig(num_blocks, (group,)))
        self.scheduler = Scheduler(manager, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_BATCHED_TOKENS)
        hasher = BlockHasher(ALGORITHM, hash_block_size=BLOCK_SIZE, seed="bench")
        for at, prompt in enumerate(prompts(num_requests, num_tokens)):
            self.scheduler.add_request(EngineRequest(str(at), prompt, max_tokens=1 << 20, hasher=hasher))
        requests = list(self.scheduler.requests.values())
        while any(request.num_output_tokens < 1 for request in requests):
            output = self.scheduler.schedule()
            done = [r for r in requests if r.request_id in output.num_scheduled_tokens]
            full = [r.request_id for r in done if r.num_computed_tokens >= r.num_tokens]
            self.scheduler.update(output.step_id, dict.fromkeys(full, ANSWER))

    def step(self) -> float:
        start = time.process_time()
        output = self.scheduler.schedule()
        planned = time.process_time() - start
        results = dict.fromkeys(output.num_scheduled_tokens, ANSWER)
        start = time.process_time()
        self.scheduler.update(output.step_id, results)
        return planned + time.process_time() - start


class Theirs:
    """vLLM's scheduler as it comes, all prompts computed."""

    def __init__(self, factory: SchedulerFactory, num_requests: int, num_tokens: int, num_blocks: int) -> None:
        self.engine = Engine(factory.make(num_blocks))
        hashed = block_hasher(ALGORITHM)
        self.engine.prefill(requests_of(prompts(num_requests, num_tokens), "decode", hashed))

    def step(self) -> float:
        return self.engine.decode(1).cpu_s


def measure(ours: Any, theirs: Any, rounds: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds per step of both, and the ratio of each round's medians."""
    times: tuple[list[float], list[float]] = ([], [])
    ratios = []
    for number in range(rounds):
        part: dict[int, list[float]] = {}
        for which in (0, 1) if number % 2 else (1, 0):
            side = (ours, theirs)[which]
            part[which] = [side.step() for _ in range(STEPS_PER_ROUND)]
            times[which].extend(part[which])
        ratios.append(statistics.median(part[1]) / statistics.median(part[0]))
    return times[0], times[1], ratios


def main() -> None:
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=MAX_NUM_SEQS)
    parser.add_argument("--tokens", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    steps = options.rounds * STEPS_PER_ROUND
    num_blocks = options.requests * ((options.tokens + steps) // BLOCK_SIZE + 4)
    theirs = Theirs(SchedulerFactory(), options.requests, options.tokens, num_blocks)
    ours = Ours(options.requests, options.tokens, num_blocks)
    mine, others, ratios = measure(ours, theirs, options.rounds)
    print(f"{options.requests} requests decode, {len(mine)} steps each, compiled: {build_info().is_compiled}")
    for name, times in (("blockpool", mine), ("vLLM", others)):
        print(
            f"{name:>9}: median {statistics.median(times) * 1e6:,.0f} µs, least {min(times) * 1e6:,.0f} µs per step"
        )
    print(f"    ratio: {statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})")


if __name__ == "__main__":
    main()
