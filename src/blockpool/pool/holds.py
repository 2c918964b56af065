"""Holds: references that an owner keeps until it releases them, a time comes or a fence is reached; ended once."""

from __future__ import annotations

from math import isfinite, nan
from typing import Any, SupportsFloat, SupportsIndex, final

from librt.vecs import append, vec
from mypy_extensions import i32, i64

from blockpool.pool.door import Door
from blockpool.pool.errors import HoldError
from blockpool.pool.layout import FLAGS, HELD, TURN, Records


@final
class Hold:
    """What `BlockPool.hold` returns: one reference on each of `blocks`, kept by `owner`.

    `until`: the time from which `expire_holds` ends it. `after`: the fence that ends it. Both None: only `release`
    does. `released`: it has ended, in whatever way.
    """

    def __init__(
        self, number: int, door: Door, ids: vec[i32], owner: str, until: float | None, after: int | None
    ) -> None:
        turns = vec[i32](capacity=len(ids))
        for b in ids:
            turns = append(turns, i32(door.records.get(i64(b), TURN)))
        self.number = number  # rises with every hold of the pool
        self.door = door  # not the pool: that would be a cycle
        self.ids = ids
        self.turns = turns
        self.owner = owner
        self.until = until
        self.after = after
        self.released = False

    @property
    def blocks(self) -> list[int]:
        """The ids in the order in which they are given back, without the null block."""
        return [int(b) for b in self.ids]

    @property
    def incarnations(self) -> list[int]:
        """Per block, how often it had been handed out when the hold was made."""
        return [int(turn) for turn in self.turns]

    def still_holds(self, block: SupportsIndex) -> bool:
        """Whether the block has not been handed out since the hold was made, so that it holds what it held then.

        True while the hold lasts, and until the block is handed out again. Raises HoldError for a block that is not
        one of the hold's.
        """
        wanted = self.door.own_id(block)
        at: i64 = 0
        for b in self.ids:
            if i64(b) == wanted:
                return self.door.records.get(wanted, TURN) == i64(self.turns[at])
            at += 1
        raise HoldError(f"block {wanted} is not in the hold of {self.owner!r}")

    def __repr__(self) -> str:
        end = "" if self.until is None else f", until={self.until}"
        if self.after is not None:
            end = f", after={self.after}"
        return f"Hold({self.owner!r}, {self.blocks}{end}{', released' if self.released else ''})"


@final
class Holds:
    """The holds of a pool that have not ended, and the references that those without a fence keep.

    (The references of a hold until a fence are pending: they are in the books of the fences.)
    """

    def __init__(self, records: Records) -> None:
        self.records = records
        self.open: dict[int, Hold] = {}  # number -> hold, in the order of their making
        self.counts: dict[int, int] = {}  # block -> references
        self.num_made = 0
        self.num_late_releases = 0

    def count(self, block: int) -> int:
        return self.counts.get(block, 0)

    def make(self, door: Door, ids: vec[i32], owner: str, until: float | None, after: int | None) -> Hold:
        """A hold that is not in the books yet."""
        self.num_made += 1
        return Hold(self.num_made, door, ids, owner, until, after)

    def enter(self, hold: Hold) -> None:
        self.open[hold.number] = hold
        if hold.after is not None:
            return
        records = self.records
        counts = self.counts
        for b in hold.ids:
            block: int = int(b)
            counts[block] = counts.get(block, 0) + 1
            records.set(i64(b), FLAGS, records.get(i64(b), FLAGS) | HELD)

    def leave(self, hold: Hold) -> None:
        """The hold has ended: its references are nobody's, for the pool to take away."""
        del self.open[hold.number]
        hold.released = True
        if hold.after is not None:
            return
        records = self.records
        for b in hold.ids:
            block: int = int(b)
            left = self.counts[block] - 1
            if left:
                self.counts[block] = left
            else:
                del self.counts[block]
                records.set(i64(b), FLAGS, records.get(i64(b), FLAGS) & ~HELD)

    def due(self, now: float) -> list[Hold]:
        """The holds whose time has come, in the order of their times, then of their making."""
        found: list[tuple[float, int, Hold]] = []
        for number, hold in self.open.items():
            until = hold.until
            if until is not None and until <= now:
                found.append((until, number, hold))
        found.sort()
        return [hold for _, _, hold in found]

    def num_pinned(self) -> int:
        """Blocks that a hold without a fence keeps."""
        return len(self.counts)

    def by_owner(self) -> dict[str, int]:
        """Owner -> the number of blocks that it keeps."""
        blocks: dict[str, set[int]] = {}
        for hold in self.open.values():
            if len(hold.ids):
                blocks.setdefault(hold.owner, set()).update(hold.blocks)
        return {owner: len(ids) for owner, ids in blocks.items()}

    def listing(self) -> list[dict[str, Any]]:
        return [
            {
                "owner": hold.owner,
                "until": hold.until,
                "after": hold.after,
                "blocks": hold.blocks,
                "incarnations": hold.incarnations,
                "released": hold.released,
            }
            for hold in self.open.values()
        ]


def checked_time(until: SupportsFloat | None) -> float | None:
    if until is None:
        return None
    try:
        time = float(until) if isinstance(until, SupportsFloat) else nan
    except OverflowError:
        time = nan
    if not isfinite(time):
        raise HoldError(f"a hold ends at a finite time, not at {until!r}")
    return time
