"""All runs of one replay: as rows of a table for people, as JSON for machines."""

from typing import Any

import msgspec

from .result import RunResult
from .tier_report import stack_as_dict
from .verdict import verdict

JSON_FORMAT = "blockpool.replay/1"
HEADINGS = (
    "blocks",
    "requests",
    "prompt tokens",
    "hit tokens",
    "hit rate",
    "blocks evicted",
    "before any reuse",
    "peak held",
    "refused",
)


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was replayed, how its sizes were chosen, and what came out."""

    traces: tuple[str, ...]
    built_in: bool
    """Whether the trace is the built-in workload."""
    trace_requests: int
    skipped_bad_lines: int
    hash_block_size: int
    sizes_from: str
    """How the pool sizes were chosen, in words."""
    runs: tuple[RunResult, ...]
    model: str | None = None
    """The architecture, when the groups were read from a model's configuration."""
    bytes_per_block: int | None = None
    """What a block costs on one rank, when that is known."""
    retention_interval: int | None = None
    """Which resume points windows and states keep: None for all, else every so many tokens."""
    max_num_batched_tokens: int | None = None
    """The longest chunk of a prompt that is computed at once; None where chunks make no difference."""
    interrupted: bool = False


def report_as_json(report: ReplayReport) -> bytes:
    """The report as an indented JSON document with a line end."""
    document: dict[str, Any] = {
        "format": JSON_FORMAT,
        "traces": report.traces,
        "built_in": report.built_in,
        "trace_requests": report.trace_requests,
        "skipped_bad_lines": report.skipped_bad_lines,
        "hash_block_size": report.hash_block_size,
        "sizes_from": report.sizes_from,
        "model": report.model,
        "bytes_per_block": report.bytes_per_block,
        "retention_interval": report.retention_interval,
        "max_num_batched_tokens": report.max_num_batched_tokens,
        "interrupted": report.interrupted,
        "runs": [_run_as_dict(run) for run in report.runs],
        "verdict": verdict(report.runs),
    }
    return msgspec.json.format(msgspec.json.encode(document)) + b"\n"


def _run_as_dict(run: RunResult) -> dict[str, Any]:
    figures: dict[str, Any] = msgspec.structs.asdict(run)
    figures |= {"hit_rate": run.hit_rate, "interrupted": run.interrupted}
    if run.tiers is None:
        del figures["tiers"]
        return figures
    return figures | stack_as_dict(run, run.tiers)


def report_rows(report: ReplayReport) -> list[tuple[str, ...]]:
    """One row per pool size, under `HEADINGS`."""
    return [_run_as_row(run) for run in report.runs]


def _run_as_row(run: RunResult) -> tuple[str, ...]:
    return (
        f"{run.num_blocks:,}",
        f"{run.requests:,} of {run.trace_requests:,}" if run.interrupted else f"{run.requests:,}",
        f"{run.prompt_tokens:,}",
        f"{run.hit_tokens:,}",
        f"{run.hit_rate:.1%}",
        f"{run.evicted_blocks:,}",
        f"{run.evicted_unused_blocks:,}",
        f"{run.peak_held_blocks:,}",
        f"{run.refused_requests:,}",
    )
