"""A tier that is obviously right, and one that fails in every way that a tier may."""

from __future__ import annotations

import random
from collections.abc import Sequence
from threading import Lock

from blockpool.offload.tier import Buffer, Change, ChangeKind, Loaded, Stored, Tier, TierStats


class PlainTier:
    """A dict of pages; the one that was used longest ago goes when there are more than `num_pages`."""

    def __init__(self, num_pages: int, name: str = "plain", medium: str = "CPU", page_bytes: int = 1 << 20) -> None:
        self.num_pages = num_pages
        self.name = name
        self.medium = medium
        self.page_bytes = page_bytes
        self.is_remote = False
        self.reports_changes = False
        self.pages: dict[bytes, bytes] = {}
        self.lock = Lock()
        self._changes: list[Change] = []
        self._stats = TierStats()

    @property
    def capacity_bytes(self) -> int | None:
        return self.num_pages * self.page_bytes

    @property
    def used_bytes(self) -> int | None:
        return sum(map(len, self.pages.values()))

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.pages for key in keys]

    def load(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> list[Loaded]:
        with self.lock:
            outcomes = []
            for key, page in zip(keys, pages, strict=True):
                found = self.pages.pop(key, None)
                if found is not None:
                    self.pages[key] = found
                    page[:] = found
                outcomes.append(Loaded.MISSING if found is None else Loaded.OK)
            return outcomes

    def store(self, keys: Sequence[bytes], pages: Sequence[Buffer]) -> list[Stored]:
        with self.lock:
            outcomes = []
            for key, page in zip(keys, pages, strict=True):
                content = bytes(page)
                if key in self.pages:
                    assert self.pages[key] == content, "one key, two contents"
                    outcomes.append(Stored.PRESENT)
                elif not self.num_pages:
                    outcomes.append(Stored.NO_ROOM)
                else:
                    if len(self.pages) == self.num_pages:
                        self._remove(next(iter(self.pages)))
                    self.pages[key] = content
                    self._note(ChangeKind.STORED, key)
                    outcomes.append(Stored.OK)
            return outcomes

    def discard(self, keys: Sequence[bytes]) -> int:
        with self.lock:
            here = [key for key in keys if key in self.pages]
            for key in here:
                self._remove(key)
            return len(here)

    def clear(self) -> int:
        with self.lock:
            count = len(self.pages)
            self.pages.clear()
            self._note(ChangeKind.CLEARED, b"")
            return count

    def stats(self) -> TierStats:
        return self._stats

    def take_changes(self) -> list[Change]:
        with self.lock:
            changes, self._changes = self._changes, []
            return changes

    def close(self) -> None:
        self.pages.clear()

    def _remove(self, key: bytes) -> None:
        del self.pages[key]
        self._note(ChangeKind.REMOVED, key)

    def _note(self, kind: ChangeKind, key: bytes) -> None:
        if self.reports_changes:
            self._changes.append(Change(kind, key))


class FaultyTier:
    """Another tier, seen through faults: pages are lost, corrupt or unreachable, stores refused, and it raises."""

    def __init__(self, inner: Tier, c: random.Random, rate: float) -> None:
        self.inner = inner
        self.c = c
        self.rate = rate
        self.name = inner.name
        self.medium = inner.medium
        self.page_bytes = inner.page_bytes
        self.is_remote = inner.is_remote
        self.num_faults = 0

    @property
    def reports_changes(self) -> bool:
        return self.inner.reports_changes

    @reports_changes.setter
    def reports_changes(self, wanted: bool) -> None:
        self.inner.reports_changes = wanted

    @property
    def capacity_bytes(self) -> int | None:
        return self.inner.capacity_bytes

    @property
    def used_bytes(self) -> int | None:
        return self.inner.used_bytes

    def _fails(self) -> bool:
        fails = self.c.random() < self.rate
        self.num_faults += fails
        return fails

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        if self._fails():  # what was lost a moment ago
            self.inner.discard(list(keys)[: self.c.randint(0, len(keys))])
        if self._fails() and self._fails():
            raise OSError("a tier that breaks its promise")
        return self.inner.lookup(keys)

    def load(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> list[Loaded]:
        if self._fails():
            self.inner.discard([self.c.choice(keys)])
        if self._fails() and self._fails():
            raise OSError("a tier that breaks its promise")
        outcomes = self.inner.load(keys, pages)
        for at, (key, page) in enumerate(zip(keys, pages, strict=True)):
            if self._fails():  # some bytes came, and are wrong
                page[: len(page) // 2] = bytes(self.c.randrange(256) for _ in range(len(page) // 2))
                outcomes[at] = self.c.choice([Loaded.CORRUPT, Loaded.UNREACHABLE, Loaded.MISSING])
                if outcomes[at] is Loaded.CORRUPT:
                    self.inner.discard([key])
        return outcomes

    def store(self, keys: Sequence[bytes], pages: Sequence[Buffer]) -> list[Stored]:
        if self._fails() and self._fails():
            raise OSError("a tier that breaks its promise")
        kept = [at for at in range(len(keys)) if not self._fails()]
        outcomes = [self.c.choice([Stored.FAILED, Stored.UNREACHABLE, Stored.NO_ROOM]) for _ in keys]
        stored = self.inner.store([keys[at] for at in kept], [pages[at] for at in kept])
        for at, outcome in zip(kept, stored, strict=True):
            outcomes[at] = outcome
        return outcomes

    def discard(self, keys: Sequence[bytes]) -> int:
        return self.inner.discard(keys)

    def clear(self) -> int:
        return self.inner.clear()

    def stats(self) -> TierStats:
        return self.inner.stats()

    def take_changes(self) -> list[Change]:
        return self.inner.take_changes()

    def close(self) -> None:
        self.inner.close()
