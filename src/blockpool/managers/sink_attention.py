"""Attention sinks: full attention, and a few blocks that every request reads."""

from __future__ import annotations

from typing import final

from librt.vecs import vec
from mypy_extensions import i32

from blockpool.managers.base import SingleTypeKVCacheManager
from blockpool.managers.specs import KVCacheGroupSpec, SinkFullAttentionSpec
from blockpool.managers.tables import NO_BLOCKS
from blockpool.pool.block_pool import BlockPool


@final
class SinkFullAttentionManager(SingleTypeKVCacheManager):
    """The sink blocks are taken from the pool when the manager is made. No table shows them; the worker puts
    `sink_block_ids` before each. Raises NoFreeBlocksError when the pool has too few.
    """

    def __init__(self, pool: BlockPool, group_id: int, group: KVCacheGroupSpec) -> None:
        super().__init__(pool, group_id, group)
        spec = group.kv_cache_spec
        assert isinstance(spec, SinkFullAttentionSpec)
        self.supports_partial_boundaries = True
        self.num_reserved_blocks = -(-int(spec.sink_len) // self.block_size)
        self.sink_blocks: vec[i32] = NO_BLOCKS
        self.reserve()

    @property
    def sink_block_ids(self) -> list[int]:
        return list(self.sink_blocks)

    def reserve(self) -> None:
        if len(self.sink_blocks) == 0:
            self.sink_blocks = self.pool.take(self.num_reserved_blocks)

    def unreserve(self) -> None:
        self.pool.free_vec(self.sink_blocks, None)
        self.sink_blocks = NO_BLOCKS

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return 0

    def num_blocks(self, num_tokens: int, num_prompt_tokens: int = 0, num_encoder_tokens: int = 0) -> int:
        return -(-num_tokens // self.block_size)
