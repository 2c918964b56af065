"""The free queue: the blocks that nobody holds, in the order in which they will be handed out.

A ring of ids with holes. A block knows its place, so it leaves from anywhere by making a hole; handing out reads
the ring in sequence, where a linked list would wait for one cache miss after another. Holes are swept out a few
places per operation: entries move towards the head, past a gap that grows from `gap` to `sweep`. The ring has
room for three times the blocks, and a sweep starts at two thirds of that, so it ends before the ring is full.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import index
from typing import Final, SupportsIndex, final

from librt.vecs import append, vec
from mypy_extensions import i32, i64

from blockpool.pool.errors import NoFreeBlocksError, QueueError, UnknownBlockError
from blockpool.pool.layout import FIELDS, MAX_BLOCKS, PLACE, Records, zeros32

#: Places swept per block that comes or goes; a sweep then ends before a third as many have come as it found.
PACE: Final[i64] = 4


@final
class FreeKVCacheBlockQueue:
    """Every operation is O(1) per block it moves, and allocates nothing per block.

    `FreeKVCacheBlockQueue(n)` queues the blocks 1 .. n-1. A pool's own queue shares the pool's records:
    whoever moves blocks in it by hand takes over the promise that a block is queued exactly while nobody
    holds it.
    """

    def __init__(self, num_blocks: int, records: Records | None = None) -> None:
        if num_blocks < 1 or num_blocks > MAX_BLOCKS:
            raise ValueError(f"num_blocks must be from 1 to {MAX_BLOCKS}, not {num_blocks}")
        n: i64 = num_blocks
        self.records = Records(n) if records is None else records
        self.size: i64 = n
        capacity: i64 = 64
        while capacity < 3 * n:
            capacity *= 2
        self.mask: i64 = capacity - 1
        self.crowded: i64 = capacity * 2 // 3
        # positions count on for ever in both directions; the ring's place is the position's low bits
        self.head: i64 = 0
        self.tail: i64 = n - 1
        self.gap: i64 = 0
        self.sweep: i64 = 0
        self.sweeping = False
        self.count: i64 = n - 1
        ring = zeros32(capacity)
        meta = self.records.meta
        base = self.records.base
        b: i64 = 1
        while b < n:
            ring[b - 1] = i32(b)
            meta[base + b * FIELDS + PLACE] = i32(b)
            b += 1
        self.ring = ring

    @property
    def num_free_blocks(self) -> int:
        """Length of the queue, counted, not walked."""
        return self.count

    def __len__(self) -> int:
        return self.count

    # -- one block ---------------------------------------------------------------------------------

    def popleft(self) -> int:
        """Take the next block. Raises NoFreeBlocksError when the queue is empty."""
        if self.count == 0:
            raise NoFreeBlocksError("no free blocks: the queue is empty")
        b = self.first()
        self.popleft_first(b)
        return b

    def remove(self, block: SupportsIndex) -> None:
        """Take a block from wherever it stands. Raises QueueError naming it when it is not queued."""
        b = self.known(block)
        if not self.has(b):
            raise QueueError(f"block {b} is not in the free queue")
        self.remove_vec(vec[i32]([i32(b)]))

    def append(self, block: SupportsIndex) -> None:
        """Put a block at the back. Raises QueueError when it is queued already."""
        self.append_n([block])

    def prepend(self, block: SupportsIndex) -> None:
        """Put a block at the front. Raises QueueError when it is queued already."""
        self.prepend_one(i64(self.outsiders([block])[0]))

    # -- several blocks, all or nothing ------------------------------------------------------------

    def popleft_n(self, n: int) -> list[int]:
        """Take the first n blocks, in order. Raises NoFreeBlocksError when there are fewer."""
        free: int = self.count
        if n < 0 or n > free:
            raise NoFreeBlocksError(f"cannot take {n} blocks: {self.count} are in the free queue")
        return list(self.popleft_vec(n))

    def append_n(self, blocks: Iterable[SupportsIndex]) -> None:
        """Put blocks at the back, in the given order."""
        self.append_vec(self.outsiders(blocks))

    def prepend_n(self, blocks: Iterable[SupportsIndex]) -> None:
        """Put blocks at the front, in the given order: the first given is the next to be handed out."""
        self.prepend_vec(self.outsiders(blocks))

    # -- reading -----------------------------------------------------------------------------------

    def __contains__(self, block: object) -> bool:
        try:
            number = index(block)  # type: ignore[arg-type]
        except TypeError:
            return False
        limit: int = self.size
        return 1 <= number < limit and self.has(number)

    def get_all_free_blocks(self) -> list[int]:
        """The whole queue from its head; walks it."""
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: SupportsIndex | None) -> Iterator[int]:
        """The blocks behind `cursor` (None: all) in the order in which they will be handed out.

        Lazy and read-only. Raises QueueError when the cursor is not queued, or when the block reached last
        leaves the queue while the walk goes on.
        """
        if cursor is None:
            return self.walk(self.head)
        b = self.known(cursor)
        if not self.has(b):
            raise QueueError(f"block {b} is not in the free queue")
        return self.walk(self.position(b) + 1)

    def walk(self, at: i64) -> Iterator[int]:
        while True:
            at = self.next_live(at, 1)
            if at == self.tail:
                return
            b = i64(self.ring[at & self.mask])
            yield b
            if not self.has(b):
                raise QueueError(f"block {b} left the free queue during a walk that had reached it")
            at = self.position(b) + 1

    def first_ids(self, count: i64) -> vec[i32]:
        """The first blocks that will be handed out, at most `count`. Read only."""
        found = vec[i32]()
        at = self.next_live(self.head, 1)
        while at < self.tail and i64(len(found)) < count:
            found = append(found, self.ring[at & self.mask])
            at = self.next_live(at + 1, 1)
        return found

    def neighbour(self, block: int, step: int) -> int:
        """The block queued next to this one, behind (step 1) or before it (-1); 0 without one."""
        if not self.has(block):
            return 0
        at = self.next_live(self.position(block) + step, step)
        return 0 if at == self.tail or at == self.head - 1 else int(self.ring[at & self.mask])

    def by_place(self) -> list[int]:
        """The blocks that say they are queued, the last to be handed out first: for an audit of the ring."""
        placed: list[tuple[int, int]] = []
        for block in range(1, self.size):
            if self.has(block):
                placed.append((self.position(block), block))
        placed.sort(reverse=True)
        return [block for _, block in placed]

    # -- the pool's way in: ids are known to be valid ----------------------------------------------

    def has(self, b: i64) -> bool:
        return self.records.get(b, PLACE) != 0

    def position(self, b: i64) -> i64:
        return self.head + ((self.records.get(b, PLACE) - 1 - self.head) & self.mask)

    def next_live(self, at: i64, step: i64) -> i64:
        """The first position from `at` on, in steps of 1 or -1, that holds a block; tail or head-1 without one."""
        while at >= self.head and at < self.tail and self.ring[at & self.mask] == 0:
            at += step
        return at

    def popleft_vec(self, n: i64) -> vec[i32]:
        """The first n blocks; there must be as many."""
        ring = self.ring
        mask = self.mask
        at = self.head
        out = vec[i32](capacity=n)
        k = n
        while k > 0:
            b = ring[at & mask]
            at += 1
            if b != 0:
                out = append(out, b)
                k -= 1
        self.head = at
        self.count -= n
        self.records.warm(out)
        meta = self.records.meta
        base = self.records.base
        for b in out:
            meta[base + i64(b) * FIELDS + PLACE] = 0
        self.pass_gap()
        return out

    def first(self) -> i64:
        """The next block; there must be one."""
        at = self.head
        while self.ring[at & self.mask] == 0:
            at += 1
        return i64(self.ring[at & self.mask])

    def popleft_first(self, b: i64) -> None:
        """Take the block that `first` found."""
        at = self.position(b) + 1
        self.records.set(b, PLACE, 0)
        self.head = at
        self.count -= 1
        self.pass_gap()

    def prepend_one(self, b: i64) -> None:
        """`prepend_vec` of one block, without an array."""
        self.make_room(1)
        self.head -= 1
        place = self.head & self.mask
        self.ring[place] = i32(b)
        self.records.set(b, PLACE, place + 1)
        self.count += 1

    def pass_gap(self) -> None:
        """The head has moved: a gap that it has passed is no gap any more."""
        if self.sweeping and self.head > self.gap:
            self.gap = self.head
            if self.head > self.sweep:
                self.sweep = self.head

    def remove_vec(self, blocks: vec[i32]) -> None:
        """Take queued blocks from wherever they stand."""
        ring = self.ring
        meta = self.records.meta
        base = self.records.base
        seen: i32 = 0
        for b in blocks:  # a short loop: the misses overlap
            seen ^= ring[i64(meta[base + i64(b) * FIELDS + PLACE]) - 1]
        self.records.sink = i64(seen)
        for b in blocks:
            o = base + i64(b) * FIELDS + PLACE
            ring[i64(meta[o]) - 1] = 0
            meta[o] = 0
        self.count -= len(blocks)

    def append_vec(self, blocks: vec[i32]) -> None:
        self.make_room(len(blocks))
        ring = self.ring
        mask = self.mask
        meta = self.records.meta
        base = self.records.base
        at = self.tail
        for b in blocks:
            place = at & mask
            ring[place] = b
            meta[base + i64(b) * FIELDS + PLACE] = i32(place + 1)
            at += 1
        self.tail = at
        self.count += len(blocks)

    def prepend_vec(self, blocks: vec[i32]) -> None:
        self.make_room(len(blocks))
        ring = self.ring
        mask = self.mask
        meta = self.records.meta
        base = self.records.base
        at = self.head - len(blocks)
        self.head = at
        for b in blocks:
            place = at & mask
            ring[place] = b
            meta[base + i64(b) * FIELDS + PLACE] = i32(place + 1)
            at += 1
        self.count += len(blocks)

    # -- holes -------------------------------------------------------------------------------------

    def make_room(self, coming: i64) -> None:
        """Sweep some places if the ring is crowded, so that `coming` more blocks fit."""
        if self.count == 0:
            self.head = self.tail
            self.sweeping = False
        elif self.sweeping or self.tail - self.head + coming > self.crowded:
            self.sweep_on(PACE * coming + PACE)

    def sweep_on(self, steps: i64) -> None:
        """Go on with the sweep for some places, or begin one; at its end the tail draws near."""
        if not self.sweeping:
            self.sweeping = True
            self.gap = self.head
            self.sweep = self.head
        ring = self.ring
        mask = self.mask
        meta = self.records.meta
        base = self.records.base
        to = self.gap
        at = self.sweep
        end = min(self.tail, at + steps)
        while at < end:
            b = ring[at & mask]
            if b != 0:
                if to != at:
                    place = to & mask
                    ring[at & mask] = 0
                    ring[place] = b
                    meta[base + i64(b) * FIELDS + PLACE] = i32(place + 1)
                to += 1
            at += 1
        self.gap = to
        self.sweep = at
        if at == self.tail:
            self.tail = to
            self.sweeping = False

    # -- the public door ---------------------------------------------------------------------------

    def known(self, block: SupportsIndex) -> i64:
        number = index(block)
        limit: int = self.size
        if number < 1 or number >= limit:
            raise UnknownBlockError(f"block {number} cannot be queued: ids run from 1 to {self.size - 1}")
        return number

    def outsiders(self, blocks: Iterable[SupportsIndex]) -> vec[i32]:
        """The blocks as ids, once it is certain that none is queued or given twice."""
        out = vec[i32]()
        seen: set[int] = set()
        for block in blocks:
            b = self.known(block)
            if self.has(b) or b in seen:
                raise QueueError(f"block {b} is in the free queue already, or was given twice")
            seen.add(b)
            out = append(out, i32(b))
        return out
