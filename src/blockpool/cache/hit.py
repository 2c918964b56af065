"""The answer to a lookup: which cached blocks a request can start from, and why not more."""

from __future__ import annotations

from enum import Enum

from blockpool.managers import CommonHit, GroupHit


class WhyNotMore(Enum):
    """What ended a hit."""

    PROMPT_END = "prompt_end"  # all that may be: the last token is always computed
    MISS = "miss"  # what the next boundary needs is not cached, in some group
    NO_HASH = "no_hash"  # the chain ends there: unknown content, or no hasher
    COLLISION = "collision"  # the next block has the hash but other content (verify_hashes)
    SKIP_READING = "skip_reading"  # the request asked not to look
    CACHING_OFF = "caching_off"


class Hit:
    """`num_tokens` tokens need no computation; `groups` has the blocks of each group; nothing is held yet.

    `own_lengths`: how far a group would have reached alone, in tokens, None where nobody looked further. `vetoed_by`:
    the group that made the hit no longer, or None. `junction`: where a group that reads the whole prefix knows more,
    to which it is shared, else 0. `ready_length`: the hit in tokens, once the steps in flight are acknowledged; not
    less than it is now.
    """

    def __init__(
        self,
        request_id: str,
        common: CommonHit,
        why_not_more: WhyNotMore,
        ready_length: int,
        manager: object,
        version: int,
    ) -> None:
        self.request_id = request_id
        self.num_tokens: int = common.num_tokens
        self.groups: tuple[GroupHit, ...] = common.groups
        self.own_lengths: tuple[int | None, ...] = common.own_lengths
        self.vetoed_by: int | None = common.vetoed_by
        self.junction: int = common.junction
        self.why_not_more = why_not_more
        self.ready_length = ready_length
        self.manager = manager
        self.version = version

    @property
    def blocks(self) -> tuple[list[int], ...]:
        """Block ids per group, one per position, 0 where nothing is needed."""
        return tuple(group.block_ids() for group in self.groups)

    def __repr__(self) -> str:
        return f"Hit({self.num_tokens} tokens, blocks={self.blocks}, why_not_more={self.why_not_more.value})"
