"""The free queue as vLLM handles it: blocks in, blocks out, over a ring of places."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, final

from librt.vecs import append, vec
from mypy_extensions import i32, i64

from blockpool.integrations.vllm.block import KVCacheBlock, loose
from blockpool.integrations.vllm.errors import NotLinkedError, StrangerError
from blockpool.integrations.vllm.home import HEAD, TAIL, Home
from blockpool.integrations.vllm.members import Members
from blockpool.pool.errors import NoFreeBlocksError, QueueError
from blockpool.pool.queue import FreeKVCacheBlockQueue as Ring


@final
class FreeKVCacheBlockQueue:
    """The blocks of a list, queued in its order; or, for the list of all blocks of a pool, that pool's own queue.

    Whoever moves blocks in a pool's own queue by hand takes over the promise that a block is queued exactly
    while nobody holds it.
    """

    def __init__(self, blocks: list[KVCacheBlock]) -> None:
        self._spare: list[int] = []
        home = blocks[0]._home if blocks else None
        if home is not None:
            if home.members() is not blocks:
                raise StrangerError("blocks of a pool are queued by their pool")
            self._home = home
            self._members: Any = blocks
            self._own = False
            return
        self._members = Members()
        self._members.append(None)
        self._members.extend(blocks)
        self._home = Home(Ring(len(blocks) + 1), None, weakref.ref(self._members))
        self._own = True
        add_sentinels(self._home, self._members)
        place = 1
        for block in blocks:
            self._settle(block, place)
            place += 1

    # -- what vLLM reads -----------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Length of the queue, counted, not walked."""
        return int(self._home.ring.count)

    @property
    def fake_free_list_head(self) -> KVCacheBlock:
        """The sentinel before the first block; it is never handed out."""
        head: KVCacheBlock = self._members.head
        return head

    @property
    def fake_free_list_tail(self) -> KVCacheBlock:
        """The sentinel behind the last block; it is never handed out."""
        tail: KVCacheBlock = self._members.tail
        return tail

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """The whole queue from its head; walks it."""
        members = self._members
        return [members[place] for place in self._home.ring.get_all_free_blocks()]

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """The blocks behind `cursor` (None: all) in the order in which they will be handed out; lazy."""
        members = self._members
        if cursor is None:
            places = self._home.ring.iter_blocks_after(None)
        else:
            places = self._home.ring.iter_blocks_after(int(self._place(cursor)))
        for place in places:
            yield members[place]

    # -- out -----------------------------------------------------------------------------------------

    def popleft(self) -> KVCacheBlock:
        """Take the next block. Raises NoFreeBlocksError, a ValueError, when there is none."""
        if self._home.ring.count == 0:
            raise NoFreeBlocksError("No free blocks available")
        return self._leave(self._home.ring.popleft())

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the first n blocks, in order. Raises NoFreeBlocksError when there are fewer."""
        return [self._leave(place) for place in self._home.ring.popleft_n(n)]

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block from wherever it stands. Raises NotLinkedError, a RuntimeError, when it is not queued."""
        place = self._place(block)
        if place <= 0 or not self._home.ring.has(place):
            raise NotLinkedError(f"remove() called on an invalid block, it is not in the free queue: {block}")
        self._home.ring.remove(int(place))
        self._leave(int(place))

    # -- in ------------------------------------------------------------------------------------------

    def append(self, block: KVCacheBlock) -> None:
        """Put a block at the back."""
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Put blocks at the back, in the given order."""
        places = self._arrive(blocks)
        self._home.ring.append_vec(places)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Put blocks at the front, in the given order: the first given is the next to be handed out."""
        places = self._arrive(blocks)
        self._home.ring.prepend_vec(places)

    # -- places of stand-alone blocks ----------------------------------------------------------------

    def _place(self, block: KVCacheBlock) -> i64:
        """Where a block stands in the ring's records; 0 for one that is not in this queue."""
        if not self._own:
            if block._home is not self._home:
                raise StrangerError(f"{block} belongs to another pool or to none")
            return block._place
        own = loose(block)
        return own.place if own.home is self._home else 0

    def _settle(self, block: KVCacheBlock, place: int) -> None:
        own = loose(block)
        if own.home is not None:
            raise QueueError(f"block {block.block_id} is in a free queue already, or was given twice")
        own.home = self._home
        own.place = place

    def _leave(self, place: int) -> KVCacheBlock:
        """The block at a place that has just left the ring."""
        block: KVCacheBlock = self._members[place]
        if self._own:
            own = loose(block)
            own.home = None
            own.place = 0
            self._members[place] = None
            self._spare.append(place)
        return block

    def _arrive(self, blocks: Iterable[KVCacheBlock]) -> vec[i32]:
        """Places for blocks that come in; all of them or none."""
        coming: list[KVCacheBlock] = list(blocks)
        if not self._own:
            return self._home.ring.outsiders([int(self._place(block)) for block in coming])
        if len({id(block) for block in coming}) < len(coming):
            raise QueueError("a block was given twice")
        for block in coming:
            if loose(block).home is not None:
                raise QueueError(f"block {block.block_id} is in a free queue already")
        if len(self._spare) < len(coming):
            self._grow(len(coming))
        places = vec[i32]()
        for block in coming:
            place = self._spare.pop()
            self._members[place] = block
            self._settle(block, place)
            places = append(places, i32(place))
        return places

    def _grow(self, coming: int) -> None:
        """A ring with more places; the blocks keep theirs."""
        old = self._home.ring
        size = int(old.size)
        ring = Ring(2 * size + coming)
        ring.popleft_n(2 * size + coming - 1)
        ring.append_n(old.get_all_free_blocks())
        self._home.ring = ring
        self._members.extend([None] * (size + coming))
        self._spare.extend(range(size, 2 * size + coming))


def add_sentinels(home: Home, members: Any) -> None:
    """The blocks with id -1 at both ends of a queue."""
    head = KVCacheBlock(-1)
    tail = KVCacheBlock(-1)
    loose(head).home = home
    loose(head).place = HEAD
    loose(tail).home = home
    loose(tail).place = TAIL
    members.head = head
    members.tail = tail
