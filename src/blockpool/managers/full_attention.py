"""Full attention: every token reads all tokens before it, so every block stays and every block counts."""

from __future__ import annotations

from typing import final

from blockpool.managers.base import SingleTypeKVCacheManager


@final
class FullAttentionManager(SingleTypeKVCacheManager):
    """Also for MLA latents and indexer caches."""

    def needed(self, boundary: int) -> range:
        return range(boundary // self.block_size)

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return 0

    def retained(self, first: int, last: int) -> list[bool] | None:
        return None

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
