"""The pool: lends integer-numbered blocks and takes them back, keeping what they hold findable meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, SupportsFloat, SupportsIndex, final

from librt.vecs import append, vec
from mypy_extensions import i32, i64

from blockpool.pool.audit import Fault, audit_dump
from blockpool.pool.block import BlockSequence, KVCacheBlock
from blockpool.pool.door import Door
from blockpool.pool.errors import (
    AlreadyHashedError,
    BoundaryError,
    CachingDisabledError,
    DigestError,
    ForeignBlockError,
    HoldError,
    MaskError,
    NoClockError,
    NoFreeBlocksError,
    NullBlockError,
    PoolBusyError,
    ReleaseError,
)
from blockpool.pool.event_log import FIRST_LAST, OFF, EventLog
from blockpool.pool.events import KVCacheEvent, StorePayload, Told, prepare
from blockpool.pool.fences import Fences
from blockpool.pool.holds import Hold, Holds, checked_time
from blockpool.pool.index import BlockHashToBlockMap
from blockpool.pool.layout import (
    FIELDS,
    FLAGS,
    GROUP_SHIFT,
    HASHED,
    HELD,
    MARK,
    MAX_BLOCKS,
    MORE,
    PENDING,
    REF,
    REUSED,
    TOKENS,
    TURN,
    WATCHED,
    Records,
)
from blockpool.pool.queue import FreeKVCacheBlockQueue
from blockpool.pool.reports import Counters, PoolMetrics, ResetResult, Usage
from blockpool.pool.reuse import ReuseHandle, ReuseWatchers

MOST_TOKENS: Final = (1 << 31) - 1  # a record keeps lengths in 32 bits


@final
class BlockPool:
    """`num_gpu_blocks` blocks, the null block (0) among them. One thread at a time.

    Wherever a block is asked for, an id or a `KVCacheBlock` handle will do; answers are ids. A call that raises
    one of `blockpool.pool.errors` has changed nothing.

    `hash_block_size`: tokens per digest. `digest_size`: bytes per digest, a multiple of 8. `events`: "off",
    "first_last" (a key is announced with its first block and removed with its last) or "per_copy". `medium`
    names the tier in events. `metrics`: hooks that are called after each operation. `clock`: what holds until a
    time are measured by, in any unit; only they need one.
    """

    def __init__(
        self,
        num_gpu_blocks: int,
        *,
        enable_caching: bool = True,
        hash_block_size: int = 16,
        digest_size: int = 32,
        events: str = "off",
        medium: str = "GPU",
        metrics: PoolMetrics | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        most: int = MAX_BLOCKS  # compared as an int: what is given may not fit 64 bits
        if num_gpu_blocks < 1 or num_gpu_blocks > most:
            raise ValueError(
                f"num_gpu_blocks must be from 1 (the null block alone) to {MAX_BLOCKS}, not {num_gpu_blocks}"
            )
        if hash_block_size < 1 or hash_block_size > MOST_TOKENS:
            raise BoundaryError(f"hash_block_size must be from 1 to {MOST_TOKENS}, not {hash_block_size}")
        if digest_size not in (8, 16, 24, 32):
            raise DigestError(f"digest_size must be 8, 16, 24 or 32 bytes, not {digest_size}")
        self.num_gpu_blocks = num_gpu_blocks
        self.size: i64 = num_gpu_blocks
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        self.digest_size = digest_size
        self.medium = medium
        self.metrics = metrics
        self.clock = clock
        self.log = EventLog(events, medium)
        self.records = Records(num_gpu_blocks)
        self.queue = FreeKVCacheBlockQueue(num_gpu_blocks, self.records)
        self.index = BlockHashToBlockMap(num_gpu_blocks, digest_size, self.records)
        self.fences = Fences(self.records)
        self.holds = Holds(self.records)
        self.door = Door(self.records, num_gpu_blocks)
        self.watchers = ReuseWatchers(self.records)
        self.busy = False
        self.changes: i64 = 0
        self.num_allocated: i64 = 0
        self.num_evicted: i64 = 0
        self.num_evicted_unused: i64 = 0
        self.evicted_of = vec[i64]()  # by group
        self.num_gone_hashed: i64 = 0

    # -- handles and answers -------------------------------------------------------------------------

    @property
    def blocks(self) -> BlockSequence:
        """A handle per block, made on demand."""
        return BlockSequence(self)

    @property
    def null_block(self) -> KVCacheBlock:
        """Block 0: the placeholder for "no data here". Never allocated, freed, counted or hashed."""
        return KVCacheBlock(self, 0)

    @property
    def free_block_queue(self) -> FreeKVCacheBlockQueue:
        return self.queue

    @property
    def cached_block_hash_to_block(self) -> BlockHashToBlockMap:
        """The prefix index."""
        return self.index

    @property
    def version(self) -> int:
        """Grows with every change of the pool."""
        return self.changes

    @property
    def fence(self) -> int:
        """The highest fence reached, -1 before the first."""
        return self.fences.reached

    @property
    def next_fence(self) -> int | None:
        """The lowest fence that would release anything, None without deferred references."""
        return self.fences.next_fence()

    def get_deferred_blocks(self) -> dict[int, int]:
        """The blocks whose every reference waits for a fence, with the fence that frees each."""
        return self.fences.deferred_until()

    @property
    def open_holds(self) -> list[Hold]:
        """The holds that have not ended, in the order of their making."""
        return list(self.holds.open.values())

    def held_by(self) -> dict[str, int]:
        """The owners of holds, with the number of blocks that each keeps."""
        return self.holds.by_owner()

    @property
    def counters(self) -> Counters:
        by_group = {int(group): int(count) for group, count in enumerate(self.evicted_of) if count}
        return Counters(
            self.num_allocated, self.num_evicted, self.num_evicted_unused, self.holds.num_late_releases, by_group
        )

    def get_num_free_blocks(self) -> int:
        """Blocks that can be handed out now, eviction candidates included. O(1)."""
        return self.queue.count

    def get_usage(self) -> float:
        """The part of the allocatable blocks that is in use (deferred ones included), from 0.0 to 1.0.

        0.0 for a pool that has only the null block.
        """
        if self.num_gpu_blocks == 1:
            return 0.0
        return 1.0 - self.queue.num_free_blocks / (self.num_gpu_blocks - 1)

    def get_usage_parts(self) -> Usage:
        """The parts of the pool. Walks all records: for reports, not for every step."""
        meta = self.records.meta
        base = self.records.base
        cached: i64 = 0
        b: i64 = 1
        while b < self.size:
            o = base + b * FIELDS
            if meta[o + REF] == 0 and i64(meta[o + FLAGS]) & HASHED:
                cached += 1
            b += 1
        free = self.queue.num_free_blocks
        deferred = self.fences.num_deferred()
        held = self.num_gpu_blocks - 1 - free - deferred
        return Usage(free, cached, deferred, held, self.holds.num_pinned())

    def get_cached_by_group(self) -> dict[int, int]:
        """How many blocks have a hash, by the group of their first one, in use or not. Walks all records."""
        meta = self.records.meta
        base = self.records.base
        counts: dict[int, int] = {}
        b: i64 = 1
        while b < self.size:
            flags = i64(meta[base + b * FIELDS + FLAGS])
            if flags & HASHED:
                group = int(flags >> GROUP_SHIFT)
                counts[group] = counts.get(group, 0) + 1
            b += 1
        return counts

    def is_block_writable(self, block: SupportsIndex) -> bool:
        """Whether one holder has the block for itself: not null, ref_cnt 1, no hash."""
        b = self.door.own_id(block)
        return b != 0 and self.records.get(b, REF) == 1 and self.records.get(b, FLAGS) & HASHED == 0

    def get_block_hashes(self, block: SupportsIndex) -> list[tuple[bytes, int]]:
        """All keys of a block with the prefix length in tokens that each covers, the primary one first."""
        out: list[tuple[bytes, int]] = []
        for entry in self.index.entries_of(self.door.own_id(block)):
            out.append((self.index.key_of(entry), int(self.records.get(entry, TOKENS))))
        return out

    # -- lending and taking back -----------------------------------------------------------------------

    def get_new_blocks(self, n: SupportsIndex) -> list[int]:
        """Hand out the n first blocks of the free queue, each with ref_cnt 1 and without a hash.

        Reuse callbacks fire first; what one raises is raised after the blocks were handed out, with their ids
        in its notes. Raises NoFreeBlocksError, and evicts nothing, when n is no int, negative, or more than are free.
        """
        count = n if isinstance(n, int) else self.door.checked_count(n)
        if count == 1 and self.metrics is None:
            b = self.take_plain()
            if b != 0:
                return [b]
        self.must_not_be_busy()
        if count > self.queue.num_free_blocks or count < 0:
            raise NoFreeBlocksError(f"cannot hand out {count} blocks: {self.queue.num_free_blocks} are free")
        out = as_list(self.take(count))
        if self.watchers.errors:
            self.watchers.raise_errors(f"get_new_blocks handed out {out} all the same")
        return out

    def touch(self, blocks: Iterable[SupportsIndex]) -> None:
        """One more reference on each; a free block leaves the queue. The null block is skipped."""
        self.touch_vec(self.door.own_ids(blocks))
        self.watchers.raise_errors()

    def free_blocks(self, ordered_blocks: Iterable[SupportsIndex], after: SupportsIndex | None = None) -> None:
        """One reference less on each; blocks that reach 0 are queued in the given order.

        Without a hash (or with caching off) they go to the front, as a group; with one to the back. So give a
        request's blocks deepest first. The null block is skipped. Handles of another pool go to their pool.
        With `after=fence` the references stay until `advance(fence)`.

        Raises ReleaseError when a block is given back more often than it is held, in any pool: no pool changes.
        (References that wait for a fence, or that a hold keeps, cannot be given back.)
        """
        blocks = ordered_blocks if isinstance(ordered_blocks, list) else list(ordered_blocks)
        if len(blocks) == 1 and after is None and self.free_plain(blocks[0]):
            return
        try:
            ids = self.door.own_ids(blocks)
        except ForeignBlockError:
            self.free_in_pools(blocks, after)
            return
        self.free_vec(ids, after)

    def free_vec(self, blocks: vec[i32], after: SupportsIndex | None) -> None:
        self.must_not_be_busy()
        if after is None:
            self.enqueue(self.lower(blocks))
        else:
            self.defer(blocks, self.door.checked_fence(after))
        self.changes += 1

    def advance(self, fence: SupportsIndex) -> None:
        """Reach a fence: every reference that waited for it or for a lower one is released, call by call.

        Holds until such a fence end. Reaching it again, or a lower one, does nothing.
        """
        self.must_not_be_busy()
        reached = self.door.checked_fence(fence)
        if reached <= self.fences.reached:
            return
        for release in self.fences.reach(reached):
            hold = release.hold
            if hold is not None:
                self.holds.leave(hold)
            self.enqueue(self.lower(release.blocks))
        self.changes += 1

    def hold(
        self,
        blocks: Iterable[SupportsIndex],
        owner: str,
        *,
        until: SupportsFloat | None = None,
        after: SupportsIndex | None = None,
    ) -> Hold:
        """One more reference on each block, kept by `owner`; a free block leaves the queue, as when it is touched.

        The references end once and together, in the order given (so hold a request's blocks deepest first): by
        `release`; with `until`, by the first `expire_holds` from that time on; with `after`, when that fence is
        reached, at once when it was. Nobody else can give them back. The null block is skipped.

        Raises HoldError for a block that nobody holds and that has no hash, for both ends in one hold, and for a
        time that is not a finite number; NoClockError for a time in a pool without a clock.
        """
        ids = without_null(self.door.own_ids(blocks))
        time = checked_time(until)
        fence = None if after is None else self.door.checked_fence(after)
        if time is not None and fence is not None:
            raise HoldError(f"a hold has one end: the time {time} or the fence {fence}")
        if time is not None and self.clock is None:
            raise NoClockError(f"a hold until {time} needs a pool with a clock")
        self.must_not_be_busy()
        for b in ids:
            if self.records.get(i64(b), REF) == 0 and self.records.get(i64(b), FLAGS) & HASHED == 0:
                raise HoldError(f"block {b} cannot be kept: nobody holds it and it has no hash")
        hold = self.hold_vec(ids, owner, time, fence)
        if self.watchers.errors:
            self.watchers.raise_errors(f"{hold!r} was made all the same")
        return hold

    def hold_vec(self, ids: vec[i32], owner: str, until: float | None, after: int | None) -> Hold:
        """The same, for blocks that are known to be held or hashed; what a hook raises is kept."""
        self.touch_vec(ids)
        hold = self.holds.make(self.door, ids, owner, until, after)
        self.holds.enter(hold)
        if after is not None:
            self.fences.defer(after, ids, hold)
            if after <= self.fences.reached:
                self.end(hold)
        return hold

    def withdraw_fence(self, fence: int, earlier: int | None) -> None:
        """The fence will never be reached: what waits for it waits for an earlier one, or is released now."""
        self.must_not_be_busy()
        for release in self.fences.withdraw_fence(fence, earlier):
            hold = release.hold
            if hold is not None:
                self.holds.leave(hold)
            self.enqueue(self.lower(release.blocks))
        self.changes += 1

    def release(self, hold: Hold) -> bool:
        """End a hold: its references are given back in the order of its blocks, as `free_blocks` does.

        False, and nothing but `counters.late_releases` changes, when it has ended before: released, expired, or its
        fence was reached. Raises HoldError for a hold of another pool.
        """
        if hold.door is not self.door:
            raise HoldError(f"{hold!r} is a hold of another pool")
        self.must_not_be_busy()
        if hold.released:
            self.holds.num_late_releases += 1
            return False
        self.end(hold)
        self.changes += 1
        return True

    def expire_holds(self) -> list[Hold]:
        """End the holds whose time has come by the pool's clock, in the order of their times, then of their making.

        No other call does: a block is never free before its owner has asked.
        """
        self.must_not_be_busy()
        clock = self.clock
        if clock is None:
            return []
        due = self.holds.due(clock())
        for hold in due:
            self.end(hold)
        if due:
            self.changes += 1
        return due

    def unpin_blocks(self, blocks: Iterable[SupportsIndex], on_reuse: Callable[[int], object]) -> ReuseHandle:
        """Give blocks back that are still being read: they join the very back of the queue and count as free.

        `on_reuse(block_id)` is called exactly once per block: when it is handed out, before its hashes go, or
        when the prefix cache is reset. It may call nothing of the pool but the returned handle's `done()`, which
        disarms what has not fired. Raises NullBlockError, or ReleaseError for a block that is not held.
        """
        ids = self.door.own_ids(blocks)
        for b in ids:
            if b == 0:
                raise NullBlockError("the null block cannot be unpinned")
        if not callable(on_reuse):
            raise TypeError(f"on_reuse must be callable, not {on_reuse!r}")
        self.must_not_be_busy()
        gone = self.lower(ids)
        handle = ReuseHandle(self.watchers, on_reuse)
        for b in ids:
            self.watchers.arm(int(b), handle)
        self.queue.append_vec(gone)
        self.changes += 1
        return handle

    def watch_blocks(self, blocks: Iterable[SupportsIndex], on_reuse: Callable[[int], object]) -> ReuseHandle:
        """Be told when blocks are handed out, without keeping them: `on_reuse` as in `unpin_blocks`.

        References and the order of the queue stay as they are. Raises NullBlockError.
        """
        ids = self.door.own_ids(blocks)
        for b in ids:
            if b == 0:
                raise NullBlockError("the null block cannot be watched: it is never handed out")
        if not callable(on_reuse):
            raise TypeError(f"on_reuse must be callable, not {on_reuse!r}")
        self.must_not_be_busy()
        handle = ReuseHandle(self.watchers, on_reuse)
        for b in ids:
            self.watchers.arm(int(b), handle)
        return handle

    # -- finding -------------------------------------------------------------------------------------

    def next_evicted(self, count: int) -> list[int]:
        """The eviction candidates that would be handed out first, among the first `count` blocks of the queue.

        Read only. Blocks without a hash are left out: nothing is lost with them.
        """
        found: list[int] = []
        records = self.records
        for b in self.queue.first_ids(count):
            if records.get(i64(b), FLAGS) & HASHED:
                found.append(int(b))
        return found

    def get_incarnations(self, blocks: Iterable[SupportsIndex]) -> list[int]:
        """How often each of these blocks was handed out, modulo 2**31."""
        records = self.records
        return [int(records.get(i64(b), TURN)) for b in self.door.own_ids(blocks)]

    def get_cached_block(self, block_hash: bytes, group_ids: Iterable[int]) -> list[int] | None:
        """The block with that digest in every group, or None if any group lacks it."""
        if len(block_hash) != self.digest_size:
            raise DigestError(f"a digest of this pool has {self.digest_size} bytes, not {len(block_hash)}")
        out: list[int] = []
        for group in group_ids:
            entry = self.index.find(block_hash, 0, self.door.checked_group(group))
            if entry == 0:
                return None
            out.append(self.index.block_of(entry))
        return out

    def lookup_run(self, digests: bytes, first: int, last: int, stride: int, group_id: int) -> list[int]:
        """The blocks of consecutive hits, digest by digest as `range(first, last, ±stride)` names them.

        `digests` is a chain's buffer, digest after digest; leftwards when last < first (to reach digest 0, last
        is -1). Stops at the first miss. Raises DigestError when the range leaves the buffer.
        """
        count = len(digests) // self.digest_size
        if stride < 1 or stride > MOST_TOKENS:
            raise DigestError(f"stride must be from 1 to {MOST_TOKENS}, not {stride}")
        if first < 0 or last < -1 or last > count or (last < first and first >= count):
            raise DigestError(f"digests {first} to {last} of a buffer of {count}")
        return as_list(self.lookup_vec(digests, first, last, stride, group_id))

    # -- registering ---------------------------------------------------------------------------------

    def cache_full_blocks(
        self,
        block_ids: Sequence[SupportsIndex],
        digests: bytes,
        first: int,
        last: int,
        block_size: int,
        group_id: int,
        block_mask: Sequence[object] | None = None,
        payload: StorePayload | None = None,
    ) -> None:
        """Register blocks first .. last-1 of a table; the i-th covers (i+1)*block_size tokens.

        `digests` is the chain's buffer from digest 0 on, one per hash block. Null blocks and those that the
        mask (one bool per block of the range) leaves out are skipped. A block that has a hash is refused
        with AlreadyHashedError unless that is a boundary inside this block, which then grows into the full one.
        """
        if first < 0 or last < first or last > len(block_ids):
            raise BoundaryError(f"blocks {first} to {last} of a table of {len(block_ids)}")
        whole = first == 0 and last == len(block_ids)
        ids = self.door.own_ids(block_ids if whole else block_ids[first:last])
        if block_mask is not None:
            if len(block_mask) != last - first:
                raise MaskError(f"a mask of {len(block_mask)} for {last - first} blocks")
            kept = vec[i32](capacity=len(ids))
            at: i64 = 0
            for b in ids:
                kept = append(kept, b if block_mask[at] else i32(0))
                at += 1
            ids = kept
        self.register(ids, digests, 0, first, block_size, group_id, payload)

    def cache_partial_block(
        self,
        block: SupportsIndex,
        digest: bytes,
        num_tokens: int,
        group_id: int,
        block_size: int,
        replace_existing_hashes: bool = False,
        payload: StorePayload | None = None,
    ) -> None:
        """Register the boundary at `num_tokens` (a multiple of hash_block_size) inside a block.

        There already: nothing happens. Longer than the primary hash: replaces all there is. Shorter: becomes
        an additional hash. `replace_existing_hashes`: the block's only hash from now on. The null block is skipped.
        Raises BoundaryError when num_tokens is not a positive multiple of hash_block_size.
        """
        b = self.door.own_id(block)
        group = self.door.checked_group(group_id)
        unit = self.hash_block_size
        if num_tokens < unit or num_tokens % unit != 0 or num_tokens > MOST_TOKENS:
            raise BoundaryError(f"a boundary at {num_tokens} tokens is not a positive multiple of {unit} below 2**31")
        self.check_block_size(block_size)
        if len(digest) != self.digest_size:
            raise DigestError(f"a digest of this pool has {self.digest_size} bytes, not {len(digest)}")
        self.must_be_caching()
        if b == 0:
            return
        there = self.index.entry_of(b, digest, 0, group)
        if there != 0 and not (replace_existing_hashes and len(self.index.entries_of(b)) > 1):
            return
        told = prepare(payload, num_tokens - unit, 1, unit) if self.log.mode != OFF else None
        if replace_existing_hashes or self.records.get(b, TOKENS) < num_tokens:
            self.forget(b)
        first = self.index.put(b, digest, 0, group, num_tokens)
        if told is not None and (first or self.log.mode != FIRST_LAST):
            parent = None if payload is None else payload.parent
            self.log.stored(told, 0, [digest], parent, group)
        self.log.flush()
        self.changes += 1

    def move_block_hashes(self, src: SupportsIndex, dst: SupportsIndex) -> None:
        """Every key of src now names dst, as the newest of its copies; src has none. No event.

        Raises AlreadyHashedError when dst has a hash, NullBlockError when either is the null block.
        """
        s = self.door.own_id(src)
        d = self.door.own_id(dst)
        if s == 0 or d == 0:
            raise NullBlockError("the null block has no hashes to move or take")
        if self.records.get(d, FLAGS) & HASHED:
            raise AlreadyHashedError(f"block {d} has a hash already, block {s}'s cannot move there")
        self.must_not_be_busy()
        moved: list[tuple[bytes, int]] = self.get_block_hashes(s)
        for entry in reversed(self.index.entries_of(s)):
            self.index.take_off(s, entry)
        for key, num_tokens in moved:
            self.index.put(d, key, 0, int.from_bytes(key[-4:], "big"), num_tokens)
        self.changes += 1

    def evict_blocks(self, block_ids: Iterable[SupportsIndex]) -> None:
        """Drop the hashes of blocks, whatever their ref_cnt. Frees nothing, moves nothing in the queue."""
        self.evict_vec(self.door.own_ids(block_ids))
        self.watchers.raise_errors()

    def evict_vec(self, ids: vec[i32]) -> None:
        """The same; what a hook raises is kept."""
        self.must_not_be_busy()
        evicted: list[int] = []
        for b in ids:
            if b != 0 and self.records.get(i64(b), FLAGS) & HASHED:
                self.forget(i64(b))
                evicted.append(int(b))
        self.log.flush()
        self.changes += 1
        metrics = self.metrics
        if metrics is not None:
            try:
                for block in evicted:
                    metrics.on_evicted(block, True)
            except BaseException as error:  # raised when the whole operation is done
                self.watchers.errors.append(error)

    def reset_prefix_cache(self) -> ResetResult:
        """Forget every hash, if no block is in use; the queue keeps its order, pending callbacks fire.

        The result is true on success; else it says how many blocks are in use, how many of those are deferred
        and who has holds, and nothing has changed.
        """
        self.must_not_be_busy()
        used = self.num_gpu_blocks - 1 - self.queue.num_free_blocks
        if used:
            return ResetResult(used, self.fences.num_deferred(), self.holds.by_owner())
        self.busy = True
        self.watchers.fire_all()
        self.busy = False
        self.index.clear()
        if self.log.mode != OFF:
            self.log.cleared()
        self.changes += 1
        self.watchers.raise_errors()
        return ResetResult()

    # -- events and inspection -----------------------------------------------------------------------

    def take_events(self) -> list[KVCacheEvent]:
        """The events since the last call, in order."""
        return self.log.take()

    def dump(self) -> dict[str, Any]:
        """The whole state as JSON-able values, for `audit_dump` and `blockpool audit`."""
        meta = self.records.meta
        base = self.records.base
        rows: list[dict[str, Any]] = []
        for block in range(self.num_gpu_blocks):
            o = base + i64(block) * FIELDS
            rows.append(
                {
                    "id": block,
                    "ref_cnt": int(meta[o + REF]),
                    "incarnation": int(meta[o + TURN]),
                    "hashes": [
                        {"key": key.hex(), "num_tokens": num_tokens}
                        for key, num_tokens in self.get_block_hashes(block)
                    ],
                }
            )
        return {
            "format": "blockpool.dump/1",
            "num_gpu_blocks": self.num_gpu_blocks,
            "enable_caching": self.enable_caching,
            "hash_block_size": self.hash_block_size,
            "digest_size": self.digest_size,
            "medium": self.medium,
            "version": self.version,
            "fence": self.fences.reached,
            "num_free_blocks": self.queue.num_free_blocks,
            "queue": self.queue.get_all_free_blocks(),
            "queue_backwards": self.queue.by_place(),
            "blocks": rows,
            "index": self.index.listing(),
            "pending": [
                {"fence": release.fence, "blocks": list(release.blocks)}
                for release in self.fences.releases
                if release.hold is None
            ],
            "holds": self.holds.listing(),
            "watchers": self.watchers.listing(),
        }

    def audit(self) -> list[Fault]:
        """Every broken invariant, by name; empty for a sound pool."""
        return audit_dump(self.dump())

    # -- the managers' way in: arrays in, arrays out -------------------------------------------------

    def take(self, n: i64) -> vec[i32]:
        """`get_new_blocks` for compiled callers, who call `watchers.raise_errors()` when they are done."""
        self.must_not_be_busy()
        if n < 0 or n > self.queue.count:
            raise NoFreeBlocksError(f"cannot hand out {n} blocks: {self.queue.count} are free")
        out = self.queue.popleft_vec(n)
        meta = self.records.meta
        base = self.records.base
        seen: i64 = 0
        for b in out:
            seen |= i64(meta[base + i64(b) * FIELDS + FLAGS])
        if seen & WATCHED:
            self.busy = True
            for b in out:
                if i64(meta[base + i64(b) * FIELDS + FLAGS]) & WATCHED:
                    self.watchers.fire(int(b))
            self.busy = False
        had_hash: list[bool] | None = None
        if self.metrics is not None:
            had_hash = [int(meta[base + i64(b) * FIELDS + FLAGS]) & 1 != 0 for b in out]
        if seen & HASHED:
            self.forget_all(out)
        for b in out:
            o = base + i64(b) * FIELDS
            meta[o + REF] = 1
            meta[o + TURN] = i32((i64(meta[o + TURN]) + 1) & 0x7FFFFFFF)
        self.num_allocated += n
        self.changes += 1
        if had_hash is not None:
            self.report_handed_out(out, had_hash)
        return out

    def take_plain(self) -> i64:
        """`take(1)` for the commonest case, without arrays: a first block that has no hash and no watcher; else 0."""
        if self.busy or self.queue.count == 0:
            return 0
        meta = self.records.meta
        b = self.queue.first()
        o = self.records.base + b * FIELDS
        if i64(meta[o + FLAGS]) & (HASHED | WATCHED):
            return 0
        self.queue.popleft_first(b)
        meta[o + REF] = 1
        meta[o + TURN] = i32((i64(meta[o + TURN]) + 1) & 0x7FFFFFFF)
        self.num_allocated += 1
        self.changes += 1
        return b

    def free_plain(self, block: SupportsIndex) -> bool:
        """`free_blocks` of one id for the commonest case: the last reference to a block without a hash."""
        if self.busy or not isinstance(block, int) or block <= 0 or block >= self.num_gpu_blocks:
            return False
        b: i64 = block
        o = self.records.base + b * FIELDS
        meta = self.records.meta
        if meta[o + REF] != 1 or i64(meta[o + FLAGS]) & (HASHED | PENDING | HELD):
            return False
        meta[o + REF] = 0
        self.queue.prepend_one(b)
        self.changes += 1
        return True

    def touch_vec(self, blocks: vec[i32]) -> None:
        self.must_not_be_busy()
        self.records.warm(blocks)
        meta = self.records.meta
        base = self.records.base
        leaving = self.records.room_for(len(blocks))
        count: i64 = 0
        for b in blocks:
            if b != 0:
                o = base + i64(b) * FIELDS
                ref = meta[o + REF]
                if ref == 0:
                    leaving[count] = b
                    count += 1
                meta[o + REF] = ref + 1
                flags = i64(meta[o + FLAGS])
                if flags & (HASHED | REUSED) == HASHED:
                    meta[o + FLAGS] = i32(flags | REUSED)
        self.queue.remove_vec(leaving[:count])
        self.changes += 1
        metrics = self.metrics
        if metrics is not None:
            try:
                for b in blocks:
                    if b != 0:
                        metrics.on_accessed(int(b))
            except BaseException as error:  # raised when the whole operation is done
                self.watchers.errors.append(error)

    def lookup_vec(self, digests: bytes, first: i64, last: i64, stride: i64, group_id: int) -> vec[i32]:
        group = self.door.checked_group(group_id)
        width = i64(self.digest_size)
        step = stride if last >= first else -stride
        steps = (last - first + step - (1 if step > 0 else -1)) // step
        return self.index.find_run(digests, first * width, steps, step * width, group)

    def register(
        self,
        ids: vec[i32],
        digests: bytes,
        first_digest: i64,
        first: i64,
        block_size: int,
        group_id: int,
        payload: StorePayload | None,
    ) -> None:
        """Register the blocks `ids`, which stand at first, first+1, … of a table; 0 is skipped.

        `digests` may be a piece of the chain: its first digest is the chain's digest `first_digest`.
        """
        group = self.door.checked_group(group_id)
        self.must_be_caching()
        self.check_block_size(block_size)
        width = i64(self.digest_size)
        factor: i64 = block_size // self.hash_block_size
        length: i64 = len(ids)
        if length > 0 and (first + length) * block_size > MOST_TOKENS:
            raise BoundaryError(f"a prefix of {(first + length) * block_size} tokens is longer than {MOST_TOKENS}")
        if len(digests) % width != 0:
            raise DigestError(f"a buffer of {len(digests)} bytes is not made of digests of {width} bytes")
        needed = ((first + length) * factor - first_digest) * width
        if length > 0 and (needed > len(digests) or (first + 1) * factor - 1 < first_digest):
            raise DigestError(
                f"blocks {first} to {first + length} need digests {(first + 1) * factor - 1} to"
                f" {(first + length) * factor - 1}, the buffer has {first_digest} to"
                f" {first_digest + len(digests) // width - 1}"
            )
        offset = ((first + 1) * factor - 1 - first_digest) * width
        told: Told | None = None
        if self.log.mode != OFF:
            told = prepare(payload, first * block_size, length, block_size)
        self.records.warm(ids)
        self.check_unhashed(ids, first, block_size)
        hs = self.index.mixes(digests, offset, length, factor * width, group)
        self.index.warm_slots(hs)
        if told is not None:
            self.register_and_announce(ids, hs, digests, first_digest, first, group, told)
        else:
            prefix_index = self.index
            meta = self.records.meta
            base = self.records.base
            covered = (first + 1) * block_size
            at: i64 = 0
            for b in ids:
                if b != 0:
                    if i64(meta[base + i64(b) * FIELDS + FLAGS]) & HASHED:
                        self.forget(i64(b))
                    prefix_index.add(i64(b), digests, offset, group, covered, hs[at])
                at += 1
                offset += factor * width
                covered += block_size
        self.changes += 1

    def check_block_size(self, block_size: int) -> None:
        unit = self.hash_block_size
        if block_size < 1 or block_size > MOST_TOKENS or block_size % unit != 0:
            raise BoundaryError(
                f"block_size {block_size} is not a multiple of the hash block size {unit} below 2**31"
            )

    # -- one step of an operation ----------------------------------------------------------------------

    def lower(self, blocks: vec[i32]) -> vec[i32]:
        """One reference less on each; those that reached 0, in the order in which they did. All or nothing.

        `num_gone_hashed` tells how many of them have a hash.
        """
        self.records.warm(blocks)
        meta = self.records.meta
        base = self.records.base
        gone = self.records.room_for(len(blocks))
        count: i64 = 0
        hashed: i64 = 0
        done: i64 = 0
        for b in blocks:
            if b != 0:
                o = base + i64(b) * FIELDS
                ref = meta[o + REF]
                flags = i64(meta[o + FLAGS])
                if ref <= 0 or (flags & (PENDING | HELD) and ref <= self.num_spoken_for(int(b))):
                    self.raise_back(blocks, done)
                    raise ReleaseError(self.why_not_released(int(b)))
                ref -= 1
                meta[o + REF] = ref
                if ref == 0:
                    gone[count] = b
                    count += 1
                    hashed += flags & HASHED
            done += 1
        self.num_gone_hashed = hashed
        return gone[:count]

    def raise_back(self, blocks: vec[i32], count: i64) -> None:
        meta = self.records.meta
        base = self.records.base
        k: i64 = 0
        while k < count:
            b = i64(blocks[k])
            if b != 0:
                meta[base + b * FIELDS + REF] += 1
            k += 1

    def num_spoken_for(self, block: int) -> int:
        """References that wait for a fence or that a hold keeps: they are not for others to give back."""
        return self.fences.count(block) + self.holds.count(block)

    def why_not_released(self, block: int) -> str:
        ref = int(self.records.get(block, REF))
        pending = self.fences.count(block)
        kept = self.holds.count(block)
        waits = f", {pending} of them waiting for a fence" if pending else ""
        keeps = f", {kept} of them kept by holds" if kept else ""
        return f"block {block} is given back more often than it is held ({ref} references{waits}{keeps})"

    def end(self, hold: Hold) -> None:
        """The references of a hold, wherever they are booked, are given back."""
        if hold.after is not None:
            self.fences.withdraw(hold)
        self.holds.leave(hold)
        self.enqueue(self.lower(hold.ids))

    def enqueue(self, gone: vec[i32]) -> None:
        """What `lower` found: without a hash to the front of the queue, with one to the back."""
        hashed = self.num_gone_hashed
        if hashed == 0:
            self.queue.prepend_vec(gone)
        elif hashed == len(gone):
            self.queue.append_vec(gone)
        else:
            meta = self.records.meta
            base = self.records.base
            front = vec[i32](capacity=len(gone) - hashed)
            back = vec[i32](capacity=hashed)
            for b in gone:
                if i64(meta[base + i64(b) * FIELDS + FLAGS]) & HASHED:
                    back = append(back, b)
                else:
                    front = append(front, b)
            self.queue.prepend_vec(front)
            self.queue.append_vec(back)

    def defer(self, blocks: vec[i32], fence: int) -> None:
        """Keep the references until the fence; at once when it was reached already. All or nothing."""
        if fence <= self.fences.reached:
            self.enqueue(self.lower(blocks))
            return
        self.check_deferrable(blocks)
        self.fences.defer(fence, without_null(blocks))

    def check_deferrable(self, blocks: vec[i32]) -> None:
        wanted: dict[int, int] = {}
        for b in blocks:
            if b != 0:
                block: int = int(b)
                more = wanted.get(block, self.num_spoken_for(block)) + 1
                if more > int(self.records.get(i64(b), REF)):
                    raise ReleaseError(self.why_not_released(block))
                wanted[block] = more

    def free_in_pools(self, blocks: list[SupportsIndex], after: SupportsIndex | None) -> None:
        """Handles of several pools: every pool is checked before any changes."""
        by_pool: dict[BlockPool, list[SupportsIndex]] = {}
        for block in blocks:
            owner = block.pool if isinstance(block, KVCacheBlock) else self
            by_pool.setdefault(owner, []).append(block)
        parts: list[tuple[BlockPool, vec[i32]]] = [(pool, pool.door.own_ids(part)) for pool, part in by_pool.items()]
        for pool, ids in parts:
            pool.must_not_be_busy()
            if after is None:
                pool.check_releasable(ids)
            else:
                pool.door.checked_fence(after)
                pool.check_deferrable(ids)
        for pool, ids in parts:
            pool.free_vec(ids, after)

    def check_releasable(self, blocks: vec[i32]) -> None:
        """Raise what `lower` would, and change nothing."""
        self.lower(blocks)
        self.raise_back(blocks, len(blocks))

    def forget(self, b: i64) -> None:
        """Drop every hash of a block, the primary one first, with events."""
        prefix_index = self.index
        for one in prefix_index.entries_of(b):
            entry: i64 = one
            if self.log.mode == OFF:
                prefix_index.drop(entry, prefix_index.mix_of(entry))
            else:
                digest = prefix_index.digest_of(entry)
                group = prefix_index.group_at(entry)
                last = prefix_index.drop(entry, prefix_index.mix_of(entry))
                if last or self.log.mode != FIRST_LAST:
                    self.log.removed(digest, group)
            if entry != b:
                prefix_index.forget_additional(b, entry)

    def forget_all(self, blocks: vec[i32]) -> None:
        """Drop the hashes of blocks that are being handed out, and count them."""
        prefix_index = self.index
        meta = self.records.meta
        base = self.records.base
        hs = vec[i64](capacity=len(blocks))
        for b in blocks:
            hs = append(hs, prefix_index.mix_of(i64(b)))
        prefix_index.warm_slots(hs)
        quiet = self.log.mode == OFF
        at: i64 = 0
        for b in blocks:
            flags = i64(meta[base + i64(b) * FIELDS + FLAGS])
            if flags & HASHED:
                self.num_evicted += 1
                if flags & REUSED == 0:
                    self.num_evicted_unused += 1
                group = flags >> GROUP_SHIFT
                while group >= len(self.evicted_of):
                    self.evicted_of = append(self.evicted_of, i64(0))
                self.evicted_of[group] += 1
                if quiet and flags & MORE == 0:
                    prefix_index.drop(i64(b), hs[at])
                else:
                    self.forget(i64(b))
            at += 1
        self.log.flush()

    def check_unhashed(self, ids: vec[i32], first: i64, block_size: i64) -> None:
        """Refuse blocks that have a hash, unless it is a boundary inside that very block, and repeated ones.

        The blocks are marked meanwhile; registering them takes the marks away.
        """
        meta = self.records.meta
        base = self.records.base
        start = first * block_size
        at: i64 = 0
        for b in ids:
            if b != 0:
                o = base + i64(b) * FIELDS
                flags = i64(meta[o + FLAGS])
                if flags & (HASHED | MARK):
                    covered = i64(meta[o + TOKENS])
                    if covered <= start or covered >= start + block_size:
                        self.unmark(ids, at)
                        why = "is named twice" if flags & MARK else f"has the hash of {covered} tokens already"
                        raise AlreadyHashedError(
                            f"block {b} {why}: it cannot be registered for {start + block_size} tokens"
                        )
                meta[o + FLAGS] = i32(flags | MARK)
            at += 1
            start += block_size

    def unmark(self, ids: vec[i32], count: i64) -> None:
        while count > 0:
            count -= 1
            self.records.set(i64(ids[count]), FLAGS, self.records.get(i64(ids[count]), FLAGS) & ~MARK)

    def register_and_announce(
        self,
        ids: vec[i32],
        hs: vec[i64],
        digests: bytes,
        first_digest: i64,
        first: i64,
        group: i64,
        told: Told,
    ) -> None:
        """Register, with one BlockStored per run of neighbours whose key was not announced before."""
        meta = self.records.meta
        base = self.records.base
        width = i64(self.digest_size)
        block_size: i64 = told.block_size
        factor = block_size // self.hash_block_size
        for b in ids:
            if b != 0 and i64(meta[base + i64(b) * FIELDS + FLAGS]) & HASHED:
                self.forget(i64(b))
        self.log.flush()
        run: list[bytes] = []
        at: i64 = 0
        for b in ids:
            place = first + at
            offset = ((place + 1) * factor - 1 - first_digest) * width
            announce = False
            if b != 0:
                new = self.index.add(i64(b), digests, offset, group, (place + 1) * block_size, hs[at])
                announce = new or self.log.mode != FIRST_LAST
            if announce:
                run.append(digests[offset : offset + width])
            elif run:
                self.announce_run(run, digests, first_digest, first, place, group, told)
                run = []
            at += 1
        if run:
            self.announce_run(run, digests, first_digest, first, first + at, group, told)

    def announce_run(
        self,
        run: list[bytes],
        digests: bytes,
        first_digest: i64,
        first: i64,
        end: i64,
        group: i64,
        told: Told,
    ) -> None:
        """One BlockStored for the blocks whose digests are `run`, the last of them block end-1 of the table."""
        width = i64(self.digest_size)
        start = end - len(run)
        before = (start * (told.block_size // self.hash_block_size) - 1 - first_digest) * width
        parent = None if start == 0 else digests[before : before + width]
        self.log.stored(told, start - first, run, parent, group)

    def report_handed_out(self, blocks: vec[i32], had_hash: list[bool]) -> None:
        metrics = self.metrics
        if metrics is None:
            return
        at = 0
        try:
            for b in blocks:
                block: int = int(b)
                if self.enable_caching:
                    metrics.on_evicted(block, had_hash[at])
                metrics.on_allocated(block)
                at += 1
        except BaseException as error:  # raised when the whole operation is done
            self.watchers.errors.append(error)

    # -- states in which a call is refused ------------------------------------------------------------

    def must_be_caching(self) -> None:
        self.must_not_be_busy()
        if not self.enable_caching:
            raise CachingDisabledError("this pool was made with enable_caching=False: it keeps no hashes")

    def must_not_be_busy(self) -> None:
        if self.busy:
            raise PoolBusyError("a reuse callback may call nothing of its pool but done()")


def without_null(ids: vec[i32]) -> vec[i32]:
    out = vec[i32]()
    for b in ids:
        if b != 0:
            out = append(out, b)
    return out


def as_list(ids: vec[i32]) -> list[int]:
    out = [0] * len(ids)
    at = 0
    for b in ids:
        out[at] = int(b)
        at += 1
    return out
