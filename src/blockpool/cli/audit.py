"""`blockpool audit`."""

from typing import TYPE_CHECKING, Annotated

import typer

from .exits import input_errors, unless_interrupted
from .text_table import text_table

if TYPE_CHECKING:
    from blockpool.inspect import BlockLine, PoolAudit

FAULTS_FOUND = 1
# A pool of this size is shown whole; of a larger one only the blocks that are in use or faulty.
SMALL_POOL = 64
SHOWN_HASH_DIGITS = 16
HEADINGS = ("pool", "block", "ref_cnt", "queue place", "hash", "")


def audit(
    dump: Annotated[
        str, typer.Argument(metavar="DUMP", help='A pool\'s dump() as JSON, or {"pools": [...]}; - is stdin.')
    ],
    show_all: Annotated[
        bool,
        typer.Option("--all", help=f"List every block, also in pools of more than {SMALL_POOL}."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check a pool's dump: every broken invariant by name, and what the books say of each block.

    Exit code: 0 clean, 1 faults found, 2 not a dump.

    Example: blockpool audit dump.json --all
    """
    from blockpool.inspect import DumpFileError, audit_file

    with unless_interrupted(), input_errors(DumpFileError):
        audits = audit_file(dump)
    if as_json:
        _print_json(audits, show_all)
    else:
        _print_tables(audits, show_all)
    if any(audit.faults for audit in audits):
        raise typer.Exit(FAULTS_FOUND)


def _shown(audit: "PoolAudit", show_all: bool) -> list["BlockLine"]:
    if show_all or audit.num_gpu_blocks <= SMALL_POOL:
        return list(audit.blocks)
    return [line for line in audit.blocks if line.in_use or line.faulty]


def _print_json(audits: list["PoolAudit"], show_all: bool) -> None:
    import msgspec

    pools = []
    for audit in audits:
        blocks = _shown(audit, show_all)
        fields = msgspec.structs.asdict(audit)
        pools.append(fields | {"blocks": blocks, "blocks_left_out": len(audit.blocks) - len(blocks)})
    document = {
        "format": "blockpool.audit/1",
        "clean": not any(audit.faults for audit in audits),
        "pools": pools,
    }
    typer.echo(msgspec.json.format(msgspec.json.encode(document)))


def _print_tables(audits: list["PoolAudit"], show_all: bool) -> None:
    for audit in audits:
        num_in_use = sum(line.in_use for line in audit.blocks)
        typer.echo(
            f"pool {audit.pool} ({audit.medium}): {audit.num_gpu_blocks:,} blocks with the null block, "
            f"{audit.num_free_blocks:,} free, {num_in_use:,} in use"
        )
        if not audit.faults:
            typer.echo("clean: every invariant holds")
        for fault in audit.faults:
            where = "" if fault.block_id is None else f"block {fault.block_id}: "
            typer.echo(f"FAULT {fault.invariant}: {where}{fault.detail}")
        _print_blocks(audit, show_all)
    num_faults = sum(len(audit.faults) for audit in audits)
    if num_faults:
        typer.echo(f"{num_faults:,} {'fault' if num_faults == 1 else 'faults'}")


def _print_blocks(audit: "PoolAudit", show_all: bool) -> None:
    lines = _shown(audit, show_all)
    if lines:
        typer.echo("\n".join(text_table(HEADINGS, [_cells(line) for line in lines])))
    left_out = len(audit.blocks) - len(lines)
    if left_out:
        blocks = "1 block that is" if left_out == 1 else f"{left_out:,} blocks that are"
        typer.echo(f"left out: {blocks} neither in use nor faulty (--all lists them)")


def _cells(line: "BlockLine") -> tuple[str, ...]:
    place = "-" if line.queue_place is None else str(line.queue_place)
    hashes = " ".join(map(_short_hash, line.hashes)) or "-"
    return str(line.pool), str(line.block_id), str(line.ref_cnt), place, hashes, ", ".join(_remarks(line))


def _remarks(line: "BlockLine") -> list[str]:
    remarks = []
    if line.faulty:
        remarks.append("FAULT")
    elif line.block_id == 0:
        remarks.append("null block")
    if line.holders:
        remarks.append("held by " + ", ".join(map(repr, line.holders)))
    return remarks


def _short_hash(key: str) -> str:
    """The first digits of the digest and the group in decimal. In a broken dump a key can be any text."""
    try:
        return f"{bytes.fromhex(key).hex()[:SHOWN_HASH_DIGITS]}:{int(key[-8:], 16)}"
    except ValueError:
        return repr(key)
