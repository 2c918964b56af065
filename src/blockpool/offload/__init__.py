"""Lower tiers: pages of blocks in host memory, on disk and in a shared store, and the transfers between them.

They keep bytes under digests; they know no scheduler but the one connector, and nothing of what the bytes mean.
"""

from blockpool.offload.arc import ArcPolicy
from blockpool.offload.disk import DiskTier
from blockpool.offload.errors import (
    DiskFileError,
    DiskFullError,
    DiskInUseError,
    KeyLengthError,
    MissingExtraError,
    OffloadError,
    PageError,
    PolicyError,
    ServerError,
    TierClosedError,
    TierError,
    TierSizeError,
)
from blockpool.offload.host import HostTier
from blockpool.offload.lru import LruPolicy
from blockpool.offload.memory import BlockMemory
from blockpool.offload.namespace import Namespace
from blockpool.offload.offloader import LoadFailure, Offloader
from blockpool.offload.policy import Policy
from blockpool.offload.tier import Change, ChangeKind, Loaded, Stored, Tier, TierStats
from blockpool.offload.transfers import TransferEngine
from blockpool.offload.valkey import ValkeyTier

__all__ = [
    "ArcPolicy",
    "BlockMemory",
    "Change",
    "ChangeKind",
    "DiskFileError",
    "DiskFullError",
    "DiskInUseError",
    "DiskTier",
    "HostTier",
    "KeyLengthError",
    "LoadFailure",
    "Loaded",
    "LruPolicy",
    "MissingExtraError",
    "Namespace",
    "OffloadError",
    "Offloader",
    "PageError",
    "Policy",
    "PolicyError",
    "ServerError",
    "Stored",
    "Tier",
    "TierClosedError",
    "TierError",
    "TierSizeError",
    "TierStats",
    "TransferEngine",
    "ValkeyTier",
]
