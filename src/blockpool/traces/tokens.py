"""Plain token JSONL: `{"tokens": [...], "output_length": n}`, one request a line.

`timestamp` (ms) is optional: a request without one comes right after the one before it. `output_length` is 0 when
it is missing.
"""

from typing import Annotated

import msgspec
import numpy as np

from .errors import BadLines
from .ids import OutputLength
from .lines import decode_lines
from .source import Source
from .trace import TraceRequest

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class _Line(msgspec.Struct, gc=False):
    tokens: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    output_length: OutputLength = 0
    timestamp: float | None = None


def read_tokens(source: Source, bad_lines: BadLines) -> list[TraceRequest]:
    """The requests in the order of the file. Raises `TraceError` unless `bad_lines` skips what is wrong."""
    decoder = msgspec.json.Decoder(_Line)
    requests = []
    arrival_s = 0.0
    for place, line in decode_lines(source, decoder, bad_lines):
        if line.timestamp is not None:
            arrival_s = line.timestamp / 1000
        requests.append(
            TraceRequest(
                arrival_s=arrival_s,
                num_prompt_tokens=len(line.tokens),
                num_output_tokens=line.output_length,
                source=place,
                token_ids=np.array(line.tokens, dtype=np.uint32),
            )
        )
    return requests
