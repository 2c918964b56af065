from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass(frozen=True)
class KVCacheSpec:
    block_size: int
    dcp_sharded = True


@dataclass(frozen=True)
class AttentionSpec(KVCacheSpec):
    pass


@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    pass


@dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
    sliding_window: int
    extra_retained_tokens: int = 0


@dataclass(frozen=True)
class CrossAttentionSpec(AttentionSpec):
    pass


@dataclass(frozen=True)
class CircularBufferSpec(AttentionSpec):
    pass


@dataclass(frozen=True)
class MambaSpec(KVCacheSpec):
    mamba_cache_mode: str = "align"
    num_speculative_blocks: int = 0
    num_prefill_checkpoint_blocks: int = 0
    dcp_sharded = False


class Kind(Enum):
    FULL = "full_attention"
    OTHER = "other"


def get_kv_cache_spec_kind(spec):
    return Kind.FULL if isinstance(spec, FullAttentionSpec) else Kind.OTHER


def get_kv_cache_spec_sliding_window(spec):
    return getattr(spec, "sliding_window", None)


@dataclass
class KVCacheGroupSpec:
    layer_names: list
    kv_cache_spec: KVCacheSpec
    is_eagle_group: bool = False
    host_resident: bool = False
    role: Any = "default"


@dataclass
class KVCacheConfig:
    num_blocks: int
    kv_cache_groups: list
    prefix_cache_retention_interval: int | None = None
    needs_kv_cache_zeroing: bool = True
    kv_cache_tensors: list = field(default_factory=list)
