"""The block tables of one group, as kernels read them: a row of block ids per running request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from blockpool.engine.store import StoreError

Row = npt.NDArray[np.int32]
MOST_BLOCK = (1 << 31) - 1


class BlockTable:
    """`ids`: [rows, positions], int32, 0 behind the end of a row. Rows are numbered by the caller.

    A row only grows; a position of it can become null; rows move as a whole. The array grows in both directions.
    Raises StoreError, and changes nothing, for a row that is not there.
    """

    def __init__(self, num_rows: int = 8, num_positions: int = 16) -> None:
        self.ids: npt.NDArray[np.int32] = np.zeros((num_rows, num_positions), np.int32)
        self.lengths: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        """Put block ids behind the end of a row; a row that was never used, or was cleared, is empty.

        Raises StoreError, and changes nothing, for a negative row and for what is no block id.
        """
        if row < 0:
            raise StoreError(f"row {row}: rows are counted from 0")
        for block_id in block_ids:
            if not 0 <= block_id <= MOST_BLOCK:
                raise StoreError(f"row {row}: block {block_id} appended, where blocks are 0 to {MOST_BLOCK}")
        first = int(self.lengths[row]) if row < len(self.lengths) else 0
        last = first + len(block_ids)
        self._make_room(row + 1, last)
        self.ids[row, first:last] = block_ids
        self.lengths[row] = last

    def set_null(self, row: int, positions: Sequence[int]) -> None:
        """These positions hold nothing any more. Raises IndexError, and changes nothing, where there is none."""
        self._must_be_row(row)
        length = int(self.lengths[row])
        for position in positions:
            if not 0 <= position < length:
                raise IndexError(f"row {row} has {length} positions, {position} is none of them")
        self.ids[row, list(positions)] = 0

    def move(self, source: int, target: int) -> None:
        """Row `source` becomes row `target`, whose content is gone, and is empty then."""
        self._must_be_row(source)
        self._must_be_row(target)
        if source != target:
            self.ids[target] = self.ids[source]
            self.lengths[target] = self.lengths[source]
            self.clear(source)

    def clear(self, row: int) -> None:
        """Make a row empty."""
        self._must_be_row(row)
        self.ids[row, :] = 0
        self.lengths[row] = 0

    def row(self, row: int) -> Row:
        """The block ids of a row, without what is behind its end: a view, true until the table grows or rows move."""
        self._must_be_row(row)
        return self.ids[row, : int(self.lengths[row])]

    def _must_be_row(self, row: int) -> None:
        if not 0 <= row < len(self.lengths):
            raise StoreError(f"there is no row {row}, rows are 0 to {len(self.lengths) - 1}")

    def _make_room(self, num_rows: int, num_positions: int) -> None:
        rows, positions = self.ids.shape
        if num_rows <= rows and num_positions <= positions:
            return
        more_rows = rows if num_rows <= rows else max(num_rows, 2 * rows)
        more_positions = positions if num_positions <= positions else max(num_positions, 2 * positions)
        ids = np.zeros((more_rows, more_positions), np.int32)
        ids[:rows, :positions] = self.ids
        lengths = np.zeros(more_rows, np.int64)
        lengths[:rows] = self.lengths
        self.ids, self.lengths = ids, lengths
