"""Blocks that a commit took, per group."""

from __future__ import annotations

from librt.vecs import vec
from mypy_extensions import i32


class KVCacheBlocks:
    """The block ids that were appended to each group's table, in token order, 0 where nothing is kept.

    Compares with what holds the same ids.
    """

    def __init__(self, groups: tuple[vec[i32], ...]) -> None:
        self._groups = groups

    def get_block_ids(self) -> tuple[list[int], ...]:
        """One list of ids per group."""
        return tuple(list(group) for group in self._groups)

    @property
    def num_blocks(self) -> int:
        """How many blocks there are, nulls not counted."""
        return sum(1 for group in self._groups for block in group if block != 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KVCacheBlocks) and self.get_block_ids() == other.get_block_ids()

    def __hash__(self) -> int:
        return hash(tuple(map(tuple, self.get_block_ids())))

    def __repr__(self) -> str:
        return f"KVCacheBlocks{self.get_block_ids()}"
