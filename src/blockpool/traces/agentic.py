"""Mooncake lines that are turns of sessions, each with what is new in it alone: the form that AIPerf writes and reads
(github.com/ai-dynamo/aiperf, "agentic code").

`session_id`, `input_length` (new tokens), `output_length`, `hash_ids` (for the new tokens: 512 each, the last may
cover fewer). The first turn of a session has its `timestamp` (ms), a later one its `delay` (ms) after the one before,
or a `timestamp`. A turn's prompt is the prompt before it, the answer to that, and the new tokens.

The prompts are rebuilt token by token and cut into units of 512 from their beginning. An answer has no ids; it is the
same only to the later turns of its own session.
"""

from collections.abc import Hashable

import msgspec
import numpy as np
import numpy.typing as npt

from .chain import PrefixIds
from .errors import BadLines, TraceError
from .ids import OutputLength, PrefixId, PromptLength, check_num_ids
from .lines import decode_lines
from .source import Source
from .trace import TraceRequest

UNIT_TOKENS = 512
# Prompts are put together here unit by unit, so a damaged length must not ask for millions of them.
MAX_PROMPT_TOKENS = 2**24


class _Line(msgspec.Struct, gc=False):
    session_id: str | int
    input_length: PromptLength
    output_length: OutputLength
    hash_ids: list[PrefixId]
    timestamp: float | None = None
    delay: float = 0.0
    is_restart: bool = False


class _Session:
    """What a session has said so far: the number of each full unit, and the pieces of the one that is not full."""

    def __init__(self, name: str | int) -> None:
        self.name = name
        self.arrival_s = 0.0
        self.num_turns = 0
        self.num_answer_tokens = 0
        self.num_tokens = 0
        self.full: list[int] = []
        self.pieces: list[tuple[Hashable, int, int]] = []

    def add_turn(self, line: _Line, prefixes: PrefixIds) -> None:
        """The answer to the turn before, then the new tokens."""
        self.add(("answer", self.name, self.num_turns), self.num_answer_tokens, prefixes)
        left = line.input_length
        for block in line.hash_ids:
            self.add(block, min(left, UNIT_TOKENS), prefixes)
            left = max(0, left - UNIT_TOKENS)
        self.add(("unknown", self.name, self.num_turns), left, prefixes)
        self.num_answer_tokens = line.output_length
        self.num_turns += 1

    def add(self, content: Hashable, num_tokens: int, prefixes: PrefixIds) -> None:
        """`num_tokens` tokens of one content, from its beginning."""
        done = 0
        while done < num_tokens:
            taken = min(num_tokens - done, UNIT_TOKENS - self.num_tokens % UNIT_TOKENS)
            self.pieces.append((content, done, taken))
            self.num_tokens += taken
            done += taken
            if self.num_tokens % UNIT_TOKENS == 0:
                self.full.append(self.last_number(prefixes))
                self.pieces = []

    def hash_ids(self, prefixes: PrefixIds) -> npt.NDArray[np.int64]:
        return np.array([*self.full, self.last_number(prefixes)] if self.pieces else self.full, dtype=np.int64)

    def last_number(self, prefixes: PrefixIds) -> int:
        """That of the prefix which ends with the pieces."""
        return prefixes.after(self.full[-1] if self.full else PrefixIds.START, tuple(self.pieces))


def read_agentic(source: Source, bad_lines: BadLines) -> list[TraceRequest]:
    """The requests in the order of the file. Raises `TraceError` unless `bad_lines` skips what is wrong.

    A turn that is skipped is missing in the prompts of the later turns too.
    """
    decoder = msgspec.json.Decoder(_Line)
    prefixes = PrefixIds()
    sessions: dict[str | int, _Session] = {}
    requests = []
    for place, line in decode_lines(source, decoder, bad_lines):
        session = sessions.get(line.session_id) or _Session(line.session_id)
        try:
            _check(line, session, place)
        except TraceError as error:
            bad_lines.report(error)
            continue
        sessions[line.session_id] = session
        session.arrival_s += line.delay / 1000
        if line.timestamp is not None:
            session.arrival_s = line.timestamp / 1000
        session.add_turn(line, prefixes)
        requests.append(
            TraceRequest(
                arrival_s=session.arrival_s,
                num_prompt_tokens=session.num_tokens,
                num_output_tokens=line.output_length,
                source=place,
                unit=UNIT_TOKENS,
                scope=f"{source.number}:{source.name}",
                hash_ids=session.hash_ids(prefixes),
            )
        )
    return requests


def _check(line: _Line, session: _Session, place: str) -> None:
    num_tokens = session.num_tokens + session.num_answer_tokens + line.input_length
    if num_tokens > MAX_PROMPT_TOKENS:
        raise TraceError(f"{place}: input_length: the session's prompt has more than {MAX_PROMPT_TOKENS} tokens")
    # A session that continues another carries the ids of all its turns, the last of each covering fewer tokens.
    if not line.is_restart:
        check_num_ids(len(line.hash_ids), line.input_length, UNIT_TOKENS, place, "hash_ids")
