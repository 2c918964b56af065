"""Why a prompt that others had before was computed again: each reusable token is hit, or lost for one reason."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import msgspec

from blockpool.cache import Hit, KVCacheManager
from blockpool.managers import ChunkedLocalAttentionSpec, CommonHit, SingleTypeKVCacheManager, SlidingWindowSpec

from .expand import DIGEST_BYTES
from .kinds import group_kinds


class LossReason(StrEnum):
    """What stood between a hit and the longest prefix that an earlier prompt had too."""

    EVICTED = "evicted"
    """The group's blocks there were handed out again, and no tier had them."""
    WINDOW_GONE = "window tail gone"
    """The window before the resume point was handed out again, or was never kept."""
    NO_CHECKPOINT = "no checkpoint"
    """No state was ever kept there: no step ended there, or the policy did not ask for one."""
    CHECKPOINT_EVICTED = "checkpoint evicted"
    """A state was kept there, and handed out again."""
    APART = "part on the GPU, part in tiers"
    """All of it was there, but what the GPU has behind the end of its own hit is in no tier to load it from."""
    NO_ROOM = "no room beside the hit"
    """In so small a pool the request fits only when all of it is computed in its chunks."""
    UNIT_TOO_COARSE = "unit too coarse"
    """The rest behind the last multiple of the common unit, or the last token, which is always computed."""
    TOO_SHORT = "shorter than the smallest reusable prefix"
    """All of it is less than one unit."""


class Loss(msgspec.Struct, frozen=True):
    """`tokens` reusable prompt tokens of `requests` requests were computed again because of one group.

    For units, `group` is the first of those with the largest blocks.
    """

    reason: LossReason
    group: int
    requests: int
    tokens: int


class Lost(NamedTuple):
    """What one request lost for one reason."""

    reason: LossReason
    group: int
    tokens: int


class LossBook:
    """Counts, per group and reason."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._counts: dict[tuple[LossReason, int], list[int]] = {}
        self._unit = manager.alignment
        self._cached = [one for one in manager.managers if one.prefix_cacheable]
        self._states = [one for one in self._cached if one.is_state]
        self._coarsest = max(self._cached, key=lambda one: one.block_size).group_id if self._cached else 0
        specs = [group.kv_cache_spec for group in manager.config.kv_cache_groups]
        self._has_window = [isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec) for spec in specs]
        # group and digest of every state that could be found when its step had ended
        self._states_kept: set[tuple[int, bytes]] = set()
        self._kinds = group_kinds(manager.config.kv_cache_groups)
        self.shortened_hits: dict[str, int] = {}
        self.reusable_tokens = 0

    def found(self, hit: Hit | CommonHit, chain: bytes, reusable: int) -> list[Lost]:
        """Why a hit is shorter than the `reusable` tokens that could have been found.

        To be asked before the request leaves anything itself. What lies beyond the longest prefix that a group has by
        itself is lost to that group, group after group, the one with the longest first; what is missing then, because
        two groups resume at different points, to the one that had the last word.
        """
        usable = reusable - reusable % self._unit
        if usable == 0:
            return [Lost(LossReason.TOO_SHORT, self._coarsest, reusable)]
        lost = []
        if usable < reusable:
            lost.append(Lost(LossReason.UNIT_TOO_COARSE, self._coarsest, reusable - usable))
        if hit.num_tokens < usable:
            own = [(max(self._own_length(one, hit, chain, usable), hit.num_tokens), one) for one in self._cached]
            reached = usable
            # Of those that reach as far, the one that the coordinator asks first: whoever reads the whole prefix.
            for length, one in sorted(own, key=lambda pair: (-pair[0], hit.own_lengths[pair[1].group_id] is None)):
                if length < reached:
                    lost += self._between(one, chain, length, reached)
                    reached = length
            if hit.num_tokens < reached and hit.vetoed_by is not None:
                lost += self._between(self._manager.managers[hit.vetoed_by], chain, hit.num_tokens, reached)
        return lost

    def no_room_for(self, num_tokens: int) -> Lost:
        """The request starts without so much of what was found: the groups that drop blocks leave no room for it."""
        dropping = [one.group_id for one in self._cached if not one.reads_whole_prefix()]
        return Lost(LossReason.NO_ROOM, dropping[0] if dropping else self._coarsest, num_tokens)

    def apart(self, hit: CommonHit, num_tokens: int) -> Lost:
        """The last tokens of a hit over GPU and tiers together cannot be used."""
        return Lost(LossReason.APART, self._coarsest if hit.vetoed_by is None else hit.vetoed_by, num_tokens)

    def add(self, reusable: int, lost: list[Lost]) -> None:
        """Count what was found of one request."""
        self.reusable_tokens += reusable
        for reason, group, tokens in lost:
            counts = self._counts.setdefault((reason, group), [0, 0])
            counts[0] += 1
            counts[1] += tokens
        for kind in {self._kinds[one.group] for one in lost}:
            self.shortened_hits[kind] = self.shortened_hits.get(kind, 0) + 1

    def step_ended(self, chain: bytes, num_tokens: int) -> None:
        """If this is a boundary, and states of it can be found now, they were kept."""
        if num_tokens % self._unit == 0 and num_tokens <= self._num_hashed(chain):
            digest = self._digest(chain, num_tokens)
            for one in self._states:
                if one.pool.get_cached_block(digest, [one.group_id]) is not None:
                    self._states_kept.add((one.group_id, digest))

    def losses(self) -> tuple[Loss, ...]:
        """The greatest first."""
        rows = [Loss(reason, group, *counts) for (reason, group), counts in self._counts.items()]
        return tuple(sorted(rows, key=lambda loss: (-loss.tokens, loss.group, loss.reason)))

    def _own_length(self, one: SingleTypeKVCacheManager, hit: Hit | CommonHit, chain: bytes, usable: int) -> int:
        known = hit.own_lengths[one.group_id]
        if known is not None:
            return min(known - known % self._unit, usable)
        return one.find_longest_hit(chain, usable, self._unit).num_tokens

    def _between(self, one: SingleTypeKVCacheManager, chain: bytes, found: int, reached: int) -> list[Lost]:
        """The tokens from `found` to `reached` are lost to one group."""
        if not one.is_state:
            window = self._has_window[one.group_id]
            return [Lost(LossReason.WINDOW_GONE if window else LossReason.EVICTED, one.group_id, reached - found)]
        kept = found
        for boundary in range(reached, found, -self._unit):
            if (one.group_id, self._digest(chain, boundary)) in self._states_kept:
                kept = boundary
                break
        lost = []
        if kept < reached:
            lost.append(Lost(LossReason.NO_CHECKPOINT, one.group_id, reached - kept))
        if found < kept:
            lost.append(Lost(LossReason.CHECKPOINT_EVICTED, one.group_id, kept - found))
        return lost

    def _num_hashed(self, chain: bytes) -> int:
        return len(chain) // DIGEST_BYTES * self._manager.pool.hash_block_size

    def _digest(self, chain: bytes, num_tokens: int) -> bytes:
        end = num_tokens // self._manager.pool.hash_block_size * DIGEST_BYTES
        return chain[end - DIGEST_BYTES : end]
