"""A file with the dumps of one or several pools."""

import sys
from pathlib import Path
from typing import Any

import msgspec

STDIN = "-"


class DumpFileError(ValueError):
    """A file is not a dump. The message names the file and, where there is one, the field."""


def file_name(path: str) -> str:
    """What messages call the file."""
    return "<stdin>" if path == STDIN else path


def load_dumps(path: str) -> list[dict[str, Any]]:
    """The dumps in a file (or stdin for "-"): the document itself, or those under its `pools`.

    Raises `DumpFileError` when the file cannot be read or is not such a document. Whether each dump is complete is
    for the audit to say.
    """
    name = file_name(path)
    try:
        data = sys.stdin.buffer.read() if path == STDIN else Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DumpFileError(f"{name}: cannot be read: {reason}") from error
    if not data.strip():
        raise DumpFileError(f"{name}: empty file")
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DumpFileError(f"{name}: not JSON: {error}") from error
    except RecursionError as error:
        raise DumpFileError(f"{name}: not a dump: nested too deeply") from error
    if not isinstance(document, dict):
        raise DumpFileError(f"{name}: not a dump: expected an object")
    if "pools" not in document:
        return [document]
    pools = document["pools"]
    if not isinstance(pools, list) or not pools:
        raise DumpFileError(f"{name}: pools: expected an array of dumps that is not empty")
    for number, dump in enumerate(pools):
        if not isinstance(dump, dict):
            raise DumpFileError(f"{name}: pools[{number}]: expected an object")
    return pools
