"""What a cache is made of: the number of blocks, and the groups of layers that share a block table."""

from __future__ import annotations

from math import gcd

import msgspec

from blockpool.cache.errors import ConfigError
from blockpool.managers import KVCacheGroupSpec


class KVCacheConfig(msgspec.Struct, frozen=True):
    """`num_blocks` counts the null block. `hash_block_size`: tokens per digest, by default the largest that fits
    every group's block size. `digest_size`: bytes per digest.
    """

    num_blocks: int
    kv_cache_groups: tuple[KVCacheGroupSpec, ...]
    hash_block_size: int | None = None
    digest_size: int = 32

    def __post_init__(self) -> None:
        if not isinstance(self.num_blocks, int) or self.num_blocks < 1:
            raise ConfigError(f"num_blocks must be an int of at least 1 (the null block), not {self.num_blocks!r}")
        if not self.kv_cache_groups:
            raise ConfigError("a cache needs at least one group")
        if self.hash_block_size is not None:
            if not isinstance(self.hash_block_size, int) or self.hash_block_size < 1:
                raise ConfigError(f"hash_block_size must be an int of at least 1 token, not {self.hash_block_size!r}")
        for group in self.kv_cache_groups:
            size = group.block_size
            if size % self.unit != 0:
                raise ConfigError(f"block size {size} is not a multiple of the hash block size {self.unit}")

    @property
    def unit(self) -> int:
        """Tokens per digest."""
        if self.hash_block_size is not None:
            return self.hash_block_size
        return gcd(*(group.block_size for group in self.kv_cache_groups))
