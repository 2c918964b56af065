"""A tier that keeps its pages in slots of its own: what host memory and disk have in common."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from blockpool.offload.errors import TierClosedError, TierSizeError
from blockpool.offload.pages import pages_to_fill, pages_to_store
from blockpool.offload.shelf import Shelf
from blockpool.offload.tier import Buffer, Change, Loaded, Stored, TierStats


class SlotTier(ABC):
    """See Tier. No lock is held while bytes move: threads read and write different slots at the same time.

    `quotas`: bytes by namespace prefix. A namespace with a quota has that much of the capacity for itself, never
    takes more, and evicts its own pages; the others share the rest. Quotas and capacity are counted in pages of
    `page_bytes`, however short a page is. The pages of one call never evict each other, and of one call the last
    page is evicted first. All methods raise TierClosedError after `close`.
    """

    is_remote = False
    max_key_bytes = 2**16

    def __init__(
        self, name: str, medium: str, capacity_bytes: int, page_bytes: int, policy: str, quotas: Mapping[bytes, int]
    ) -> None:
        if page_bytes < 1:
            raise TierSizeError(f"tier {name!r}: a page of {page_bytes} bytes")
        self.name = name
        self.medium = medium
        self.page_bytes = page_bytes
        self._shelf = Shelf(capacity_bytes // page_bytes, page_bytes, policy, quotas)
        self._num_calls = 0
        self._closed = False
        self._calls = threading.Condition(threading.Lock())

    @property
    def capacity_bytes(self) -> int:
        return self._shelf.num_slots * self.page_bytes

    @property
    def used_bytes(self) -> int:
        return self._shelf.used_bytes

    @property
    def reports_changes(self) -> bool:
        return self._shelf.reports_changes

    @reports_changes.setter
    def reports_changes(self, wanted: bool) -> None:
        self._shelf.reports_changes = wanted

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        self._check_open()
        return self._shelf.lookup(keys)

    def keys(self) -> list[bytes]:
        """Of all pages that can be found."""
        return self._shelf.keys()

    def load(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> list[Loaded]:
        """A page of another length than its buffer stays, and is MISSING. Raises PageError."""
        check_keys(keys)
        views = pages_to_fill(keys, pages)
        self._begin_call()
        try:
            reads = self._shelf.begin_reads(keys, [len(view) for view in views])
            found = [Loaded.UNREACHABLE] * len(reads.slots)
            try:
                found = list(self._read(reads.slots, [views[at] for at in reads.places]))
            finally:
                results, wipes = self._shelf.end_reads(reads, found)
                self._wipe_and_release(wipes)
            return results
        finally:
            self._end_call()

    def store(self, keys: Sequence[bytes], pages: Sequence[Buffer]) -> list[Stored]:
        """Raises PageError and KeyLengthError."""
        check_keys(keys)
        views = pages_to_store(keys, pages, self.page_bytes, self.max_key_bytes)
        self._begin_call()
        try:
            writes = self._shelf.begin_writes(keys, [len(view) for view in views])
            written = [False] * len(writes.slots)
            try:
                pages_of_new = [views[at] for at in writes.places]
                written = list(map(bool, self._write(writes.slots, writes.keys, pages_of_new, writes.last_uses)))
            finally:
                results, wipes = self._shelf.end_writes(writes, written)
                self._wipe_and_release(wipes)
            return results
        finally:
            self._end_call()

    def discard(self, keys: Sequence[bytes]) -> int:
        check_keys(keys)
        self._begin_call()
        try:
            wipes = self._shelf.discard(keys)
            self._wipe_and_release(wipes)
            return len(wipes)
        finally:
            self._end_call()

    def clear(self) -> int:
        self._begin_call()
        try:
            wipes = self._shelf.clear()
            self._wipe_and_release(wipes)
            return len(wipes)
        finally:
            self._end_call()

    def stats(self) -> TierStats:
        return self._shelf.stats()

    def take_changes(self) -> list[Change]:
        return self._shelf.take_changes()

    def audit(self) -> list[str]:
        """What is wrong with the books while no other thread uses the tier: nothing."""
        return self._shelf.audit()

    def close(self) -> None:
        """Waits for the calls of other threads."""
        with self._calls:
            if self._closed:
                return
            self._closed = True
            self._calls.wait_for(lambda: not self._num_calls)
        self._give_back()

    @abstractmethod
    def _read(self, slots: list[int], pages: list[memoryview]) -> list[Loaded]:
        """Fill these buffers, each as long as its page."""

    @abstractmethod
    def _write(
        self, slots: list[int], keys: list[bytes], pages: list[memoryview], last_uses: list[int]
    ) -> list[bool]:
        """Of which pages all is there."""

    @abstractmethod
    def _wipe(self, slots: list[int]) -> None:
        """Nothing of these may be found again, even after a restart."""

    @abstractmethod
    def _give_back(self) -> None:
        """Memory, file."""

    def _wipe_and_release(self, slots: list[int]) -> None:
        if slots:
            try:
                self._wipe(slots)
            finally:
                self._shelf.release(slots)

    def _check_open(self) -> None:
        if self._closed:
            raise TierClosedError(f"tier {self.name!r} is closed")

    def _begin_call(self) -> None:
        with self._calls:
            self._check_open()
            self._num_calls += 1

    def _end_call(self) -> None:
        with self._calls:
            self._num_calls -= 1
            if self._closed:
                self._calls.notify_all()


def check_keys(keys: Sequence[bytes]) -> None:
    """Raises TypeError before anything has changed."""
    for key in keys:
        if not isinstance(key, bytes):
            raise TypeError(f"a key is bytes, not {type(key).__name__}: {key!r}")
