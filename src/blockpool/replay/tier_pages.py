"""One tier in a replay: which pages are in it, and what was written, read and evicted."""

from __future__ import annotations

from blockpool.offload.arc import ArcPolicy
from blockpool.offload.lru import LruPolicy
from blockpool.offload.policy import Policy

from .tier_run import TierRun
from .tiers import TierOrder, TierSpec


class TierPages:
    """Pages by key, without their bytes. `page_bytes`: of the smallest page."""

    def __init__(self, spec: TierSpec, page_bytes: int) -> None:
        self.spec = spec
        # Which pages are here, and whether they were loaded since they came.
        self.pages: dict[bytes, bool] = {}
        self._sizes: dict[bytes, int] = {}
        self._policy: Policy[bytes]
        if spec.order is TierOrder.ARC:
            self._policy = ArcPolicy(spec.capacity_bytes // page_bytes)
        else:
            self._policy = LruPolicy()
        self._gone: set[bytes] = set()  # that were here once and are no longer
        self._used_bytes = 0
        self._loaded = [0, 0]  # pages and bytes
        self._stored = [0, 0]
        self._promoted = [0, 0]
        self._distinct = [0, 0]
        self._evicted = 0
        self._evicted_unread = 0

    def load(self, key: bytes) -> None:
        """Read a page that is here."""
        self.pages[key] = True
        self._policy.used(key)
        self._loaded[0] += 1
        self._loaded[1] += self._sizes[key]

    def store(self, key: bytes, num_bytes: int) -> None:
        """Write a page of the pool; one that is here already is not written again, and counts as used."""
        if key in self.pages:
            self._policy.used(key)
        else:
            self._write(key, num_bytes, self._stored)

    def promote(self, key: bytes, num_bytes: int) -> None:
        """Write a page that was found in a slower tier, unless it is here."""
        if key not in self.pages:
            self._write(key, num_bytes, self._promoted)

    def _write(self, key: bytes, num_bytes: int, counts: list[int]) -> None:
        while self._used_bytes + num_bytes > self.spec.capacity_bytes:
            self._evict(next(self._policy.victims()))
        self._policy.added(key)
        self.pages[key] = False
        self._sizes[key] = num_bytes
        self._used_bytes += num_bytes
        counts[0] += 1
        counts[1] += num_bytes
        if key in self._gone:
            self._gone.remove(key)
        else:
            self._distinct[0] += 1
            self._distinct[1] += num_bytes

    def _evict(self, key: bytes) -> None:
        self._policy.evicted(key)
        self._evicted += 1
        self._evicted_unread += not self.pages.pop(key)
        self._used_bytes -= self._sizes.pop(key)
        self._gone.add(key)

    def result(self, hit_tokens: int) -> TierRun:
        """The figures so far."""
        spec = self.spec
        return TierRun(
            name=spec.name,
            capacity_bytes=spec.capacity_bytes,
            store=spec.store_text,
            order=str(spec.order),
            read_bytes_per_s=spec.read_bytes_per_s,
            hit_tokens=hit_tokens,
            loaded_pages=self._loaded[0],
            loaded_bytes=self._loaded[1],
            stored_pages=self._stored[0],
            stored_bytes=self._stored[1],
            promoted_pages=self._promoted[0],
            promoted_bytes=self._promoted[1],
            distinct_pages=self._distinct[0],
            distinct_bytes=self._distinct[1],
            evicted_pages=self._evicted,
            evicted_unread_pages=self._evicted_unread,
            held_pages=len(self.pages),
            held_bytes=self._used_bytes,
        )
