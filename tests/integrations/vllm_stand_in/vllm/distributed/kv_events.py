from typing import Any

import msgspec


class BlockStored(msgspec.Struct):
    block_hashes: list[Any]
    parent_block_hash: Any
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: Any = None
    group_idx: int | None = None
    session_id: str | None = None
    lookahead_token_ids: Any = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct):
    block_hashes: list[Any]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct):
    pass
