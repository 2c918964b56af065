"""What one run of a trace through one pool has measured."""

import msgspec

from .losses import Loss
from .tier_run import StackRun


class GroupRun(msgspec.Struct, frozen=True, kw_only=True):
    """The share of one group of layers, in its blocks."""

    kind: str
    """As `--groups` has it: full:16, window=1024:16."""
    block_size: int
    """Tokens per block."""
    held_at_peak: int
    """Blocks in use when the most blocks of the pool were."""
    evicted_blocks: int
    """Blocks handed out while they had one of this group's hashes."""
    cached_blocks: int
    """Blocks that had one when the run ended."""


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one pool size. Lengths are in tokens, sizes in blocks, of whichever group."""

    num_blocks: int
    """The pool's size, the null block included."""
    block_size: int
    """Tokens per block; with several groups the common unit, at whose multiples all of them can resume."""
    requests: int
    """Requests this run has dealt with, refused ones included; fewer than the trace has only when interrupted."""
    refused_requests: int
    """Requests that need more blocks than the whole pool has. They were not replayed."""
    prompt_tokens: int
    """Of the replayed requests."""
    hit_tokens: int
    """Prompt tokens whose KV was found in the cache, on the GPU."""
    reusable_tokens: int
    """Those that an earlier prompt had in front too, and that are not its last: what an endless cache without blocks
    would have found."""
    evicted_blocks: int
    """Blocks handed out while they had a hash."""
    evicted_unused_blocks: int
    """Of these: blocks that had not been hit since they got their hash."""
    peak_held_blocks: int
    """The most blocks that were in use at once, the null block not counted."""
    trace_requests: int
    """Requests the trace has."""
    groups: tuple[GroupRun, ...]
    losses: tuple[Loss, ...]
    """Why reusable tokens were not hit: together that is `reusable_tokens` - `found_tokens`. The greatest first."""
    shortened_hits: dict[str, int]
    """Lookups that found less than was reusable because of a group of this kind, each counted once."""
    tiers: StackRun | None = None
    """Where there are tiers below the pool: what was found there, and what moved."""

    @property
    def found_tokens(self) -> int:
        """Prompt tokens that were not computed: hits on the GPU, and what came from tiers."""
        return self.hit_tokens + (self.tiers.hit_tokens if self.tiers else 0)

    @property
    def found_rate(self) -> float:
        """Found tokens / prompt tokens; 0.0 when no token was replayed."""
        return self.found_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def hit_rate(self) -> float:
        """Hit tokens / prompt tokens; 0.0 when no token was replayed."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def interrupted(self) -> bool:
        """Whether the run ended before the trace did."""
        return self.requests < self.trace_requests

    @property
    def replayed_requests(self) -> int:
        """Requests that went through the pool."""
        return self.requests - self.refused_requests
