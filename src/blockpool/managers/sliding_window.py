"""Sliding window: a token reads itself and the sliding_window - 1 tokens before it."""

from __future__ import annotations

from typing import final

from blockpool.managers.base import SingleTypeKVCacheManager
from blockpool.managers.specs import KVCacheGroupSpec, SlidingWindowSpec
from blockpool.pool.block_pool import BlockPool


@final
class SlidingWindowManager(SingleTypeKVCacheManager):
    """A resume point needs the window that ends there; what lies before the window is dropped."""

    def __init__(self, pool: BlockPool, group_id: int, group: KVCacheGroupSpec) -> None:
        super().__init__(pool, group_id, group)
        spec = group.kv_cache_spec
        assert isinstance(spec, SlidingWindowSpec)
        self.sliding_window: int = spec.sliding_window

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.sliding_window + 1)

    def num_blocks(self, num_tokens: int, num_prompt_tokens: int = 0, num_encoder_tokens: int = 0) -> int:
        return -(-num_tokens // self.block_size)

    def most_blocks(self, max_model_len: int, max_in_flight_tokens: int, num_prompt_tokens: int = 0) -> int | None:
        return self.recycling_cap(self.sliding_window - 1, max_model_len, max_in_flight_tokens)
