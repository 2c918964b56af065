"""Deferred release: references that end when a fence is reached, in the order of the calls that gave them."""

from __future__ import annotations

from typing import final

from librt.vecs import vec
from mypy_extensions import i32, i64

from blockpool.pool.holds import Hold
from blockpool.pool.layout import FLAGS, PENDING, REF, Records


@final
class Release:
    """The blocks of one `free_blocks(..., after=fence)`, or of one hold until a fence."""

    def __init__(self, fence: int, blocks: vec[i32], hold: Hold | None) -> None:
        self.fence = fence
        self.blocks = blocks
        self.hold = hold


@final
class Fences:
    def __init__(self, records: Records) -> None:
        self.records = records
        self.reached = -1
        self.releases: list[Release] = []
        self.counts: dict[int, int] = {}  # block -> pending references

    def count(self, block: int) -> int:
        return self.counts.get(block, 0)

    def defer(self, fence: int, blocks: vec[i32], hold: Hold | None = None) -> None:
        records = self.records
        counts = self.counts
        for b in blocks:
            block: int = int(b)
            counts[block] = counts.get(block, 0) + 1
            records.set(i64(b), FLAGS, records.get(i64(b), FLAGS) | PENDING)
        self.releases.append(Release(fence, blocks, hold))

    def reach(self, fence: int) -> list[Release]:
        """The releases that are due, no longer pending, in the order of their calls."""
        self.reached = fence
        due = [release for release in self.releases if release.fence <= fence]
        if due:
            self.releases = [release for release in self.releases if release.fence > fence]
        for release in due:
            self.settle(release.blocks)
        return due

    def withdraw(self, hold: Hold) -> None:
        """The hold ends before its fence: its references are no longer pending."""
        self.releases = [release for release in self.releases if release.hold is not hold]
        self.settle(hold.ids)

    def withdraw_fence(self, fence: int, earlier: int | None) -> list[Release]:
        """What waited for one fence waits for an earlier one; without one, it is returned, no longer pending."""
        waiting = [release for release in self.releases if release.fence == fence]
        if earlier is not None:
            for release in waiting:
                release.fence = earlier
                if release.hold is not None:
                    release.hold.after = earlier
            return []
        self.releases = [release for release in self.releases if release.fence != fence]
        for release in waiting:
            self.settle(release.blocks)
        return waiting

    def settle(self, blocks: vec[i32]) -> None:
        records = self.records
        for b in blocks:
            block: int = int(b)
            left = self.counts[block] - 1
            if left:
                self.counts[block] = left
            else:
                del self.counts[block]
                records.set(i64(b), FLAGS, records.get(i64(b), FLAGS) & ~PENDING)

    def num_deferred(self) -> int:
        """Blocks whose every reference is pending."""
        total = 0
        for block, pending in self.counts.items():
            if int(self.records.get(block, REF)) == pending:
                total += 1
        return total

    def next_fence(self) -> int | None:
        """The lowest fence that would release anything, or None."""
        return min([release.fence for release in self.releases if len(release.blocks)], default=None)

    def deferred_until(self) -> dict[int, int]:
        """The blocks whose every reference is pending, with the fence that frees each."""
        until: dict[int, int] = {}
        for release in self.releases:
            for b in release.blocks:
                block: int = int(b)
                if self.counts[block] == int(self.records.get(block, REF)):
                    until[block] = max(until.get(block, -1), release.fence)
        return until
