"""Why a prompt that others had before was computed again: each reusable token is hit, or lost for one reason."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from blockpool.cache import Hit, KVCacheManager
from blockpool.managers import ChunkedLocalAttentionSpec, SlidingWindowSpec

from .expand import DIGEST_BYTES


class LossReason(StrEnum):
    """What stood between a hit and the longest prefix that an earlier prompt had too."""

    EVICTED = "evicted"
    """The group's blocks there were handed out again."""
    WINDOW_GONE = "window tail gone"
    """The window before the resume point was handed out again, or was never kept."""
    NO_CHECKPOINT = "no checkpoint"
    """No step ended there, or the policy kept no state."""
    CHECKPOINT_EVICTED = "checkpoint evicted"
    """A state was kept there, and handed out again."""
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


class LossBook:
    """Counts, per group and reason."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._counts: dict[tuple[LossReason, int], list[int]] = {}
        self._unit = manager.alignment
        cached = [one for one in manager.managers if one.prefix_cacheable]
        self._coarsest = max(cached, key=lambda one: one.block_size).group_id if cached else 0
        specs = [group.kv_cache_spec for group in manager.config.kv_cache_groups]
        self._has_window = [isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec) for spec in specs]
        self._has_states = [spec.is_state for spec in specs]
        self._states_kept: set[bytes] = set()
        self.reusable_tokens = 0

    def found(self, hit: Hit, chain: bytes, reusable: int) -> list[tuple[LossReason, int, int]]:
        """Why a hit is shorter than the `reusable` tokens that could have been found: (reason, group, tokens).

        To be asked before the request leaves anything itself.
        """
        usable = reusable - reusable % self._unit
        if usable == 0:
            return [(LossReason.TOO_SHORT, self._coarsest, reusable)]
        lost = [(LossReason.UNIT_TOO_COARSE, self._coarsest, reusable - usable)]
        if hit.num_tokens < usable:
            group = self._coarsest if hit.vetoed_by is None else hit.vetoed_by
            lost.append((self._why(group, chain, hit.num_tokens, usable), group, usable - hit.num_tokens))
        return lost

    def add(self, reusable: int, lost: list[tuple[LossReason, int, int]]) -> None:
        """Count what was found of one request."""
        self.reusable_tokens += reusable
        for reason, group, tokens in lost:
            if tokens:
                counts = self._counts.setdefault((reason, group), [0, 0])
                counts[0] += 1
                counts[1] += tokens

    def kept(self, chain: bytes, num_tokens: int) -> None:
        """A step has ended here: the states of this boundary are kept, if it is one."""
        if num_tokens % self._unit == 0:
            self._states_kept.add(self._digest(chain, num_tokens))

    def losses(self) -> tuple[Loss, ...]:
        """The greatest first."""
        rows = [Loss(reason, group, *counts) for (reason, group), counts in self._counts.items()]
        return tuple(sorted(rows, key=lambda loss: (-loss.tokens, loss.group, loss.reason)))

    def _why(self, group: int, chain: bytes, found: int, usable: int) -> LossReason:
        if self._has_states[group]:
            boundaries = range(usable, found, -self._unit)
            if any(self._digest(chain, boundary) in self._states_kept for boundary in boundaries):
                return LossReason.CHECKPOINT_EVICTED
            return LossReason.NO_CHECKPOINT
        return LossReason.WINDOW_GONE if self._has_window[group] else LossReason.EVICTED

    def _digest(self, chain: bytes, num_tokens: int) -> bytes:
        end = num_tokens // self._manager.pool.hash_block_size * DIGEST_BYTES
        return chain[end - DIGEST_BYTES : end]
