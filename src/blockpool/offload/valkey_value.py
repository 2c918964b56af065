"""A page as the value of a key in a shared store: a header with length and checksum, then the page."""

from __future__ import annotations

import struct

from blockpool.offload.checksum import ALGORITHMS, CHECKSUM_BYTES, Checksum, checksum_named
from blockpool.offload.errors import MissingExtraError
from blockpool.offload.tier import Buffer, Loaded

MAGIC = b"BLKP"
HEADER = struct.Struct(f"<4sB3xQ{CHECKSUM_BYTES}s")  # magic, checksum number, page length, page checksum


class ValueForm:
    """Writes with one checksum, reads those that can be computed here."""

    def __init__(self, checksum: str) -> None:
        """Raises MissingExtraError."""
        self._number = next(number for number, name in ALGORITHMS.items() if name == checksum)
        self._checksums: dict[int, Checksum] = {}
        for number, name in ALGORITHMS.items():
            try:
                self._checksums[number] = checksum_named(name, "the tier", "disk")
            except MissingExtraError:
                if number == self._number:
                    raise

    def wrap(self, page: memoryview) -> bytes:
        header = HEADER.pack(MAGIC, self._number, len(page), self._checksums[self._number](page))
        return b"".join((header, page))

    def unwrap(self, value: Buffer, page: memoryview) -> Loaded:
        """Fill the buffer. MISSING: its checksum cannot be computed here, so that nobody can say what it is."""
        data = memoryview(value)
        if len(data) != HEADER.size + len(page):
            return Loaded.CORRUPT
        magic, number, num_bytes, stored = HEADER.unpack_from(data)
        if magic != MAGIC or num_bytes != len(page) or number not in ALGORITHMS:
            return Loaded.CORRUPT
        if number not in self._checksums:
            return Loaded.MISSING
        page[:] = data[HEADER.size :]
        return Loaded.OK if self._checksums[number](page) == stored else Loaded.CORRUPT
