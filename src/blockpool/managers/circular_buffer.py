"""Circular buffer: one block per request, written round and round."""

from __future__ import annotations

from typing import final

from blockpool.managers.base import SingleTypeKVCacheManager


@final
class CircularBufferManager(SingleTypeKVCacheManager):
    """Takes part in admission and release, and in nothing that concerns prefixes."""

    def needed(self, boundary: int) -> range:
        return range(0)

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return 0

    def num_blocks(self, num_tokens: int, num_prompt_tokens: int = 0, num_encoder_tokens: int = 0) -> int:
        return 1

    def most_blocks(self, max_model_len: int, max_in_flight_tokens: int, num_prompt_tokens: int = 0) -> int | None:
        return 1
