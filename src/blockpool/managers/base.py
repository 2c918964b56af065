"""One kind of attention: four questions that each kind answers, and what follows from the answers.

A kind says which blocks a resume point needs, what its tokens no longer read, what is worth registering and
how many blocks hold a length. Looking up, taking, registering, dropping and giving back are written once, here and in
`resume`, `lookup` and `retention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex

from librt.vecs import vec
from mypy_extensions import i32, i64, mypyc_attr

from blockpool.managers.errors import SpecError
from blockpool.managers.lookup import longest_hit
from blockpool.managers.resume import margin_behind, step_between
from blockpool.managers.retention import RetentionPolicy, worth_registering
from blockpool.managers.specs import KVCacheGroupSpec
from blockpool.managers.tables import NO_BLOCKS, NOTHING_FOUND, GroupHit, Table
from blockpool.pool.block_pool import MOST_TOKENS, BlockPool
from blockpool.pool.events import StorePayload
from blockpool.pool.layout import FLAGS, HASHED, REF, TOKENS

NO_POSITIONS = range(0)


@mypyc_attr(allow_interpreted_subclasses=True)
class SingleTypeKVCacheManager:
    """The tables of one group over one pool. To be subclassed, see docs/guides/write_a_manager.md.

    `block_size`: tokens per position of a table (all ranks), for a group that is cached a multiple of the pool's
    hash_block_size; `factor`: digests per block. Facts about the kind, which a subclass may set when it is made:

    `prefix_cacheable`: its blocks can be found again; else it takes no part in lookups and registers nothing.
    `supports_partial_boundaries`: it can resume inside a block, from a copy of it.
    `findable_at_acknowledgement`: full blocks may be found only when the step that writes them has run, not already
    by what runs after it.

    Raises SpecError when the spec does not fit the pool.
    """

    def __init__(self, pool: BlockPool, group_id: int, group: KVCacheGroupSpec) -> None:
        spec = group.kv_cache_spec
        size = group.block_size
        if spec.prefix_cacheable and size % pool.hash_block_size != 0:
            raise SpecError(
                f"group {group_id}: block_size {size} is not a multiple of the pool's hash block size"
                f" {pool.hash_block_size}"
            )
        self.pool = pool
        self.group_id = group_id
        self.block_size = size
        self.factor: int = size // pool.hash_block_size
        self.is_state: bool = spec.is_state
        self.draft_margin = group.draft_margin
        self.prefix_cacheable: bool = spec.prefix_cacheable
        self.supports_partial_boundaries = False
        self.hits_end_inside = False  # whether the cache that it is part of has hits which end inside its blocks
        self.findable_at_acknowledgement: bool = spec.is_state
        self.max_steps_in_flight = 1  # that the engine has at a time: the cache that it is part of says so
        self.num_reserved_blocks = 0  # taken at start-up, for all requests
        self.tables: dict[str, Table] = {}
        # What a lookup takes for cached, digest -> block, while it is asked what will be found after steps in flight.
        self.awaited: dict[bytes, int] | None = None
        self.needs_what_is_read: bool = type(self).needed is SingleTypeKVCacheManager.needed
        self._reads_whole_prefix = -1  # not asked yet

    # -- the four questions --------------------------------------------------------------------------

    def needed(self, boundary: int) -> range:
        """The block positions that must be cached so that computation can resume at token `boundary`.

        They end with the boundary's own block: range(…, ceil(boundary / block_size)), or are none; a larger boundary
        never starts earlier. Unless a kind says otherwise: the blocks of the tokens that are still read.
        """
        size = self.block_size
        return range(self.num_skipped_tokens(boundary) // size, -(-boundary // size))

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """How many leading tokens the next token no longer reads; never falls."""
        raise NotImplementedError(f"{type(self).__name__}.num_skipped_tokens")

    def retained(
        self, first: int, last: int, boundaries: Sequence[int], policy: RetentionPolicy
    ) -> list[bool] | None:
        """Which of the full blocks first .. last-1 are worth registering; None means all of them.

        Those that `needed` names for a boundary that the policy, or `boundaries` (in tokens, aligned down), promise
        to later requests. Kinds that read the whole prefix keep all.
        """
        if self.reads_whole_prefix():
            return None
        return worth_registering(self, first, last, boundaries, policy)

    def num_blocks(self, num_tokens: int, num_prompt_tokens: int = 0, num_encoder_tokens: int = 0) -> int:
        """How many blocks a request needs that computes so many tokens at once."""
        raise NotImplementedError(f"{type(self).__name__}.num_blocks")

    # -- what follows from them, where a kind may know better ----------------------------------------------

    def unread(self, num_computed_tokens: int, num_prompt_tokens: int) -> tuple[int, int]:
        """The positions first .. end-1 of a table that no later token reads."""
        return 0, self.num_skipped_tokens(num_computed_tokens) // self.block_size

    def most_blocks(self, max_model_len: int, max_in_flight_tokens: int, num_prompt_tokens: int = 0) -> int | None:
        """How many blocks a request can hold at a time, given that it drops what it no longer reads.

        `max_in_flight_tokens`: computed or being computed, but not settled. None: nothing is dropped, no cap.
        """
        return None

    def recycling_cap(self, num_read_tokens: int, max_model_len: int, max_in_flight_tokens: int) -> int:
        """Blocks for so many read tokens and those in flight, wherever in a block they start."""
        size = self.block_size
        most = -(-min(num_read_tokens + max_in_flight_tokens, max_model_len) // size) + 1
        return min(most, -(-max_model_len // size))

    def table_length(self, num_tokens: int, num_prompt_tokens: int = 0, num_encoder_tokens: int = 0) -> int:
        """How many positions a table for so many tokens has, nulls included."""
        return self.num_blocks(num_tokens, num_prompt_tokens, num_encoder_tokens)

    def reads_whole_prefix(self) -> bool:
        """Whether a resume point needs every block before it, however far it is."""
        if self._reads_whole_prefix < 0:
            far = MOST_TOKENS - MOST_TOKENS % self.block_size
            blocks = self.needed(far)
            self._reads_whole_prefix = int(len(blocks) > 0 and blocks.start == 0)
        return self._reads_whole_prefix == 1

    # -- looking up ----------------------------------------------------------------------------------

    def find_longest_hit(self, digests: bytes, max_length: int, alignment: int) -> GroupHit:
        """The cached blocks for the greatest boundary that can be resumed at. Read only.

        `digests`: a chain's buffer from digest 0 on. The boundary is at most `max_length` tokens, at most what the
        digests cover, a multiple of `alignment` and of block_size (of the hash block size where the kind can resume
        inside a block and the alignment allows it). With a draft margin one more unit behind it is cached too,
        which may lie beyond max_length. Each block is looked at once at most.
        """
        if not self.prefix_cacheable:
            return NOTHING_FOUND
        return longest_hit(self, digests, max_length, alignment)

    def holds_still(self, hit: GroupHit) -> bool:
        """Whether every block of a hit still has a hash and was not handed out since; a state, that very hash."""
        if not hit.holds_still(self.pool.records, self.block_size):
            return False
        if not self.is_state or len(hit) == 0:
            return True
        hashes = self.pool.get_block_hashes(int(hit.blocks[len(hit) - 1]))
        return any(covered == hit.num_tokens for _, covered in hashes)

    def num_evictable(self, hit: GroupHit) -> int:
        """How many blocks of a hit stand in the free queue: adopting one takes it from what is free."""
        return hit.num_evictable(self.pool.records)

    def replay_boundary(self, num_prompt_tokens: int, alignment: int) -> int:
        """Where an equal prompt would resume if everything were cached: all but its last token, aligned down.

        What all groups of a model keep is the least of their answers.
        """
        step = step_between(self, alignment)
        hashed = num_prompt_tokens - num_prompt_tokens % self.pool.hash_block_size
        most = min(num_prompt_tokens - 1, hashed - margin_behind(self, step))
        return max(0, most - most % step)

    # -- holding -------------------------------------------------------------------------------------

    def reserve(self) -> None:
        """Take the blocks that all requests share, if they are not taken. Most kinds have none."""

    def unreserve(self) -> None:
        """Give those back, before the pool is reset; `reserve` right after it takes the same ones."""

    def at_rest(
        self,
        request_id: str,
        num_tokens: int,
        settled_tokens: int,
        num_prompt_tokens: int,
        num_encoder_tokens: int,
        num_tokens_to_register: int,
        num_hashed_tokens: int = MOST_TOKENS,
        num_computed_tokens: int = MOST_TOKENS,
    ) -> bool:
        """Whether a step to `num_tokens` takes nothing, drops nothing and registers nothing. Read only."""
        table = self.tables.get(request_id)
        if table is None or self.table_length(num_tokens, num_prompt_tokens, num_encoder_tokens) > len(table):
            return False
        if table.tail_block != 0:
            return False
        if table.num_dropped != 0 or self.is_state:  # else all is there
            if not self.can_read(request_id, num_computed_tokens, num_tokens, num_prompt_tokens):
                return False
        _, unread = self.unread(settled_tokens, num_prompt_tokens)
        if unread > table.num_dropped and len(self.droppable(request_id, settled_tokens, num_prompt_tokens)) > 0:
            return False
        if not self.prefix_cacheable:
            return True
        size = self.block_size
        if table.num_registered < min(num_tokens_to_register, num_hashed_tokens) // size and not (
            self.is_state and num_tokens_to_register % size != 0
        ):
            return False
        if table.has_tail or not self.hits_end_inside:
            return True
        boundary = self.partial_boundary(request_id, num_prompt_tokens, num_tokens_to_register)
        return boundary == 0 or boundary > num_hashed_tokens

    def scratch_of(self, request_id: str) -> list[int]:
        """The blocks at the end of a table that are for states of drafts, and move along with it."""
        table = self.tables.get(request_id)
        return [] if table is None else list(table.blocks[len(table) - table.num_scratch :])

    def num_kept(self, request_id: str) -> int:
        """How many blocks the request's table holds, nulls not counted."""
        table = self.tables.get(request_id)
        return 0 if table is None else table.num_kept()

    def num_owned(self, request_id: str) -> int:
        """How many of them nobody else holds."""
        table = self.tables.get(request_id)
        count = 0
        if table is not None:
            for b in table.blocks:
                if b != 0 and self.pool.records.get(i64(b), REF) == 1:
                    count += 1
        return count

    def can_read(self, request_id: str, num_computed_tokens: int, num_tokens: int, num_prompt_tokens: int) -> bool:
        """Whether the table has what a step from `num_computed_tokens` to `num_tokens` reads and writes, as far as it
        goes: what was dropped, or was never adopted, cannot be read again.
        """
        table = self.tables.get(request_id)
        if table is None:
            return True
        first, end = self.unread(num_computed_tokens, num_prompt_tokens)
        return table.num_dropped <= max(first, end)

    def num_held(self, request_id: str) -> int:
        """Length of the request's table, in blocks; 0 for an unknown request."""
        table = self.tables.get(request_id)
        return 0 if table is None else len(table)

    def block_ids(self, request_id: str) -> list[int]:
        """The request's table, 0 where nothing is kept; empty for an unknown request."""
        table = self.tables.get(request_id)
        return [] if table is None else list(table.blocks)

    def adopt(self, request_id: str, hit: GroupHit) -> None:
        """Start a request's table with a hit: one more reference on each of its blocks."""
        self.pool.touch_vec(hit.blocks)
        table = Table()
        table.extend(hit.blocks)
        table.num_registered = hit.num_tokens // self.block_size
        table.num_dropped = hit.first
        self.tables[request_id] = table

    def allocate(self, request_id: str, num_blocks: int) -> vec[i32]:
        """Append new blocks to a request's table."""
        blocks = self.pool.take(num_blocks)
        self.tables[request_id].extend(blocks)
        return blocks

    def num_new_blocks(
        self,
        request_id: str,
        num_tokens: int,
        hit: GroupHit | None = None,
        num_computed_tokens: int = 0,
        num_prompt_tokens: int = 0,
        num_encoder_tokens: int = 0,
    ) -> int:
        """How many blocks to take so that the table has room for `num_tokens` tokens. Read only, never negative.

        For a request without a table: beside the `hit`, to be adopted, whose partly covered last block needs a copy.
        `num_computed_tokens`: with the hit and what comes from elsewhere; what the next token no longer reads of that
        costs nothing. Adopted blocks cost nothing here: see `num_evictable`.
        """
        length = self.table_length(num_tokens, num_prompt_tokens, num_encoder_tokens)
        table = self.tables.get(request_id)
        if table is not None:
            return max(0, length - len(table))
        adopted = 0
        copied = 0
        if hit is not None:
            adopted = len(hit)
            copied = int(hit.num_tokens % self.block_size != 0)
        _, num_nulls = self.gap(adopted, length, num_computed_tokens, num_prompt_tokens)
        return max(0, length - adopted - num_nulls) + copied

    def grow(
        self,
        request_id: str,
        num_tokens: int,
        num_computed_tokens: int = 0,
        num_prompt_tokens: int = 0,
        num_encoder_tokens: int = 0,
    ) -> vec[i32]:
        """Append what `num_new_blocks` has counted (but for the copy), null where nothing is kept; what was appended.

        The request has a table: `adopt` comes first, with NOTHING_FOUND where there is no hit.
        """
        table = self.tables[request_id]
        held = len(table)
        length = self.table_length(num_tokens, num_prompt_tokens, num_encoder_tokens)
        if length <= held:
            return NO_BLOCKS
        before, num_nulls = self.gap(held, length, num_computed_tokens, num_prompt_tokens)
        blocks = self.pool.take(length - held - num_nulls)
        if num_nulls == 0:
            table.extend(blocks)
            return blocks
        table.extend(blocks[:before])
        table.extend_null(num_nulls)
        table.extend(blocks[before:])
        return table.blocks[held:]

    def gap(self, held: int, length: int, num_computed_tokens: int, num_prompt_tokens: int) -> tuple[int, int]:
        """Of the positions held .. length-1: how many stand before those that no token reads; how many are those."""
        first, end = self.unread(num_computed_tokens, num_prompt_tokens)
        first = max(first, held)
        return first - held, max(0, min(end, length) - first)

    def swap_block(self, request_id: str, position: int, block: int) -> int:
        """Put another block at a position of a table; the one that was there. References stay with the caller."""
        return int(self.tables[request_id].replace(position, i32(block)))

    # -- dropping ------------------------------------------------------------------------------------

    def droppable(self, request_id: str, settled_tokens: int, num_prompt_tokens: int = 0) -> vec[i32]:
        """The blocks of a table that no token behind `settled_tokens` reads, deepest first. Read only.

        Settled tokens are computed and will not be taken back: no drafts, nothing in flight.
        """
        table = self.tables.get(request_id)
        if table is None:
            return NO_BLOCKS
        first, end = self.unread(settled_tokens, num_prompt_tokens)
        end = min(end, len(table))
        first = max(first, int(table.num_dropped))
        return table.held_between(first, end) if first < end else NO_BLOCKS

    def drop(
        self,
        request_id: str,
        settled_tokens: int,
        num_prompt_tokens: int = 0,
        after: SupportsIndex | None = None,
    ) -> vec[i32]:
        """Give back, in one batch, what is `droppable`; the table shows null there. With `after`, at that fence."""
        blocks = self.droppable(request_id, settled_tokens, num_prompt_tokens)
        table = self.tables.get(request_id)
        if table is None:
            return blocks
        first, end = self.unread(settled_tokens, num_prompt_tokens)
        end = min(end, len(table))
        if end > table.num_dropped:
            if len(blocks) > 0:
                self.pool.free_vec(blocks, after)
                table.forget_between(max(i64(first), table.num_dropped), end)
            table.num_dropped = end
        return blocks

    # -- registering ---------------------------------------------------------------------------------

    def is_registered(self, request_id: str, num_tokens: int) -> bool:
        """Whether every block that is full at `num_tokens` was offered to the index already."""
        table = self.tables.get(request_id)
        if table is None:
            return False
        size = self.block_size
        if table.num_registered >= num_tokens // size or not self.prefix_cacheable:
            return True
        return self.is_state and num_tokens % size != 0

    def unregistered(self, request_id: str, num_tokens: int, num_digests: int) -> range:
        """The positions that are full at `num_tokens`, have a digest and were not offered to the index yet.

        A block of states holds the one at its end only if a step has ended there: the last position, or none.
        """
        table = self.tables.get(request_id)
        if table is None or not self.prefix_cacheable:
            return NO_POSITIONS
        first = int(table.num_registered)
        last = min(num_tokens // self.block_size, num_digests // self.factor, len(table))
        if self.is_state:
            if last * self.block_size != num_tokens:
                return NO_POSITIONS
            first = max(first, last - 1)
        return range(first, max(last, first))

    def register(
        self,
        request_id: str,
        first: int,
        last: int,
        digests: bytes,
        first_digest: int,
        payload: StorePayload | None,
        boundaries: Sequence[int] = (),
        policy: RetentionPolicy | None = None,
    ) -> vec[i32]:
        """Offer the blocks first .. last-1 of a table to the index; `digests` starts at digest `first_digest`.

        With a policy, only those worth it (`retained`). Returns the blocks that were registered, 0 for the others.
        For blocks that become findable later than they are picked: `pick`, `mark_registered`, then `offer_blocks`.
        """
        blocks = self.pick(request_id, first, last, boundaries, policy)
        offer_blocks(self, blocks, first, digests, first_digest, payload)
        self.mark_registered(request_id, last)
        return blocks

    def pick(
        self,
        request_id: str,
        first: int,
        last: int,
        boundaries: Sequence[int] = (),
        policy: RetentionPolicy | None = None,
    ) -> vec[i32]:
        """The blocks first .. last-1 of a table that are to be offered, 0 for the others. Read only."""
        table = self.tables[request_id]
        blocks = table.blocks[first:last]
        mask = None if policy is None else self.retained(first, last, boundaries, policy)
        if mask is not None:
            at: i64 = 0
            for keep in mask:
                if not keep:
                    blocks[at] = 0
                at += 1
        if table.was_revoked:
            skip_registered(self, blocks, first)
        return blocks

    def mark_registered(self, request_id: str, last: int) -> None:
        """The blocks before position `last` were picked: they are not asked for again."""
        self.tables[request_id].num_registered = last

    def partial_boundary(self, request_id: str, num_prompt_tokens: int, num_tokens: int) -> int:
        """The boundary inside a block at which the prompt's tail is to be registered now; 0 for none.

        That is once, when `num_tokens` have reached it (a state: exactly there), and never on a block whose hash
        covers it already. It is the last one that a replay of the prompt can use.
        """
        table = self.tables.get(request_id)
        if table is None or table.has_tail or not self.supports_partial_boundaries or not self.prefix_cacheable:
            return 0
        end = num_prompt_tokens if self.draft_margin else num_prompt_tokens - 1
        boundary = end - end % self.pool.hash_block_size
        position = boundary // self.block_size
        if boundary % self.block_size == 0 or position >= len(table):
            return 0
        if num_tokens < boundary or (self.is_state and num_tokens != boundary):
            return 0
        block = i64(table.blocks[position])
        records = self.pool.records
        if block == 0 or (records.get(block, FLAGS) & HASHED and records.get(block, TOKENS) >= boundary):
            return 0
        return boundary

    def mark_tail(self, request_id: str, boundary: int) -> int:
        """The block of a table that `boundary` lies in is offered as far as that, once; the block."""
        table = self.tables[request_id]
        block = table.blocks[boundary // self.block_size]
        table.has_tail = True
        if self.is_state:
            table.tail_block = i64(block)
        return int(block)

    def register_partial(
        self, request_id: str, boundary: int, digest: bytes, payload: StorePayload | None = None
    ) -> int:
        """Register the block of a table that `boundary` lies in, as far as that; the block."""
        block = self.mark_tail(request_id, boundary)
        self.pool.cache_partial_block(block, digest, boundary, self.group_id, self.block_size, payload=payload)
        return block

    def unregister(self, gone: set[int]) -> None:
        """These blocks lost their hashes: every table that has one offers it again when its time comes."""
        for table in self.tables.values():
            at: i64 = 0
            for b in table.blocks:
                if int(b) in gone:
                    table.has_tail = False
                    table.tail_block = 0
                    if at < table.num_registered:
                        table.num_registered = at
                        table.was_revoked = True
                        break
                at += 1


# Functions and not methods: on an interpreted subclass a method is called as Python calls it, and each array that is
# handed over in that way is never given back.


def offer_blocks(
    manager: SingleTypeKVCacheManager,
    blocks: vec[i32],
    first: int,
    digests: bytes,
    first_digest: int,
    payload: StorePayload | None,
) -> None:
    """Register blocks that stand at first, first+1, … of a table; 0 is skipped. `digests`: as in `register`."""
    size = manager.block_size
    manager.pool.register(blocks, digests, first_digest, first, size, manager.group_id, payload)


def skip_registered(manager: SingleTypeKVCacheManager, blocks: vec[i32], first: i64) -> None:
    """Requests that share a block, or were revoked, may offer it again: the second time it is skipped."""
    records = manager.pool.records
    at: i64 = 0
    for b in blocks:
        covered = (first + at + 1) * manager.block_size
        if b != 0 and records.get(i64(b), FLAGS) & HASHED and records.get(i64(b), TOKENS) == covered:
            blocks[at] = 0
        at += 1
