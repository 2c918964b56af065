"""No read ever sees what another prefix has left: random workloads over a memory of fingerprints."""

from __future__ import annotations

from collections import Counter

import pytest

from blockpool import build_info
from tests.engine.shadow_engine import run_workload
from tests.sizes import LONG

PARTS = 4
#: The interpreted build runs the same code, far slower.
WORKLOADS = 20_000 if LONG else 600 if build_info().is_compiled else 120

HAPPENS = (
    "preempted",
    "copies",
    "cleared",
    "loads",
    "hits",
    "hits inside blocks",
    "nulled",
    "three in flight",
    "accepted drafts",
    "rejected drafts",
    "stop",
    "length",
    "abort",
    "error",
)


@pytest.mark.parametrize("seed", [60, 738, 17_406])
def test_who_can_run_alone_is_never_given_up(seed: int) -> None:
    """Too large with its drafts, in one piece, or in the pieces that others leave of a step."""
    run_workload(seed)


@pytest.mark.parametrize("part", range(PARTS))
def test_no_read_sees_a_foreign_fingerprint(part: int) -> None:
    """Tokens are those of a request alone, and at the end everything is free and the books are sound."""
    seen: Counter[str] = Counter()
    for seed in range(part, WORKLOADS, PARTS):
        try:
            engine = run_workload(seed)
        except BaseException as error:
            error.add_note(f"workload {seed}: tests.engine.shadow_engine.run_workload({seed})")
            raise
        seen += engine.seen
        seen["reads"] += engine.store.num_reads
    assert seen["reads"] > 100 * WORKLOADS / PARTS
    assert [what for what in HAPPENS if not seen[what]] == []
