"""Reference window: a token reads the whole prompt, and a window over the output before it."""

from __future__ import annotations

from typing import final

from blockpool.managers.base import SingleTypeKVCacheManager
from blockpool.managers.specs import KVCacheGroupSpec, ReferenceWindowSpec
from blockpool.pool.block_pool import BlockPool


@final
class ReferenceWindowManager(SingleTypeKVCacheManager):
    """A resume point needs all before it: it may lie in the prompt. The gap between prompt and window is dropped."""

    def __init__(self, pool: BlockPool, group_id: int, group: KVCacheGroupSpec) -> None:
        super().__init__(pool, group_id, group)
        spec = group.kv_cache_spec
        assert isinstance(spec, ReferenceWindowSpec)
        self.sliding_window: int = spec.sliding_window

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return 0

    def unread(self, num_computed_tokens: int, num_prompt_tokens: int) -> tuple[int, int]:
        end = max(num_prompt_tokens, num_computed_tokens - self.sliding_window)
        return -(-num_prompt_tokens // self.block_size), end // self.block_size

    def num_blocks(self, num_tokens: int, num_prompt_tokens: int = 0, num_encoder_tokens: int = 0) -> int:
        return -(-num_tokens // self.block_size)

    def most_blocks(self, max_model_len: int, max_in_flight_tokens: int, num_prompt_tokens: int = 0) -> int | None:
        prompt = -(-num_prompt_tokens // self.block_size)
        window = self.recycling_cap(self.sliding_window, max_model_len, max_in_flight_tokens)
        return min(prompt + window, -(-max_model_len // self.block_size))
