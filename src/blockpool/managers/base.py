"""One kind of attention: four questions that each kind answers, and what follows from the answers.

A kind says which blocks a resume point needs, what its tokens no longer read, what is worth registering and
how many blocks hold a length. Looking up, taking, registering and giving back are written once, here.
"""

from __future__ import annotations

from librt.vecs import append, vec
from mypy_extensions import i32, i64

from blockpool.managers.tables import NOTHING_FOUND, GroupHit, Table
from blockpool.pool.block_pool import BlockPool
from blockpool.pool.events import StorePayload
from blockpool.pool.layout import FIELDS, FLAGS, HASHED, REF, TOKENS, TURN


class SingleTypeKVCacheManager:
    """The tables of one group over one pool. `block_size` in tokens, a multiple of the pool's hash_block_size."""

    def __init__(self, pool: BlockPool, group_id: int, block_size: int) -> None:
        if block_size < 1 or block_size % pool.hash_block_size != 0:
            raise ValueError(
                f"group {group_id}: block_size {block_size} is not a multiple of the pool's hash block size"
                f" {pool.hash_block_size}"
            )
        self.pool = pool
        self.group_id = group_id
        self.block_size = block_size
        self.factor: int = block_size // pool.hash_block_size
        self.tables: dict[str, Table] = {}

    # -- the four questions --------------------------------------------------------------------------

    def needed(self, boundary: int) -> range:
        """The block positions that must be resident so that computation can resume at token `boundary`."""
        raise NotImplementedError

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """How many leading tokens the next token no longer reads."""
        raise NotImplementedError

    def retained(self, first: int, last: int) -> list[bool] | None:
        """Which of the full blocks first .. last-1 are worth registering; None means all of them."""
        raise NotImplementedError

    def num_blocks(self, num_tokens: int) -> int:
        """How many blocks hold that many tokens of one request."""
        raise NotImplementedError

    # -- looking up ----------------------------------------------------------------------------------

    def find_longest_hit(self, digests: bytes, max_length: int) -> GroupHit:
        """The longest run of cached blocks from the start of a chain, at most `max_length` tokens. Read only."""
        factor: i64 = self.factor
        most = min(i64(max_length) // self.block_size, i64(len(digests)) // self.pool.digest_size // factor)
        if most == 0:
            return NOTHING_FOUND
        blocks = self.pool.lookup_vec(digests, factor - 1, most * factor, factor, self.group_id)
        meta = self.pool.records.meta
        base = self.pool.records.base
        turns = vec[i32](capacity=len(blocks))
        for b in blocks:
            turns = append(turns, meta[base + i64(b) * FIELDS + TURN])
        return GroupHit(blocks, turns)

    def shortened(self, hit: GroupHit, num_blocks: int) -> GroupHit:
        """The first `num_blocks` positions of a hit."""
        return GroupHit(hit.blocks[:num_blocks], hit.turns[:num_blocks])

    def holds_still(self, hit: GroupHit) -> bool:
        """Whether every block of a hit still has a hash and was not handed out since."""
        meta = self.pool.records.meta
        base = self.pool.records.base
        turns = hit.turns
        at: i64 = 0
        for b in hit.blocks:
            o = base + i64(b) * FIELDS
            if meta[o + TURN] != turns[at] or i64(meta[o + FLAGS]) & HASHED == 0:
                return False
            at += 1
        return True

    def num_evictable(self, hit: GroupHit) -> int:
        """How many blocks of a hit stand in the free queue: adopting one takes it from what is free."""
        meta = self.pool.records.meta
        base = self.pool.records.base
        count: i64 = 0
        for b in hit.blocks:
            if meta[base + i64(b) * FIELDS + REF] == 0:
                count += 1
        return count

    # -- holding -------------------------------------------------------------------------------------

    def num_held(self, request_id: str) -> int:
        """Length of the request's table, in blocks; 0 for an unknown request."""
        table = self.tables.get(request_id)
        return 0 if table is None else len(table)

    def is_registered(self, request_id: str, num_tokens: int) -> bool:
        """Whether every block that is full at `num_tokens` was offered to the index already."""
        table = self.tables.get(request_id)
        return table is not None and table.num_registered >= num_tokens // self.block_size

    def block_ids(self, request_id: str) -> list[int]:
        """The request's table; empty for an unknown request."""
        table = self.tables.get(request_id)
        return [] if table is None else list(table.blocks)

    def adopt(self, request_id: str, hit: GroupHit) -> None:
        """Start a request's table with a hit: one more reference on each of its blocks."""
        self.pool.touch_vec(hit.blocks)
        table = Table()
        table.extend(hit.blocks)
        table.num_registered = len(hit.blocks)
        self.tables[request_id] = table

    def allocate(self, request_id: str, num_blocks: int) -> vec[i32]:
        """Append new blocks to a request's table."""
        blocks = self.pool.take(num_blocks)
        self.tables[request_id].extend(blocks)
        return blocks

    # -- registering ---------------------------------------------------------------------------------

    def unregistered(self, request_id: str, num_tokens: int, num_digests: int) -> range:
        """The positions that are full at `num_tokens`, have a digest and were not offered to the index yet."""
        table = self.tables.get(request_id)
        if table is None:
            return range(0)
        last = min(num_tokens // self.block_size, num_digests // self.factor, len(table))
        return range(int(table.num_registered), max(last, int(table.num_registered)))

    def register(
        self,
        request_id: str,
        first: int,
        last: int,
        digests: bytes,
        first_digest: int,
        payload: StorePayload | None,
    ) -> vec[i32]:
        """Offer the blocks first .. last-1 of a table to the index; `digests` starts at digest `first_digest`.

        Returns the blocks that were registered.
        """
        table = self.tables[request_id]
        blocks = table.blocks[first:last]
        mask = self.retained(first, last)
        if mask is not None:
            at: i64 = 0
            for keep in mask:
                if not keep:
                    blocks[at] = 0
                at += 1
        if table.was_revoked:
            self.skip_registered(blocks, first)
        self.pool.register(blocks, digests, first_digest, first, self.block_size, self.group_id, payload)
        table.num_registered = last
        return blocks

    def skip_registered(self, blocks: vec[i32], first: i64) -> None:
        """After a revocation, requests that share a block offer it both: the second finds it registered."""
        records = self.pool.records
        at: i64 = 0
        for b in blocks:
            covered = (first + at + 1) * self.block_size
            if b != 0 and records.get(i64(b), FLAGS) & HASHED and records.get(i64(b), TOKENS) == covered:
                blocks[at] = 0
            at += 1

    def unregister(self, revoked: list[int]) -> None:
        """These blocks lost their hashes: every table that has one offers it again when its time comes."""
        gone = set(revoked)
        for table in self.tables.values():
            at: i64 = 0
            for b in table.blocks:
                if int(b) in gone and at < table.num_registered:
                    table.num_registered = at
                    table.was_revoked = True
                    break
                at += 1
