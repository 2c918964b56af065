"""Concurrent runs for people and for machines."""

from collections.abc import Sequence
from typing import Any

import msgspec

from .concurrent import ConcurrentRun, Percentiles
from .step_cost import StepCost

JSON_FORMAT = "blockpool.replay.concurrent/1"
CONCURRENT_HEADINGS = (
    "blocks",
    "cache",
    "requests",
    "refused",
    "hit rate",
    "computed tokens",
    "preempted",
    "most running",
    "most waiting",
    "queued p50",
    "p90",
    "p99",
    "first token p50",
    "p90",
    "p99",
    "busy",
)


class ConcurrentReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was replayed, under which limits and costs, and what came out."""

    traces: tuple[str, ...]
    built_in: bool
    trace_requests: int
    skipped_bad_lines: int
    hash_block_size: int
    sizes_from: str
    model: str | None
    bytes_per_block: int | None
    retention_interval: int | None
    max_num_batched_tokens: int
    max_num_seqs: int
    cost: StepCost
    runs: tuple[ConcurrentRun, ...]
    interrupted: bool = False
    """Whether Ctrl-C came before all runs were done; the one that was running then is left out."""


def concurrent_rows(runs: Sequence[ConcurrentRun]) -> list[tuple[str, ...]]:
    """One row per run, under `CONCURRENT_HEADINGS`; times in seconds."""
    return [
        (
            f"{run.num_blocks:,}",
            "on" if run.with_cache else "off",
            f"{run.requests:,}",
            f"{run.refused_requests:,}",
            f"{run.hit_rate:.1%}",
            f"{run.computed_tokens:,}",
            f"{run.preemptions:,}",
            f"{run.most_running:,}",
            f"{run.most_waiting:,}",
            *_row(run.queueing),
            *_row(run.first_token),
            f"{run.busy_seconds / run.seconds:.0%}" if run.seconds else "-",
        )
        for run in runs
    ]


def _row(times: Percentiles) -> tuple[str, str, str]:
    return seconds(times.p50), seconds(times.p90), seconds(times.p99)


def seconds(time: float) -> str:
    """To the millisecond where that is much."""
    return f"{time:,.3f}" if time < 10 else f"{time:,.1f}"


def concurrent_verdict(runs: Sequence[ConcurrentRun]) -> list[str]:
    """What each pool did with the trace, and what its cache changed."""
    sentences = []
    for run in runs:
        if not run.with_cache:
            continue
        at = f"At {run.num_blocks:,} blocks"
        if not run.replayed_requests:
            sentences.append(f"{at} nothing was replayed: every request needs more than the whole pool.")
            continue
        sentences.append(
            f"{at} half of the requests had their first token within {seconds(run.first_token.p50)} s, 99% within "
            f"{seconds(run.first_token.p99)} s; 99% waited no longer than {seconds(run.queueing.p99)} s to begin."
        )
        if run.preemptions:
            times = "1 time" if run.preemptions == 1 else f"{run.preemptions:,} times"
            sentences.append(f"{at} running requests lost their blocks to others {times}, and computed again.")
        if run.refused_requests:
            sentences.append(f"{at} {run.refused_requests:,} of {run.requests:,} requests never fit.")
        without = [other for other in runs if other.num_blocks == run.num_blocks and not other.with_cache]
        sentences += [_with_and_without(at, run, other) for other in without]
    return sentences


def _with_and_without(at: str, run: ConcurrentRun, other: ConcurrentRun) -> str:
    spared = other.computed_tokens - run.computed_tokens
    share = spared / other.computed_tokens if other.computed_tokens else 0.0
    return (
        f"{at} the cache spared {spared:,} of {other.computed_tokens:,} computed tokens ({share:.1%}); without it "
        f"99% of the first tokens came within {seconds(other.first_token.p99)} s."
    )


def concurrent_as_json(report: ConcurrentReport) -> bytes:
    """The report as an indented JSON document with a line end."""
    fields = {name: getattr(report, name) for name in report.__struct_fields__ if name != "runs"}
    runs: list[dict[str, Any]] = [msgspec.structs.asdict(run) | {"hit_rate": run.hit_rate} for run in report.runs]
    document = {"format": JSON_FORMAT, **fields, "runs": runs, "verdict": concurrent_verdict(report.runs)}
    return msgspec.json.format(msgspec.json.encode(document)) + b"\n"
