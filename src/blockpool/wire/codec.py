"""Batches of events as bytes: exactly vLLM 0.33's, and whatever its consumers and SGLang write.

A batch is an array of three, an event a map with its `type` first. SGLang, and vLLM before 0.13, write events as
arrays that begin with their type; both are read.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from blockpool.hashing import digest_to_int
from blockpool.pool import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from blockpool.wire.errors import BatchError
from blockpool.wire.lean import UNREADABLE

HashForm = Literal["bytes", "int"]


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """What happened at `ts` (wall clock, seconds) to the index of one data-parallel rank."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class _ArrayStored(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _ArrayRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None = None
    group_idx: int | None = None


class _ArrayCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    medium: str | None = None


class _ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_ArrayStored | _ArrayRemoved | _ArrayCleared]
    data_parallel_rank: int | None = None


_encoder = msgspec.msgpack.Encoder()
_maps = msgspec.msgpack.Decoder(KVEventBatch)
_arrays = msgspec.msgpack.Decoder(_ArrayBatch)
_STRUCT_OF = {_ArrayStored: BlockStored, _ArrayRemoved: BlockRemoved, _ArrayCleared: AllBlocksCleared}


def encode_batch(batch: KVEventBatch) -> bytes:
    """The payload of a message."""
    return _encoder.encode(batch)


def decode_batch(payload: bytes) -> KVEventBatch:
    """A payload's batch, whichever way its events are written. Raises BatchError."""
    try:
        return _maps.decode(payload)
    except UNREADABLE as error:
        first = error
    try:
        batch = _arrays.decode(payload)
    except UNREADABLE:
        raise BatchError(f"not a batch of events: {first}") from None
    return KVEventBatch(batch.ts, [_as_map(event) for event in batch.events], batch.data_parallel_rank)


def _as_map(event: _ArrayStored | _ArrayRemoved | _ArrayCleared) -> KVCacheEvent:
    return _STRUCT_OF[type(event)](**msgspec.structs.asdict(event))  # type: ignore[no-any-return]


def with_int_hashes(event: KVCacheEvent) -> KVCacheEvent:
    """The event with the 64-bit form of its hashes, as vLLM announces them by default."""
    if isinstance(event, AllBlocksCleared):
        return event
    hashes: list[bytes | int] = [_as_int(one) for one in event.block_hashes]
    if isinstance(event, BlockRemoved):
        return msgspec.structs.replace(event, block_hashes=hashes)
    parent = event.parent_block_hash
    return msgspec.structs.replace(
        event, block_hashes=hashes, parent_block_hash=None if parent is None else _as_int(parent)
    )


def _as_int(one: bytes | int) -> int:
    return digest_to_int(one) if isinstance(one, bytes) else one
