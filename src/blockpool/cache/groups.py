"""The managers of all groups, each over the pool that its blocks come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from blockpool.cache.config import KVCacheConfig
from blockpool.cache.errors import ConfigError
from blockpool.managers import Coordinator, RetentionPolicy, SingleTypeKVCacheManager, make_manager
from blockpool.pool import BlockPool


@final
class Groups:
    """`managers`, in the order of the config, and of each the number of its pool in `pool_of`.

    `cached`: those that can be hit. `num_reserved`: blocks per pool that are set aside for all requests.
    """

    def __init__(self, config: KVCacheConfig, pools: Sequence[BlockPool]) -> None:
        self.pools: list[BlockPool] = list(pools)
        self.managers: list[SingleTypeKVCacheManager] = []
        self.pool_of: list[int] = []
        self.clears: list[bool] = []
        for group_id, group in enumerate(config.kv_cache_groups):
            self.managers.append(make_manager(self.pools[group.pool], group_id, group))
            self.pool_of.append(group.pool)
            self.clears.append(group.clear_new_blocks)
        self.coordinator = Coordinator(self.managers, config.partial_hits)
        self.alignment: int = self.coordinator.alignment
        try:
            self.policy = RetentionPolicy(self.alignment, config.retention_interval)
        except ValueError as wrong:
            raise ConfigError(f"retention_interval: {wrong}") from None
        self.cached: list[SingleTypeKVCacheManager] = [m for m in self.managers if m.prefix_cacheable]
        self.num_reserved: list[int] = [0] * len(self.pools)
        for at, manager in enumerate(self.managers):
            self.num_reserved[self.pool_of[at]] += manager.num_reserved_blocks
            inside = self.alignment % manager.block_size != 0
            manager.hits_end_inside = manager.supports_partial_boundaries and inside

    def version(self) -> int:
        """Grows with every change of any pool."""
        total = 0
        for pool in self.pools:
            total += int(pool.changes)
        return total

    def capacity(self, pool: int) -> int:
        """How many blocks of a pool requests can have at most."""
        return self.pools[pool].num_gpu_blocks - 1 - self.num_reserved[pool]

    def replay_boundary(self, num_prompt_tokens: int) -> int:
        """Where an equal prompt would resume if everything were cached, in tokens."""
        boundary = num_prompt_tokens
        for manager in self.cached:
            boundary = min(boundary, manager.replay_boundary(num_prompt_tokens, self.alignment))
        return boundary
