"""Policy: what one kind of attention needs, keeps, drops and can reuse.

A manager keeps one group's block tables over a pool; it knows no other group, no token and no clock.
"""

from blockpool.managers.base import SingleTypeKVCacheManager
from blockpool.managers.full_attention import FullAttentionManager
from blockpool.managers.specs import FullAttentionSpec, KVCacheGroupSpec
from blockpool.managers.tables import NOTHING_FOUND, GroupHit, Table

__all__ = [
    "NOTHING_FOUND",
    "FullAttentionManager",
    "FullAttentionSpec",
    "GroupHit",
    "KVCacheGroupSpec",
    "SingleTypeKVCacheManager",
    "Table",
]
