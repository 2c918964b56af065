"""How far a request could be resumed with what lies in lower tiers, by each group's own rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm
from typing import NamedTuple

from blockpool.cache import KVCacheManager, Request
from blockpool.managers import SingleTypeKVCacheManager
from blockpool.offload.namespace import GROUP_BYTES
from blockpool.offload.tier import Tier

AT_A_TIME = 64  # keys per question, of a group that reads everything: the first that is missing ends it


class Keys:
    """The keys of one request's blocks from a position on, made once, as they are asked for."""

    def __init__(self, manager: SingleTypeKVCacheManager, start: bytes, request: Request, first: int = 0) -> None:
        self.num_blocks = request.num_hashes() // manager.factor
        self._first = first
        self._made: list[bytes] = []
        self._start = start
        self._group = manager.group_id.to_bytes(GROUP_BYTES, "big")
        self._width = manager.pool.digest_size
        self._stride = manager.factor * self._width
        self._digests = request.digests(0, self.num_blocks * manager.factor)

    def __getitem__(self, position: int) -> bytes:
        return self.run(position, position + 1)[0]

    def run(self, first: int, last: int) -> list[bytes]:
        """Of the positions first .. last-1."""
        known = self._first + len(self._made)
        if last > known:
            start, digests, width, stride, group = self._start, self._digests, self._width, self._stride, self._group
            self._made += [
                start + digests[end - width : end] + group
                for end in range((known + 1) * stride, (last + 1) * stride, stride)
            ]
        return self._made[first - self._first : last - self._first]


def look_up_in(tiers: Sequence[Tier], errors: list[str], keys: Sequence[bytes]) -> list[bool]:
    """Which of these pages some tier has; names of what tiers raise go to `errors`."""
    found = [False] * len(keys)
    is_any = False
    for tier in tiers:
        try:
            if not is_any:
                there = tier.lookup(keys)
                if len(there) == len(keys):
                    found = there
            else:
                missing = [at for at, here in enumerate(found) if not here]
                there = tier.lookup([keys[at] for at in missing])
                for at, here in zip(missing, there, strict=True):
                    found[at] = here
        except Exception as error:  # a tier that breaks its promise has nothing
            errors.append(type(error).__name__)
        is_any = True in found
        if is_any and False not in found:
            break
    return found


class Wanted(NamedTuple):
    """Pages that a request wants of one group: those of the positions from `first` on."""

    manager: SingleTypeKVCacheManager
    first: int
    keys: list[bytes]


class Finder:
    """`starts`: per group, what its keys begin with. `alignment`: hits end at its multiples, in tokens: pages are of
    whole blocks.
    """

    def __init__(self, manager: KVCacheManager, starts: Sequence[bytes]) -> None:
        self.managers = [one for one in manager.managers if one.prefix_cacheable]
        self.alignment = lcm(*(one.block_size for one in self.managers)) if self.managers else 1
        self._starts = list(starts)

    def keys(self, request: Request, start: int = 0) -> list[Keys]:
        """Of each group that is cached, from token `start` on."""
        return [
            Keys(manager, self._starts[manager.group_id], request, start // manager.block_size)
            for manager in self.managers
        ]

    def num_blocks(self, request: Request, start: int) -> int:
        """How many there are behind token `start`, of all groups."""
        return sum(max(0, request.num_tokens - start) // one.block_size for one in self.managers)

    def wanted(self, all_keys: Sequence[Keys], start: int, boundary: int) -> list[Wanted]:
        """What a request needs to go on at a boundary, of what lies behind token `start`, group by group.

        `all_keys`: its keys, from there on.
        """
        found: list[Wanted] = []
        for manager, keys in zip(self.managers, all_keys, strict=True):
            size = manager.block_size
            first = max(start // size, manager.needed(boundary).start)
            found.append(Wanted(manager, first, keys.run(first, boundary // size)))
        return found

    def furthest(
        self,
        request: Request,
        num_computed_tokens: int,
        look_up: Callable[[Sequence[bytes]], list[bool]],
        all_keys: Sequence[Keys] | None = None,
    ) -> int:
        """The greatest boundary, in tokens, from which the request can go on when its blocks behind
        `num_computed_tokens` are those that `look_up` finds; `num_computed_tokens` if there is none. `all_keys`: its
        keys from there on, if they were made already.
        """
        start = num_computed_tokens
        most = request.num_tokens - 1
        keys = self.keys(request, start) if all_keys is None else all_keys
        whole = [at for at, manager in enumerate(self.managers) if manager.reads_whole_prefix()]
        for at in whole:
            manager = self.managers[at]
            most = min(most, self._run(manager, keys[at], start, most, look_up) - self._margin(manager))
        most -= most % self.alignment
        if most <= start:
            return start
        parts = [at for at in range(len(self.managers)) if at not in whole]
        gaps = [self._gaps(self.managers[at], keys[at], start, most, look_up) for at in parts]
        while most > start:
            shorter = most
            for at, gap in zip(parts, gaps, strict=True):
                shorter = min(shorter, self._usable(self.managers[at], gap, start, shorter))
            if shorter == most:
                return most
            most = shorter - shorter % self.alignment
        return start

    def _margin(self, manager: SingleTypeKVCacheManager) -> int:
        return manager.block_size if manager.draft_margin else 0

    def _run(
        self,
        manager: SingleTypeKVCacheManager,
        keys: Keys,
        start: int,
        most: int,
        look_up: Callable[[Sequence[bytes]], list[bool]],
    ) -> int:
        """Where the blocks from token `start` on end that are there without a gap."""
        size = manager.block_size
        position = start // size
        last = min(keys.num_blocks, (most + self._margin(manager)) // size)
        while position < last:
            asked = keys.run(position, min(position + AT_A_TIME, last))
            found = look_up(asked)
            if not all(found):
                return (position + found.index(False)) * size
            position += len(asked)
        return position * size

    def _gaps(
        self,
        manager: SingleTypeKVCacheManager,
        keys: Keys,
        start: int,
        most: int,
        look_up: Callable[[Sequence[bytes]], list[bool]],
    ) -> list[int]:
        """For each position from that of `start` on, the last one up to it that is not there, or -1."""
        size = manager.block_size
        first = start // size
        last = (most + self._margin(manager)) // size
        known = min(last, keys.num_blocks)
        found = look_up(keys.run(first, known)) if first < known else []
        gaps: list[int] = []
        gap = -1
        for position in range(first, last):
            if position >= known or not found[position - first]:
                gap = position
            gaps.append(gap)
        return gaps

    def _usable(self, manager: SingleTypeKVCacheManager, gaps: list[int], start: int, boundary: int) -> int:
        """The boundary, or a shorter one that what is missing for it allows: not yet one that can be used."""
        size = manager.block_size
        margin = self._margin(manager)
        needed = manager.needed(boundary)
        if margin:
            behind = manager.needed(boundary + margin)
            if len(behind):
                needed = range(min(needed.start, behind.start) if len(needed) else behind.start, behind.stop)
        first = start // size
        if len(needed) == 0 or needed.stop <= first:
            return boundary
        gap = gaps[needed.stop - 1 - first]
        if gap < max(needed.start, first):
            return boundary
        return min(boundary - 1, max(start, gap * size - margin))
