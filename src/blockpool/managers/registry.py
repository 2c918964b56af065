"""Which manager keeps the tables of which kind of spec."""

from __future__ import annotations

from typing import Final

from blockpool.managers.base import SingleTypeKVCacheManager
from blockpool.managers.chunked_local import ChunkedLocalAttentionManager
from blockpool.managers.circular_buffer import CircularBufferManager
from blockpool.managers.cross_attention import CrossAttentionManager
from blockpool.managers.errors import SpecError
from blockpool.managers.full_attention import FullAttentionManager
from blockpool.managers.mamba import MambaManager
from blockpool.managers.reference_window import ReferenceWindowManager
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
from blockpool.pool.block_pool import BlockPool

MANAGERS: Final[dict[type, type[SingleTypeKVCacheManager]]] = {
    FullAttentionSpec: FullAttentionManager,
    SlidingWindowSpec: SlidingWindowManager,
    ChunkedLocalAttentionSpec: ChunkedLocalAttentionManager,
    ReferenceWindowSpec: ReferenceWindowManager,
    MambaSpec: MambaManager,
    CircularBufferSpec: CircularBufferManager,
    CrossAttentionSpec: CrossAttentionManager,
    SinkFullAttentionSpec: SinkFullAttentionManager,
}


def register_manager(spec_class: type, manager_class: type) -> None:
    """From now on `manager_class` keeps the groups whose spec is a `spec_class`, or derived from it.

    Replaces what was registered for that class. Raises SpecError unless the one is a KVCacheSpec and the other a
    SingleTypeKVCacheManager.
    """
    if not isinstance(spec_class, type) or not issubclass(spec_class, KVCacheSpec):
        raise SpecError(f"spec_class must be a subclass of KVCacheSpec, not {spec_class!r}")
    if not isinstance(manager_class, type) or not issubclass(manager_class, SingleTypeKVCacheManager):
        raise SpecError(f"manager_class must be a subclass of SingleTypeKVCacheManager, not {manager_class!r}")
    MANAGERS[spec_class] = manager_class


def manager_class_of(spec: KVCacheSpec) -> type[SingleTypeKVCacheManager]:
    """The manager class of the nearest of a spec's classes that has one. Raises SpecError when none has."""
    for spec_class in type(spec).__mro__:
        found = MANAGERS.get(spec_class)
        if found is not None:
            return found
    raise SpecError(f"no manager is registered for {type(spec).__name__}: see register_manager")


def make_manager(pool: BlockPool, group_id: int, group: KVCacheGroupSpec) -> SingleTypeKVCacheManager:
    """The manager of a group, over the pool that its blocks come from."""
    return manager_class_of(group.kv_cache_spec)(pool, group_id, group)
