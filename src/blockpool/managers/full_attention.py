"""Full attention: every token reads all tokens before it, so every block stays and every block counts."""

from __future__ import annotations

from typing import final

from blockpool.managers.base import SingleTypeKVCacheManager
from blockpool.managers.specs import KVCacheGroupSpec
from blockpool.pool.block_pool import BlockPool


@final
class FullAttentionManager(SingleTypeKVCacheManager):
    """Also for MLA latents and indexer caches."""

    def __init__(self, pool: BlockPool, group_id: int, group: KVCacheGroupSpec) -> None:
        super().__init__(pool, group_id, group)
        self.supports_partial_boundaries = True

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return 0

    def num_blocks(self, num_tokens: int, num_prompt_tokens: int = 0, num_encoder_tokens: int = 0) -> int:
        return -(-num_tokens // self.block_size)
