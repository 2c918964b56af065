"""How long the same work takes on vLLM's own classes and on ours, here: by turns, so that other load slows both."""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib import import_module
from statistics import median
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

import msgspec

BLOCK_SIZE = 16
NUM_TOKENS = 8192
ROUNDS = 40
NS_PER_US = 1000

#: Does a piece of work once. The nanoseconds that it took, without what had to be prepared for it.
Work = Callable[[], int]


class Speed(msgspec.Struct, frozen=True):
    """Medians of one piece of work in microseconds, and how many times faster ours is."""

    work: str
    vllm_us: float
    blockpool_us: float
    times_faster: float


def race(work: str, theirs: Work, ours: Work) -> Speed:
    """Both by turns, one after the other and the other after the one, after a round that does not count."""
    times: tuple[list[int], list[int]] = ([], [])
    for number in range(ROUNDS + 1):
        for which in (0, 1) if number % 2 else (1, 0):
            times[which].append((theirs, ours)[which]())
    slow, fast = (median(one[1:]) for one in times)
    return Speed(work, round(slow / NS_PER_US, 1), round(fast / NS_PER_US, 1), round(slow / max(fast, 1), 2))


def allocate_and_free(pool_class: type) -> Work:
    """1,000 blocks without a hash, out of 10,000."""
    pool = pool_class(10_001, True, BLOCK_SIZE)

    def work() -> int:
        begin = perf_counter_ns()
        pool.free_blocks(pool.get_new_blocks(1000))
        return perf_counter_ns() - begin

    return work


def cache_and_look_up(pool_class: type) -> Work:
    """The 512 blocks of a prompt are registered, and then found one by one. Every prompt is new."""
    pool = pool_class(4 * 512 + 1, True, BLOCK_SIZE)
    choose = random.Random(3)
    request = hashable("prompt", [0] * NUM_TOKENS)

    def work() -> int:
        hashes = request.block_hashes = [choose.randbytes(32) for _ in range(512)]
        blocks = pool.get_new_blocks(512)
        begin = perf_counter_ns()
        pool.cache_full_blocks(request, blocks, 0, 512, BLOCK_SIZE, 0)
        for block_hash in hashes:
            pool.get_cached_block(block_hash, [0])
        took = perf_counter_ns() - begin
        pool.free_blocks(blocks[::-1])
        return took

    return work


def hash_prompt(get_request_block_hasher: Callable[..., Any], function: Callable[[Any], bytes]) -> Work:
    """The block hashes of a prompt of 8,192 tokens."""
    choose = random.Random(4)
    tokens = [choose.randrange(150_000) for _ in range(NUM_TOKENS)]
    hasher = get_request_block_hasher(BLOCK_SIZE, function)

    def work() -> int:
        prompt = hashable("prompt", tokens)
        begin = perf_counter_ns()
        hasher(prompt)
        return perf_counter_ns() - begin

    return work


def hashable(request_id: str, tokens: list[int], **more: Any) -> Any:
    """A request as far as a block hasher looks at one."""
    return SimpleNamespace(
        request_id=request_id,
        all_token_ids=tokens,
        num_tokens=len(tokens),
        num_prompt_tokens=len(tokens),
        block_hashes=[],
        **{"lora_request": None, "mm_features": [], "cache_salt": None, "prompt_embeds": None} | more,
    )


class ManagerCycle:
    """Prompts of 8,192 tokens through vLLM's KVCacheManager: look up, allocate, free.

    Four prompts in turn, two and two with one first half, in a pool that holds two and a half of them: so there
    are hits, registrations and evictions. The manager gets whatever pool stands in vLLM's place when this is made.
    """

    def __init__(self, function: Callable[[Any], bytes]) -> None:
        interface = import_module("vllm.v1.kv_cache_interface")
        spec = interface.FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=import_module("torch").float32
        )
        config = interface.KVCacheConfig(
            num_blocks=1300, kv_cache_tensors=[], kv_cache_groups=[interface.KVCacheGroupSpec(["layer"], spec)]
        )
        self.manager = import_module("vllm.v1.core.kv_cache_manager").KVCacheManager(
            config, max_model_len=2 * NUM_TOKENS, scheduler_block_size=BLOCK_SIZE, hash_block_size=BLOCK_SIZE
        )
        hasher = import_module("vllm.v1.core.kv_cache_utils").get_request_block_hasher(BLOCK_SIZE, function)
        choose = random.Random(5)
        halves = [[choose.randrange(150_000) for _ in range(NUM_TOKENS // 2)] for _ in range(6)]
        self.requests = [
            import_module("vllm.v1.request").Request(
                request_id=f"prompt-{number}",
                prompt_token_ids=halves[number // 2] + halves[2 + number],
                sampling_params=import_module("vllm.sampling_params").SamplingParams(max_tokens=1),
                pooling_params=None,
                block_hasher=hasher,
            )
            for number in range(4)
        ]
        self.num_cycles = 0
        #: Tokens found and block ids got, prompt by prompt.
        self.seen: list[tuple[int, Any]] = []

    def work(self) -> int:
        request = self.requests[self.num_cycles % len(self.requests)]
        self.num_cycles += 1
        manager = self.manager
        begin = perf_counter_ns()
        blocks, num_tokens, *_ = manager.get_computed_blocks(request)
        manager.allocate_slots(request, request.num_tokens - num_tokens, num_tokens, blocks)
        took = perf_counter_ns() - begin
        self.seen.append((num_tokens, manager.get_block_ids(request.request_id)))
        begin = perf_counter_ns()
        manager.free(request)
        return took + perf_counter_ns() - begin
