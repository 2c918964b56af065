"""Chunked local attention: a token reads itself and what lies before it in its own chunk."""

from __future__ import annotations

from typing import final

from blockpool.managers.base import SingleTypeKVCacheManager
from blockpool.managers.specs import ChunkedLocalAttentionSpec, KVCacheGroupSpec
from blockpool.pool.block_pool import BlockPool


@final
class ChunkedLocalAttentionManager(SingleTypeKVCacheManager):
    """A resume point needs its chunk up to there; at the start of a chunk, nothing."""

    def __init__(self, pool: BlockPool, group_id: int, group: KVCacheGroupSpec) -> None:
        super().__init__(pool, group_id, group)
        spec = group.kv_cache_spec
        assert isinstance(spec, ChunkedLocalAttentionSpec)
        self.attention_chunk_size: int = spec.attention_chunk_size

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return num_computed_tokens - num_computed_tokens % self.attention_chunk_size

    def num_blocks(self, num_tokens: int, num_prompt_tokens: int = 0, num_encoder_tokens: int = 0) -> int:
        return -(-num_tokens // self.block_size)

    def most_blocks(self, max_model_len: int, max_in_flight_tokens: int, num_prompt_tokens: int = 0) -> int | None:
        return self.recycling_cap(self.attention_chunk_size - 1, max_model_len, max_in_flight_tokens)
