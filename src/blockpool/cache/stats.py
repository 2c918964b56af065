"""How much of the prompts the cache spared, counted once per request, at its admission."""

from __future__ import annotations

from collections import deque

import msgspec


class PrefixCacheStats(msgspec.Struct, frozen=True):
    """`queries` and `hits` in tokens. Resumed requests (preempted before) are booked apart.

    `external_queries`: tokens that a hit has left, of requests for which a connector was asked; `external_hits`: how
    many of them it brings.
    """

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits per query of first admissions, 0.0 without any."""
        return self.hits / self.queries if self.queries else 0.0

    def __sub__(self, other: PrefixCacheStats) -> PrefixCacheStats:
        return PrefixCacheStats(*(mine - theirs for mine, theirs in zip(self.fields, other.fields, strict=True)))

    @property
    def fields(self) -> tuple[int, ...]:
        return (
            self.requests,
            self.queries,
            self.hits,
            self.preempted_requests,
            self.preempted_queries,
            self.preempted_hits,
            self.external_queries,
            self.external_hits,
        )


class StatsBook:
    """Cumulative counts, counts since a mark, and the hit rate over the last requests."""

    def __init__(self, window: int = 1000) -> None:
        self._counts = [0] * 8
        self._mark = PrefixCacheStats()
        self._recent: deque[tuple[int, int]] = deque(maxlen=window)
        self._recent_queries = 0
        self._recent_hits = 0

    def admitted(self, queries: int, hits: int, *, resumed: bool, external: int | None = None) -> None:
        """A request with `queries` tokens began with `hits` of them cached, and `external` brought from elsewhere
        (None: nobody was asked).
        """
        at = 3 if resumed else 0
        counts = self._counts
        if external is not None:
            counts[6] += queries - hits
            counts[7] += external
        counts[at] += 1
        counts[at + 1] += queries
        counts[at + 2] += hits
        if resumed:
            return
        recent = self._recent
        if len(recent) == recent.maxlen:
            old_queries, old_hits = recent[0]
            self._recent_queries -= old_queries
            self._recent_hits -= old_hits
        recent.append((queries, hits))
        self._recent_queries += queries
        self._recent_hits += hits

    @property
    def total(self) -> PrefixCacheStats:
        return PrefixCacheStats(*self._counts)

    def since_mark(self) -> PrefixCacheStats:
        """The counts since the last `mark()`."""
        return self.total - self._mark

    def mark(self) -> None:
        self._mark = self.total

    @property
    def rolling_hit_rate(self) -> float:
        """Hits per query over the last requests (1,000 unless told), 0.0 without any."""
        return self._recent_hits / self._recent_queries if self._recent_queries else 0.0
