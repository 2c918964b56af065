"""Pages in host memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from blockpool.offload.slot_tier import SlotTier
from blockpool.offload.tier import Loaded

#: A copy that the other threads may wait for, in bytes.
SMALL = 128 * 1024


class HostTier(SlotTier):
    """One arena, taken and touched at the start: no page fault comes later. Copies of large pages release the
    interpreter lock; for small ones that costs more than it spares.

    `policy`: "lru" or "arc". `quotas`: see SlotTier. Nothing survives the process.
    """

    def __init__(
        self,
        capacity_bytes: int,
        page_bytes: int,
        policy: str = "lru",
        quotas: Mapping[bytes, int] | None = None,
        name: str = "host",
    ) -> None:
        """Raises TierSizeError and PolicyError; MemoryError where there is not that much."""
        super().__init__(name, "CPU", capacity_bytes, page_bytes, policy, quotas or {})
        self._arena = np.empty(self.capacity_bytes, dtype=np.uint8)
        self._arena.fill(0)
        self._bytes = memoryview(self._arena.data)

    def _read(self, slots: list[int], pages: list[memoryview]) -> list[Loaded]:
        for slot, page in zip(slots, pages, strict=True):
            start = slot * self.page_bytes
            end = start + len(page)
            if len(page) <= SMALL:
                page[:] = self._bytes[start:end]
            else:
                np.copyto(np.frombuffer(page, np.uint8), self._arena[start:end])
        return [Loaded.OK] * len(slots)

    def _write(
        self, slots: list[int], keys: list[bytes], pages: list[memoryview], last_uses: list[int]
    ) -> list[bool]:
        for slot, page in zip(slots, pages, strict=True):
            start = slot * self.page_bytes
            end = start + len(page)
            if len(page) <= SMALL:
                self._bytes[start:end] = page
            else:
                np.copyto(self._arena[start:end], np.frombuffer(page, np.uint8))
        return [True] * len(slots)

    def _wipe(self, slots: list[int]) -> None:
        """Without the index there is no way to a page."""

    def _give_back(self) -> None:
        self._arena = np.empty(0, dtype=np.uint8)
        self._bytes = memoryview(self._arena.data)
