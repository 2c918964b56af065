"""Mooncake JSONL, the format of the traces published with the FAST'25 paper (github.com/kvcache-ai/Mooncake).

One request a line: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`. An id stands for the prefix up to
and including its 512 tokens; the last may cover fewer, or be missing. Ids are global: all Mooncake files read
together share one space.
"""

import msgspec
import numpy as np

from .errors import BadLines, TraceError
from .ids import OutputLength, PrefixId, PromptLength, check_num_ids
from .lines import decode_lines
from .source import Source
from .trace import TraceRequest

UNIT_TOKENS = 512
SCOPE = "mooncake"


class _Line(msgspec.Struct, gc=False):
    timestamp: float
    input_length: PromptLength
    output_length: OutputLength
    hash_ids: list[PrefixId]


def read_mooncake(source: Source, bad_lines: BadLines) -> list[TraceRequest]:
    """The requests in the order of the file. Raises `TraceError` unless `bad_lines` skips what is wrong."""
    decoder = msgspec.json.Decoder(_Line)
    requests = []
    for place, line in decode_lines(source, decoder, bad_lines):
        try:
            check_num_ids(len(line.hash_ids), line.input_length, UNIT_TOKENS, place, "hash_ids")
        except TraceError as error:
            bad_lines.report(error)
            continue
        requests.append(
            TraceRequest(
                arrival_s=line.timestamp / 1000,
                num_prompt_tokens=line.input_length,
                num_output_tokens=line.output_length,
                source=place,
                unit=UNIT_TOKENS,
                scope=SCOPE,
                hash_ids=np.array(line.hash_ids, dtype=np.int64),
            )
        )
    return requests
