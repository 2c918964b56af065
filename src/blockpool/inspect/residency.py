"""How long blocks live, lie idle and wait to be used again: a sample, taken by a pool's hooks."""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from itertools import pairwise

#: Upper ends in seconds, those of vLLM; one more bucket has no end.
BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0),
)
ACCESSES_KEPT = 4


class Histogram:
    """Counts per bucket, and the sum of what was observed, in seconds."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds

    @property
    def num_observed(self) -> int:
        return sum(self.counts)


class _Life:
    """A sampled block since it was handed out."""

    __slots__ = ("accesses_s", "born_s")

    def __init__(self, now_s: float) -> None:
        self.born_s = now_s
        self.accesses_s: deque[float] = deque(maxlen=ACCESSES_KEPT)


class ResidencySampler:
    """The metrics hooks of one pool: `BlockPool(..., metrics=sampler)`. Block ids of two pools would be mixed up.

    `sample_rate`: part of the blocks handed out that are followed, above 0.0 to 1.0. Of these: `lifetime`, from
    being handed out to losing the hash or being handed out again; `idle`, from the last touch (or the beginning) to
    that; `reuse_gap`, between the last few touches.

    All blocks are counted: `evicted_by_reuse`, handed out while they had a hash; `evicted_by_request`, whose hashes
    were dropped by `evict_blocks`.
    """

    def __init__(
        self,
        sample_rate: float = 0.01,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        if not 0.0 < sample_rate <= 1.0:
            raise ValueError(f"sample_rate must be above 0.0 and at most 1.0, not {sample_rate}")
        self.sample_rate = sample_rate
        self.lifetime = Histogram()
        self.idle = Histogram()
        self.reuse_gap = Histogram()
        self.evicted_by_reuse = 0
        self.evicted_by_request = 0
        self._clock = clock
        self._random = (rng or random.Random()).random
        self._lives: dict[int, _Life] = {}
        self._just_evicted = -1

    def on_allocated(self, block_id: int) -> None:
        if block_id == self._just_evicted:  # it lost its hash by this
            self.evicted_by_request -= 1
            self.evicted_by_reuse += 1
        self._just_evicted = -1
        if self._random() < self.sample_rate:
            self._lives[block_id] = _Life(self._clock())

    def on_accessed(self, block_id: int) -> None:
        life = self._lives.get(block_id)
        if life is not None:
            life.accesses_s.append(self._clock())

    def on_evicted(self, block_id: int, had_hash: bool) -> None:
        self._just_evicted = -1
        if had_hash:
            self.evicted_by_request += 1
            self._just_evicted = block_id
        life = self._lives.pop(block_id, None)
        if life is None:
            return
        now_s = self._clock()
        self.lifetime.observe(now_s - life.born_s)
        self.idle.observe(now_s - (life.accesses_s[-1] if life.accesses_s else life.born_s))
        accesses = list(life.accesses_s)
        for earlier, later in pairwise(accesses):
            self.reuse_gap.observe(later - earlier)
