"""Events as a reader needs them that keeps keys only: tokens and extra keys are skipped, not decoded."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from blockpool.wire.errors import BatchError

BlockSize = Annotated[int, msgspec.Meta(ge=1)]
#: What decoding raises for bytes that are no batch: RecursionError for what is nested too deeply.
UNREADABLE: Final = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class Stored(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: list[bytes | int]
    block_size: BlockSize
    medium: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[bytes | int]
    medium: str | None = None
    group_idx: int | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    medium: str | None = None


class Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[Stored | Removed | Cleared]


class _ArrayStored(msgspec.Struct, array_like=True, tag="BlockStored", gc=False):
    block_hashes: list[bytes | int]
    parent_block_hash: msgspec.Raw
    token_ids: msgspec.Raw
    block_size: BlockSize
    lora_id: msgspec.Raw = msgspec.Raw()
    medium: str | None = None
    lora_name: msgspec.Raw = msgspec.Raw()
    extra_keys: msgspec.Raw = msgspec.Raw()
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _ArrayRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved", gc=False):
    block_hashes: list[bytes | int]
    medium: str | None = None
    group_idx: int | None = None


class _ArrayCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    medium: str | None = None


class _ArrayBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_ArrayStored | _ArrayRemoved | _ArrayCleared]


_maps = msgspec.msgpack.Decoder(Batch)
_arrays = msgspec.msgpack.Decoder(_ArrayBatch)


def read_lean(payload: bytes) -> Batch:
    """A payload's events, whichever way they are written. Raises BatchError."""
    try:
        return _maps.decode(payload)
    except UNREADABLE as error:
        first = error
    try:
        batch = _arrays.decode(payload)
    except UNREADABLE:
        raise BatchError(f"not a batch of events: {first}") from None
    return Batch(batch.ts, [_as_map(event) for event in batch.events])


def _as_map(event: _ArrayStored | _ArrayRemoved | _ArrayCleared) -> Stored | Removed | Cleared:
    if isinstance(event, _ArrayStored):
        return Stored(
            event.block_hashes,
            event.block_size,
            event.medium,
            event.group_idx,
            event.kv_cache_spec_kind,
            event.kv_cache_spec_sliding_window,
        )
    if isinstance(event, _ArrayRemoved):
        return Removed(event.block_hashes, event.medium, event.group_idx)
    return Cleared(event.medium)
