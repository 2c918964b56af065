"""Lower tiers: pages of blocks in host memory, on disk and in a shared store, and the transfers between them.

They keep bytes under digests; they know no scheduler but the one connector, and nothing of what the bytes mean.
"""

from blockpool.offload.errors import OffloadError
from blockpool.offload.memory import BlockMemory
from blockpool.offload.namespace import Namespace
from blockpool.offload.offloader import LoadFailure, Offloader
from blockpool.offload.tier import Change, ChangeKind, Loaded, Stored, Tier, TierStats
from blockpool.offload.transfers import TransferEngine

__all__ = [
    "BlockMemory",
    "Change",
    "ChangeKind",
    "LoadFailure",
    "Loaded",
    "Namespace",
    "OffloadError",
    "Offloader",
    "Stored",
    "Tier",
    "TierStats",
    "TransferEngine",
]
