"""What a pool says of its index: the events of vLLM 0.33, field by field (msgspec structs, tagged maps).

Whoever applies them in order holds the set of keys that can be hit. Not compiled: plain values for others to
encode, compare and copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True, kw_only=True):
    """Blocks that can be hit from now on: `token_ids` covers exactly `block_hashes`, in order.

    `parent_block_hash` is the digest before the first of them, None at the start of a sequence.
    """

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True, kw_only=True):
    """Keys that can no longer be hit."""

    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True, kw_only=True):
    """Every key of that medium is gone (of every medium, when it is left out)."""

    medium: str | None = None


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class StorePayload(msgspec.Struct, frozen=True, kw_only=True):
    """What a registration carries into its BlockStored, and what the pool itself never looks at.

    `token_ids`: the sequence's tokens from token 0 on. `extra_keys(start, end)`: the untagged extra keys of the
    block of tokens [start, end), or None. `lookahead(end)`: the tokens behind a block that its hash covers too.
    `parent`: the digest before a partial boundary; full blocks find theirs in the chain.
    """

    token_ids: Sequence[int] = ()
    parent: bytes | None = None
    extra_keys: Callable[[int, int], tuple[Any, ...] | None] | None = None
    lookahead: Callable[[int], list[int]] | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    session_id: str | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


NOTHING = StorePayload()


class Told(msgspec.Struct, frozen=True):
    """What a payload says of a range of blocks, one entry per block: asked before anything is registered, since a
    payload may raise.
    """

    payload: StorePayload
    block_size: int
    token_ids: list[int]
    extra_keys: list[tuple[Any, ...] | None] | None
    lookahead: list[list[int]] | None


def prepare(payload: StorePayload | None, first_token: int, num_blocks: int, block_size: int) -> Told:
    """Ask a payload about `num_blocks` blocks that begin at `first_token`."""
    known = NOTHING if payload is None else payload
    end = first_token + num_blocks * block_size
    starts = range(first_token, end, block_size)
    piece = known.token_ids[first_token:end]
    return Told(
        known,
        block_size,
        [int(token) for token in piece],
        None if known.extra_keys is None else [known.extra_keys(start, start + block_size) for start in starts],
        None if known.lookahead is None else [known.lookahead(start + block_size) for start in starts],
    )


def stored(
    told: Told, first: int, hashes: list[bytes], parent: bytes | None, group_id: int, medium: str
) -> BlockStored:
    """The event for consecutive blocks, the `first`-th of the range and those that follow it."""
    known, size = told.payload, told.block_size
    last = first + len(hashes)
    extras = None if told.extra_keys is None else told.extra_keys[first:last]
    if extras is not None and all(extra is None for extra in extras):
        extras = None
    return BlockStored(
        block_hashes=list(hashes),
        parent_block_hash=parent,
        token_ids=told.token_ids[first * size : last * size],
        block_size=size,
        lora_id=known.lora_id,
        medium=medium,
        lora_name=known.lora_name,
        extra_keys=extras,
        group_idx=group_id,
        kv_cache_spec_kind=known.kv_cache_spec_kind,
        kv_cache_spec_sliding_window=known.kv_cache_spec_sliding_window,
        session_id=known.session_id,
        lookahead_token_ids=None if told.lookahead is None else told.lookahead[first:last],
    )
