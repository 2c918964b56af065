"""What one run of a trace through one pool has measured."""

import msgspec


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one pool size. Lengths are in tokens, sizes in blocks of `block_size` tokens."""

    num_blocks: int
    """The pool's size, the null block included."""
    block_size: int
    requests: int
    """Requests this run has dealt with, refused ones included; fewer than the trace has only when interrupted."""
    refused_requests: int
    """Requests that need more blocks than the whole pool has. They were not replayed."""
    prompt_tokens: int
    """Of the replayed requests."""
    hit_tokens: int
    """Prompt tokens whose KV was found in the cache."""
    evicted_blocks: int
    """Blocks handed out while they had a hash."""
    evicted_unused_blocks: int
    """Of these: blocks that had not been hit since they got their hash."""
    peak_held_blocks: int
    """The most blocks that were in use at once, the null block not counted."""
    trace_requests: int
    """Requests the trace has."""

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
