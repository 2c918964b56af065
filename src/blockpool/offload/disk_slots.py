"""The slots of a disk tier's file: which bytes are read and written, where, and in which order."""

from __future__ import annotations

import errno
import os
from array import array
from collections.abc import Iterator, Sequence
from typing import Final, final

from blockpool.offload.checksum import CHECKSUM_BYTES, Checksum
from blockpool.offload.disk_layout import ENTRY_BYTES, NO_ENTRY, Entry, Layout
from blockpool.offload.tier import Buffer, Loaded

#: So many entries are read or wiped at once.
ENTRIES_AT_ONCE: Final = 8192
#: And so much of neighbouring pages is read or written at once.
RUN_BYTES: Final = 512 * 1024
OK: Final = Loaded.OK


@final
class DiskSlots:
    """An open file with its layout. Threads may use different slots at the same time."""

    def __init__(self, file: int, layout: Layout, checksum: Checksum) -> None:
        self._file = file
        self._layout = layout
        self._checksum = checksum
        self._slots_offset = layout.slots_offset
        self._stride = layout.slot_stride
        self._checksums = bytearray(CHECKSUM_BYTES * layout.num_slots)
        self._entry_uses = array("Q", bytes(8 * layout.num_slots))  # what the entry in the file says
        self._may_have_entry = bytearray(layout.num_slots)  # in the file, whole or torn

    def write_header(self) -> None:
        """Raises OSError."""
        self._write_all([self._layout.header()], 0)

    def read_entries(self) -> Iterator[tuple[int, Entry | None]]:
        """Those of the file that are not blank, None for what is torn. Raises OSError."""
        for slot, data in self._stored_entries():
            self._may_have_entry[slot] = 1
            entry = self._layout.read_entry(slot, data, self._checksum)
            if entry is not None:
                self._checksums[slot * CHECKSUM_BYTES : (slot + 1) * CHECKSUM_BYTES] = entry.checksum
                self._entry_uses[slot] = entry.last_use
            yield slot, entry

    def read(self, slots: list[int], pages: list[memoryview]) -> list[Loaded]:
        results = [Loaded.UNREACHABLE] * len(slots)
        for run in self._runs(slots, pages):
            if not self._read_run(slots, pages, run, results) and len(run) > 1:
                for at in run:
                    self._read_run(slots, pages, [at], results)
        return results

    def _read_run(self, slots: list[int], pages: list[memoryview], run: list[int], results: list[Loaded]) -> bool:
        """Whether all of it is there. Of one page that is not, whether it is corrupt; of several that is not said."""
        first = slots[run[0]]
        data = [pages[at] for at in run]
        try:
            is_whole = self._read_all(data, self._page_offset(first))
        except OSError:
            return False
        checksums = [self._checksum(page) for page in data]
        stored = self._checksums[first * CHECKSUM_BYTES : (first + len(run)) * CHECKSUM_BYTES]
        if is_whole and b"".join(checksums) == stored:
            for at in run:
                results[at] = OK
            return True
        if len(run) == 1:
            results[run[0]] = Loaded.CORRUPT
        return False

    def write(self, slots: list[int], keys: list[bytes], pages: list[memoryview], last_uses: list[int]) -> list[bool]:
        written = [False] * len(slots)
        for run in self._runs(slots, pages):
            is_done = self._write_run(slots, keys, pages, last_uses, run)
            for at in run:
                written[at] = is_done or (len(run) > 1 and self._write_run(slots, keys, pages, last_uses, [at]))
        return written

    def _write_run(
        self, slots: list[int], keys: list[bytes], pages: list[memoryview], last_uses: list[int], run: list[int]
    ) -> bool:
        """Old entries, pages, new entries, in this order; whether all of it is there."""
        first = slots[run[0]]
        end = first + len(run)
        data = [pages[at] for at in run]
        checksums = [self._checksum(page) for page in data]
        try:
            if self._may_have_entry.find(1, first, end) >= 0:
                self._write_blanks(first, len(run))
            self._write_all(data, self._page_offset(first))
            lengths = [len(page) for page in data]
            self._write_entries(first, [keys[at] for at in run], lengths, [last_uses[at] for at in run], checksums)
        except OSError:
            return False
        self._checksums[first * CHECKSUM_BYTES : end * CHECKSUM_BYTES] = b"".join(checksums)
        return True

    def _write_entries(
        self, first: int, keys: list[bytes], lengths: list[int], last_uses: list[int], checksums: list[bytes]
    ) -> None:
        data = self._layout.entries(first, keys, lengths, last_uses, checksums, self._checksum)
        end = first + len(keys)
        self._may_have_entry[first:end] = b"\1" * len(keys)
        self._write_all([data], self._layout.entry_offset(first))
        self._entry_uses[first:end] = array("Q", last_uses)

    def wipe(self, slots: list[int]) -> None:
        """Neighbours at once. Where the device refuses, a page may be found again after a restart: its own bytes."""
        slots = [slot for slot in slots if self._may_have_entry[slot]]
        for run in runs(slots, ENTRIES_AT_ONCE):
            try:
                self._write_blanks(slots[run[0]], len(run))
            except OSError:
                continue  # whoever takes the slot next wipes it first

    def note_use(self, slot: int, key: bytes, num_bytes: int, last_use: int) -> None:
        """In the entry, if it says otherwise. Raises OSError."""
        if self._entry_uses[slot] != last_use:
            checksum = bytes(self._checksums[slot * CHECKSUM_BYTES : (slot + 1) * CHECKSUM_BYTES])
            self._write_entries(slot, [key], [num_bytes], [last_use], [checksum])

    def _write_blanks(self, first: int, count: int) -> None:
        self._write_all([NO_ENTRY * count], self._layout.entry_offset(first))
        self._may_have_entry[first : first + count] = bytes(count)

    def _page_offset(self, slot: int) -> int:
        return self._slots_offset + slot * self._stride

    def _runs(self, slots: list[int], pages: list[memoryview]) -> list[list[int]]:
        """Places of pages that are one behind the other in the file, without a gap: read or written at once. Each
        call gives the interpreter lock up, and may wait long to have it back.
        """
        stride = self._stride
        if stride > RUN_BYTES // 2 or any(len(page) < stride for page in pages):
            return [[at] for at in range(len(slots))]
        return runs(slots, RUN_BYTES // stride)

    def _read_all(self, parts: list[memoryview], offset: int) -> bool:
        """Whether the file goes that far."""
        left = sum(map(len, parts))
        while (num_read := os.preadv(self._file, parts, offset)) < left:
            if not num_read:
                return False
            offset += num_read
            left -= num_read
            parts = behind(parts, num_read)
        return True

    def _write_all(self, parts: Sequence[Buffer], offset: int) -> None:
        left = sum(map(len, parts))
        while (num_written := os.pwritev(self._file, parts, offset)) < left:
            if not num_written:
                raise OSError(errno.EIO, "nothing was written")
            offset += num_written
            left -= num_written
            parts = behind(parts, num_written)

    def _stored_entries(self) -> Iterator[tuple[int, bytes]]:
        """Those that are not blank."""
        blank = NO_ENTRY * ENTRIES_AT_ONCE
        for first in range(0, self._layout.num_slots, ENTRIES_AT_ONCE):
            count = min(ENTRIES_AT_ONCE, self._layout.num_slots - first)
            data = os.pread(self._file, count * ENTRY_BYTES, self._layout.entry_offset(first))
            if data == blank[: len(data)]:
                continue
            for place in range(count):
                entry = data[place * ENTRY_BYTES : (place + 1) * ENTRY_BYTES]
                if entry != NO_ENTRY:
                    yield first + place, entry


def runs(slots: Sequence[int], at_once: int) -> list[list[int]]:
    """The places of slots that are neighbours, in the order of the slots, at most so many together."""
    found: list[list[int]] = []
    end = -1
    for at in sorted(range(len(slots)), key=slots.__getitem__):
        if slots[at] == end and len(found[-1]) < at_once:
            found[-1].append(at)
        else:
            found.append([at])
        end = slots[at] + 1
    return found


def behind(parts: Sequence[Buffer], count: int) -> list[memoryview]:
    """What is left of buffers without their first `count` bytes."""
    left = []
    for part in parts:
        if count < len(part):
            left.append(memoryview(part)[count:])
        count = max(0, count - len(part))
    return left
