"""A chain seen in the unit of a group whose blocks hold several hash blocks: every k-th digest, nothing rehashed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, overload

import numpy as np

from blockpool.hashing.errors import BlockSizeError
from blockpool.hashing.extra_keys import untagged

if TYPE_CHECKING:
    from blockpool.hashing.chain import BlockHashes
    from blockpool.hashing.extra_keys import Key


class BlockHashView:
    """Digest i is the one that closes the i-th block of `block_size` tokens. The view follows its chain.

    Made by BlockHashes.with_block_size; raises BlockSizeError if block_size is no multiple of the chain's unit.
    """

    __slots__ = ("_chain", "_factor", "block_size")

    def __init__(self, chain: BlockHashes, block_size: int) -> None:
        if block_size < 1 or block_size % chain.hash_block_size:
            raise BlockSizeError(f"block size {block_size} is no multiple of {chain.hash_block_size}, the hash unit")
        self._chain = chain
        self._factor = block_size // chain.hash_block_size
        self.block_size = block_size

    @property
    def digest_size(self) -> int:
        """Bytes per digest."""
        return self._chain.digest_size

    def __len__(self) -> int:
        return len(self._chain) // self._factor

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self._chain[self._unit(i)] for i in range(*index.indices(len(self)))]
        return self._chain[self._unit(range(len(self))[index])]

    def __iter__(self) -> Iterator[bytes]:
        i = 0
        while i < len(self):
            yield self._chain[self._unit(i)]
            i += 1

    def __repr__(self) -> str:
        return f"<BlockHashView: {len(self)} digests of {self.block_size} tokens>"

    def raw(self, first: int = 0, last: int | None = None) -> bytes:
        """The digests [first, last) of this view, concatenated. Raises IndexError outside of it."""
        last = len(self) if last is None else last
        if not 0 <= first <= last <= len(self):
            raise IndexError(f"digests [{first}, {last}) of {len(self)}")
        units = self._chain.raw(first * self._factor, last * self._factor)
        if self._factor == 1:
            return units
        rows = np.frombuffer(units, np.uint8).reshape(last - first, self._factor, self.digest_size)
        return rows[:, -1].tobytes()

    def parent_of(self, index: int) -> bytes | None:
        """The digest before block `index` of this view; None for the first block."""
        i = range(len(self))[index]
        return None if i == 0 else self._chain[self._unit(i - 1)]

    def extra_keys(self, index: int) -> Key | None:
        """The tagged extra value of the whole block `index` of this view: offsets count from its start."""
        return self._chain.keys_of_span(*self._span(index))

    def event_extra_keys(self, index: int) -> Key | None:
        """The same without tags, as events publish it."""
        return untagged(self.extra_keys(index))

    def _unit(self, index: int) -> int:
        return (index + 1) * self._factor - 1

    def _span(self, index: int) -> tuple[int, int]:
        i = range(len(self))[index]
        return i * self.block_size, (i + 1) * self.block_size
