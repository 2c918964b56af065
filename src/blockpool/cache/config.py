"""What a cache is made of: its pools of blocks, and the groups of layers that share a block table."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from pathlib import Path
from typing import Any

import msgspec

from blockpool.cache.errors import ConfigError
from blockpool.managers import KVCacheGroupSpec


class KVCacheConfig(msgspec.Struct, frozen=True):
    """`num_blocks` counts the null block; a tuple has one number per pool, groups say which is theirs.

    `hash_block_size`: tokens per digest, by default the largest that fits the block size of every group that can be
    hit. `digest_size`: bytes per digest. `retention_interval`: which resume points window and state groups keep, see
    RetentionPolicy: None for all, r for one every r tokens, 0 for the prompts' own ends and shared prefixes alone.
    `partial_hits`: hits may end inside a block, where every group allows it and hash blocks are smaller; the worker
    copies such a block (`take_block_copies`).
    """

    num_blocks: int | tuple[int, ...]
    kv_cache_groups: tuple[KVCacheGroupSpec, ...]
    hash_block_size: int | None = None
    digest_size: int = 32
    retention_interval: int | None = None
    partial_hits: bool = True

    def __post_init__(self) -> None:
        if not self.pool_sizes or not all(is_int(size, 1) for size in self.pool_sizes):
            raise ConfigError(
                f"num_blocks must be an int of at least 1 (the null block), or one per pool, not {self.num_blocks!r}"
            )
        if not self.kv_cache_groups:
            raise ConfigError("a cache needs at least one group")
        if self.hash_block_size is not None and not is_int(self.hash_block_size, 1):
            raise ConfigError(f"hash_block_size must be an int of at least 1 token, not {self.hash_block_size!r}")
        if self.retention_interval is not None and not is_int(self.retention_interval, 0):
            raise ConfigError(
                f"retention_interval must be None or an int of at least 0 tokens, not {self.retention_interval!r}"
            )
        num_pools = len(self.pool_sizes)
        for group_id, group in enumerate(self.kv_cache_groups):
            if group.pool >= num_pools:
                raise ConfigError(f"group {group_id}: its pool is {group.pool}, num_blocks names {num_pools}")
            size = group.block_size
            if group.kv_cache_spec.prefix_cacheable and size % self.unit != 0:
                raise ConfigError(
                    f"group {group_id}: block size {size} is not a multiple of the hash block size {self.unit}"
                )
        for pool in range(num_pools):
            if all(group.pool != pool for group in self.kv_cache_groups):
                raise ConfigError(f"pool {pool} belongs to no group")

    @classmethod
    def from_hf_config(
        cls,
        source: str | Path | Mapping[str, Any],
        *,
        memory_bytes: int,
        block_size: int = 16,
        hash_block_size: int | None = None,
        digest_size: int = 32,
        retention_interval: int | None = None,
        partial_hits: bool = True,
        **options: Any,
    ) -> KVCacheConfig:
        """The cache of a model in so many bytes on each rank, planned as vLLM plans it.

        `source`: its `config.json` (file, folder or content), or its name, see `blockpool.models.find_model`.
        `block_size`: see `blockpool.models.lay_out`. `options`: those of `blockpool.models.read_model`, such as
        `kv_cache_dtype` and `tensor_parallel_size`. Raises `blockpool.models.ModelError`, and ConfigError.
        """
        from blockpool.models import lay_out, read_model  # whoever has groups needs no models

        if not is_int(memory_bytes, 0):
            raise ConfigError(f"memory_bytes must be an int of at least 0 bytes, not {memory_bytes!r}")
        layout = lay_out(read_model(source, **options), block_size=block_size)
        return cls(
            layout.num_blocks(memory_bytes),
            layout.kv_cache_groups,
            hash_block_size=hash_block_size,
            digest_size=digest_size,
            retention_interval=retention_interval,
            partial_hits=partial_hits,
        )

    @property
    def pool_sizes(self) -> tuple[int, ...]:
        """Blocks per pool, the null block counted."""
        return self.num_blocks if isinstance(self.num_blocks, tuple) else (self.num_blocks,)

    @property
    def unit(self) -> int:
        """Tokens per digest."""
        if self.hash_block_size is not None:
            return self.hash_block_size
        groups = self.kv_cache_groups
        cached = [group for group in groups if group.kv_cache_spec.prefix_cacheable]
        return gcd(*(group.block_size for group in cached or groups))


def is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
