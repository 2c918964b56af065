"""The resume points that later requests are served at: what is stored is what those need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from mypy_extensions import i64

from blockpool.managers.resume import margin_behind, parts_to_resume, step_between

if TYPE_CHECKING:
    from blockpool.managers.base import SingleTypeKVCacheManager


@final
class RetentionPolicy:
    """`alignment`: hits end at its multiples, in tokens: what the cache looks up with.

    `interval`: None is dense, every aligned boundary can be resumed at; r > 0, a multiple of the alignment, every
    r tokens; 0, only the boundaries that are named: the replay of the prompt, junctions of shared prefixes. Those
    count under every policy. Raises ValueError for other values.
    """

    def __init__(self, alignment: int, interval: int | None = None) -> None:
        if alignment < 1:
            raise ValueError(f"alignment must be at least 1 token, not {alignment}")
        if interval is not None and (interval < 0 or interval % alignment != 0):
            raise ValueError(f"interval must be None, 0 or a multiple of the alignment {alignment}, not {interval}")
        self.alignment = alignment
        self.interval = interval

    def stops(self, manager: SingleTypeKVCacheManager, start: int, boundaries: Sequence[int]) -> list[int]:
        """Behind token `start`, where a step must end for a group of states to keep what is promised: the named
        boundaries, and the end of the interval, if there is one.
        """
        step = step_between(manager, self.alignment)
        stops = [named - named % step for named in boundaries]
        if self.interval:
            stops.append((start // self.interval + 1) * self.interval)
        return [stop for stop in stops if stop > start]

    def __repr__(self) -> str:
        return f"RetentionPolicy(alignment={self.alignment}, interval={self.interval})"


def worth_registering(
    manager: SingleTypeKVCacheManager, first: int, last: int, boundaries: Sequence[int], policy: RetentionPolicy
) -> list[bool] | None:
    """Which of the full blocks first .. last-1 some resumable boundary needs; None for all of them.

    The cost grows with last - first and the number of `boundaries`, which are aligned down.
    """
    step: i64 = step_between(manager, policy.alignment)
    margin: i64 = margin_behind(manager, int(step))
    keep = [False] * (last - first)
    start: i64 = first
    end: i64 = last
    count: i64 = 0
    interval: i64 = policy.alignment if policy.interval is None else policy.interval
    if interval > 0:
        interval = max(interval, step)
        marked = start
        multiple = max(1, (start * manager.block_size - margin) // interval)
        while marked < end:
            boundary = multiple * interval
            multiple += 1
            needed_from, needed_to = full_blocks(manager, boundary - boundary % step, margin)
            if needed_from >= end:
                break
            at = max(needed_from, marked)
            while at < min(needed_to, end):
                keep[at - start] = True
                count += 1
                at += 1
            marked = max(marked, needed_to)
    for named in boundaries:
        boundary = i64(named) - i64(named) % step
        if boundary > 0:
            needed_from, needed_to = full_blocks(manager, boundary, margin)
            at = max(needed_from, start)
            while at < min(needed_to, end):
                count += 0 if keep[at - start] else 1
                keep[at - start] = True
                at += 1
    return None if count == end - start else keep


def full_blocks(manager: SingleTypeKVCacheManager, boundary: i64, margin: i64) -> tuple[i64, i64]:
    first, last, _, _ = parts_to_resume(manager, boundary, margin)
    return first, last
