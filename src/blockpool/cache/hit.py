"""The answer to a lookup: which cached blocks a request can start from, and why not more."""

from __future__ import annotations

from enum import Enum

from blockpool.managers import GroupHit
from blockpool.pool import BlockPool


class WhyNotMore(Enum):
    """What ended a hit."""

    PROMPT_END = "prompt_end"  # all that may be: the last token is always computed
    MISS = "miss"  # the next block is not cached
    NO_HASH = "no_hash"  # the chain ends there: unknown content, or no hasher
    COLLISION = "collision"  # the next block has the hash but other content (verify_hashes)
    SKIP_READING = "skip_reading"  # the request asked not to look
    CACHING_OFF = "caching_off"


class Hit:
    """`num_tokens` tokens need no computation; `groups` has the blocks of each group; nothing is held yet."""

    def __init__(
        self,
        request_id: str,
        num_tokens: int,
        groups: tuple[GroupHit, ...],
        why_not_more: WhyNotMore,
        pool: BlockPool,
        pool_version: int,
    ) -> None:
        self.request_id = request_id
        self.num_tokens = num_tokens
        self.groups = groups
        self.why_not_more = why_not_more
        self.pool = pool
        self.pool_version = pool_version

    @property
    def blocks(self) -> tuple[list[int], ...]:
        """Block ids per group, one per position."""
        return tuple(group.block_ids() for group in self.groups)

    def __repr__(self) -> str:
        return f"Hit({self.num_tokens} tokens, blocks={self.blocks}, why_not_more={self.why_not_more.value})"
