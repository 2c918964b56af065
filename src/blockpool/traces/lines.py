"""Lines of a JSONL file as typed records."""

from collections.abc import Iterator
from typing import TypeVar

import msgspec

from .decode import check_utf8, decode_record
from .errors import BadLines, TraceError
from .source import Source

Record = TypeVar("Record")


def decode_lines(
    source: Source, decoder: msgspec.json.Decoder[Record], bad_lines: BadLines
) -> Iterator[tuple[str, Record]]:
    """("file:line", record) per line that is not blank; a bad line goes to `bad_lines`."""
    for number, line in enumerate(source.data.split(b"\n"), start=1):
        line = line.strip()
        if not line:
            continue
        place = f"{source.name}:{number}"
        try:
            check_utf8(line, place)
            record = decode_record(decoder, line, place)
        except TraceError as error:
            bad_lines.report(error)
        else:
            yield place, record
