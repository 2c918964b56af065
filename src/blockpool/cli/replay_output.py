"""What both modes of `blockpool replay` write in the same way."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .exits import fail

if TYPE_CHECKING:
    from blockpool.traces import Trace

STDOUT = "-"


def trace_lines(trace: "Trace", built_in: bool) -> list[str]:
    """What was read."""
    lines = [", ".join(trace.names)]
    if built_in:
        lines = ["No TRACE given, so this is the built-in workload: chats, agents and one-shot prompts, made up."]
    if trace.first_bad_line is not None:
        skipped = "1 bad line" if trace.skipped_bad_lines == 1 else f"{trace.skipped_bad_lines:,} bad lines"
        lines.append(f"skipped {skipped}, the first: {trace.first_bad_line}")
    return lines


def write_json(text: bytes, where: str) -> None:
    """To a file, or to stdout, which then holds nothing else."""
    if where == STDOUT:
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
        return
    try:
        Path(where).write_bytes(text)
    except OSError as error:
        fail(f"--json: {where} cannot be written: {error.strerror}")
