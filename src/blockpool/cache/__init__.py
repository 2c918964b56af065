"""One request through all groups: look up, plan, commit, register, release.

The cache combines managers over pools; it knows no model, no worker and no clock.
"""

from blockpool.cache.block_copy import BlockCopy
from blockpool.cache.blocks import KVCacheBlocks
from blockpool.cache.config import KVCacheConfig
from blockpool.cache.errors import CacheError, ConfigError, RequestError, StalePlan, StepError
from blockpool.cache.hit import Hit, WhyNotMore
from blockpool.cache.manager import KVCacheManager
from blockpool.cache.pins import PinResult
from blockpool.cache.plan import EMPTY_PLAN, AllocationPlan, PoolRoom, Refusal, RefusalReason
from blockpool.cache.request import Request
from blockpool.cache.reset import CacheResetResult
from blockpool.cache.stats import PrefixCacheStats, StatsBook
from blockpool.cache.stored import StoredBlocks

__all__ = [
    "EMPTY_PLAN",
    "AllocationPlan",
    "BlockCopy",
    "CacheError",
    "CacheResetResult",
    "ConfigError",
    "Hit",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVCacheManager",
    "PinResult",
    "PoolRoom",
    "PrefixCacheStats",
    "Refusal",
    "RefusalReason",
    "Request",
    "RequestError",
    "StalePlan",
    "StatsBook",
    "StepError",
    "StoredBlocks",
    "WhyNotMore",
]
