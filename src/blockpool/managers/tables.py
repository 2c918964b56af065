"""A request's block table in one group: ids in token order, append-only while the request runs."""

from __future__ import annotations

from typing import Final, final

from librt.vecs import append, vec
from mypy_extensions import i32, i64


@final
class Table:
    """`blocks`: the ids. `num_registered`: how many of the leading ones were offered to the prefix index.

    `was_revoked`: a cancelled step took some of them back, which others may have too.
    """

    def __init__(self) -> None:
        self.blocks: vec[i32] = vec[i32]()
        self.num_registered: i64 = 0
        self.was_revoked = False

    def __len__(self) -> int:
        return len(self.blocks)

    def extend(self, blocks: vec[i32]) -> None:
        table = self.blocks
        for b in blocks:
            table = append(table, b)
        self.blocks = table

    def deepest_first(self) -> vec[i32]:
        table = self.blocks
        at: i64 = len(table)
        out = vec[i32](capacity=at)
        while at > 0:
            at -= 1
            out = append(out, table[at])
        return out


@final
class GroupHit:
    """The blocks of a prefix hit in one group, one per position, and the incarnation each had when found."""

    def __init__(self, blocks: vec[i32], turns: vec[i32]) -> None:
        self.blocks = blocks
        self.turns = turns

    def __len__(self) -> int:
        return len(self.blocks)

    def block_ids(self) -> list[int]:
        return list(self.blocks)


#: What a request without a hit adopts.
NOTHING_FOUND: Final = GroupHit(vec[i32](), vec[i32]())
