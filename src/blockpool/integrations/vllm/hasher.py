"""vLLM's request hasher on our kernel: the same bytes, block by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from blockpool.hashing.errors import HashingError
from blockpool.hashing.kernel import chain_as_list
from blockpool.integrations.vllm.words import words

#: vLLM's hash functions that the kernel computes, by name; every other function is called as it is.
FORMS: dict[str, Literal["cbor", "pickle"]] = {"sha256": "pickle", "sha256_cbor": "cbor"}


def get_request_block_hasher(
    hash_block_size: int, caching_hash_fn: Callable[[Any], bytes], num_hash_lookahead_tokens: int = 0
) -> Callable[[Any], list[bytes]]:
    """A function that hashes what a request has not hashed yet: its complete units of `hash_block_size` tokens.

    It returns the new hashes; with lookahead a unit waits for that many tokens behind it, which it depends on.
    """
    ours = getattr(caching_hash_fn, "__module__", "") == "vllm.utils.hashing"
    form = FORMS.get(getattr(caching_hash_fn, "__name__", "")) if ours else None
    unit, lookahead = hash_block_size, num_hash_lookahead_tokens

    def request_block_hasher(request: Any) -> list[bytes]:
        hashes = request.block_hashes
        first = len(hashes) * unit
        count = (request.num_tokens - lookahead - first) // unit
        if count < 1:
            return []
        tokens = getattr(request, "_all_token_ids", None)
        if type(tokens) is not list:
            tokens = list(request.all_token_ids)
        parent = hashes[-1] if hashes else words().none_hash(caching_hash_fn)
        extras = extra_values(request, tokens, first, count, unit, lookahead)
        if form is not None and len(parent) == 32:
            try:
                return chain_as_list(form, tokens, unit, parent, extras, count, first)
            except HashingError:
                pass  # ids that are no token ids: what the function itself makes of them, or its own error
        return one_by_one(caching_hash_fn, tokens, unit, parent, extras, count, first)

    return request_block_hasher


def extra_values(
    request: Any, tokens: list[int], first: int, count: int, unit: int, lookahead: int
) -> list[Any] | None:
    """What is hashed besides the tokens of each unit; None when there is nothing for any."""
    everywhere = bool(request.mm_features) or request.lora_request is not None or request.prompt_embeds is not None
    if not lookahead and not everywhere and not (request.cache_salt and first == 0):
        return None
    values: list[Any] = [None] * count
    if everywhere or request.cache_salt:
        asked, at = words(), 0
        for i in range(count):
            start = first + i * unit
            values[i], at = asked.tagged_keys(request, start, start + unit, lookahead, at)
            if not everywhere:
                break  # a salt is in the first unit alone
    if lookahead:
        for i in range(count):
            end = first + (i + 1) * unit
            values[i] = (values[i], *tokens[end : end + lookahead])
    return values


def one_by_one(
    hash_fn: Callable[[Any], bytes],
    tokens: list[int],
    unit: int,
    parent: bytes,
    extras: list[Any] | None,
    count: int,
    first: int,
) -> list[bytes]:
    """The chain with the given function: for those that the kernel does not compute."""
    hashes: list[bytes] = []
    for i in range(count):
        start = first + i * unit
        parent = hash_fn((parent, tuple(tokens[start : start + unit]), None if extras is None else extras[i]))
        hashes.append(parent)
    return hashes
