"""The Qwen usage traces of Alibaba Bailian (github.com/alibaba-edu/qwen-bailian-usagetraces-anon): JSONL.

One request a line: `chat_id`, `timestamp` (s), `input_length`, `output_length`, `hash_ids`. An id stands for the
content of 16 tokens, wherever they are; a prefix is what its ids are in order. A line has the whole prompt, history
included: `parent_chat_id` and `turn` name the turn before, and say nothing that the ids do not.
"""

import msgspec

from .chain import PrefixIds
from .errors import BadLines, TraceError
from .ids import OutputLength, PrefixId, PromptLength, check_num_ids
from .lines import decode_lines
from .source import Source
from .trace import TraceRequest

UNIT_TOKENS = 16


class _Line(msgspec.Struct, gc=False):
    chat_id: int
    timestamp: float
    input_length: PromptLength
    output_length: OutputLength
    hash_ids: list[PrefixId]


def read_bailian(source: Source, bad_lines: BadLines) -> list[TraceRequest]:
    """The requests in the order of the file; its ids are its own: each published file was salted for itself.

    Raises `TraceError` unless `bad_lines` skips what is wrong.
    """
    decoder = msgspec.json.Decoder(_Line)
    prefixes = PrefixIds()
    requests = []
    for place, line in decode_lines(source, decoder, bad_lines):
        try:
            check_num_ids(len(line.hash_ids), line.input_length, UNIT_TOKENS, place, "hash_ids")
        except TraceError as error:
            bad_lines.report(error)
            continue
        requests.append(
            TraceRequest(
                arrival_s=line.timestamp,
                num_prompt_tokens=line.input_length,
                num_output_tokens=line.output_length,
                source=place,
                unit=UNIT_TOKENS,
                scope=f"{source.number}:{source.name}",
                hash_ids=prefixes.of(line.hash_ids),
            )
        )
    return requests
