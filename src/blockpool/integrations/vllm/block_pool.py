"""vLLM's BlockPool: its methods, its objects, our books."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

from librt.vecs import append, vec
from mypy_extensions import i32, i64, mypyc_attr

from blockpool.integrations.vllm.additional import AdditionalKeys
from blockpool.integrations.vllm.block import KVCacheBlock, Loose, register_key
from blockpool.integrations.vllm.errors import (
    HashSetError,
    MaskLengthError,
    NotCachingError,
    NotHeldError,
    NullGivenError,
    RangeError,
    StrangerError,
    UnknownIdError,
)
from blockpool.integrations.vllm.hash_map import map_of
from blockpool.integrations.vllm.home import Home
from blockpool.integrations.vllm.keys import Keys
from blockpool.integrations.vllm.members import Members
from blockpool.integrations.vllm.notice import say_kept
from blockpool.integrations.vllm.queue import FreeKVCacheBlockQueue, add_sentinels
from blockpool.integrations.vllm.strays import Strays
from blockpool.integrations.vllm.words import words
from blockpool.pool.block_pool import MOST_TOKENS
from blockpool.pool.block_pool import BlockPool as Books
from blockpool.pool.errors import NoFreeBlocksError
from blockpool.pool.events import BlockRemoved
from blockpool.pool.layout import FIELDS, FLAGS, HASHED, MARK, TOKENS


@mypyc_attr(allow_interpreted_subclasses=True)
class PoolOverBooks:
    """`num_gpu_blocks` blocks, the null block (0) among them, as vLLM's managers and connectors expect them.

    Blocks go in and come out as the objects in `blocks`, which stay the same for the life of the pool. A call that
    refuses something has changed nothing; in particular a block that is given back more often than it is held. What a
    metrics hook or a callback raises is raised when the operation is done.
    """

    kv_event_queue: list[Any]

    def __init__(
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_kv_cache_events: bool = False,
        metrics_collector: Any = None,
        num_hash_lookahead_tokens: int = 0,
        medium: str = "GPU",
    ) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        self.enable_kv_cache_events = enable_kv_cache_events
        self.metrics_collector = metrics_collector
        self.num_hash_lookahead_tokens = num_hash_lookahead_tokens
        self.medium = medium
        self.books = Books(
            num_gpu_blocks,
            enable_caching=enable_caching,
            hash_block_size=hash_block_size,
            events="per_copy" if enable_kv_cache_events else "off",
            medium=medium,
        )
        members = Members()
        members.owner = weakref.ref(self)
        self.blocks: list[KVCacheBlock] = members
        self._home = Home(self.books.queue, self.books, weakref.ref(members))
        self._keys = Keys(self.books.index)
        self._home.keys = self._keys
        self._strays = Strays(self.books.index, self._keys)
        block_id = 0
        while block_id < num_gpu_blocks:
            members.append(KVCacheBlock(block_id, pool=self._home))
            block_id += 1
        add_sentinels(self._home, members)
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        self.cached_block_hash_to_block = map_of(self._home, members, self._strays)
        me: Any = self  # a subclass may keep its events elsewhere
        me.kv_event_queue = []
        say_kept()

    # -- counts --------------------------------------------------------------------------------------

    @property
    def cached_block_hashes_by_block(self) -> AdditionalKeys:
        """Block id to the set of its additional keys; a view."""
        return AdditionalKeys(self.books.index, self._keys)

    def get_num_free_blocks(self) -> int:
        """Blocks that can be handed out now, eviction candidates included."""
        return self.books.queue.count

    def get_usage(self) -> float:
        """The part of the blocks that is in use, from 0.0 to 1.0; blocks that are only cached are free."""
        return self.books.get_usage()

    def is_block_writable(self, block: KVCacheBlock) -> bool:
        """Whether one holder has the block for itself: not null, ref_cnt 1, no hash."""
        return self.books.is_block_writable(int(place_of(self, block)))

    # -- lending and taking back -----------------------------------------------------------------------

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """The num_blocks first blocks of the free queue, each with ref_cnt 1 and without a hash.

        Raises NoFreeBlocksError, a ValueError, and changes nothing when fewer are free.
        """
        books = self.books
        if num_blocks == 1 and self.metrics_collector is None:
            b = books.take_plain()
            if b != 0:
                return [self.blocks[b]]
        if num_blocks < 0 or num_blocks > books.queue.num_free_blocks:
            raise NoFreeBlocksError(
                f"Cannot get {num_blocks} free blocks from the pool: {books.queue.num_free_blocks} are free"
            )
        ids = books.take(num_blocks)
        out: list[KVCacheBlock] = [self.blocks[i64(b)] for b in ids]
        if self.enable_kv_cache_events:
            publish_removed(self)
        if self.metrics_collector is not None:
            measure_handed_out(self, out)
        if books.watchers.errors:
            books.watchers.raise_errors(f"get_new_blocks handed out {[int(b) for b in ids]} all the same")
        return out

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """One more reference on each; a free block leaves the queue. The null block is skipped."""
        given: list[Any] = blocks if isinstance(blocks, list) else list(blocks)
        apart = Apart()
        ids = ids_of(self, given, apart)
        if apart.foreign:
            raise StrangerError(f"{apart.foreign[0]} belongs to another pool")
        self.books.touch_vec(ids)
        for own in apart.loose:
            own.ref_cnt += 1
        if self.metrics_collector is not None:
            measure_accessed(self, given)
        self.books.watchers.raise_errors()

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """One reference less on each. Blocks that nobody holds are queued in the given order.

        Without a hash they go to the front, as a group; with one to the back. The null block is skipped. Blocks of
        another pool are given back there; one that belongs to no pool is only counted.
        Raises NotHeldError when a block is given back more often than it is held: no pool has changed.
        """
        blocks: list[Any] = ordered_blocks if isinstance(ordered_blocks, list) else list(ordered_blocks)
        apart = Apart()
        ids = ids_of(self, blocks, apart)
        books = self.books
        if apart.foreign:
            check_held(books, ids)
            parts = apart.by_home()
            for home, part in parts:
                if home.books is not None:
                    check_held(home.books, places_of(part))
            release(books, ids)
            for home, part in parts:
                pool = home.owner()
                pool.free_blocks(part)
        else:
            release(books, ids)
        for own in apart.loose:
            own.ref_cnt -= 1

    def unpin_blocks(self, blocks: Iterable[KVCacheBlock], on_reuse: Callable[[KVCacheBlock], None]) -> None:
        """Give blocks back that are still being read: they join the back of the queue and count as free.

        `on_reuse(block)` is called once per block: when it is handed out, or when the prefix cache is reset. It
        may call nothing of this pool. Several callbacks of one block are all called, in the order they were set.
        """
        ids: list[int] = []
        for block in blocks:
            if block.is_null:
                raise NullGivenError("the null block cannot be unpinned")
            ids.append(int(place_of(self, block)))
        members = self._home.members

        def reused(block_id: int) -> None:
            on_reuse(members()[block_id])

        if not callable(on_reuse):
            raise TypeError(f"on_reuse must be callable, not {on_reuse!r}")
        check_held(self.books, places(ids))
        self.books.unpin_blocks(ids, reused)

    # -- finding -------------------------------------------------------------------------------------

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> list[KVCacheBlock] | None:
        """The block with that hash in every group, in their order, or None if any group lacks it."""
        digest = block_hash if len(block_hash) == 32 else self._keys.digest(block_hash)
        index = self.books.index
        out: list[KVCacheBlock] = []
        for group_id in kv_cache_group_ids:
            entry = index.find(digest, 0, group_id)
            if entry == 0:
                return None
            b = index.block_of(entry)
            out.append(self.blocks[b] if b != 0 else self._strays.at(entry))
        return out

    # -- registering ---------------------------------------------------------------------------------

    def cache_full_blocks(
        self,
        request: Any,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        """Register blocks[num_cached_blocks:num_full_blocks]; the i-th of `blocks` covers (i+1)*block_size tokens.

        The request's hashes are at hash_block_size. Null blocks and those that the mask (one bool per block of the
        range) leaves out are skipped. A block that has a key grows into the longer prefix if its length is known;
        otherwise HashSetError is raised.
        """
        if num_cached_blocks >= num_full_blocks:
            return
        must_cache(self, block_size)
        if num_cached_blocks < 0 or num_full_blocks > len(blocks):
            raise RangeError(f"blocks {num_cached_blocks} to {num_full_blocks} of a table of {len(blocks)}")
        count = num_full_blocks - num_cached_blocks
        if block_mask is not None and len(block_mask) != count:
            raise MaskLengthError(f"a mask of {len(block_mask)} for {count} blocks")
        self.books.door.checked_group(kv_cache_group_id)
        hashes = full_hashes(request, num_cached_blocks, num_full_blocks, block_size // self.hash_block_size)
        ids = unhashed(self, blocks, num_cached_blocks, num_full_blocks, block_size, block_mask)
        register_ids(self, request, ids, blocks, hashes, num_cached_blocks, block_size, kv_cache_group_id)

    def cache_partial_block(
        self,
        request: Any,
        block: KVCacheBlock,
        num_tokens: int,
        kv_cache_group_id: int,
        block_size: int,
        replace_existing_hashes: bool = False,
    ) -> bytes | None:
        """Register the boundary at `num_tokens`, a multiple of hash_block_size, inside a block. Returns the key.

        The null block has none: None. There already: nothing happens. Longer than the primary key: replaces all
        there is. Shorter: becomes an additional key. `replace_existing_hashes`: the block's only key from now on.
        """
        must_cache(self, block_size)
        unit = self.hash_block_size
        if num_tokens < unit or num_tokens % unit != 0 or num_tokens > MOST_TOKENS:
            raise RangeError(f"a boundary at {num_tokens} tokens is not a positive multiple of {unit} below 2**31")
        number = num_tokens // unit
        if len(request.block_hashes) < number:
            raise RangeError(
                f"a boundary at {num_tokens} tokens needs {number} hashes, the request has"
                f" {len(request.block_hashes)}"
            )
        self.books.door.checked_group(kv_cache_group_id)
        b = place_of(self, block)
        if b == 0:
            return None
        return register_boundary(self, request, int(b), num_tokens, kv_cache_group_id, replace_existing_hashes)

    def _insert_block_hash(
        self, block_hash_with_group_id: bytes, block: KVCacheBlock, num_tokens: int | None
    ) -> None:
        """List a block under a key: as its primary one if it has none, else as an additional one. No event."""
        if block._home is None:
            if block.block_hash is not None:
                raise HashSetError(f"block {block.block_id} has a hash already")
            block_hash, group = self._keys.split(block_hash_with_group_id)
            self._strays.register(block, block_hash, group, num_tokens)
            return
        b = place_of(self, block)
        if b == 0:
            raise NullGivenError("the null block has no hash")
        register_key(self._home, b, block_hash_with_group_id, num_tokens)

    def move_block_hashes(self, src_block: KVCacheBlock, dst_block: KVCacheBlock) -> None:
        """Every key of src_block now names dst_block; src_block has none. No event.

        Raises HashSetError when dst_block has a key.
        """
        src, dst = place_of(self, src_block), place_of(self, dst_block)
        if src == 0 or dst == 0:
            raise NullGivenError("the null block has no hashes to move or take")
        if self.books.records.get(dst, FLAGS) & HASHED:
            raise HashSetError(f"block {dst} has a hash already, block {src}'s cannot move there")
        self.books.move_block_hashes(int(src), int(dst))

    # -- dropping ------------------------------------------------------------------------------------

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        """Drop every key of a block, with events. Whether it had one."""
        if block._home is None:
            return forget_stray(self, block)
        had_key = drop_keys(self, place_of(self, block))
        if self.metrics_collector is not None:
            measure_evicted(self, [block])
        self.books.watchers.raise_errors()
        return had_key

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Drop the keys of blocks, whatever their ref_cnt. Frees nothing, moves nothing in the queue."""
        for block_id in block_ids:
            if block_id < 0 or block_id >= self.num_gpu_blocks:
                raise UnknownIdError(f"block {block_id} is unknown: ids run from 0 to {self.num_gpu_blocks - 1}")
        evicted = [self.blocks[block_id] for block_id in block_ids]
        for block in evicted:
            drop_keys(self, block._place)
        if self.metrics_collector is not None:
            measure_evicted(self, evicted)
        self.books.watchers.raise_errors()

    def reset_prefix_cache(self) -> bool:
        """Forget every key, if no block is in use; the queue keeps its order, pending callbacks are called."""
        self.books.must_not_be_busy()
        failed: BaseException | None = None
        try:
            result = self.books.reset_prefix_cache()
            if not result:
                words().warn(
                    f"the prefix cache is not reset: {result.num_blocks_in_use} blocks are in use (of"
                    f" {self.num_gpu_blocks - 1})"
                )
                return False
        except BaseException as error:  # of a callback; the keys are gone all the same
            failed = error
        self._keys.clear()
        self._strays.clear()
        if self.enable_kv_cache_events:
            publish_removed(self)
        if self.metrics_collector is not None:
            self.metrics_collector.reset()
        if failed is not None:
            raise failed
        return True

    # -- events --------------------------------------------------------------------------------------

    def take_events(self) -> list[Any]:
        """The events since the last call, in order."""
        if not self.enable_kv_cache_events:
            return []
        me: Any = self
        events: list[Any] = me.kv_event_queue
        me.kv_event_queue = []
        return events

    def emit_cached_block_events(
        self, request: Any, num_cached_blocks: int, block_size: int, kv_cache_group_id: int
    ) -> None:
        """Announce the first blocks of a request as stored, whether they are or not; nothing is registered.

        A block that the request has no hash of is left out, with those behind it.
        """
        if not self.enable_kv_cache_events or num_cached_blocks <= 0:
            return
        check_block_size(self, block_size)
        num_cached_blocks = min(num_cached_blocks, len(request.block_hashes) * self.hash_block_size // block_size)
        if num_cached_blocks == 0:
            return
        hashes = full_hashes(request, 0, num_cached_blocks, block_size // self.hash_block_size)
        spans = [(i * block_size, (i + 1) * block_size) for i in range(num_cached_blocks)]
        publish(
            self,
            words().stored(
                request,
                hashes,
                None,
                spans,
                (0, num_cached_blocks * block_size),
                block_size,
                kv_cache_group_id,
                self.num_hash_lookahead_tokens,
                self.medium,
            ),
        )


@final
class Apart:
    """Blocks that were given to a pool and are not its own."""

    def __init__(self) -> None:
        self.loose: list[Loose] = []
        self.foreign: list[KVCacheBlock] = []

    def put(self, block: KVCacheBlock) -> None:
        own = block._loose
        if own is None:
            self.foreign.append(block)
        else:
            self.loose.append(own)

    def by_home(self) -> list[tuple[Home, list[KVCacheBlock]]]:
        parts: list[tuple[Home, list[KVCacheBlock]]] = []
        for block in self.foreign:
            home = block._home
            if home is None or home.owner() is None:
                raise StrangerError(f"{block} belongs to a pool that is gone")
            for known, part in parts:
                if known is home:
                    part.append(block)
                    break
            else:
                parts.append((home, [block]))
        return parts


# What follows are functions and not methods: through the class that vLLM instantiates, which is interpreted, a method
# would be called as Python calls it, and each array that is handed over in that way is never given back.


def places_of(blocks: list[KVCacheBlock]) -> vec[i32]:
    out = vec[i32]()
    for block in blocks:
        out = append(out, i32(block._place))
    return out


def places(ids: list[int]) -> vec[i32]:
    out = vec[i32]()
    for one in ids:
        out = append(out, i32(one))
    return out


def full_hashes(request: Any, first: int, last: int, factor: int) -> list[bytes]:
    """A request's hashes at the ends of blocks first to last-1 of `factor` hash blocks each."""
    given: Any = request.block_hashes
    if isinstance(given, list):
        if last * factor > len(given):
            raise RangeError(f"{last} blocks need {last * factor} hashes, the request has {len(given)}")
        if factor == 1:
            return given[first:last]
        return given[(first + 1) * factor - 1 : last * factor : factor]
    if last > len(given):  # a view, at the block size already
        raise RangeError(f"{last} blocks need {last} hashes, the request has {len(given)}")
    return [given[i] for i in range(first, last)]


def register_ids(
    pool: PoolOverBooks,
    request: Any,
    ids: vec[i32],
    blocks: list[Any],
    hashes: list[bytes],
    first: int,
    block_size: int,
    group_id: int,
) -> None:
    """Register the blocks at first, first+1, … of a request's table under their hashes, with events.

    An id of 0 is skipped; -1 stands for the block in `blocks` at that position, which belongs to no pool.
    """
    index = pool.books.index
    records = pool.books.records
    keep = pool._keys
    keep.tidy()
    digests: list[bytes] = [h if len(h) == 32 else keep.keep(h) for h in hashes]
    group: i64 = group_id
    hs = vec[i64](capacity=len(digests))
    for digest in digests:
        hs = append(hs, index.mix_at(digest, 0, group))
    index.warm_slots(hs)
    covered: i64 = first * block_size
    size: i64 = block_size
    at: i64 = 0
    told: Any = None
    if pool.enable_kv_cache_events:
        told = told_of(pool, request, ids, hashes, first, block_size, group_id)
    for b in ids:
        covered += size
        if b > 0:
            if records.get(i64(b), FLAGS) & HASHED:
                pool.books.forget(i64(b))
            index.add(i64(b), digests[at], 0, group, covered, hs[at])
        elif b < 0:
            stray = blocks[first + at]
            forget_stray(pool, stray)
            pool._strays.register(stray, hashes[at], group, covered)
        at += 1
    pool.books.changes += 1
    if pool.enable_kv_cache_events:
        publish_removed(pool)
        if told is not None:
            publish(pool, told)


def register_boundary(
    pool: PoolOverBooks, request: Any, block: int, num_tokens: int, group_id: int, replaces: bool
) -> bytes:
    """Register a block as far as a boundary inside it, with events. The key."""
    unit = pool.hash_block_size
    number = num_tokens // unit
    hashes: Any = request.block_hashes
    block_hash: bytes = hashes[number - 1]
    key = block_hash + group_id.to_bytes(4, "big")
    pool._keys.tidy()
    digest = pool._keys.keep(block_hash)
    index = pool.books.index
    b: i64 = block
    group: i64 = group_id
    if not replaces and index.entry_of(b, digest, 0, group) != 0:
        return key
    told: Any = None
    if pool.enable_kv_cache_events:
        parent: bytes | None = hashes[number - 2] if number > 1 else None
        told = words().stored(
            request,
            [block_hash],
            parent,
            [(num_tokens - unit, num_tokens)],
            (num_tokens - unit, num_tokens),
            unit,
            group_id,
            pool.num_hash_lookahead_tokens,
            pool.medium,
        )
    known = pool.books.records.get(b, TOKENS)
    if replaces or (known != 0 and known < num_tokens):
        pool.books.forget(b)
    index.put(b, digest, 0, group, num_tokens)
    pool.books.changes += 1
    if pool.enable_kv_cache_events:
        publish_removed(pool)
        publish(pool, told)
    return key


def forget_stray(pool: PoolOverBooks, block: KVCacheBlock) -> bool:
    gone = pool._strays.forget(block)
    if pool.enable_kv_cache_events:
        for key in gone:
            block_hash, group = pool._keys.split(key)
            publish(pool, words().removed(block_hash, group, pool.medium))
    return len(gone) > 0


def drop_keys(pool: PoolOverBooks, b: i64) -> bool:
    """Drop every key of a block, with events. Whether it had one."""
    if b == 0 or pool.books.records.get(b, FLAGS) & HASHED == 0:
        return False
    pool.books.forget(b)
    pool.books.changes += 1
    if pool.enable_kv_cache_events:
        publish_removed(pool)
    return True


def told_of(
    pool: PoolOverBooks,
    request: Any,
    ids: vec[i32],
    hashes: list[bytes],
    first: int,
    block_size: int,
    group_id: int,
) -> Any:
    """What is to be announced of a range: one event for the blocks of it that are registered, None if none is."""
    stored: list[bytes] = []
    spans: list[tuple[int, int]] = []
    at = 0
    for b in ids:
        if b != 0:
            stored.append(hashes[at])
            spans.append(((first + at) * block_size, (first + at + 1) * block_size))
        at += 1
    if not stored:
        return None
    parent: bytes | None = None
    if first > 0:
        parent = full_hashes(request, first - 1, first, block_size // pool.hash_block_size)[0]
    return words().stored(
        request,
        stored,
        parent,
        spans,
        (first * block_size, (first + at) * block_size),
        block_size,
        group_id,
        pool.num_hash_lookahead_tokens,
        pool.medium,
    )


def publish(pool: PoolOverBooks, event: Any) -> None:
    me: Any = pool
    me.kv_event_queue.append(event)


def publish_removed(pool: PoolOverBooks) -> None:
    """One event per key that has left the index."""
    said = words()
    for event in pool.books.take_events():
        if isinstance(event, BlockRemoved):
            for digest in event.block_hashes:
                if isinstance(digest, bytes):
                    publish(pool, said.removed(pool._keys.original(digest), event.group_idx, pool.medium))
        else:
            publish(pool, said.cleared())


def measure_handed_out(pool: PoolOverBooks, blocks: list[KVCacheBlock]) -> None:
    collector = pool.metrics_collector
    try:
        for block in blocks:
            if pool.enable_caching:
                collector.on_block_evicted(block)
            collector.on_block_allocated(block)
    except BaseException as error:  # raised when the whole operation is done
        pool.books.watchers.errors.append(error)


def measure_evicted(pool: PoolOverBooks, blocks: list[KVCacheBlock]) -> None:
    collector = pool.metrics_collector
    try:
        for block in blocks:
            collector.on_block_evicted(block)
    except BaseException as error:
        pool.books.watchers.errors.append(error)


def measure_accessed(pool: PoolOverBooks, blocks: list[Any]) -> None:
    collector = pool.metrics_collector
    try:
        for block in blocks:
            if not block.is_null:
                collector.on_block_accessed(block)
    except BaseException as error:
        pool.books.watchers.errors.append(error)


def place_of(pool: PoolOverBooks, block: KVCacheBlock) -> i64:
    if block._home is not pool._home:
        raise StrangerError(f"{block} is not a block of this pool")
    return block._place


def ids_of(pool: PoolOverBooks, blocks: list[Any], apart: Apart) -> vec[i32]:
    """The places of this pool's blocks; those of other pools and of none are put apart."""
    home = pool._home
    room = pool.books.records.room_for(len(blocks))
    count: i64 = 0
    for block in blocks:
        if not isinstance(block, KVCacheBlock):
            raise StrangerError(f"{block!r} is not a block of this pool")
        if block._home is home:
            room[count] = i32(block._place)
            count += 1
        else:
            apart.put(block)
    return room[:count]


def must_cache(pool: PoolOverBooks, block_size: int) -> None:
    pool.books.must_not_be_busy()
    if not pool.enable_caching:
        raise NotCachingError("this pool was made with enable_caching=False: it keeps no hashes")
    check_block_size(pool, block_size)


def check_block_size(pool: PoolOverBooks, block_size: int) -> None:
    if block_size < 1 or block_size > MOST_TOKENS or block_size % pool.hash_block_size != 0:
        raise RangeError(
            f"block_size {block_size} is not a multiple of the hash block size {pool.hash_block_size} below 2**31"
        )


def unhashed(pool: PoolOverBooks, blocks: list[Any], first: int, last: int, block_size: int, mask: Any) -> vec[i32]:
    """The blocks of a range that are to be registered; 0: skipped; -1: registered, but of no pool.

    Refuses those that have another key.
    """
    home = pool._home
    records = pool.books.records
    if last * block_size > MOST_TOKENS:
        raise RangeError(f"a prefix of {last * block_size} tokens is longer than {MOST_TOKENS}")
    begin: i64 = first
    end: i64 = last
    size: i64 = block_size
    ids = vec[i32](capacity=end - begin)
    i = begin
    wrong: KVCacheBlock | None = None
    try:  # marked, so that a block that is named twice is seen
        while i < end:
            block = blocks[i]
            if not isinstance(block, KVCacheBlock):
                raise StrangerError(f"{block!r} is not a block of this pool")
            b: i64 = 0
            if mask is None or mask[i - begin]:
                if block._home is home:
                    b = block._place
                    if b != 0:
                        flags = records.get(b, FLAGS)
                        if flags & (HASHED | MARK):
                            covered = records.get(b, TOKENS)
                            if flags & MARK or covered == 0 or covered >= (i + 1) * size:
                                wrong = block
                                break
                        records.set(b, FLAGS, flags | MARK)
                elif block._home is None and pool._strays.fits(block, int(i + 1) * block_size):
                    b = 0 if block.is_null else -1
                else:
                    wrong = block
                    break
            ids = append(ids, i32(b))
            i += 1
    finally:
        for one in ids:
            if one > 0:
                o = records.base + i64(one) * FIELDS + FLAGS
                records.meta[o] = i32(i64(records.meta[o]) & ~MARK)
    if wrong is not None:
        refuse(pool, wrong, block_size * int(i + 1))
    return ids


def refuse(pool: PoolOverBooks, block: KVCacheBlock, num_tokens: int) -> None:
    if block._home is not pool._home and block._home is not None:
        raise StrangerError(f"{block} is not a block of this pool")
    raise HashSetError(
        f"block {block.block_id} has the hash of {block.block_hash_num_tokens} tokens already, or is named twice:"
        f" it cannot be registered for {num_tokens} tokens"
    )


def check_held(books: Books, ids: vec[i32]) -> None:
    try:
        books.check_releasable(ids)
    except ValueError as error:
        raise NotHeldError(str(error)) from None


def release(books: Books, ids: vec[i32]) -> None:
    try:
        books.free_vec(ids, None)
    except ValueError as error:
        raise NotHeldError(str(error)) from None
