"""What a resume needs in each group: asked of the group's own manager, told once per length, as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm

import msgspec
import numpy as np
import numpy.typing as npt

from blockpool.managers import (
    Coordinator,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SingleTypeKVCacheManager,
    SlidingWindowSpec,
    SpecError,
    make_manager,
)
from blockpool.managers.resume import margin_behind, parts_to_resume, step_between
from blockpool.pool import BlockPool
from blockpool.wire.errors import GroupRuleError

Numbers = npt.NDArray[np.int64]
Masks = npt.NDArray[np.uint64]
Fact = tuple[int, str | None, int | None]  # block size, kind, window

FULL_KINDS = (None, "full_attention", "mla_attention", "sink_full_attention")
WINDOW_KINDS = ("sliding_window", "sliding_window_mla")


def spec_of(group: int, facts: list[Fact]) -> KVCacheSpec:
    """A group's spec from what its events said. Raises GroupRuleError where they do not say enough."""
    if group < 0:
        raise GroupRuleError(f"group {group} is none: groups are counted from 0")
    try:
        return _spec_of(group, facts)
    except SpecError as error:
        raise GroupRuleError(f"group {group}: {error}") from None


def _spec_of(group: int, facts: list[Fact]) -> KVCacheSpec:
    # A boundary inside a block is announced in smaller units.
    size = max(fact[0] for fact in facts)
    kind = next((fact[1] for fact in facts if fact[1] is not None), None)
    window = next((fact[2] for fact in facts if fact[2] is not None), None)
    if kind in FULL_KINDS:
        return FullAttentionSpec(size)
    if kind in WINDOW_KINDS and window is not None:
        return SlidingWindowSpec(size, window)
    if kind == "mamba":
        return MambaSpec(size, 0, "align")
    raise GroupRuleError(
        f"group {group} is of kind {kind!r}: its events do not say what a resume needs, so its spec must be stated"
    )


class _Needs(msgspec.Struct, frozen=True):
    """For boundary i of a group: full blocks first[i] .. last[i]-1, and two digests inside blocks (-1: none).

    `margin`: tokens behind the boundary that must have hashes too.
    """

    first: Numbers
    last: Numbers
    tails: tuple[Numbers, Numbers]
    reads_all: bool
    margin: int


class GroupRules:
    """All groups of one model. `unit`: tokens per hash. Every usable prefix is a multiple of `step` tokens."""

    def __init__(self, unit: int, groups: Mapping[int, KVCacheGroupSpec], partial_hits: bool = True) -> None:
        for group, spec in groups.items():
            if spec.kv_cache_spec.block_size % unit:
                size = spec.kv_cache_spec.block_size
                raise GroupRuleError(f"group {group} has blocks of {size} tokens, no multiple of {unit}")
        pool = BlockPool(1, hash_block_size=unit)
        made = {group: make_manager(pool, group, spec) for group, spec in groups.items()}
        self.unit = unit
        self.managers = {group: manager for group, manager in made.items() if manager.prefix_cacheable}
        alignment = Coordinator(list(self.managers.values()), partial_hits).alignment
        self.alignment = alignment
        self.step = lcm(*(step_between(manager, alignment) for manager in self.managers.values()))
        self._needs: dict[int, _Needs] = {}

    def usable(self, group: int, rows: Masks) -> Masks:
        """[boundaries, words]: who can resume at each boundary. `rows`: [hashes, words], who has each key."""
        manager = self.managers[group]
        count = len(rows) * self.unit // self.step
        needs = self._needs_of(group, manager, count)
        factor = manager.block_size // self.unit
        blocks = rows[factor - 1 :: factor]
        first, last = needs.first[:count], needs.last[:count]
        # What drafting recomputes must be covered by hashes too.
        ends = np.arange(1, count + 1) * self.step + needs.margin
        inside = (last <= len(blocks)) & (ends <= len(rows) * self.unit)
        out = _all_of(blocks, first, np.where(inside, last, first), needs.reads_all)
        for tail in needs.tails:
            at = tail[:count]
            out &= np.where((at < 0)[:, None], ~np.uint64(0), rows[np.clip(at, 0, len(rows) - 1)])
            inside &= at < len(rows)
        out[~inside] = 0
        if needs.reads_all:  # what is usable there is a prefix: a block that is cached further serves less, too
            out = np.bitwise_or.accumulate(out[::-1], axis=0)[::-1]
        return out

    def _needs_of(self, group: int, manager: SingleTypeKVCacheManager, count: int) -> _Needs:
        known = self._needs.get(group)
        if known is not None and len(known.first) >= count:
            return known
        margin = margin_behind(manager, step_between(manager, self.alignment))
        table = np.array(
            [parts_to_resume(manager, at * self.step, margin) for at in range(1, 2 * count + 1)], dtype=np.int64
        ).reshape(-1, 4)
        tails = [np.where(table[:, i] > 0, table[:, i] // self.unit - 1, -1) for i in (2, 3)]
        made = _Needs(table[:, 0], table[:, 1], (tails[0], tails[1]), manager.reads_whole_prefix(), margin)
        self._needs[group] = made
        return made


def _all_of(blocks: Masks, first: Numbers, last: Numbers, reads_all: bool) -> Masks:
    """For each i, the bits that all of blocks first[i] .. last[i]-1 have; all bits where that is none."""
    out = np.full((len(first), blocks.shape[1]), ~np.uint64(0))
    some = last > first
    if not some.any():
        return out
    first, last = first[some], last[some]
    if reads_all:
        out[some] = np.bitwise_and.accumulate(blocks, axis=0)[last - 1]
        return out
    # Any range is two ranges, overlapping perhaps, whose length is a power of two.
    powers = np.frexp(last - first)[1] - 1
    level = blocks
    answer = np.empty((len(first), blocks.shape[1]), dtype=np.uint64)
    for power in range(int(powers.max()) + 1):
        if power:
            level = level[: -(1 << (power - 1))] & level[1 << (power - 1) :]
        here = powers == power
        answer[here] = level[first[here]] & level[last[here] - (1 << power)]
    out[some] = answer
    return out
