"""No read ever sees what another prefix has left, through lower tiers too: random workloads, faults and aborts."""

from __future__ import annotations

from collections import Counter

import pytest

from blockpool import build_info
from tests.offload.tiered_engine import run_tiered
from tests.sizes import LONG

PARTS = 2
IS_COMPILED = build_info().is_compiled
BY_HAND = 6_000 if LONG else 120 if IS_COMPILED else 24
WITH_THREADS = 1_000 if LONG else 24 if IS_COMPILED else 6

HAPPENS = ("loads", "loaded tokens", "failed loads", "late", "abort", "preempted", "copies", "nulled")
LOSSES = ("store: busy", "store: reused", "store: failed", "store: OSError", "load: missing", "load: corrupt")


def run_all(seeds: range, num_threads: int) -> tuple[Counter[str], Counter[str]]:
    seen: Counter[str] = Counter()
    losses: Counter[str] = Counter()
    for seed in seeds:
        try:
            engine = run_tiered(seed, num_threads)
        except BaseException as error:
            error.add_note(f"workload {seed}: tests.offload.tiered_engine.run_tiered({seed}, {num_threads})")
            raise
        offloader = engine.connection.offloader
        seen += engine.seen
        seen["reads"] += engine.store.num_reads
        seen["loaded tokens"] += offloader.num_loaded_tokens
        seen["failed loads"] += len(offloader.load_failures)
        seen["late"] += engine.scheduler.num_late_reports
        losses += offloader.losses
    return seen, losses


@pytest.mark.parametrize("part", range(PARTS))
def test_no_read_sees_a_foreign_fingerprint(part: int) -> None:
    """Page by page, in an order that the seed says."""
    seen, losses = run_all(range(part, BY_HAND, PARTS), 0)
    assert seen["reads"] > 100 * BY_HAND / PARTS
    if IS_COMPILED:
        assert [what for what in HAPPENS if not seen[what]] == []
        assert [what for what in LOSSES if not losses[what]] == []


def test_nor_with_threads() -> None:
    seen, _ = run_all(range(100_000, 100_000 + WITH_THREADS), 2)
    assert seen["loads"] > 0
