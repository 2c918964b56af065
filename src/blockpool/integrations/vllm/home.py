"""Where a block lives: the books behind it, and the way from a place in them back to the block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, final

from mypy_extensions import i64

from blockpool.integrations.vllm.keys import Keys
from blockpool.pool.block_pool import BlockPool as Books
from blockpool.pool.queue import FreeKVCacheBlockQueue as Ring

if TYPE_CHECKING:
    from blockpool.integrations.vllm.block import KVCacheBlock

HEAD: Final[i64] = -1  # the places of the sentinels at both ends of a queue
TAIL: Final[i64] = -2


@final
class Home:
    """Shared by all blocks of a pool, or by the blocks in one stand-alone queue, which has no `books`.

    Every block refers to its home, and the garbage collector is never to visit the blocks of a pool: so no strong
    reference leads from here back to them. `members` is a weak one to the list that holds them, place by place.
    """

    def __init__(self, ring: Ring, books: Books | None, members: Any) -> None:
        self.ring = ring
        self.books = books
        self.keys: Keys | None = None if books is None else Keys(books.index)
        self.members = members

    def owner(self) -> Any:
        """The pool whose home this is. None when it is gone, and for a stand-alone queue."""
        members = self.members()
        return None if members is None else members.owner()

    def neighbour(self, place: i64, step: i64) -> KVCacheBlock | None:
        """The block queued behind (step 1) or before (-1) a place; a sentinel at the end; None outside the queue."""
        ring = self.ring
        if place == HEAD:
            at = ring.head
        elif place == TAIL:
            at = ring.tail - 1
        elif place > 0 and ring.has(place):
            at = ring.position(place) + step
        else:
            return None
        if (place == HEAD and step < 0) or (place == TAIL and step > 0):
            return None
        members = self.members()
        if members is None:
            return None
        at = ring.next_live(at, step)
        found: KVCacheBlock
        if at == ring.tail:
            found = members.tail
        elif at == ring.head - 1:
            found = members.head
        else:
            found = members[int(ring.ring[at & ring.mask])]
        return found
