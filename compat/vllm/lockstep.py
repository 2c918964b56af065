"""Comparing what two sides show, and saying where they part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

MAX_REPLAYS = 300
CAUGHT = (ValueError, RuntimeError)

Planned = TypeVar("Planned")


@dataclass(frozen=True)
class Parting:
    """The first difference: in which scenario, after which operation, and in what."""

    what: str
    seed: int
    number: int
    where: str
    theirs: Any
    ours: Any
    history: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"DIFFERENCE in {self.what}, seed {self.seed}, operation {self.number}: {self.where}",
            f"  vllm      {self.theirs}",
            f"  blockpool {self.ours}",
            "  the operations, last one last:",
            *(f"    {text}" for text in self.history),
        ]
        return "\n".join(lines)


def first_difference(theirs: Any, ours: Any, where: str = "") -> tuple[str, Any, Any] | None:
    """The innermost place where two observations differ, as (path, theirs, ours).

    True is not 1 here, a tuple is no list, and numpy's 1 is not 1: vLLM sends these values to other processes."""
    if theirs == ours and repr(theirs) == repr(ours):
        return None
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in [*theirs, *(key for key in ours if key not in theirs)]:
            if key not in theirs or key not in ours:
                return (f"{where}/{key}", theirs.get(key, "absent"), ours.get(key, "absent"))
            if found := first_difference(theirs[key], ours[key], f"{where}/{key}"):
                return found
    both_sequences = isinstance(theirs, list | tuple) and isinstance(ours, list | tuple)
    if both_sequences and len(theirs) == len(ours) and type(theirs) is type(ours) and len(theirs) > 3:
        for i, (one, other) in enumerate(zip(theirs, ours, strict=True)):
            if found := first_difference(one, other, f"{where}[{i}]"):
                return found
    return (where, theirs, ours)


def same_outcome(theirs: tuple[str, Any], ours: tuple[str, Any]) -> tuple[str, Any, Any] | None:
    """Compares what two calls did. Both may refuse with an error of their own: which one is not vLLM's promise,
    except for those that its scheduler and its tests catch."""
    if theirs[0] == ours[0] == "raised":
        for kind in CAUGHT:
            if isinstance(theirs[1], kind) and not isinstance(ours[1], kind):
                return ("raised", repr(theirs[1]), repr(ours[1]))
        return None
    if theirs[0] != ours[0]:
        return ("outcome", described(theirs), described(ours))
    return first_difference(theirs[1], ours[1], "returned")


def described(outcome: tuple[str, Any]) -> str:
    return f"{outcome[0]} {outcome[1]!r}"


def shrink(
    planned: Sequence[Planned], replay: Callable[[Sequence[Planned]], Parting | None], parting: Parting
) -> Parting:
    """Leaves out operations for as long as the two still part: first half of them at once, then fewer."""
    kept = list(planned)
    replays = 0
    size = len(kept) // 2
    while size >= 1 and replays < MAX_REPLAYS:
        start = 0
        while start < len(kept) and replays < MAX_REPLAYS:
            fewer = kept[:start] + kept[start + size :]
            replays += 1
            found = replay(fewer)
            if found is None:
                start += size
            else:
                kept, parting = fewer, found
        size //= 2
    return parting
