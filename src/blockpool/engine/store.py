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
Bytes = npt.NDArray[np.uint8]


class StoreError(EngineError, ValueError):
    """An access that no memory allows: a write to the null block, a slot, block, layer or group that is not there."""


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

    What raises StoreError has changed nothing. Slots and blocks are counted from 0: none is negative.
    """

    def begin_step(self, step_id: int) -> None:
        """What follows belongs to this step."""

    def clear(self, group_id: int, block_ids: list[int]) -> None:
        """These blocks are zero. Raises StoreError for a block that is not there."""

    def copy(self, order: BlockCopy) -> None:
        """A block becomes a copy of another, in all layers of a group.

        Raises StoreError for a copy onto the null block, and for a block that is not there.
        """

    def write(self, access: Access, layer: int, *values: Array) -> None:
        """Keys and values, or one state. Raises StoreError for the null block and for a slot that is not there."""

    def read(self, access: Access, layer: int) -> tuple[Array, ...]:
        """What was written there. Raises StoreError for a slot that is not there."""


def must_be_group(who: str, group_id: int, num_groups: int) -> None:
    if not 0 <= group_id < num_groups:
        raise StoreError(f"{who}: there is no group {group_id}, groups are 0 to {num_groups - 1}")


def must_be_layer(access: Access, layer: int, num_layers: int) -> None:
    if not 0 <= layer < num_layers:
        raise StoreError(
            f"request {access.request_id!r}, group {access.group_id}: there is no layer {layer}, layers are 0 to"
            f" {num_layers - 1}"
        )


def must_be_slots(access: Access, num_blocks: int, block_size: int) -> None:
    """All slots of an access are in a memory of so many blocks."""
    slots = access.slots
    num_slots = num_blocks * block_size
    if len(slots) and not (slots.min() >= 0 and slots.max() < num_slots):
        at = int(np.argmax((slots < 0) | (slots >= num_slots)))
        raise StoreError(
            f"request {access.request_id!r}, group {access.group_id}: token {access.tokens[at]} is in slot"
            f" {slots[at]}, where slots are 0 to {num_slots - 1}: {num_blocks} blocks of {block_size}"
        )


def must_not_be_null(access: Access, block_size: int) -> None:
    """No slot of an access is in the null block."""
    is_null = access.slots < block_size
    if is_null.any():
        raise StoreError(
            f"request {access.request_id!r}, group {access.group_id}: token {access.tokens[int(np.argmax(is_null))]}"
            " written to the null block"
        )


def must_be_blocks(group_id: int, block_ids: list[int], num_blocks: int) -> None:
    for block_id in block_ids:
        if not 0 <= block_id < num_blocks:
            raise StoreError(f"group {group_id}: there is no block {block_id}, blocks are 0 to {num_blocks - 1}")


def must_be_page(group_id: int, given: int, wanted: int) -> None:
    if given != wanted:
        raise StoreError(f"group {group_id}: a page of {given} bytes, where pages have {wanted}")


def must_be_copy(order: BlockCopy, num_blocks: int) -> None:
    must_be_blocks(order.group_id, [order.src_block_id, order.dst_block_id], num_blocks)
    if order.dst_block_id == 0:
        raise StoreError(f"group {order.group_id}: block {order.src_block_id} copied onto the null block")
