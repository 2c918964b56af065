"""An order to the worker: copy one block onto another."""

from __future__ import annotations

from typing import NamedTuple


class BlockCopy(NamedTuple):
    """Copy block `src_block_id` to block `dst_block_id` in the layers of a group, before the forward pass."""

    group_id: int
    src_block_id: int
    dst_block_id: int
