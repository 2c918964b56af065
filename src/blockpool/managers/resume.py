"""What it takes to resume a request at a boundary: the one rule that looking up and storing both follow."""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING

from mypy_extensions import i64

if TYPE_CHECKING:
    from blockpool.managers.base import SingleTypeKVCacheManager


def step_between(manager: SingleTypeKVCacheManager, alignment: int) -> int:
    """Tokens from one boundary to the next, in this group, for hits that end at multiples of `alignment`.

    A boundary lies inside a block only where the group can resume there and the alignment asks for it.
    """
    unit = manager.block_size
    if alignment < 1:
        raise ValueError(f"group {manager.group_id}: alignment must be at least 1 token, not {alignment}")
    if alignment % unit == 0:
        return alignment
    if manager.supports_partial_boundaries:
        unit = manager.pool.hash_block_size
    return lcm(alignment, unit)


def margin_behind(manager: SingleTypeKVCacheManager, step: int) -> int:
    """How many tokens behind a boundary must be cached too, so that drafting can resume there: one unit, or none."""
    return min(step, manager.block_size) if manager.draft_margin else 0


def parts_of(manager: SingleTypeKVCacheManager, boundary: i64) -> tuple[i64, i64, i64]:
    """What `needed` names for one boundary: full blocks first .. last-1, and the boundary itself if it lies inside
    a block that is needed up to there, else 0.
    """
    unit: i64 = manager.block_size
    full = boundary // unit
    if manager.needs_what_is_read:  # the same answer, without a range
        first = i64(manager.num_skipped_tokens(int(boundary))) // unit
        last = full if full * unit == boundary else full + 1
    else:
        needed = manager.needed(int(boundary))
        first = needed.start
        last = needed.stop
    if first >= last:
        return full, full, 0
    return min(first, full), full, boundary if last > full else 0


def parts_to_resume(manager: SingleTypeKVCacheManager, boundary: i64, margin: i64) -> tuple[i64, i64, i64, i64]:
    """The blocks that must be cached to resume at a boundary: full ones first .. last-1, and up to two boundaries
    (0 for none) inside blocks that are needed as far as these.

    With a margin, what is needed there joins in. A block that is cached beyond a boundary inside it serves that
    boundary too: it holds keys and values of all tokens up to its end (a state does not, and has no margin).
    """
    first, last, tail = parts_of(manager, boundary)
    if margin == 0:
        return first, last, tail, 0
    first_behind, last_behind, tail_behind = parts_of(manager, boundary + margin)
    if first_behind == last_behind and tail_behind == 0:
        return first, last, tail, 0
    if first_behind <= boundary // manager.block_size:
        tail = 0
    return first, last_behind, tail, tail_behind
