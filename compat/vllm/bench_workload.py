"""What is asked of the engine: prompts, half of each shared within a family, and vLLM's requests made of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

BLOCK_SIZE = 16
VOCABULARY = 128_000
END_OF_TEXT = 2

Hasher = Callable[[Any], list[Any]]


@functools.cache
def families_of_prompts(num_prompts: int, num_tokens: int, num_families: int, seed: int) -> list[list[int]]:
    """Prompts of which the first half is that of the family, and the second half their own."""
    rng = np.random.default_rng(seed)
    num_shared = num_tokens // 2
    shared = [tokens(rng, num_shared) for _ in range(num_families)]
    return [shared[number % num_families] + tokens(rng, num_tokens - num_shared) for number in range(num_prompts)]


def tokens(rng: np.random.Generator, num_tokens: int) -> list[int]:
    drawn: list[int] = rng.integers(VOCABULARY, size=num_tokens).tolist()
    return drawn


def requests_of(prompts: list[list[int]], name: str, hasher: Hasher | None) -> list[Any]:
    """One vLLM request per prompt. They end when they are told to, not by themselves."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    sampling = SamplingParams(max_tokens=1_000_000, ignore_eos=True)
    sampling.update_from_generation_config({}, END_OF_TEXT)
    return [
        Request(f"{name}-{number}", prompt, sampling, None, block_hasher=hasher)
        for number, prompt in enumerate(prompts)
    ]


def block_hasher(algorithm: str) -> Hasher:
    """The request hasher that vLLM would use now, which is ours while ours is installed."""
    from vllm.utils import hashing
    from vllm.v1.core import kv_cache_utils

    hash_function = getattr(hashing, algorithm)
    kv_cache_utils.init_none_hash(hash_function)
    hasher: Hasher = kv_cache_utils.get_request_block_hasher(BLOCK_SIZE, hash_function)
    return hasher
