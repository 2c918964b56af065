"""Requests of a trace, whatever file they came from."""

from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt

MAX_TOKENS = 2**31 - 1
"""No length in a trace may exceed this: larger numbers are damage, not traffic."""


class TraceRequest(msgspec.Struct, frozen=True, gc=False, eq=False):
    """One request: when it came, how long it was, and what its prompt shares with others.

    The prompt is known either by `hash_ids` or by `token_ids`, never by both. An id stands for the whole prefix up
    to and including its `unit` tokens: within one `scope`, equal id means equal prefix. The last id may cover fewer
    than `unit` tokens of the prompt, and ids may be missing at the end, or all of them: nothing is known of those
    tokens.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    source: str
    """Where it was read, for messages: "file:line"."""
    unit: int = 1
    """Tokens per id; 1 for token ids."""
    scope: str = ""
    """Ids mean the same in requests of the same scope only. Empty for token ids, which mean the same everywhere."""
    hash_ids: npt.NDArray[np.int64] | None = None
    """[ids], each 0 <= id < 2**63."""
    token_ids: npt.NDArray[np.uint32] | None = None
    """[num_prompt_tokens]."""


class Trace(msgspec.Struct, frozen=True, eq=False):
    """Requests of one or several files in the order of their arrival."""

    requests: tuple[TraceRequest, ...]
    names: tuple[str, ...]
    """The files, in the order in which they were given."""
    skipped_bad_lines: int = 0
    first_bad_line: str | None = None
    """What was wrong with the first line that was skipped."""

    def units(self) -> tuple[int, ...]:
        """The units of the requests known by ids, in tokens, ascending; empty when there are none of them."""
        known = (request for request in self.requests if request.hash_ids is not None and len(request.hash_ids))
        return tuple(sorted({request.unit for request in known}))


def in_arrival_order(requests: Iterable[TraceRequest]) -> tuple[TraceRequest, ...]:
    """Sorted by time; requests of the same time stay in the given order."""
    return tuple(sorted(requests, key=lambda request: request.arrival_s))
