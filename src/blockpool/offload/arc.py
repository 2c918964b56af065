"""Recent and frequent pages apart, with a split that follows the traffic.

After N. Megiddo and D. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. Not quite theirs: a
tier makes room before it knows that a page comes back, so a returning key moves the split from the next eviction on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic

from blockpool.offload.policy import Key


class ArcPolicy(Generic[Key]):
    """Keys used once since they came, keys used again, and as many evicted keys (ghosts) as there are pages.

    A page that was used once is evicted before any that was used again, unless the recent ones fit into their share.
    A ghost that returns says which share was too small. A long scan passes through the recent part alone.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity` in pages."""
        self.capacity = capacity
        self._recent_share = 0.0  # so many pages of `capacity` are meant for recent ones
        # least recent first, all four
        self._recent: OrderedDict[Key, None] = OrderedDict()
        self._frequent: OrderedDict[Key, None] = OrderedDict()
        self._recent_ghosts: OrderedDict[Key, None] = OrderedDict()
        self._frequent_ghosts: OrderedDict[Key, None] = OrderedDict()

    @property
    def recent_share(self) -> float:
        """How many of the pages are meant for those used once."""
        return self._recent_share

    def added(self, key: Key) -> None:
        assert key not in self
        if key in self._recent_ghosts:
            step = max(1.0, len(self._frequent_ghosts) / len(self._recent_ghosts))
            self._recent_share = min(float(self.capacity), self._recent_share + step)
            del self._recent_ghosts[key]
            self._frequent[key] = None
        elif key in self._frequent_ghosts:
            step = max(1.0, len(self._recent_ghosts) / len(self._frequent_ghosts))
            self._recent_share = max(0.0, self._recent_share - step)
            del self._frequent_ghosts[key]
            self._frequent[key] = None
        else:
            self._recent[key] = None
        self._forget_ghosts()

    def used(self, key: Key) -> None:
        if key in self._recent:
            del self._recent[key]
            self._frequent[key] = None
        else:
            self._frequent.move_to_end(key)

    def removed(self, key: Key) -> None:
        if key in self._recent:
            del self._recent[key]
        else:
            del self._frequent[key]

    def evicted(self, key: Key) -> None:
        if key in self._recent:
            del self._recent[key]
            self._recent_ghosts[key] = None
        else:
            del self._frequent[key]
            self._frequent_ghosts[key] = None
        self._forget_ghosts()

    def victims(self) -> Iterator[Key]:
        recent, frequent = iter(self._recent), iter(self._frequent)
        num_recent, num_frequent = len(self._recent), len(self._frequent)
        while num_recent or num_frequent:
            if num_recent and (num_recent > self._recent_share or not num_frequent):
                num_recent -= 1
                yield next(recent)
            else:
                num_frequent -= 1
                yield next(frequent)

    def clear(self) -> None:
        for keys in (self._recent, self._frequent, self._recent_ghosts, self._frequent_ghosts):
            keys.clear()
        self._recent_share = 0.0

    def _forget_ghosts(self) -> None:
        while self._recent_ghosts and len(self._recent) + len(self._recent_ghosts) > self.capacity:
            self._recent_ghosts.popitem(last=False)
        num_known = len(self) + len(self._recent_ghosts) + len(self._frequent_ghosts)
        while self._frequent_ghosts and num_known > 2 * self.capacity:
            self._frequent_ghosts.popitem(last=False)
            num_known -= 1

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    def __contains__(self, key: object) -> bool:
        return key in self._recent or key in self._frequent
