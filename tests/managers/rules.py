"""The rules for each kind of attention, as their table states them, and what follows by trying everything."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from blockpool.managers import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    ReferenceWindowSpec,
    RetentionPolicy,
    SingleTypeKVCacheManager,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    make_manager,
)
from blockpool.pool import BlockPool

GROUP = 3


def up(tokens: int, size: int) -> int:
    return (tokens + size - 1) // size


def chain(num_digests: int, name: str = "") -> bytes:
    """A chain's buffer: any digests will do."""
    return b"".join(hashlib.sha256(f"{name}{i}".encode()).digest() for i in range(num_digests))


@dataclass
class Rule:
    """One kind with its sizes. `needed(b)`: the set of positions; `dropped(settled, prompt)`: those given back."""

    spec: KVCacheSpec
    size: int
    needed: Callable[[int], set[int]]
    dropped: Callable[[int, int], set[int]]
    partial: bool = False
    whole: bool = False  # keeps every full block, whatever the policy
    margin: bool = False

    def manager(self, pool: BlockPool) -> SingleTypeKVCacheManager:
        return make_manager(pool, GROUP, KVCacheGroupSpec(("layer",), self.spec, draft_margin=self.margin))


def full(size: int) -> Rule:
    return Rule(FullAttentionSpec(size), size, lambda b: set(range(up(b, size))), lambda n, p: set(), True, True)


def sink(size: int) -> Rule:
    return Rule(
        SinkFullAttentionSpec(size, 2 * size), size, lambda b: set(range(up(b, size))), lambda n, p: set(), True, True
    )


def window(size: int, width: int) -> Rule:
    """The ceil((w-1)/B) blocks that end at b; positions that no token from n on reads are dropped."""
    return Rule(
        SlidingWindowSpec(size, width),
        size,
        lambda b: set(range(max(0, b // size - up(width - 1, size)), b // size)),
        lambda n, p: {i for i in range(n) if (i + 1) * size <= n - width + 1},
    )


def chunked(size: int, chunk: int) -> Rule:
    return Rule(
        ChunkedLocalAttentionSpec(size, chunk),
        size,
        lambda b: {t // size for t in range(b // chunk * chunk, b)},
        lambda n, p: {i for i in range(n) if (i + 1) * size <= n // chunk * chunk},
    )


def reference(size: int, width: int) -> Rule:
    return Rule(
        ReferenceWindowSpec(size, width),
        size,
        lambda b: set(range(up(b, size))),
        lambda n, p: {i for i in range(n) if i * size >= p and (i + 1) * size <= n - width},
        whole=True,
    )


def state(size: int, drafts: int = 0) -> Rule:
    return Rule(
        MambaSpec(size, drafts, "align"),
        size,
        lambda b: {up(b, size) - 1},
        lambda n, p: {i for i in range(n) if (i + 1) * size <= n - 1},
        partial=True,
    )


CACHEABLE = (full, sink, window, chunked, reference, state)
OTHERS = (CircularBufferSpec(4), CrossAttentionSpec(4), MambaSpec(4, 2, "none"))


def step_of(rule: Rule, alignment: int, unit: int) -> int:
    """The distance between boundaries: multiples of the alignment and of the block, or the unit inside blocks."""
    smallest = unit if rule.partial else rule.size
    return next(b for b in range(alignment, alignment * rule.size + 1, alignment) if b % smallest == 0)


def ends_needed(rule: Rule, boundary: int, step: int) -> dict[int, int]:
    """Position -> the token up to which it must be cached to resume at a boundary, the margin's needs included."""
    reach = [boundary, boundary + min(step, rule.size)] if rule.margin else [boundary]
    return {
        position: min((position + 1) * rule.size, max(b for b in reach if position in rule.needed(b)))
        for position in set().union(*(rule.needed(b) for b in reach))
    }


def longest(
    rule: Rule, cached: Callable[[int], int], num_hashed: int, max_length: int, alignment: int, unit: int
) -> tuple[int, list[int]]:
    """The greatest boundary that can be resumed at, by trying all of them, and its list of blocks.

    `cached(end)`: the block cached for the boundary at token `end`, or 0.
    """
    step = step_of(rule, alignment, unit)
    for boundary in range(max_length, 0, -1):
        if boundary % step or boundary + (min(step, rule.size) if rule.margin else 0) > num_hashed:
            continue
        ends = ends_needed(rule, boundary, step)
        if all(cached(end) for end in ends.values()):
            shown = rule.needed(boundary)
            return boundary, [cached(ends[p]) if p in shown else 0 for p in range(up(boundary, rule.size))]
    return 0, []


def resumable(policy: RetentionPolicy, step: int, named: Iterable[int], most: int) -> set[int]:
    """The boundaries up to `most` that a policy promises to later requests."""
    out = {b // step * step for b in named}
    if policy.interval != 0:
        interval = policy.alignment if policy.interval is None else policy.interval
        out |= {b // step * step for b in range(interval, most + 1, interval)}
    return out - {0}


def worth(rule: Rule, policy: RetentionPolicy, unit: int, named: Iterable[int], first: int, last: int) -> list[bool]:
    """Which full blocks some promised boundary needs."""
    if rule.whole:
        return [True] * (last - first)
    step = step_of(rule, policy.alignment, unit)
    far = last * rule.size + 200
    wanted = {
        position
        for boundary in resumable(policy, step, named, far)
        for position, end in ends_needed(rule, boundary, step).items()
        if end == (position + 1) * rule.size
    }
    return [position in wanted for position in range(first, last)]
