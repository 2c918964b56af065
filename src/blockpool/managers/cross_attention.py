"""Cross attention: every token reads the output of the encoder, which is written once."""

from __future__ import annotations

from typing import final

from blockpool.managers.base import SingleTypeKVCacheManager


@final
class CrossAttentionManager(SingleTypeKVCacheManager):
    """Its blocks are taken at admission, for `num_encoder_tokens`, and kept to the end."""

    def needed(self, boundary: int) -> range:
        return range(0)

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return 0

    def num_blocks(self, num_tokens: int, num_prompt_tokens: int = 0, num_encoder_tokens: int = 0) -> int:
        return -(-num_encoder_tokens // self.block_size)
