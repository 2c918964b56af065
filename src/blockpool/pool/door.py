"""The door of a pool: what callers name, checked once, becomes ids that the rest of the pool may trust."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import SupportsIndex, final

import numpy as np
from librt.vecs import vec
from mypy_extensions import i32, i64

from blockpool.pool.block import KVCacheBlock
from blockpool.pool.errors import (
    BlockPoolError,
    FenceError,
    ForeignBlockError,
    GroupError,
    NoFreeBlocksError,
    UnknownBlockError,
)
from blockpool.pool.layout import MAX_GROUP, VEC32, Records


@final
class Door:
    """It does not know its pool (that would be a cycle, and a large pool would wait for the garbage collector)."""

    def __init__(self, records: Records, size: i64) -> None:
        self.records = records
        self.size = size

    def own_id(self, block: SupportsIndex) -> i64:
        if isinstance(block, KVCacheBlock):
            if block.pool.door is not self:
                raise ForeignBlockError(f"block {block.block_id} belongs to another pool")
            return block._id
        try:
            number = index(block)
        except TypeError:
            raise UnknownBlockError(f"{block!r} is neither a block id nor a block") from None
        limit: int = self.size  # compared as an int: the number may not fit 64 bits
        if number < 0 or number >= limit:
            raise UnknownBlockError(f"block {number} is unknown: ids run from 0 to {self.size - 1}")
        return number

    def own_ids(self, blocks: Iterable[SupportsIndex]) -> vec[i32]:
        if type(blocks) is VEC32:
            for b in blocks:
                if b < 0 or i64(b) >= self.size:
                    self.own_id(int(b))
            return blocks
        if isinstance(blocks, list):
            return self.own_ids_of_list(blocks)
        if isinstance(blocks, np.ndarray):
            return self.own_ids_of_list(blocks.tolist())
        return self.own_ids_of_list(list(blocks))

    def own_ids_of_list(self, blocks: list[SupportsIndex]) -> vec[i32]:
        size = self.size
        room = self.records.room_for(len(blocks))
        count: i64 = 0
        try:
            for block in blocks:
                b: i64 = -1
                if isinstance(block, int):
                    b = block
                if b < 0 or b >= size:
                    b = self.own_id(block)
                room[count] = i32(b)
                count += 1
        except BlockPoolError:
            raise
        except ValueError:  # an int beyond 64 bits, in compiled code
            raise UnknownBlockError(f"a block id is beyond all ids: they run from 0 to {size - 1}") from None
        return room[:count]

    def checked_group(self, group_id: int) -> i64:
        most: int = MAX_GROUP
        if group_id < 0 or group_id > most:
            raise GroupError(f"group id {group_id} is not from 0 to {MAX_GROUP}")
        return group_id

    def checked_fence(self, fence: SupportsIndex) -> int:
        try:
            number = index(fence)
        except TypeError:
            number = -1
        if number < 0:
            raise FenceError(f"a fence is an int of 0 or more, not {fence!r}")
        return number

    def checked_count(self, n: SupportsIndex) -> int:
        try:
            return index(n)
        except TypeError:
            raise NoFreeBlocksError(f"a number of blocks is an int, not {n!r}") from None
