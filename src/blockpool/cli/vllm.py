"""`blockpool vllm`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from .exits import input_errors, unless_interrupted
from .text_table import text_table

if TYPE_CHECKING:
    from blockpool.integrations.vllm.selftest import CheckReport

NOT_WELL = 1

vllm = typer.Typer(
    help="The drop-in for vLLM: its block pool on our books.", no_args_is_help=True, rich_markup_mode=None
)


@vllm.command(short_help="Try the drop-in in this environment: is it the same, is it faster?")
def check(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Try the drop-in on the vLLM of this environment: what it replaces, whether it does the same, how much faster.

    Takes up to half a minute, needs no model and no GPU, and leaves nothing changed.

    Exit code: 0 well, 1 a difference was found or this vLLM was not tested, 2 there is no vLLM.

    Example: blockpool vllm check --json
    """
    import contextlib
    import sys

    from blockpool.integrations.vllm.selftest import check
    from blockpool.integrations.vllm.swap import VLLMNotFoundError

    def tell(stage: str) -> None:
        if sys.stderr.isatty():
            print(f"{stage} ...", file=sys.stderr)

    # What vLLM prints while it is imported is not part of the answer.
    with unless_interrupted(), input_errors(VLLMNotFoundError), contextlib.redirect_stdout(sys.stderr):
        report = check(tell)
    if as_json:
        _print_json(report)
    else:
        print_text(report)
    if not report.is_well:
        raise typer.Exit(NOT_WELL)


def _print_json(report: "CheckReport") -> None:
    import msgspec

    document = {"format": "blockpool.vllm-check/1", "well": report.is_well} | msgspec.structs.asdict(report)
    typer.echo(msgspec.json.format(msgspec.json.encode(document)))


def print_text(report: "CheckReport") -> None:
    """The report for people."""
    tested = "tested" if report.vllm_tested else f"NOT TESTED, only {', '.join(report.tested_versions)}"
    built = "compiled" if report.compiled else "NOT COMPILED: correct, but slow"
    typer.echo(f"vLLM {report.vllm_version} ({tested})")
    typer.echo(
        f"blockpool {report.blockpool_version} ({built}), hash kernel {report.hash_kernel}, Python {report.python}"
    )
    if report.refused is not None:
        typer.echo(f"REFUSED {report.refused}")
    if report.replacements:
        typer.echo()
        replaced = [(f"{one.num_modules:,}", f"{one.module}.{one.name}") for one in report.replacements]
        _print_table(("in modules", ""), replaced)
    if report.comparisons:
        typer.echo()
        for one in report.comparisons:
            typer.echo(f"{'the same' if one.difference is None else 'DIFFERENT'}: {one.count:,} {one.what}")
            if one.difference is not None:
                typer.echo(f"  {one.difference}")
    if report.speeds:
        typer.echo()
        speeds = [
            (f"{one.vllm_us:,.0f}", f"{one.blockpool_us:,.0f}", f"{one.times_faster:.1f}", one.work)
            for one in report.speeds
        ]
        _print_table(("vLLM us", "blockpool us", "times faster", ""), speeds)
    for what in report.left_out:
        typer.echo(f"left out: {what}")
    typer.echo()
    typer.echo(_verdict(report))


def _print_table(headings: Sequence[str], rows: Sequence[tuple[str, ...]]) -> None:
    """Figures, and what they are about in the last column."""
    width = max(len(row[-1]) for row in rows)
    for line in text_table(headings, [(*row[:-1], row[-1].ljust(width)) for row in rows]):
        typer.echo(line)


def _verdict(report: "CheckReport") -> str:
    if report.differences:
        return "blockpool is not the same as vLLM's own here: do not use it, and report this, please."
    if not report.replacements:
        return "blockpool cannot take the place of vLLM's own here."
    if not report.vllm_tested:
        return f"Nothing is different, but vLLM {report.vllm_version} was not tested: BLOCKPOOL_VLLM=force uses it."
    if report.refused is not None:
        return "Nothing is different, but blockpool refuses this vLLM: BLOCKPOOL_VLLM=force uses it."
    if not report.compiled:
        return "Nothing is different, but blockpool is not compiled here, and so slower than vLLM's own."
    managed = any(one.name == "KVCacheManager" for one in report.replacements)
    beside = "; BLOCKPOOL_VLLM_MANAGER=1 beside it, its KVCacheManager too" if managed else ""
    return f"Well: BLOCKPOOL_VLLM=1 uses blockpool{beside}."
