"""`blockpool replay`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .exits import INTERRUPTED, fail, input_errors, unless_interrupted
from .memory_size import parse_memory
from .model_options import lay_out_model, parse_retention
from .progress import ProgressBar
from .replay_output import STDOUT, trace_lines, write_json
from .replay_tiers import check_tier_options, parse_tiers, tier_stack
from .text_table import text_table

if TYPE_CHECKING:
    from blockpool.cache import KVCacheConfig
    from blockpool.models import CacheLayout
    from blockpool.replay import DigestedTrace, ReplayReport, RunResult
    from blockpool.replay.tiers import TierStack
    from blockpool.traces import Trace

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
        typer.Option(
            metavar="SIZE[,SIZE...]", help="Pool sizes as memory (40GiB, 40GB); needs --model or --bytes-per-token."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE", help="The model: a known name or its config.json. Its groups of layers are replayed."
        ),
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option(metavar="GROUPS", help="The groups themselves, in place of a model: full:16,window=1024:16*5."),
    ] = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(metavar="DTYPE", help="With --model: what keys and values are kept in.  [default: auto]"),
    ] = None,
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option(metavar="RANKS", min=1, help="With --model: figures are those of one rank.  [default: 1]"),
    ] = None,
    encoder_tokens: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", min=1, help="What cross attention reads per request; default: the model's."),
    ] = None,
    bytes_per_token: Annotated[
        int | None,
        typer.Option(metavar="BYTES", min=1, help="KV bytes of one token over all layers, for --memory."),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            min=1,
            max=2**31 - 1,
            help="Tokens per block; default: the trace's own unit, 16 with --model.",
        ),
    ] = None,
    hash_block_size: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", min=1, help="Tokens per hash; divides the block size, which is the default."),
    ] = None,
    retention_interval: Annotated[
        str,
        typer.Option(
            metavar="dense|TOKENS",
            help="The resume points that windows and states keep: all, or one every so many.",
        ),
    ] = "dense",
    max_num_batched_tokens: Annotated[
        int, typer.Option(metavar="TOKENS", min=1, help="The most tokens that are computed at once, in a step.")
    ] = 8192,
    mode: Annotated[
        str,
        typer.Option(
            metavar="sequential|concurrent",
            help="One request after the other, or as they arrive, in steps whose time is computed.",
        ),
    ] = "sequential",
    max_num_seqs: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Concurrent: requests that hold blocks at a time.  [default: 256]"),
    ] = None,
    step_overhead_us: Annotated[
        float | None,
        typer.Option(metavar="US", help="Concurrent: what every step takes.  [default: 500]"),
    ] = None,
    prefill_tokens_per_s: Annotated[
        float | None,
        typer.Option(
            "--prefill-tokens-per-s",
            "--prefill-rate",
            metavar="TOKENS",
            help="How fast prompts are computed. With --tier: what loading is compared with, unset: nothing.  "
            "[default: concurrent: 20000]",
        ),
    ] = None,
    decode_ms: Annotated[
        float | None,
        typer.Option(metavar="MS", help="Concurrent: what a step takes more if it decodes.  [default: 15]"),
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SIZE[@RATE]",
            help="A tier below the pool, the fastest first: host=64GiB, or host=64GiB@25GB/s with its bandwidth.",
            show_default=False,
        ),
    ] = None,
    tier_store: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]WHEN",
            help="What a tier stores: blocks at their completion, at their eviction from the GPU, or after hits=N.  "
            "[default: completion]",
            show_default=False,
        ),
    ] = None,
    tier_policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]lru|arc", help="Which page a full tier evicts.  [default: lru]", show_default=False
        ),
    ] = None,
    block_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="With --tier and no model: bytes of a block (2MiB), in every group."),
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
    """Replay traffic through a block pool: what would have been hit, what evicted, and which layers spoiled it?

    Requests run one after the other, each ending before the next begins: the pure cache question.

    Example: blockpool replay conversation_trace.jsonl --num-blocks 1000,5000,20000

    Example: blockpool replay conversation_trace.jsonl --model google/gemma-3-27b-it --memory 40GiB

    Example: blockpool replay trace.jsonl --model Qwen/Qwen3-8B --memory 40GiB --tier host=64GiB --tier disk=1TiB

    Example: blockpool replay trace.jsonl --mode concurrent --model Qwen/Qwen3-8B --memory 40GiB --decode-ms 12
    """
    sizes = _parse_sizes(num_blocks or [])
    memories = _parse_memories(memory, bool(sizes))
    _check_options(memory, model, groups, bytes_per_token, block_size, hash_block_size)
    if model is None and (kv_cache_dtype is not None or tensor_parallel_size is not None):
        fail("--kv-cache-dtype and --tensor-parallel-size change what a block of a model costs: they need --model")
    interval = parse_retention(retention_interval)
    page_bytes = check_tier_options(bool(tier), mode, model, bytes_per_token, block_bytes)
    clock = _clock_options(mode, max_num_seqs, step_overhead_us, None if tier else prefill_tokens_per_s, decode_ms)
    if json is not None and json != STDOUT:
        _check_writable(Path(json))

    from blockpool.cache import ConfigError
    from blockpool.models import ModelError
    from blockpool.replay import DigestedTrace, ReplayError, ReplayReport
    from blockpool.traces import TraceError

    with unless_interrupted(), input_errors(TraceError, ReplayError, ModelError, ConfigError):
        specs = parse_tiers(tier or [], tier_store or [], tier_policy or [])
        layout = None
        if model is not None:
            layout = lay_out_model(model, block_size or 16, kv_cache_dtype or "auto", tensor_parallel_size or 1)
        trace = _load(traces or [], format, skip_bad_lines)
        config = _config(trace, layout, groups, block_size, hash_block_size, interval)
        num_encoder_tokens = _num_encoder_tokens(encoder_tokens, layout, config)
        stack = tier_stack(
            specs,
            config,
            layout,
            bytes_per_token=bytes_per_token,
            block_bytes=page_bytes,
            prefill_tokens_per_s=prefill_tokens_per_s,
        )
        digested = DigestedTrace(trace, config.unit)
        if sizes:
            sizes_from = "given"
        elif memories:
            sizes = [_blocks_in(size, layout, bytes_per_token, config) for size in memories]
            per = f"{layout.bytes_per_block:,} bytes per block" if layout else f"{bytes_per_token:,} bytes per token"
            sizes_from = f"{memory}, {per}"
        else:
            sizes, sizes_from = _derived_sizes(digested, config, max_num_batched_tokens, num_encoder_tokens)
        if max(sizes) > MAX_NUM_BLOCKS:
            fail(
                f"a pool of {max(sizes):,} blocks ({sizes_from}) is larger than {MAX_NUM_BLOCKS:,}: give --num-blocks"
            )
        if clock is not None:
            from .replay_concurrent import run_concurrently

            run_concurrently(
                digested,
                config,
                sizes,
                sizes_from,
                layout=layout,
                max_num_batched_tokens=max_num_batched_tokens,
                num_encoder_tokens=num_encoder_tokens,
                clock=clock,
                built_in=not traces,
                json=json,
            )
            return
        runs, interrupted = _run_all(digested, config, sizes, max_num_batched_tokens, num_encoder_tokens, stack)
    report = ReplayReport(
        traces=trace.names,
        built_in=not traces,
        trace_requests=len(trace.requests),
        skipped_bad_lines=trace.skipped_bad_lines,
        hash_block_size=config.unit,
        sizes_from=sizes_from,
        runs=tuple(runs),
        model=layout.architecture if layout else None,
        bytes_per_block=layout.bytes_per_block if layout else None,
        retention_interval=interval,
        max_num_batched_tokens=max_num_batched_tokens,
        interrupted=interrupted,
    )
    if json != STDOUT:
        _print_report(report, trace, config)
    if json is not None:
        from blockpool.replay import report_as_json

        write_json(report_as_json(report), json)
    if interrupted:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)


def _clock_options(
    mode: str,
    max_num_seqs: int | None,
    step_overhead_us: float | None,
    prefill_tokens_per_s: float | None,
    decode_ms: float | None,
) -> dict[str, float] | None:
    """The options of the concurrent mode that were given; None in the sequential one."""
    given = {
        "max_num_seqs": max_num_seqs,
        "step_overhead_us": step_overhead_us,
        "prefill_tokens_per_s": prefill_tokens_per_s,
        "decode_ms": decode_ms,
    }
    options = {name: value for name, value in given.items() if value is not None}
    if mode == "concurrent":
        return options
    if mode != "sequential":
        fail(f"--mode: {mode!r} is neither sequential nor concurrent")
    for name in options:
        fail(f"--{name.replace('_', '-')} is for --mode concurrent: one after the other, requests take no time")
    return None


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


def _parse_memories(memory: str | None, has_sizes: bool) -> list[int]:
    """Bytes of each value of --memory."""
    if memory is None:
        return []
    if has_sizes:
        fail("--num-blocks and --memory both set the pool size: give one of them")
    try:
        return [parse_memory(part) for part in memory.split(",")]
    except ValueError as error:
        fail(f"--memory: {error}")


def _check_options(
    memory: str | None,
    model: str | None,
    groups: str | None,
    bytes_per_token: int | None,
    block_size: int | None,
    hash_block_size: int | None,
) -> None:
    """Fail for options that contradict or miss each other."""
    if model is not None and groups is not None:
        fail("--model and --groups both name the groups of layers: give one of them")
    if model is None and (memory is None) != (bytes_per_token is None):
        fail("--memory and --bytes-per-token need each other, or --model: the pool size is computed from both")
    if bytes_per_token is not None and (model is not None or groups is not None):
        fail("--bytes-per-token is for one group that reads everything: not with --model, which says it, or --groups")
    if block_size is not None and groups is not None:
        fail("--block-size and --groups both say how many tokens a block has: give one of them")
    if hash_block_size is not None and (model is not None or groups is not None):
        fail("--hash-block-size is for one group that reads everything: --model and --groups say it themselves")


def _config(
    trace: "Trace",
    layout: "CacheLayout | None",
    groups: str | None,
    block_size: int | None,
    hash_block_size: int | None,
    interval: int | None,
) -> "KVCacheConfig":
    """The cache to replay through; its number of blocks is yet to be said."""
    from blockpool.cache import KVCacheConfig
    from blockpool.models import parse_groups
    from blockpool.replay import default_block_size, full_attention, hash_unit

    if layout is None and groups is None:
        block_size = block_size or default_block_size(trace)
        hash_block_size = hash_block_size or block_size
        if block_size % hash_block_size:
            fail(f"--hash-block-size {hash_block_size} does not divide the block size of {block_size} tokens")
        return full_attention(1, block_size, hash_block_size)
    specs = layout.kv_cache_groups if layout else parse_groups(groups or "")
    return KVCacheConfig(
        num_blocks=1,
        kv_cache_groups=specs,
        hash_block_size=hash_unit(trace, specs),
        retention_interval=interval,
        partial_hits=False,
    )


def _num_encoder_tokens(given: int | None, layout: "CacheLayout | None", config: "KVCacheConfig") -> int:
    """What each request's cross attention reads: as given, or at most what the model's encoder gives."""
    from blockpool.managers import CrossAttentionSpec

    reads = any(isinstance(group.kv_cache_spec, CrossAttentionSpec) for group in config.kv_cache_groups)
    if given is not None and not reads:
        fail("--encoder-tokens: no group has cross attention")
    if reads and given is None and layout is None:
        fail("--groups: cross attention reads an encoder's tokens: say how many with --encoder-tokens")
    return given or (layout.num_encoder_tokens if layout else 0)


def _blocks_in(
    memory_bytes: int, layout: "CacheLayout | None", bytes_per_token: int | None, config: "KVCacheConfig"
) -> int:
    from blockpool.replay import blocks_in_memory

    if layout is not None:
        return layout.num_blocks(memory_bytes)
    assert bytes_per_token is not None
    return blocks_in_memory(memory_bytes, bytes_per_token, config.kv_cache_groups[0].block_size)


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


def _derived_sizes(
    digested: "DigestedTrace", config: "KVCacheConfig", max_num_batched_tokens: int, num_encoder_tokens: int
) -> tuple[list[int], str]:
    from blockpool.replay import DEFAULT_SHARES, default_pool_sizes, measure_need

    need = measure_need(
        digested, config, max_num_batched_tokens=max_num_batched_tokens, num_encoder_tokens=num_encoder_tokens
    )
    shares = ", ".join(f"{share:.0%}" for share in DEFAULT_SHARES)
    one_group = len(config.kv_cache_groups) == 1
    whole = "with which this trace needs no eviction" if one_group else "that hold every prefix of this trace once"
    why = (
        f"{shares} of the {need.whole_trace:,} blocks {whole}, "
        f"but no fewer than its largest request needs ({need.largest_request:,})"
    )
    return default_pool_sizes(need), why


def _run_all(
    digested: "DigestedTrace",
    config: "KVCacheConfig",
    sizes: list[int],
    max_num_batched_tokens: int,
    num_encoder_tokens: int,
    stack: "TierStack | None",
) -> tuple[list["RunResult"], bool]:
    """The runs, the last of them incomplete if the second value, "interrupted", is true."""
    from msgspec.structs import replace

    from blockpool.replay import ReplayInterrupted, replay

    runs: list[RunResult] = []
    with ProgressBar(len(digested)) as bar:
        for number, size in enumerate(sizes, start=1):
            bar.describe(f"{size:,} blocks ({number} of {len(sizes)})")
            try:
                run = replay(
                    digested,
                    replace(config, num_blocks=size),
                    max_num_batched_tokens=max_num_batched_tokens,
                    num_encoder_tokens=num_encoder_tokens,
                    tiers=stack,
                    on_progress=bar.update,
                )
                runs.append(run)
            except ReplayInterrupted as interruption:
                return [*runs, interruption.result], True
            except KeyboardInterrupt:
                return runs, True
            except MemoryError:
                fail(f"not enough memory for a pool of {size:,} blocks")
    return runs, False


def _print_report(report: "ReplayReport", trace: "Trace", config: "KVCacheConfig") -> None:
    from blockpool.models import groups_as_text
    from blockpool.replay import HEADINGS, KIND_HEADINGS, kind_rows, report_rows, verdict
    from blockpool.replay.tier_report import TIER_HEADINGS, tier_rows

    for line in trace_lines(trace, report.built_in):
        typer.echo(line)
    several = len(config.kv_cache_groups) > 1
    if several:
        name = "" if report.model is None else f"{report.model}: "
        typer.echo(f"{name}{groups_as_text(config.kv_cache_groups)}")
        unit = report.runs[0].block_size if report.runs else config.unit
        typer.echo(f"{report.trace_requests:,} requests; hits end at multiples of {unit:,} tokens")
    else:
        block_size = config.kv_cache_groups[0].block_size
        hashed = "" if config.unit == block_size else f", hashed in blocks of {config.unit:,}"
        typer.echo(f"{report.trace_requests:,} requests; blocks of {block_size:,} tokens{hashed}")
    typer.echo(f"pool sizes: {report.sizes_from}")
    typer.echo()
    for line in text_table(HEADINGS, report_rows(report)):
        typer.echo(line)
    typer.echo()
    if several:
        for line in text_table(KIND_HEADINGS, [row for run in report.runs for row in kind_rows(run)]):
            typer.echo(line)
        typer.echo()
    rows = [row for run in report.runs for row in tier_rows(run)]
    if rows:
        for line in text_table(TIER_HEADINGS, rows):
            typer.echo(line)
        typer.echo()
    for sentence in verdict(report.runs):
        typer.echo(sentence)
