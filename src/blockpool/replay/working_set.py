"""What given prompts leave in the cache, and whether a pool keeps it: replayed without and with its limits."""

from collections.abc import Callable, Sequence

import msgspec

from blockpool.cache import KVCacheConfig
from blockpool.managers import KVCacheGroupSpec
from blockpool.traces import Trace

from .capacity import distinct_groups, num_reserved_blocks
from .digests import DigestedTrace
from .drive import DEFAULT_BATCHED_TOKENS
from .errors import ReplayError
from .simulate import replay
from .sizes import hash_unit, measure_need

# The books of so many take two gigabytes.
MOST_BLOCKS = 2**24

Progress = Callable[[int], None]


class WorkingSet(msgspec.Struct, frozen=True, kw_only=True):
    """All that a trace's prompts leave when nothing is ever evicted."""

    requests: int
    blocks: tuple[int, ...]
    """That can be found again after the last request, per group."""
    largest_request: int
    """Blocks that the request with the most holds at its peak, in all groups."""
    hit_rate: float
    """Hit tokens / prompt tokens, which no pool can exceed."""

    @property
    def num_blocks(self) -> int:
        """`blocks` in all groups."""
        return sum(self.blocks)


class PoolOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The same prompts, one after the other, in a pool of its real size."""

    hit_rate: float
    evicted_blocks: int
    refused_requests: int

    @property
    def fits(self) -> bool:
        """Whether nothing had to make room for anything."""
        return not self.evicted_blocks and not self.refused_requests


class WorkingSetBook:
    """One trace and one set of groups, replayed as often as asked.

    Raises ReplayError when the trace's ids do not fit the groups' unit, or when its working set is too large to be
    measured.
    """

    def __init__(
        self,
        trace: Trace,
        groups: Sequence[KVCacheGroupSpec],
        *,
        retention_interval: int | None = None,
        max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS,
        on_progress: Progress = lambda num_done: None,
    ) -> None:
        self._groups = tuple(groups)
        self._retention_interval = retention_interval
        self._max_num_batched_tokens = max_num_batched_tokens
        self._on_progress = on_progress
        self._unit = hash_unit(trace, self._groups)
        self._digested = DigestedTrace(trace, self._unit)
        self.endless = self._measure_endless()

    def outcome(self, num_blocks: int) -> PoolOutcome:
        """What a pool of so many blocks, the null block included, makes of it."""
        endless = self.endless
        if num_blocks >= num_reserved_blocks(self._groups) + endless.num_blocks + endless.largest_request:
            return PoolOutcome(hit_rate=endless.hit_rate, evicted_blocks=0, refused_requests=0)
        run = replay(
            self._digested,
            self._config(num_blocks, self._groups),
            max_num_batched_tokens=self._max_num_batched_tokens,
            on_progress=self._on_progress,
        )
        return PoolOutcome(
            hit_rate=run.hit_rate, evicted_blocks=run.evicted_blocks, refused_requests=run.refused_requests
        )

    def _config(self, num_blocks: int, groups: tuple[KVCacheGroupSpec, ...]) -> KVCacheConfig:
        return KVCacheConfig(
            num_blocks,
            groups,
            hash_block_size=self._unit,
            retention_interval=self._retention_interval,
            partial_hits=False,
        )

    def _measure_endless(self) -> WorkingSet:
        """In a pool that grows until nothing is evicted: what is computed twice may stay twice."""
        kinds, kind_of = distinct_groups(self._groups)
        config = self._config(num_reserved_blocks(kinds), kinds)
        need = measure_need(self._digested, config, max_num_batched_tokens=self._max_num_batched_tokens)
        num_blocks = need.whole_trace
        while True:
            num_blocks = 2 * num_blocks
            if num_blocks > MOST_BLOCKS:
                raise ReplayError(
                    f"the working set of these prompts takes about {num_blocks // 2:,} blocks, more than can be "
                    "measured: take larger blocks, or `blockpool replay` with pools of given sizes"
                )
            run = replay(
                self._digested,
                self._config(num_blocks, kinds),
                max_num_batched_tokens=self._max_num_batched_tokens,
                on_progress=self._on_progress,
            )
            if not run.evicted_blocks and not run.refused_requests:
                break
        counts = [kind_of.count(kind) for kind in range(len(kinds))]
        held = [group.held_at_peak for group in run.groups]
        return WorkingSet(
            requests=run.requests,
            blocks=tuple(run.groups[kind].cached_blocks for kind in kind_of),
            largest_request=sum(count * blocks for count, blocks in zip(counts, held, strict=True)),
            hit_rate=run.hit_rate,
        )
