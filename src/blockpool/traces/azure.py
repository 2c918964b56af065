"""The CSV of the Azure LLM inference traces (github.com/Azure/AzurePublicDataset): lengths only.

Columns `TIMESTAMP` (a date and time, UTC), `ContextTokens`, `GeneratedTokens`. Nothing is known of any prompt's
content, so nothing of it is ever found again.
"""

import csv
from collections.abc import Iterator
from datetime import UTC, datetime

import numpy as np

from .decode import check_utf8
from .errors import BadLines, TraceError
from .source import Source
from .trace import MAX_TOKENS, TraceRequest

TIME, PROMPT, OUTPUT = "TIMESTAMP", "ContextTokens", "GeneratedTokens"
NO_IDS = np.array([], dtype=np.int64)


def is_azure_header(line: bytes) -> bool:
    """Whether a line names the columns of the format."""
    names = {name.strip().strip(b'"') for name in line.split(b",")}
    return {PROMPT.encode(), OUTPUT.encode()} <= names


def read_azure(source: Source, bad_lines: BadLines) -> list[TraceRequest]:
    """The requests in the order of the file. Raises `TraceError` unless `bad_lines` skips what is wrong.

    A header without one of the three columns is never skipped.
    """
    requests = []
    for place, fields in _rows(source, bad_lines):
        try:
            requests.append(
                TraceRequest(
                    arrival_s=_seconds(fields, place),
                    num_prompt_tokens=_count(fields, PROMPT, 1, place),
                    num_output_tokens=_count(fields, OUTPUT, 0, place),
                    source=place,
                    scope="azure",
                    hash_ids=NO_IDS,
                )
            )
        except TraceError as error:
            bad_lines.report(error)
    return requests


def _rows(source: Source, bad_lines: BadLines) -> Iterator[tuple[str, dict[str, str]]]:
    """("file:line", column -> value) per line behind the header that is not blank."""
    columns: list[str] | None = None
    for number, line in enumerate(source.data.split(b"\n"), start=1):
        if not line.strip():
            continue
        place = f"{source.name}:{number}"
        try:
            check_utf8(line, place)
            values = _values(line, place)
            if columns is not None and len(values) != len(columns):
                raise TraceError(f"{place}: {len(values)} values for {len(columns)} columns")
        except TraceError as error:
            if columns is None:
                raise
            bad_lines.report(error)
            continue
        if columns is None:
            columns = [value.strip() for value in values]
            for column in (TIME, PROMPT, OUTPUT):
                if column not in columns:
                    raise TraceError(f"{place}: {column}: missing in the header")
        else:
            yield place, dict(zip(columns, values, strict=True))


def _values(line: bytes, place: str) -> list[str]:
    try:
        return next(csv.reader([line.decode().rstrip("\r")], strict=True))
    except csv.Error as error:
        raise TraceError(f"{place}: {error}") from error


def _seconds(fields: dict[str, str], place: str) -> float:
    """Since 1970; a time without a zone is UTC."""
    try:
        moment = datetime.fromisoformat(fields[TIME].strip())
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise TraceError(f"{place}: {TIME}: {fields[TIME]!r} is not a date and time") from error


def _count(fields: dict[str, str], column: str, least: int, place: str) -> int:
    text = fields[column].strip()
    if not (text.isascii() and text.isdigit()) or len(text) > 10 or not least <= int(text) <= MAX_TOKENS:
        raise TraceError(f"{place}: {column}: expected an int from {least} to {MAX_TOKENS}, not {text!r}")
    return int(text)
