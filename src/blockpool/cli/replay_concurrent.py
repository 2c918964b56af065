"""`blockpool replay --mode concurrent`."""

import sys
from typing import TYPE_CHECKING, Any

import typer

from .exits import INTERRUPTED, fail
from .progress import ProgressBar
from .replay_output import STDOUT, trace_lines, write_json
from .text_table import text_table

if TYPE_CHECKING:
    from blockpool.cache import KVCacheConfig
    from blockpool.models import CacheLayout
    from blockpool.replay import ConcurrentReport, DigestedTrace
    from blockpool.traces import Trace


def run_concurrently(
    digested: "DigestedTrace",
    config: "KVCacheConfig",
    sizes: list[int],
    sizes_from: str,
    *,
    layout: "CacheLayout | None",
    max_num_batched_tokens: int,
    num_encoder_tokens: int,
    clock: dict[str, Any],
    built_in: bool,
    json: str | None,
) -> None:
    """Replay with and without cache, per pool size, and show it. Raises ReplayError."""
    from msgspec.structs import replace

    from blockpool.replay import (
        DEFAULT_NUM_SEQS,
        ConcurrentReport,
        ConcurrentRun,
        StepCost,
        concurrent_as_json,
        replay_concurrently,
    )

    trace = digested.trace
    max_num_seqs = clock.pop("max_num_seqs", DEFAULT_NUM_SEQS)
    cost = StepCost(**clock)
    runs: list[ConcurrentRun] = []
    interrupted = False
    pairs = [(size, enable_caching) for size in sizes for enable_caching in (True, False)]
    with ProgressBar(len(digested)) as bar:
        for size, enable_caching in pairs:
            bar.describe(f"{size:,} blocks, {'with' if enable_caching else 'without'} cache")
            try:
                runs.append(
                    replay_concurrently(
                        digested,
                        replace(config, num_blocks=size),
                        cost,
                        max_num_seqs=max_num_seqs,
                        max_num_batched_tokens=max_num_batched_tokens,
                        num_encoder_tokens=num_encoder_tokens,
                        enable_caching=enable_caching,
                        on_progress=bar.update,
                    )
                )
            except KeyboardInterrupt:
                interrupted = True
                break
            except MemoryError:
                fail(f"not enough memory for a pool of {size:,} blocks")
    report = ConcurrentReport(
        traces=trace.names,
        built_in=built_in,
        trace_requests=len(trace.requests),
        skipped_bad_lines=trace.skipped_bad_lines,
        hash_block_size=config.unit,
        sizes_from=sizes_from,
        model=layout.architecture if layout else None,
        bytes_per_block=layout.bytes_per_block if layout else None,
        retention_interval=config.retention_interval,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        cost=cost,
        runs=tuple(runs),
        interrupted=interrupted,
    )
    if json != STDOUT:
        _print(report, trace, config)
    if json is not None:
        write_json(concurrent_as_json(report), json)
    if interrupted:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)


def _print(report: "ConcurrentReport", trace: "Trace", config: "KVCacheConfig") -> None:
    from blockpool.models import groups_as_text
    from blockpool.replay import CONCURRENT_HEADINGS, concurrent_rows, concurrent_verdict

    for line in trace_lines(trace, report.built_in):
        typer.echo(line)
    name = "" if report.model is None else f"{report.model}: "
    typer.echo(f"{name}{groups_as_text(config.kv_cache_groups)}")
    cost = report.cost
    typer.echo(
        f"{report.trace_requests:,} requests as they arrive; at most {report.max_num_seqs:,} at a time, "
        f"{report.max_num_batched_tokens:,} tokens a step"
    )
    typer.echo(
        f"a step takes {cost.step_overhead_us:g} us, prompts {cost.prefill_tokens_per_s:,g} tokens/s, decoding "
        f"{cost.decode_ms:g} ms; times below are seconds"
    )
    typer.echo(f"pool sizes: {report.sizes_from}")
    typer.echo()
    if report.runs:
        for line in text_table(CONCURRENT_HEADINGS, concurrent_rows(report.runs)):
            typer.echo(line)
        typer.echo()
    if report.interrupted:
        typer.echo(f"Interrupted after {len(report.runs)} runs: the one that was running is left out.")
    for sentence in concurrent_verdict(report.runs):
        typer.echo(sentence)
