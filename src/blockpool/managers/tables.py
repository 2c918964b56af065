"""What a group keeps per request, its block table, and what a lookup hands over, the blocks of a hit."""

from __future__ import annotations

from typing import Final, final

from librt.vecs import append, vec
from mypy_extensions import i32, i64

from blockpool.pool.layout import FIELDS, FLAGS, HASHED, REF, TOKENS, TURN, Records


@final
class Table:
    """`blocks`: the ids in token order, 0 where nothing is kept; it only grows while the request runs.

    `num_registered`: how many of the leading ones were offered to the prefix index. `num_dropped`: the positions
    before it hold no block that could still be dropped. `num_scratch`: how many blocks at the end are for states of
    drafts. `has_tail`: the prompt's tail was offered too; `tail_block`: the block of a state group that was offered
    so and is written on, until its entry has moved elsewhere, else 0.
    `was_revoked`: a cancelled step took some of them back, which others may have too.
    """

    def __init__(self) -> None:
        self.blocks: vec[i32] = vec[i32]()
        self.num_registered: i64 = 0
        self.num_dropped: i64 = 0
        self.num_scratch: i64 = 0
        self.has_tail = False
        self.tail_block: i64 = 0
        self.was_revoked = False

    def __len__(self) -> int:
        return len(self.blocks)

    def extend(self, blocks: vec[i32]) -> None:
        table = self.blocks
        for b in blocks:
            table = append(table, b)
        self.blocks = table

    def extend_null(self, count: i64) -> None:
        table = self.blocks
        while count > 0:
            table = append(table, i32(0))
            count -= 1
        self.blocks = table

    def replace(self, position: i64, block: i32) -> i32:
        """Put a block at a position; what was there."""
        table = self.blocks
        old = table[position]
        table[position] = block
        return old

    def deepest_first(self) -> vec[i32]:
        table = self.blocks
        at: i64 = len(table)
        out = vec[i32](capacity=at)
        while at > 0:
            at -= 1
            out = append(out, table[at])
        return out

    def held_between(self, first: i64, last: i64) -> vec[i32]:
        """The blocks at positions first .. last-1, deepest first, without nulls."""
        table = self.blocks
        out = vec[i32]()
        while last > first:
            last -= 1
            if table[last] != 0:
                out = append(out, table[last])
        return out

    def num_kept(self) -> int:
        count: i64 = 0
        for b in self.blocks:
            if b != 0:
                count += 1
        return int(count)

    def forget_between(self, first: i64, last: i64) -> None:
        """Show null at positions first .. last-1."""
        table = self.blocks
        while first < last:
            table[first] = 0
            first += 1


@final
class GroupHit:
    """The blocks of a prefix hit in one group: resuming at `num_tokens` finds all it needs.

    `blocks` has an entry per position up to the hit's length, the last of which may be only partly covered; null (0)
    where nothing is needed: in all positions before `first`. `turns`: the incarnation that each had when found.
    """

    def __init__(self, blocks: vec[i32], turns: vec[i32], num_tokens: int, first: int = 0) -> None:
        self.blocks = blocks
        self.turns = turns
        self.num_tokens = num_tokens
        self.first = first

    def __len__(self) -> int:
        return len(self.blocks)

    def block_ids(self) -> list[int]:
        return list(self.blocks)

    def cut(self, num_tokens: int, block_size: int) -> GroupHit:
        """The shorter hit that ends at `num_tokens`, in a group whose usable boundaries are a prefix."""
        length: i64 = -(-num_tokens // block_size)
        return GroupHit(self.blocks[:length], self.turns[:length], num_tokens)

    def holds_still(self, records: Records, block_size: i64) -> bool:
        """Whether every block was not handed out since, and still has a hash that covers as much."""
        meta = records.meta
        base = records.base
        turns = self.turns
        blocks = self.blocks
        num_tokens: i64 = self.num_tokens
        at: i64 = self.first
        end: i64 = len(blocks)
        while at < end:
            b = i64(blocks[at])
            if b != 0:
                o = base + b * FIELDS
                if meta[o + TURN] != turns[at] or i64(meta[o + FLAGS]) & HASHED == 0:
                    return False
                if i64(meta[o + TOKENS]) < min((at + 1) * block_size, num_tokens):
                    return False
            at += 1
        return True

    def num_kept(self) -> int:
        """How many blocks there are, nulls not counted."""
        count: i64 = 0
        for b in self.blocks:
            if b != 0:
                count += 1
        return int(count)

    def num_evictable(self, records: Records) -> int:
        """How many of the blocks stand in the free queue."""
        meta = records.meta
        base = records.base
        blocks = self.blocks
        count: i64 = 0
        at: i64 = self.first
        end: i64 = len(blocks)
        while at < end:
            b = i64(blocks[at])
            if b != 0 and meta[base + b * FIELDS + REF] == 0:
                count += 1
            at += 1
        return count


NO_BLOCKS: Final = vec[i32]()
#: What a request without a hit adopts.
NOTHING_FOUND: Final = GroupHit(vec[i32](), vec[i32](), 0)
