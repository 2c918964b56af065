"""Pages in one file that survives the process, and proves its bytes."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec

from blockpool.offload.checksum import best_checksum, checksum_named
from blockpool.offload.disk_layout import (
    ALIGNMENT,
    MAX_KEY_BYTES,
    Layout,
    read_header,
)
from blockpool.offload.disk_slots import DiskSlots
from blockpool.offload.errors import DiskFileError, DiskFullError, DiskInUseError
from blockpool.offload.shelf import Kept
from blockpool.offload.slot_tier import SlotTier
from blockpool.offload.tier import Loaded

NO_ROOM_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Reopened(msgspec.Struct, frozen=True):
    """What was in the file at the start. `num_dropped`: entries that were torn, or whose page lies behind the end of
    a file that was cut. `num_surplus`: stored twice, or more than the quotas allow now."""

    num_pages: int = 0
    num_dropped: int = 0
    num_surplus: int = 0


class DiskTier(SlotTier):
    """One preallocated file, for one process at a time. Buffers are read and written in place, without a copy.

    Every page is checked at every load: other bytes than were stored are CORRUPT, and discarded. Checksums are
    xxh3_128 where xxhash is installed when the file is made, else SHA-1; the file says which.

    *After kill -9* every page that can be found has its bytes: an entry is wiped before its slot is written again,
    and written after it. *After a power loss* the system may have kept an entry and not its page: such a page can be
    found, is CORRUPT when it is loaded, and nothing else. So nothing waits for the device but `close`, which also
    notes down what was used last; after a crash the order is that of the stores.

    `policy`: "lru" or "arc"; after a restart all pages count as used once. `quotas`: see SlotTier.
    """

    max_key_bytes = MAX_KEY_BYTES

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity_bytes: int,
        page_bytes: int,
        policy: str = "lru",
        quotas: Mapping[bytes, int] | None = None,
        name: str = "disk",
        *,
        overwrite: bool = False,
    ) -> None:
        """Make the file, or go on with it: it must be of this page size and capacity, or `overwrite` be set.

        Raises DiskFileError, DiskInUseError, DiskFullError, MissingExtraError, TierSizeError, PolicyError, OSError.
        """
        super().__init__(name, "STORAGE", capacity_bytes, page_bytes, policy, quotas or {})
        self.path = Path(path)
        real_path, is_mine = os.path.realpath(self.path), False
        self._file, is_created = self._open(real_path)
        try:
            self._lock_file()
            is_mine = is_created
            self.reopened = self._open_layout(overwrite)
        except BaseException:
            if is_mine:
                os.unlink(real_path)
            os.close(self._file)
            raise

    @property
    def checksum(self) -> str:
        """Which one the file has."""
        return self._layout.checksum

    def _open(self, path: str) -> tuple[int, bool]:
        """A regular file, and whether it is made here. Nothing else is opened: for a device, that may do much."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600), True
        except FileExistsError:
            pass
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise DiskFileError(f"{self.path} is no regular file")
        file = os.open(path, flags)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise DiskFileError(f"{self.path} is no regular file")
        return file, False

    def _lock_file(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DiskInUseError(f"{self.path} is in use by another tier") from None

    def _open_layout(self, overwrite: bool) -> Reopened:
        found_bytes = os.fstat(self._file).st_size
        if overwrite and found_bytes:
            # what is there goes only when there is room for what comes
            num_slots = self._shelf.num_slots
            self._preallocate(Layout(self.page_bytes, num_slots, best_checksum(), b"").file_bytes, found_bytes)
            os.ftruncate(self._file, 0)
            found_bytes = 0
        if not found_bytes:
            name = best_checksum()
            self._layout = Layout(self.page_bytes, self._shelf.num_slots, name, os.urandom(16))
        else:
            self._layout = self._read_layout()
        checksum = checksum_named(self._layout.checksum, str(self.path), "disk")
        self._slots = DiskSlots(self._file, self._layout, checksum)
        if not found_bytes:
            self._preallocate(self._layout.file_bytes, 0)
            self._slots.write_header()
        else:
            self._preallocate(self._layout.file_bytes, found_bytes)
        return self._reopen(found_bytes) if found_bytes else Reopened()

    def _read_layout(self) -> Layout:
        def refuse(reason: str) -> DiskFileError:
            return DiskFileError(f"{self.path}: {reason}; overwrite=True makes it anew")

        layout = read_header(os.pread(self._file, ALIGNMENT, 0), refuse)
        if layout.page_bytes != self.page_bytes:
            raise refuse(f"its pages have {layout.page_bytes} bytes, not {self.page_bytes}")
        if layout.num_slots != self._shelf.num_slots:
            raise refuse(f"it has room for {layout.num_slots} pages, not {self._shelf.num_slots}")
        return layout

    def _preallocate(self, file_bytes: int, found_bytes: int) -> None:
        """Or leave the file as long as it was."""
        try:
            os.posix_fallocate(self._file, 0, file_bytes)
        except OSError as why:
            os.ftruncate(self._file, found_bytes)
            if why.errno not in NO_ROOM_ERRORS:
                raise
            raise DiskFullError(
                why.errno, f"no room for {file_bytes} bytes: {why.strerror}", str(self.path)
            ) from None

    def _reopen(self, found_bytes: int) -> Reopened:
        pages = []
        num_dropped = 0
        for slot, entry in self._slots.read_entries():
            if entry is None or self._layout.slot_offset(slot) + entry.num_bytes > found_bytes:
                num_dropped += 1
                continue
            pages.append(Kept(entry.key, slot, entry.num_bytes, entry.last_use))
        surplus = self._shelf.adopt(pages)
        self._wipe(surplus)
        return Reopened(len(pages) - len(surplus), num_dropped, len(surplus))

    def _read(self, slots: list[int], pages: list[memoryview]) -> list[Loaded]:
        return self._slots.read(slots, pages)

    def _write(
        self, slots: list[int], keys: list[bytes], pages: list[memoryview], last_uses: list[int]
    ) -> list[bool]:
        return self._slots.write(slots, keys, pages, last_uses)

    def _wipe(self, slots: list[int]) -> None:
        """Where the device refuses, a page may be found again after a restart: its own bytes."""
        self._slots.wipe(slots)

    def _give_back(self) -> None:
        try:
            for key, slot, num_bytes, last_use in self._shelf.last_uses():
                self._slots.note_use(slot, key, num_bytes, last_use)
            os.fdatasync(self._file)
        except OSError:
            pass  # an entry that was not written keeps its page or loses it, and is never wrong
        finally:
            os.close(self._file)
