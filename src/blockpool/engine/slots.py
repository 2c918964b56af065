"""Where a token lies in memory: its slot, counted over all blocks.

Slots are 64-bit: block ids times block sizes, and times bytes even more so, exceed 32 bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def slot_mapping(row: npt.NDArray[np.int32], block_size: int, first: int, last: int) -> Ints:
    """The slots of tokens first .. last-1 of a request, whose table is `row`: row[t // B] * B + t % B.

    A token whose position is null gets a slot of the null block, which reads as zeros. Raises IndexError for tokens
    that the table does not reach.
    """
    return slots_of(row, block_size, np.arange(first, last, dtype=np.int64))


def slots_of(row: npt.NDArray[np.int32], block_size: int, tokens: Ints) -> Ints:
    """The same for any tokens of a request."""
    if len(tokens) and not (tokens.min() >= 0 and int(tokens.max()) // block_size < len(row)):
        raise IndexError(
            f"tokens {int(tokens.min())} to {int(tokens.max())} in a table of {len(row)} blocks of {block_size}"
        )
    return row[tokens // block_size].astype(np.int64) * block_size + tokens % block_size


def ring_slots(row: npt.NDArray[np.int32], block_size: int, tokens: Ints) -> Ints:
    """The slots of tokens in a circular buffer of one block: B tokens later, a slot is written again.

    Raises IndexError for negative tokens, and for a table without a block.
    """
    if len(tokens) and not (tokens.min() >= 0 and len(row)):
        raise IndexError(
            f"tokens {int(tokens.min())} to {int(tokens.max())} in a circular buffer: a table of {len(row)} blocks"
        )
    if not len(tokens):
        return np.zeros(0, np.int64)
    return np.int64(row[0]) * block_size + tokens % block_size
