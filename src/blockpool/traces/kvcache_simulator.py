"""The JSONL of kvcache-simulator (pypi.org/project/kvcache-simulator): `hash_ids`, `input_length`, `block_size`.

`block_size` is the tokens per id; a line without one has that of the lines before it. `output_length` and `timestamp`
(ms) are optional: a request without a time comes right after the one before it. Ids are this file's alone, and a
prefix is what its ids are in order. `block_tokens`, tokens id by id, is read where it says the same as `block_size`.
"""

import msgspec

from .chain import PrefixIds
from .errors import BadLines, TraceError
from .ids import OutputLength, PrefixId, PromptLength, UnitLength, check_num_ids
from .lines import decode_lines
from .source import Source
from .trace import TraceRequest


class _Line(msgspec.Struct, gc=False):
    hash_ids: list[PrefixId]
    input_length: PromptLength
    block_size: UnitLength | None = None
    block_tokens: list[UnitLength] | None = None
    output_length: OutputLength = 0
    timestamp: float | None = None


def read_kvcache_simulator(source: Source, bad_lines: BadLines) -> list[TraceRequest]:
    """The requests in the order of the file. Raises `TraceError` unless `bad_lines` skips what is wrong."""
    decoder = msgspec.json.Decoder(_Line)
    prefixes: dict[int, PrefixIds] = {}
    requests = []
    arrival_s = 0.0
    block_size: int | None = None
    for place, line in decode_lines(source, decoder, bad_lines):
        try:
            block_size = block_size if line.block_size is None else line.block_size
            if block_size is None:
                raise TraceError(f"{place}: block_size: missing")
            check_num_ids(len(line.hash_ids), line.input_length, block_size, place, "hash_ids")
            _check_block_tokens(line, block_size, place)
        except TraceError as error:
            bad_lines.report(error)
            continue
        if line.timestamp is not None:
            arrival_s = line.timestamp / 1000
        requests.append(
            TraceRequest(
                arrival_s=arrival_s,
                num_prompt_tokens=line.input_length,
                num_output_tokens=line.output_length,
                source=place,
                unit=block_size,
                scope=f"{source.number}:{source.name}:{block_size}",
                hash_ids=prefixes.setdefault(block_size, PrefixIds()).of(line.hash_ids),
            )
        )
    return requests


def _check_block_tokens(line: _Line, block_size: int, place: str) -> None:
    """Blocks of other sizes than `block_size`, but for the last, have no place on a grid. Raises `TraceError`."""
    tokens = line.block_tokens
    if tokens is None:
        return
    if len(tokens) != len(line.hash_ids):
        raise TraceError(f"{place}: block_tokens: {len(tokens)} lengths for {len(line.hash_ids)} ids")
    if any(count != block_size for count in tokens[:-1]) or (tokens and tokens[-1] > block_size):
        raise TraceError(f"{place}: block_tokens: blocks of other than {block_size} tokens cannot be replayed")
