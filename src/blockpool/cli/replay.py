"""`blockpool replay`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .exits import INTERRUPTED, fail, input_errors, unless_interrupted
from .memory_size import parse_memory
from .progress import ProgressBar
from .text_table import text_table

if TYPE_CHECKING:
    from blockpool.replay import DigestedTrace, ReplayReport, RunResult
    from blockpool.traces import Trace

STDOUT = "-"
# What a pool can count; written out, since --help should not import the pool.
MAX_NUM_BLOCKS = 2**27


def replay(
    traces: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TRACE]...",
            help="Trace files, plain or gzip, merged by time; - is stdin. None: a built-in workload.",
            show_default=False,
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="mooncake, sessions, tokens, agentic, bailian, kvcache-simulator, azure or kv-events; "
            "default: what the content says.",
        ),
    ] = None,
    num_blocks: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N[,N...]",
            help="Pool sizes in blocks, the null block included; may be repeated. "
            "Default: a few sizes derived from the trace.",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Pool size as memory (40GiB, 40GB); needs --bytes-per-token."),
    ] = None,
    bytes_per_token: Annotated[
        int | None,
        typer.Option(metavar="BYTES", min=1, help="KV bytes of one token over all layers, for --memory."),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", min=1, max=2**31 - 1, help="Tokens per block; default: the trace's own unit."),
    ] = None,
    hash_block_size: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", min=1, help="Tokens per hash; divides the block size, which is the default."),
    ] = None,
    skip_bad_lines: Annotated[
        bool,
        typer.Option("--skip-bad-lines", help="Count and skip malformed lines instead of stopping at the first."),
    ] = False,
    json: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the results as JSON; - is stdout, which then holds nothing else."),
    ] = None,
) -> None:
    """Replay traffic through a block pool: what would have been hit, and what evicted?

    Requests run one after the other, each ending before the next begins: the pure cache question.

    Example: blockpool replay conversation_trace.jsonl --num-blocks 1000,5000,20000
    """
    sizes = _parse_sizes(num_blocks or [])
    memory_bytes = _parse_memory(memory, bytes_per_token, bool(sizes))
    if json is not None and json != STDOUT:
        _check_writable(Path(json))

    from blockpool.replay import DigestedTrace, ReplayError, ReplayReport, blocks_in_memory, default_block_size
    from blockpool.traces import TraceError

    with unless_interrupted(), input_errors(TraceError, ReplayError):
        trace = _load(traces or [], format, skip_bad_lines)
        block_size = block_size or default_block_size(trace)
        hash_block_size = hash_block_size or block_size
        if block_size % hash_block_size:
            fail(f"--hash-block-size {hash_block_size} does not divide the block size of {block_size} tokens")
        digested = DigestedTrace(trace, hash_block_size)
        if sizes:
            sizes_from = "given"
        elif memory_bytes is not None and bytes_per_token is not None:
            sizes = [blocks_in_memory(memory_bytes, bytes_per_token, block_size)]
            sizes_from = f"{memory}, {bytes_per_token:,} bytes per token"
        else:
            sizes, sizes_from = _derived_sizes(digested, block_size)
        if max(sizes) > MAX_NUM_BLOCKS:
            fail(
                f"a pool of {max(sizes):,} blocks ({sizes_from}) is larger than {MAX_NUM_BLOCKS:,}: give --num-blocks"
            )
    runs, interrupted = _run_all(digested, block_size, sizes)
    report = ReplayReport(
        traces=trace.names,
        built_in=not traces,
        trace_requests=len(trace.requests),
        skipped_bad_lines=trace.skipped_bad_lines,
        hash_block_size=hash_block_size,
        sizes_from=sizes_from,
        runs=tuple(runs),
        interrupted=interrupted,
    )
    if json != STDOUT:
        _print_report(report, trace, block_size)
    if json is not None:
        _write_json(report, json)
    if interrupted:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)


def _parse_sizes(texts: list[str]) -> list[int]:
    """The values of --num-blocks in the given order, each once."""
    sizes: dict[int, None] = {}
    for part in ",".join(texts).split(",") if texts else []:
        try:
            size = int(part)
        except ValueError:
            fail(f"--num-blocks: {part.strip()!r} is not a number of blocks")
        if not 2 <= size <= MAX_NUM_BLOCKS:
            fail(f"--num-blocks: {size} is not between 2 (one is the null block) and {MAX_NUM_BLOCKS}")
        sizes[size] = None
    return list(sizes)


def _parse_memory(memory: str | None, bytes_per_token: int | None, has_sizes: bool) -> int | None:
    """Bytes of --memory, None when it is not given."""
    if (memory is None) != (bytes_per_token is None):
        fail("--memory and --bytes-per-token need each other: the pool size is computed from both")
    if memory is None:
        return None
    if has_sizes:
        fail("--num-blocks and --memory both set the pool size: give one of them")
    try:
        return parse_memory(memory)
    except ValueError as error:
        fail(f"--memory: {error}")


def _check_writable(path: Path) -> None:
    """Better now than after the replay."""
    if path.is_dir():
        fail(f"--json: {path} is a directory")
    if not path.absolute().parent.is_dir():
        fail(f"--json: there is no directory {path.absolute().parent}")


def _load(paths: list[str], format: str | None, skip_bad_lines: bool) -> "Trace":
    from blockpool.traces import TraceFormat, read_traces, synthetic_trace

    if format is not None and format not in list(TraceFormat):
        fail(f"--format: {format!r} is not one of {', '.join(TraceFormat)}")
    if not paths:
        return synthetic_trace()
    return read_traces(paths, format=TraceFormat(format) if format else None, skip_bad_lines=skip_bad_lines)


def _derived_sizes(digested: "DigestedTrace", block_size: int) -> tuple[list[int], str]:
    from blockpool.replay import DEFAULT_SHARES, default_pool_sizes, measure_need

    need = measure_need(digested, block_size)
    shares = ", ".join(f"{share:.0%}" for share in DEFAULT_SHARES)
    why = (
        f"{shares} of the {need.whole_trace:,} blocks with which this trace needs no eviction, "
        f"but no fewer than its largest request needs ({need.largest_request:,})"
    )
    return default_pool_sizes(need), why


def _run_all(digested: "DigestedTrace", block_size: int, sizes: list[int]) -> tuple[list["RunResult"], bool]:
    """The runs, the last of them incomplete if the second value, "interrupted", is true."""
    from blockpool.replay import ReplayInterrupted, replay

    runs: list[RunResult] = []
    with ProgressBar(len(digested)) as bar:
        for number, size in enumerate(sizes, start=1):
            bar.describe(f"{size:,} blocks ({number} of {len(sizes)})")
            try:
                runs.append(replay(digested, num_blocks=size, block_size=block_size, on_progress=bar.update))
            except ReplayInterrupted as interruption:
                return [*runs, interruption.result], True
            except KeyboardInterrupt:
                return runs, True
            except MemoryError:
                fail(f"not enough memory for a pool of {size:,} blocks")
    return runs, False


def _print_report(report: "ReplayReport", trace: "Trace", block_size: int) -> None:
    from blockpool.replay import HEADINGS, report_rows, verdict

    if report.built_in:
        typer.echo("No TRACE given, so this is the built-in workload: chats, agents and one-shot prompts, made up.")
    else:
        typer.echo(", ".join(report.traces))
    if trace.first_bad_line is not None:
        lines = "1 bad line" if report.skipped_bad_lines == 1 else f"{report.skipped_bad_lines:,} bad lines"
        typer.echo(f"skipped {lines}, the first: {trace.first_bad_line}")
    hashed = "" if report.hash_block_size == block_size else f", hashed in blocks of {report.hash_block_size:,}"
    typer.echo(f"{report.trace_requests:,} requests; blocks of {block_size:,} tokens{hashed}")
    typer.echo(f"pool sizes: {report.sizes_from}")
    typer.echo()
    for line in text_table(HEADINGS, report_rows(report)):
        typer.echo(line)
    typer.echo()
    for sentence in verdict(report.runs):
        typer.echo(sentence)


def _write_json(report: "ReplayReport", where: str) -> None:
    from blockpool.replay import report_as_json

    text = report_as_json(report)
    if where == STDOUT:
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
        return
    try:
        Path(where).write_bytes(text)
    except OSError as error:
        fail(f"--json: {where} cannot be written: {error.strerror}")
