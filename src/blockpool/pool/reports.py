"""What a pool answers about itself: usage, counters, the outcome of a reset. Plain values, not compiled."""

from __future__ import annotations

from typing import Protocol

import msgspec


class Usage(msgspec.Struct, frozen=True):
    """How the allocatable blocks divide: free + deferred + held is all of them.

    `cached` counts those of the free ones that can still be hit; `deferred` those whose every reference waits
    for a fence; `pinned` those of the held ones that holds without a fence keep.
    """

    free: int
    cached: int
    deferred: int
    held: int
    pinned: int = 0


class Counters(msgspec.Struct, frozen=True):
    """Blocks since the pool was made.

    `evicted_blocks`: handed out while they had a hash; `evicted_unused_blocks`: those of them that nobody had
    touched since they got it. `late_releases`: how often a hold was released that had ended before.
    `evicted_by_group`: the evicted ones by the group of their first hash, groups that lost none left out.
    """

    allocated_blocks: int
    evicted_blocks: int
    evicted_unused_blocks: int
    late_releases: int = 0
    evicted_by_group: dict[int, int] = {}


class ResetResult(msgspec.Struct, frozen=True):
    """True when the prefix cache was emptied; else how many blocks stand in the way.

    `holds`: the owners of holds, with the number of blocks that each keeps.
    """

    num_blocks_in_use: int = 0
    num_blocks_deferred: int = 0
    holds: dict[str, int] = {}

    def __bool__(self) -> bool:
        return self.num_blocks_in_use == 0


class PoolMetrics(Protocol):
    """Hooks that a pool calls after each operation; sampling is the collector's business."""

    def on_allocated(self, block_id: int) -> None:
        """The block was handed out."""

    def on_accessed(self, block_id: int) -> None:
        """The block was touched."""

    def on_evicted(self, block_id: int, had_hash: bool) -> None:
        """The block was handed out (`had_hash`: and lost its hashes by that), or its hashes were dropped."""
