"""Where ours differs from vLLM on purpose. What is named here is taken out of the comparison, and nothing else; each
difference is counted, so that one which no longer occurs is noticed.

`empty stored`      vLLM announces a BlockStored without a single hash when a mask leaves out every block of a range;
                    ours announces nothing then.
`order of a set`    A block's additional keys are a set in vLLM, and when all of them go, their BlockRemoved come in
                    the set's order. Ours has an order of its own. Neither is a promise.

What vLLM accepts and ours refuses is not in this list: such calls are not made (see pool_ops).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lockstep import first_difference

NAMES = ("empty stored", "order of a set")
Event = tuple[str, dict[str, Any]]  # as pool_world.fields shows it


class Deliberate:
    """Compares two lists of events but for the deliberate differences, and counts those."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def difference(
        self, theirs: Sequence[Event], ours: Sequence[Event], siblings: frozenset[tuple[Any, int]]
    ) -> tuple[str, Any, Any] | None:
        """Like lockstep.first_difference. `siblings` is what `sibling_keys` found before or after any operation."""
        if theirs == ours:
            return None
        found = first_difference(self.normal(theirs, siblings), self.normal(ours, siblings), "events")
        if found is None:
            self.note(theirs, ours)
        return found

    def normal(self, events: Sequence[Event], siblings: frozenset[tuple[Any, int]]) -> list[Event]:
        kept = [event for event in events if not is_empty_stored(event)]
        run: list[Event] = []
        result: list[Event] = []
        for event in kept:
            if is_removal_of(event, siblings):
                run.append(event)
            else:
                result += [*sorted(run, key=repr), event]
                run = []
        return result + sorted(run, key=repr)

    def note(self, theirs: Sequence[Event], ours: Sequence[Event]) -> None:
        """Which differences these equal-but-for-them lists had."""
        if sum(map(is_empty_stored, theirs)) != sum(map(is_empty_stored, ours)):
            self.counts["empty stored"] += 1
        one, other = ([event for event in events if not is_empty_stored(event)] for events in (theirs, ours))
        if one != other:
            self.counts["order of a set"] += 1


def sibling_keys(pool: Any) -> set[tuple[Any, int]]:
    """(external hash, group) of the keys in a vLLM pool that share their block with other additional keys."""
    from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash

    return {
        (maybe_convert_block_hash(get_block_hash(key)), get_group_id(key))
        for keys in pool.cached_block_hashes_by_block.values()
        if len(keys) > 1
        for key in keys
    }


def is_empty_stored(event: Event) -> bool:
    kind, values = event
    return kind.endswith(".BlockStored") and values["block_hashes"][1] == []


def is_removal_of(event: Event, siblings: frozenset[tuple[Any, int]]) -> bool:
    kind, values = event
    return kind.endswith(".BlockRemoved") and (values["block_hashes"][1][0], values["group_idx"][1]) in siblings
