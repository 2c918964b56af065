"""The memory behind the block ids, as a model sees it: the interface of the stores, and one access to them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from blockpool.cache import BlockCopy
from blockpool.engine.errors import EngineError
from blockpool.engine.slots import Ints

Array = npt.NDArray[np.float64]
Prints = npt.NDArray[np.uint64]


class StoreError(EngineError, ValueError):
    """An access that no memory allows: a write to the null block, a slot that is not there."""


class Access(NamedTuple):
    """A request reads or writes slots of one group.

    `tokens`: which token each slot is for; `slots`: see `slot_mapping`; `prints`: what names the prefix up to and
    including that token. For a state: the last token that went into it, its block id, and the print of that prefix.
    """

    request_id: str
    group_id: int
    tokens: Ints
    slots: Ints
    prints: Prints


class Store(Protocol):
    """`layer` counts the layers of a group from 0. Arrays have one row per slot of the access.

    A step is `begin_step`, clears, copies, then writes and reads. Block 0 is the null block: it reads as zeros.
    """

    def begin_step(self, step_id: int) -> None:
        """What follows belongs to this step."""

    def clear(self, group_id: int, block_ids: list[int]) -> None:
        """These blocks are zero."""

    def copy(self, order: BlockCopy) -> None:
        """A block becomes a copy of another, in all layers of a group. Raises StoreError for the null block."""

    def write(self, access: Access, layer: int, *values: Array) -> None:
        """Keys and values, or one state. Raises StoreError for the null block."""

    def read(self, access: Access, layer: int) -> tuple[Array, ...]:
        """What was written there."""
