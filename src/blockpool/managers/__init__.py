"""Policy: what one kind of attention needs, keeps, drops and can reuse.

A manager keeps one group's block tables over a pool; it knows no other group, no token and no clock.
"""

from blockpool.managers.base import SingleTypeKVCacheManager
from blockpool.managers.chunked_local import ChunkedLocalAttentionManager
from blockpool.managers.circular_buffer import CircularBufferManager
from blockpool.managers.coordinator import CommonHit, Coordinator
from blockpool.managers.cross_attention import CrossAttentionManager
from blockpool.managers.errors import SpecError
from blockpool.managers.full_attention import FullAttentionManager
from blockpool.managers.mamba import MambaManager
from blockpool.managers.reference_window import ReferenceWindowManager
from blockpool.managers.registry import make_manager, manager_class_of, register_manager
from blockpool.managers.retention import RetentionPolicy
from blockpool.managers.sink_attention import SinkFullAttentionManager
from blockpool.managers.sliding_window import SlidingWindowManager
from blockpool.managers.specs import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    ReferenceWindowSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from blockpool.managers.tables import NOTHING_FOUND, GroupHit, Table

__all__ = [
    "NOTHING_FOUND",
    "ChunkedLocalAttentionManager",
    "ChunkedLocalAttentionSpec",
    "CircularBufferManager",
    "CircularBufferSpec",
    "CommonHit",
    "Coordinator",
    "CrossAttentionManager",
    "CrossAttentionSpec",
    "FullAttentionManager",
    "FullAttentionSpec",
    "GroupHit",
    "KVCacheGroupSpec",
    "KVCacheSpec",
    "MambaManager",
    "MambaSpec",
    "ReferenceWindowManager",
    "ReferenceWindowSpec",
    "RetentionPolicy",
    "SingleTypeKVCacheManager",
    "SinkFullAttentionManager",
    "SinkFullAttentionSpec",
    "SlidingWindowManager",
    "SlidingWindowSpec",
    "SpecError",
    "Table",
    "make_manager",
    "manager_class_of",
    "register_manager",
]
