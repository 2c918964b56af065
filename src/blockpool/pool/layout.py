"""The record of a block: one cache line of sixteen 32-bit fields in one array, shared by queue, index and pool.

Entry 0 is the null block, entries 1..n-1 the blocks, and entries from n on hold additional hashes (a block has one
primary hash, which lives in its own entry).
A field that is 0 means "none": the null block is never queued, hashed or copied.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np
from librt.vecs import vec
from mypy_extensions import i32, i64

FIELDS: Final[i64] = 16
REF: Final[i64] = 0  # reference count; of an additional hash: the block it belongs to
FLAGS: Final[i64] = 1  # the bits below, and the group id above them
PLACE: Final[i64] = 2  # where in the free queue's ring, from 1; 0 outside it
TOKENS: Final[i64] = 3  # length in tokens of the prefix that the entry's hash covers
TURN: Final[i64] = 4  # incarnation: how often the block was handed out, modulo 2**31
COPY_PREV: Final[i64] = 6  # ring of the entries that share one key, both 0 for a key with one entry
COPY_NEXT: Final[i64] = 7
DIGEST: Final[i64] = 8  # up to eight words of digest

HASHED: Final[i64] = 1  # the entry is in the index
REUSED: Final[i64] = 2  # touched since it got its hash
MORE: Final[i64] = 4  # the block has additional hashes
WATCHED: Final[i64] = 8  # a reuse callback is armed
PENDING: Final[i64] = 16  # some of its references wait for a fence
LATER: Final[i64] = 32  # not the first entry registered under its key
MARK: Final[i64] = 64  # set only while one call checks its arguments
HELD: Final[i64] = 128  # holds keep some of its references
GROUP_SHIFT: Final[i64] = 8
LOW_BITS: Final[i64] = 255  # everything but the group id
OF_HASH: Final[i64] = 1 | 2 | 32  # bits that describe the entry's hash
MAX_GROUP: Final[i64] = (1 << 23) - 1
MAX_BLOCKS: Final[i64] = 1 << 27
MAX_DIGEST: Final[i64] = 32

VEC32: Final = type(vec[i32]())


def zeros32(n: i64) -> vec[i32]:
    return vec[i32](memoryview(bytes(4 * n)).cast("i"))


def zeros64(n: i64) -> vec[i64]:
    return vec[i64](memoryview(bytes(8 * n)).cast("q"))


@final
class Records:
    """The array of records, by reference: it is replaced when room for additional hashes is made.

    `base` is where entry 0 begins, so that every record is one aligned cache line. (Every record would straddle two
    lines otherwise, and a random access to it would wait twice.)
    """

    def __init__(self, num_entries: i64) -> None:
        self.num_entries: i64 = num_entries
        self.meta = zeros32((num_entries + 1) * FIELDS)
        self.base: i64 = to_cache_line(self.meta)
        self.sink: i64 = 0
        self.room = zeros32(64)

    def get(self, entry: i64, field: i64) -> i64:
        return i64(self.meta[self.base + entry * FIELDS + field])

    def set(self, entry: i64, field: i64, value: i64) -> None:
        self.meta[self.base + entry * FIELDS + field] = i32(value)

    def room_for(self, count: i64) -> vec[i32]:
        """Scratch space: filling it and copying the part that was filled costs less than appending one by one."""
        if len(self.room) < count:
            self.room = zeros32(2 * count)
        return self.room

    def warm(self, entries: vec[i32]) -> None:
        """Read a field of each record: a short loop, so that many cache misses overlap."""
        meta = self.meta
        base = self.base
        seen: i32 = 0
        for b in entries:
            seen ^= meta[base + i64(b) * FIELDS]
        self.sink = i64(seen)

    def grow(self, added: i64) -> None:
        """Append empty entries."""
        old = self.meta
        count = self.num_entries * FIELDS
        meta = zeros32((self.num_entries + added + 1) * FIELDS)
        base = to_cache_line(meta)
        k: i64 = 0
        while k < count:
            meta[base + k] = old[self.base + k]
            k += 1
        self.meta = meta
        self.base = base
        self.num_entries += added


def to_cache_line(array: object) -> int:
    """Fields from the array's start to the next address that is a multiple of 64."""
    return int(-np.asarray(array).ctypes.data % 64 // 4)
