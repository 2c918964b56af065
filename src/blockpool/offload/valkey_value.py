"""A page as the value of a key in a shared store: a header with its length and its proof, then the page."""

from __future__ import annotations

import struct

from blockpool.offload.checksum import ALGORITHMS, CHECKSUM_BYTES, Checksum, checksum_named
from blockpool.offload.errors import MissingExtraError
from blockpool.offload.tier import Buffer, Loaded

MAGIC = b"BLKP"
HEADER = struct.Struct(f"<4sB3xQ{CHECKSUM_BYTES}s")  # magic, checksum number, page length, checksum of page and key


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

    def wrap(self, key: bytes, page: memoryview) -> bytes:
        header = HEADER.pack(MAGIC, self._number, len(page), self._proof(self._number, key, page))
        return b"".join((header, page))

    def unwrap(self, value: Buffer, key: bytes, page: memoryview) -> Loaded:
        """Fill the buffer. MISSING: it is a page of another length, or its checksum cannot be computed here, so that
        nobody can say what it is. The page of another key is CORRUPT."""
        data = memoryview(value)
        if len(data) < HEADER.size:
            return Loaded.CORRUPT
        magic, number, num_bytes, stored = HEADER.unpack_from(data)
        content = data[HEADER.size :]
        if magic != MAGIC or num_bytes != len(content) or number not in ALGORITHMS:
            return Loaded.CORRUPT
        if number not in self._checksums:
            return Loaded.MISSING
        if num_bytes != len(page):
            return Loaded.MISSING if self._proof(number, key, content) == stored else Loaded.CORRUPT
        page[:] = content
        return Loaded.OK if self._proof(number, key, page) == stored else Loaded.CORRUPT

    def _proof(self, number: int, key: bytes, page: memoryview) -> bytes:
        checksum = self._checksums[number]
        return checksum(checksum(page) + key)
