"""A place below the GPU that keeps pages: what every tier answers to, and what can come of a page."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import msgspec


class Loaded(Enum):
    """What came of a page that was to be read. All but OK are a miss: the bytes in the buffer are nobody's."""

    OK = "ok"
    MISSING = "missing"  # it is not there, or no longer
    CORRUPT = "corrupt"  # its bytes are not those that were stored; the tier has discarded it
    UNREACHABLE = "unreachable"  # the device or the server did not give it


class Stored(Enum):
    """What came of a page that was to be written. After all but OK and PRESENT it is not to be found."""

    OK = "ok"
    PRESENT = "present"  # it was there already, with the same key
    NO_ROOM = "no_room"  # nothing can be evicted for it: a quota of nothing, or all pages are being read
    FAILED = "failed"  # the device refused it, as when it is full
    UNREACHABLE = "unreachable"  # the server did not take it


class ChangeKind(Enum):
    """What happened to a tier's index."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"  # all pages of the tier; the key is empty


class Change(NamedTuple):
    """One change of a tier's index, in order."""

    kind: ChangeKind
    key: bytes


class TierStats(msgspec.Struct):
    """Counts since the tier was made; `bytes` are those of pages, without what a tier adds to them."""

    stored_pages: int = 0
    stored_bytes: int = 0
    loaded_pages: int = 0
    loaded_bytes: int = 0
    evicted_pages: int = 0
    refused_pages: int = 0  # neither stored nor present
    missing_pages: int = 0  # asked for in vain, for each reason of Loaded
    corrupt_pages: int = 0
    unreachable_pages: int = 0


Buffer = memoryview | bytearray | bytes


class Tier(Protocol):
    """Pages of at most `page_bytes` bytes under keys (see Namespace). All methods may be called by several threads.

    A page can be found once all of its bytes are there, and never changes: a key names its content. `store` and
    `load` take some pages at a time, and answer one by one; no failure of a page raises.

    `name`: for people, one of a kind among the tiers of an engine. `medium`: of its events ("CPU", "STORAGE").
    `is_remote`: `lookup` waits for a server, so that no step may wait for it. `reports_changes`: set it to have
    `take_changes` filled.
    """

    name: str
    medium: str
    page_bytes: int
    is_remote: bool
    reports_changes: bool

    @property
    def capacity_bytes(self) -> int | None:
        """Of pages; None where somebody else says."""

    @property
    def used_bytes(self) -> int | None:
        """Of pages that can be found; None where somebody else knows."""

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these pages are here. Changes no order, counts nothing."""

    def load(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> list[Loaded]:
        """Fill these buffers, each as long as the page that was stored."""

    def store(self, keys: Sequence[bytes], pages: Sequence[Buffer]) -> list[Stored]:
        """Keep these pages, evicting others as need be."""

    def discard(self, keys: Sequence[bytes]) -> int:
        """Forget these pages; how many there were."""

    def clear(self) -> int:
        """Forget all pages; how many there were."""

    def stats(self) -> TierStats:
        """What it has done so far: a copy."""

    def take_changes(self) -> list[Change]:
        """What came and went since the last call."""

    def close(self) -> None:
        """Give back what it holds; twice is once."""
