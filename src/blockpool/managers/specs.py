"""What a model says about one kind of attention: the spec of a group of layers. Plain values, not compiled."""

from __future__ import annotations

import msgspec


class FullAttentionSpec(msgspec.Struct, frozen=True):
    """Every token reads all tokens before it (also MLA latents and indexer caches). `block_size` in tokens."""

    block_size: int

    def __post_init__(self) -> None:
        if not isinstance(self.block_size, int) or self.block_size < 1:
            raise ValueError(f"block_size must be an int of at least 1 token, not {self.block_size!r}")


class KVCacheGroupSpec(msgspec.Struct, frozen=True):
    """The layers that share one kind of attention, and so one block table per request."""

    layer_names: tuple[str, ...]
    kv_cache_spec: FullAttentionSpec
