"""The longest prefix that every group of a model can resume from."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import final

from blockpool.managers.base import SingleTypeKVCacheManager
from blockpool.managers.tables import NOTHING_FOUND, GroupHit


@final
class CommonHit:
    """`num_tokens` tokens that need no computation in any group, and the blocks of each group for them.

    `own_lengths`: what a group would have had by itself, in tokens, where that is known without looking further: for
    groups that read the whole prefix; else None. `vetoed_by`: the group that made the hit no longer than it is, None
    when nothing did. `junction`: where a group that reads the whole prefix knows more, to which it is shared; else 0.
    """

    def __init__(
        self,
        num_tokens: int,
        groups: tuple[GroupHit, ...],
        own_lengths: tuple[int | None, ...],
        vetoed_by: int | None,
    ) -> None:
        self.num_tokens = num_tokens
        self.groups = groups
        self.own_lengths = own_lengths
        self.vetoed_by = vetoed_by

    @property
    def junction(self) -> int:
        deepest = max([0, *[length for length in self.own_lengths if length is not None]])
        return deepest if deepest > self.num_tokens else 0


@final
class Coordinator:
    """All groups of one model, over one pool or several. `alignment`: every hit ends at a multiple of it, in tokens.

    That is the least common multiple of the cached groups' block sizes; the hash block size where each of them can
    resume inside a block or has blocks of that size, unless `partial_hits` is False.
    """

    def __init__(self, managers: Sequence[SingleTypeKVCacheManager], partial_hits: bool = True) -> None:
        self.managers: list[SingleTypeKVCacheManager] = list(managers)
        cached = [manager for manager in self.managers if manager.prefix_cacheable]
        self.alignment: int = lcm(*[manager.block_size for manager in cached]) if cached else 1
        if cached and partial_hits and all(m.supports_partial_boundaries or m.factor == 1 for m in cached):
            self.alignment = cached[0].pool.hash_block_size
        # Groups whose usable boundaries are a prefix answer from one scan, so they are asked first.
        self.whole: list[int] = []
        self.others: list[int] = []
        for at, manager in enumerate(self.managers):
            if manager.prefix_cacheable:
                (self.whole if manager.reads_whole_prefix() else self.others).append(at)

    def longest_common_hit(self, digests: bytes, max_length: int) -> CommonHit:
        """The greatest aligned boundary, at most `max_length` tokens, that every cached group can resume from.

        Read only. `digests`: the request's chain from digest 0 on.
        """
        managers = self.managers
        hits: list[GroupHit] = [NOTHING_FOUND] * len(managers)
        own: list[int | None] = [None] * len(managers)
        length = max_length - max_length % self.alignment if self.whole or self.others else 0
        vetoed_by: int | None = None
        for at in self.whole:
            hits[at] = managers[at].find_longest_hit(digests, max_length, self.alignment)
            own[at] = hits[at].num_tokens
            if hits[at].num_tokens < length:
                length = hits[at].num_tokens
                vetoed_by = at
        settled = False
        while not settled and length > 0:
            settled = True
            for at in self.others:
                if hits[at].num_tokens != length:
                    hits[at] = managers[at].find_longest_hit(digests, length, self.alignment)
                    if hits[at].num_tokens < length:
                        length = hits[at].num_tokens
                        vetoed_by = at
                        settled = False
            for at in self.whole:
                if hits[at].num_tokens > length:  # what is usable there is a prefix
                    hits[at] = hits[at].cut(length, managers[at].block_size)
        if length == 0:
            hits = [NOTHING_FOUND] * len(managers)
        return CommonHit(length, tuple(hits), tuple(own), vetoed_by)
