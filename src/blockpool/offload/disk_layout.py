"""A disk tier's file: a header, a directory of one entry per slot, and the slots.

    0             header, 4096 bytes
    4096          directory: `num_slots` entries of 128 bytes, padded to a multiple of 4096
    behind it     slots: `page_bytes` each, padded to a multiple of 4096

An entry is its own proof: its checksum covers the file's id and the slot's number, so that an entry that was torn, or
of another file or slot, is none. Numbers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from blockpool.offload.checksum import ALGORITHMS, CHECKSUM_BYTES, Checksum, sha1_128
from blockpool.offload.errors import DiskFileError

MAGIC = b"BLKPTIER"
VERSION = 1
ALIGNMENT = 4096
HEADER = struct.Struct("<8sIIQQ16s")  # magic, version, checksum number, page bytes, slots, file id
ENTRY = struct.Struct("<16sQQH78s")  # page checksum, page length, last use, key length, key
SLOT = struct.Struct("<Q")
ENTRY_BYTES = CHECKSUM_BYTES + ENTRY.size
MAX_KEY_BYTES = 78
NO_ENTRY = bytes(ENTRY_BYTES)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Entry(NamedTuple):
    key: bytes
    num_bytes: int
    last_use: int
    checksum: bytes


class Layout(msgspec.Struct, frozen=True):
    """What a file is made for, and where things are in it."""

    page_bytes: int
    num_slots: int
    checksum: str
    file_id: bytes

    @property
    def slots_offset(self) -> int:
        return ALIGNMENT + aligned(self.num_slots * ENTRY_BYTES)

    @property
    def slot_stride(self) -> int:
        return aligned(self.page_bytes)

    @property
    def file_bytes(self) -> int:
        return self.slots_offset + self.num_slots * self.slot_stride

    def entry_offset(self, slot: int) -> int:
        return ALIGNMENT + slot * ENTRY_BYTES

    def slot_offset(self, slot: int) -> int:
        return self.slots_offset + slot * self.slot_stride

    def header(self) -> bytes:
        number = next(number for number, name in ALGORITHMS.items() if name == self.checksum)
        fields = HEADER.pack(MAGIC, VERSION, number, self.page_bytes, self.num_slots, self.file_id)
        return (fields + sha1_128(fields)).ljust(ALIGNMENT, b"\0")

    def entries(
        self,
        first: int,
        keys: list[bytes],
        lengths: list[int],
        last_uses: list[int],
        checksums: list[bytes],
        checksum: Checksum,
    ) -> bytes:
        """Of the slots from `first` on."""
        file_id = self.file_id
        slot = first
        parts: list[bytes] = []
        for key, num_bytes, last_use, of_page in zip(keys, lengths, last_uses, checksums, strict=True):
            fields = ENTRY.pack(of_page, num_bytes, last_use, len(key), key)
            parts.append(checksum(file_id + SLOT.pack(slot) + fields))
            parts.append(fields)
            slot += 1
        return b"".join(parts)

    def read_entry(self, slot: int, data: bytes, checksum: Checksum) -> Entry | None:
        """None: it is torn, or none."""
        fields = data[CHECKSUM_BYTES:]
        if checksum(self.file_id + SLOT.pack(slot) + fields) != data[:CHECKSUM_BYTES]:
            return None
        page_checksum, num_bytes, last_use, key_bytes, key = ENTRY.unpack(fields)
        return Entry(key[:key_bytes], num_bytes, last_use, page_checksum)


def read_header(data: bytes, refuse: Callable[[str], DiskFileError]) -> Layout:
    """Raises DiskFileError, made by `refuse` from a reason."""
    if not data.startswith(MAGIC):
        raise refuse("it is not the file of a disk tier")
    fields = data[: HEADER.size]
    if len(data) < ALIGNMENT or data[HEADER.size : HEADER.size + CHECKSUM_BYTES] != sha1_128(fields):
        raise refuse("its header is damaged")
    _, version, number, page_bytes, num_slots, file_id = HEADER.unpack(fields)
    if version != VERSION or number not in ALGORITHMS:
        raise refuse(f"it is of version {version} with checksum {number}; this is version {VERSION}")
    return Layout(page_bytes, num_slots, ALGORITHMS[number], file_id)
