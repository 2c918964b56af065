"""Mechanism: block ids, reference counts, order and digests, kept as arrays of integers.

A pool knows no token, request or model, and it decides nothing: it offers atomic operations that
managers combine.
"""

from blockpool.pool.audit import Fault, audit_dump
from blockpool.pool.block import BlockSequence, KVCacheBlock
from blockpool.pool.block_pool import BlockPool
from blockpool.pool.errors import (
    AlreadyHashedError,
    BlockPoolError,
    BoundaryError,
    CachingDisabledError,
    DigestError,
    DumpError,
    FenceError,
    ForeignBlockError,
    GroupError,
    HoldError,
    MaskError,
    NoClockError,
    NoFreeBlocksError,
    NullBlockError,
    PoolBusyError,
    QueueError,
    ReleaseError,
    UnknownBlockError,
)
from blockpool.pool.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, StorePayload
from blockpool.pool.holds import Hold
from blockpool.pool.index import BlockHashToBlockMap
from blockpool.pool.queue import FreeKVCacheBlockQueue
from blockpool.pool.reports import Counters, PoolMetrics, ResetResult, Usage
from blockpool.pool.reuse import ReuseHandle

# A compiled class fills the slot behind operator.index() only when the method is assigned from outside.
KVCacheBlock.__index__ = KVCacheBlock.__index__  # type: ignore[method-assign]

__all__ = [
    "AllBlocksCleared",
    "AlreadyHashedError",
    "BlockHashToBlockMap",
    "BlockPool",
    "BlockPoolError",
    "BlockRemoved",
    "BlockSequence",
    "BlockStored",
    "BoundaryError",
    "CachingDisabledError",
    "Counters",
    "DigestError",
    "DumpError",
    "Fault",
    "FenceError",
    "ForeignBlockError",
    "FreeKVCacheBlockQueue",
    "GroupError",
    "Hold",
    "HoldError",
    "KVCacheBlock",
    "KVCacheEvent",
    "MaskError",
    "NoClockError",
    "NoFreeBlocksError",
    "NullBlockError",
    "PoolBusyError",
    "PoolMetrics",
    "QueueError",
    "ReleaseError",
    "ResetResult",
    "ReuseHandle",
    "StorePayload",
    "UnknownBlockError",
    "Usage",
    "audit_dump",
]
