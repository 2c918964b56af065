"""Blocks that will be found when the step that writes them has run."""

from __future__ import annotations

from typing import final

from librt.vecs import vec
from mypy_extensions import i32

from blockpool.cache.request import Request
from blockpool.managers import SingleTypeKVCacheManager


@final
class Waiting:
    """Blocks that become findable when the step that writes them is acknowledged.

    They stand at `first`, first+1, … of the request's table, 0 is skipped; `digests` starts at digest `first_digest`.
    With a `boundary`, the one block is registered as far as that, under the one digest.
    """

    def __init__(
        self,
        manager: SingleTypeKVCacheManager,
        request: Request,
        blocks: vec[i32],
        first: int,
        digests: bytes,
        first_digest: int,
        boundary: int = 0,
    ) -> None:
        self.manager = manager
        self.request = request
        self.blocks = blocks
        self.first = first
        self.digests = digests
        self.first_digest = first_digest
        self.boundary = boundary
        self.place = self.first_found()
        self.key = self.digest_at(self.place)

    def first_found(self) -> int:
        """The number of the first digest that will be registered."""
        if self.boundary:
            return self.first_digest
        at = 0
        while int(self.blocks[at]) == 0:
            at += 1
        return (self.first + at + 1) * self.manager.factor - 1

    def digest_at(self, number: int) -> bytes:
        width = self.manager.pool.digest_size
        place = (number - self.first_digest) * width
        return self.digests[place : place + width]

    def entries(self) -> dict[bytes, int]:
        """Digest -> block of all that will be registered."""
        manager = self.manager
        width = manager.pool.digest_size
        if self.boundary:
            return {self.digests: int(self.blocks[0])}
        found: dict[bytes, int] = {}
        for at in range(len(self.blocks)):
            block = int(self.blocks[at])
            if block:
                place = ((self.first + at + 1) * manager.factor - 1 - self.first_digest) * width
                found[self.digests[place : place + width]] = block
        return found


@final
class WaitingList:
    """All that waits, by the place and the bytes of its first digest: an equal one means an equal prefix."""

    def __init__(self) -> None:
        self.by_place: dict[int, dict[bytes, list[Waiting]]] = {}

    def add(self, waiting: Waiting) -> None:
        self.by_place.setdefault(waiting.place, {}).setdefault(waiting.key, []).append(waiting)

    def remove(self, waiting: Waiting) -> None:
        keys = self.by_place[waiting.place]
        left = [one for one in keys[waiting.key] if one is not waiting]
        if left:
            keys[waiting.key] = left
        else:
            del keys[waiting.key]
            if not keys:
                del self.by_place[waiting.place]

    def of_chain(self, digests: bytes, width: int) -> list[Waiting]:
        """What waits of a chain's own prefixes."""
        found: list[Waiting] = []
        for place, keys in self.by_place.items():
            found.extend(keys.get(digests[place * width : (place + 1) * width], NOTHING))
        return found

    def is_replaced(self, tail: Waiting) -> bool:
        """Whether a tail's block is registered further, or will be as a whole: the tail is never found then."""
        manager = tail.manager
        block = int(tail.blocks[0])
        for _, covered in manager.pool.get_block_hashes(block):
            if covered >= tail.boundary:
                return True
        for keys in self.by_place.values():
            for waits in keys.values():
                for waiting in waits:
                    if waiting.boundary == 0 and waiting.manager is manager and i32(block) in waiting.blocks:
                        return True
        return False


NOTHING: list[Waiting] = []
