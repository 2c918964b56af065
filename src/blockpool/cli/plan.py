"""`blockpool plan`."""

import re
from typing import TYPE_CHECKING, Annotated

import typer

from .exits import fail, input_errors, unless_interrupted
from .memory_size import parse_memory
from .model_options import parse_retention
from .progress import ProgressBar
from .text_table import text_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockpool.managers import KVCacheGroupSpec
    from blockpool.models import CacheLayout, ModelCache
    from blockpool.replay.capacity_report import CapacityPool, CapacityReport, CapacitySetting
    from blockpool.traces import Trace

DEFAULT_BLOCK_SIZE = 16
# The default lengths, as far as the model goes; a longer one is measured when it is asked for.
SHORT_LENGTHS = (1024, 8192, 32768)
LONGEST_DEFAULT = 131072
MOST_TOKENS = 2**24
# What a pool can count; written out, since --help should not import the pool.
MAX_NUM_BLOCKS = 2**27
NUMBER = re.compile(r"(-?[0-9]+)([kKmM]?)")
MODEL_OPTIONS = "--kv-cache-dtype, --tensor-parallel-size and --block-size are for --model: groups have their sizes"


def plan(
    traces: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TRACE]...",
            help="Traces of prompts, as for replay: does their working set fit the pool?",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="The model: its name on Hugging Face, its config.json, or the folder of that.",
        ),
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option(metavar="GROUPS", help="The groups themselves, in place of a model: full:16,window=1024:16*5."),
    ] = None,
    bytes_per_block: Annotated[
        int | None,
        typer.Option(metavar="BYTES", min=1, help="With --groups: what a block costs, for figures in bytes."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE[,SIZE...]", help="Memory for the cache on each rank: 40GiB, 40GB."),
    ] = None,
    num_blocks: Annotated[
        str | None,
        typer.Option(metavar="N[,N...]", help="The pool in blocks, the null block included, in place of --memory."),
    ] = None,
    block_size: Annotated[
        str | None,
        typer.Option(metavar="TOKENS[,...]", help="Tokens per block; with states the step of it.  [default: 16]"),
    ] = None,
    retention_interval: Annotated[
        str,
        typer.Option(
            metavar="dense|TOKENS[,...]",
            help="Resume points that windows and states keep: all, one every so many tokens, or with 0 the prompts' "
            "own ends.",
        ),
    ] = "dense",
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS[,...]",
            help="Lengths of prompts, 8k being 8192.  [default: 1k,8k,32k and the model's longest, at most 128k]",
        ),
    ] = None,
    output_length: Annotated[
        int, typer.Option(metavar="TOKENS", min=0, max=MOST_TOKENS, help="Tokens that each request generates.")
    ] = 0,
    encoder_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            min=0,
            max=MOST_TOKENS,
            help="What cross attention reads.  [default: what the model's encoder reads at most]",
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=10**9, help="How much memory do so many requests at once need?"),
    ] = None,
    max_num_batched_tokens: Annotated[
        int,
        typer.Option(
            metavar="TOKENS",
            min=1,
            max=MOST_TOKENS,
            help="The longest chunk of a prompt that is computed at once; the default is that of vLLM's server on "
            "large GPUs.",
        ),
    ] = 8192,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="What keys and values are kept in.  [default: auto]")
    ] = None,
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option(
            metavar="RANKS", min=1, help="Ranks that share the heads; all figures are of one.  [default: 1]"
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS", min=1, max=MOST_TOKENS, help="The longest sequence.  [default: what the model says]"
        ),
    ] = None,
    list_models: Annotated[
        bool, typer.Option("--list-models", help="List the models that are known by name, and exit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Does a model's cache fit? Blocks per prompt, requests at once, what can be found again, and what would help.

    Several values of --memory, --block-size or --retention-interval are compared side by side. Nothing is downloaded.

    Example: blockpool plan --model Qwen/Qwen3-8B --memory 40GiB

    Example: blockpool plan --model google/gemma-3-27b-it --concurrency 64 --lengths 8k
    """
    if list_models:
        _print_models()
        return
    if model is None and groups is None:
        fail("give --model or --groups: a model's name (--list-models), its config.json, or groups as full:16")
    if model is not None and groups is not None:
        fail("--model and --groups both say what the groups are: give one of them")
    if model is not None and bytes_per_block is not None:
        fail("--bytes-per-block is for --groups: a model says what a block costs")
    if groups is not None and (kv_cache_dtype or tensor_parallel_size or block_size is not None):
        fail(MODEL_OPTIONS)
    if memory is not None and num_blocks is not None:
        fail("--num-blocks and --memory both set the pool size: give one of them")
    if memory is not None and groups is not None and bytes_per_block is None:
        fail("--memory with --groups needs --bytes-per-block, or give the pool as --num-blocks")
    if traces and memory is None and num_blocks is None:
        fail("a TRACE is compared with a pool: give --memory or --num-blocks")
    memories = _parse_memories(memory)
    pool_sizes = _numbers("--num-blocks", num_blocks, 2, MAX_NUM_BLOCKS)
    intervals = list(dict.fromkeys(parse_retention(part.strip()) for part in retention_interval.split(",")))

    from blockpool.cache import ConfigError
    from blockpool.models import ModelError, find_model, parse_groups, read_model
    from blockpool.replay import ReplayError
    from blockpool.replay.capacity_report import CapacityReport, capacity_as_json, measure_setting, needs_of
    from blockpool.replay.capacity_verdict import capacity_verdict
    from blockpool.traces import TraceError, read_traces

    with unless_interrupted(), input_errors(ModelError, ConfigError, ReplayError, TraceError):
        read = None
        source = groups or ""
        if model is not None:
            found = find_model(model)
            source = f"{found.name}, from {found.origin}" if found.origin else found.name
            read = read_model(
                model, kv_cache_dtype=kv_cache_dtype or "auto", tensor_parallel_size=tensor_parallel_size or 1
            )
        limit = max_model_len or (read.max_model_len if read else None)
        prompt_lengths = _lengths(lengths, limit, output_length)
        layouts: list[tuple[int | None, CacheLayout | None]] = [(None, None)]
        if read is not None:
            layouts = _layouts(read, _numbers("--block-size", block_size, 1, MOST_TOKENS) or [DEFAULT_BLOCK_SIZE])
        given = parse_groups(groups) if groups is not None else ()
        cut = [(size, layout, layout.kv_cache_groups if layout else given) for size, layout in layouts]
        encoder_tokens = _encoder_tokens(encoder_tokens, read, cut[0][2])
        for _, _, parts in cut:
            _check_intervals(parts, intervals)
        settings = [
            measure_setting(
                parts,
                layout=layout,
                block_size=size,
                bytes_per_block=bytes_per_block,
                retention_interval=interval,
                lengths=prompt_lengths,
                num_output_tokens=output_length,
                max_num_batched_tokens=max_num_batched_tokens,
                num_encoder_tokens=encoder_tokens,
            )
            for size, layout, parts in cut
            for interval in intervals
        ]
        if traces and encoder_tokens:
            fail("a TRACE does not say what an encoder reads: plan without it")
        trace = read_traces(traces) if traces else None
        measured = [_with_pools(setting, memories, pool_sizes, trace, max_num_batched_tokens) for setting in settings]
        settings = [setting for setting, _ in measured]
        layout = layouts[0][1]
        report = CapacityReport(
            source=source,
            architecture=layout.architecture if layout else None,
            max_model_len=limit,
            num_encoder_tokens=encoder_tokens,
            kv_cache_dtype=(kv_cache_dtype or "auto") if layout else None,
            tensor_parallel_size=tensor_parallel_size or 1,
            num_output_tokens=output_length,
            max_num_batched_tokens=max_num_batched_tokens,
            notes=layout.notes if layout else (),
            settings=tuple(settings),
            pools=tuple(pool for _, pools in measured for pool in pools),
            needs=tuple(needs_of(setting, concurrency) for setting in settings) if concurrency else (),
            traces=tuple(traces or ()),
        )
    verdict = capacity_verdict(report)
    if as_json:
        typer.echo(capacity_as_json(report, verdict), nl=False)
    else:
        _print_report(report, verdict)


# -- options -------------------------------------------------------------------------------------------


def _parse_memories(text: str | None) -> list[int]:
    sizes = []
    for part in text.split(",") if text is not None else []:
        try:
            sizes.append(parse_memory(part))
        except ValueError as error:
            fail(f"--memory: {error}")
    return list(dict.fromkeys(sizes))


def _numbers(option: str, text: str | None, least: int, most: int) -> list[int]:
    """The values of an option that has several, each once. 8k is 8192."""
    numbers = []
    for part in text.split(",") if text is not None else []:
        part = part.strip()
        match = NUMBER.fullmatch(part)
        if match is None:
            fail(f"{option}: {part!r} is not a number")
        digits, unit = match.groups()
        # int() refuses thousands of digits, and so many are too many in any case
        number = int(digits) * {"": 1, "k": 2**10, "m": 2**20}[unit.lower()] if len(digits) <= 20 else None
        if number is None or not least <= number <= most:
            fail(f"{option}: {part} is not between {least} and {most}")
        numbers.append(number)
    return list(dict.fromkeys(numbers))


def _lengths(text: str | None, limit: int | None, output_length: int) -> list[int]:
    """Lengths of prompts, which with their output stay within the model's."""
    longest = MOST_TOKENS if limit is None else limit - output_length
    if longest < 1:
        fail(f"--output-length: {output_length} leaves no room for a prompt in the model's {limit} tokens")
    lengths = _numbers("--lengths", text, 1, MOST_TOKENS)
    for length in lengths:
        if length > longest:
            fail(
                f"--lengths: {length} and {output_length} of output are more than the {limit} tokens of the model "
                "(--max-model-len sets another limit)"
            )
    if lengths:
        return lengths
    shorter = [length for length in SHORT_LENGTHS if length < longest]
    return shorter if limit is None else [*shorter, min(longest, LONGEST_DEFAULT)]


def _encoder_tokens(given: int | None, read: "ModelCache | None", groups: "Sequence[KVCacheGroupSpec]") -> int:
    """What cross attention reads: what is given, else what the model's encoder reads at most."""
    from blockpool.managers import CrossAttentionSpec

    has_cross = any(isinstance(group.kv_cache_spec, CrossAttentionSpec) for group in groups)
    if given and not has_cross:
        fail("--encoder-tokens: there is no cross attention that would read them")
    if given is None and has_cross and read is None:
        fail("a group of cross attention holds what an encoder has written: give --encoder-tokens")
    if given is not None:
        return given
    return read.num_encoder_tokens if read else 0


def _check_intervals(groups: "Sequence[KVCacheGroupSpec]", intervals: list[int | None]) -> None:
    """Resume points are where hits can end."""
    from blockpool.replay.capacity import common_unit

    unit = common_unit(groups)
    sizes = "/".join(str(size) for size in dict.fromkeys(group.block_size for group in groups))
    for interval in intervals:
        if interval and interval % unit != 0:
            fail(
                f"--retention-interval: {interval} is neither dense nor 0 nor a multiple of {unit}, the unit of hits "
                f"with blocks of {sizes} tokens"
            )


def _layouts(read: "ModelCache", sizes: list[int]) -> "list[tuple[int | None, CacheLayout | None]]":
    from blockpool.models import lay_out

    return [(size, lay_out(read, block_size=size)) for size in sizes]


# -- measuring -----------------------------------------------------------------------------------------


def _with_pools(
    setting: "CapacitySetting",
    memories: list[int],
    pool_sizes: list[int],
    trace: "Trace | None",
    max_num_batched_tokens: int,
) -> "tuple[CapacitySetting, list[CapacityPool]]":
    """The setting, with what the trace leaves in it, and each of the pools."""
    import msgspec

    from blockpool.replay.capacity_report import blocks_in, pool_of
    from blockpool.replay.working_set import WorkingSetBook

    sizes: list[tuple[int, int | None]] = [(size, None) for size in pool_sizes]
    sizes += [(blocks_in(setting, memory), memory) for memory in memories]
    for size, memory in sizes:
        if size > MAX_NUM_BLOCKS:
            fail(
                f"--memory: {memory} bytes are {size:,} blocks, more than the {MAX_NUM_BLOCKS:,} that a pool can have"
            )
    if trace is None:
        return setting, [pool_of(setting, size, memory) for size, memory in sizes]
    with ProgressBar(len(trace.requests)) as bar:
        bar.describe("working set")
        book = WorkingSetBook(
            trace,
            setting.kv_cache_groups,
            retention_interval=setting.retention_interval,
            max_num_batched_tokens=max_num_batched_tokens,
            on_progress=bar.update,
        )
        setting = msgspec.structs.replace(setting, working_set=book.endless)
        return setting, [pool_of(setting, size, memory, book.outcome(size)) for size, memory in sizes]


# -- printing ------------------------------------------------------------------------------------------


def _print_report(report: "CapacityReport", verdict: list[str]) -> None:
    from blockpool.replay import capacity_tables as tables

    typer.echo(report.source if report.architecture is None else f"{report.source} ({report.architecture})")
    longest = "" if report.max_model_len is None else f"; sequences of at most {report.max_model_len:,} tokens"
    typer.echo(f"prompts are computed in chunks of at most {report.max_num_batched_tokens:,} tokens{longest}")
    if report.architecture is not None:
        ranks = "one rank" if report.tensor_parallel_size == 1 else f"each of {report.tensor_parallel_size} ranks"
        typer.echo(f"memory and blocks are those of {ranks}; kv_cache_dtype {report.kv_cache_dtype}")
    for note in report.notes:
        typer.echo(f"note: {note}")
    first = report.settings[0]
    shown = {setting.block_size: setting for setting in reversed(report.settings)}
    for setting in reversed(shown.values()):
        typer.echo()
        for line in tables.bytes_lines(setting):
            typer.echo(line)
        _print_table(tables.GROUP_HEADINGS, tables.group_rows(setting))
    typer.echo()
    if len(report.settings) > 1:
        typer.echo(f"with {tables.setting_text(first)}:")
    _print_table(tables.PROMPT_HEADINGS, tables.prompt_rows(first))
    if report.pools:
        typer.echo()
        _print_table(tables.comparison_headings(report), tables.comparison_rows(report))
    typer.echo()
    for sentence in verdict:
        typer.echo(sentence)


def _print_table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    for line in text_table(headings, rows):
        typer.echo(line)


def _print_models() -> None:
    from blockpool.models import groups_as_text, known_models, lay_out, read_model

    with unless_interrupted():
        layouts = {path: lay_out(read_model(path)) for path in known_models().values()}
        rows = []
        for name, path in known_models().items():
            layout = layouts[path]
            rows.append((f"{layout.bytes_per_token:,}", groups_as_text(layout.kv_cache_groups), name))
        width = max(len(name) for _, _, name in rows)
        _print_table(("bytes per token", "groups", "model"), [(*row[:2], row[2].ljust(width)) for row in rows])
