"""Small traces for tests: random ones that share prefixes as real ones do, and single requests."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from blockpool.replay import DigestedTrace, RunResult, full_attention, replay
from blockpool.traces import Trace, TraceRequest


def ids_request(
    ids: Sequence[int], num_prompt_tokens: int, num_output_tokens: int = 0, unit: int = 4, scope: str = "s"
) -> TraceRequest:
    return TraceRequest(
        arrival_s=0.0,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        source="test:1",
        unit=unit,
        scope=scope,
        hash_ids=np.array(ids, dtype=np.int64),
    )


def tokens_request(tokens: Sequence[int], num_output_tokens: int = 0) -> TraceRequest:
    return TraceRequest(
        arrival_s=0.0,
        num_prompt_tokens=len(tokens),
        num_output_tokens=num_output_tokens,
        source="test:1",
        token_ids=np.array(tokens, dtype=np.uint32),
    )


def trace_of(*requests: TraceRequest) -> Trace:
    return Trace(requests=requests, names=("test",))


class PrefixIds:
    """Gives equal prefixes equal ids and different ones different ids."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, ...], int] = {}

    def of(self, tokens: Sequence[int], unit: int) -> list[int]:
        ends = [*range(unit, len(tokens), unit), len(tokens)]
        return [self._ids.setdefault(tuple(tokens[:end]), len(self._ids)) for end in ends]


# Two letters make shared prefixes likely.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=40)
outputs = st.integers(0, 12)


@st.composite
def id_traces(draw: st.DrawFn, unit: int, max_requests: int = 25) -> Trace:
    """Requests over a few prompts and their continuations, some with ids missing at the end."""
    ids = PrefixIds()
    requests = []
    known: list[list[int]] = [[]]
    for _ in range(draw(st.integers(1, max_requests))):
        prompt = draw(st.sampled_from(known)) + draw(prompts)
        known.append(prompt)
        own = ids.of(prompt, unit)
        kept = draw(st.integers(0, len(own))) if draw(st.booleans()) else len(own)
        requests.append(ids_request(own[:kept], len(prompt), draw(outputs), unit, draw(st.sampled_from("st"))))
    return trace_of(*requests)


@st.composite
def token_traces(draw: st.DrawFn, max_requests: int = 25) -> Trace:
    requests = []
    known: list[list[int]] = [[]]
    for _ in range(draw(st.integers(1, max_requests))):
        prompt = draw(st.sampled_from(known)) + draw(prompts)
        known.append(prompt)
        requests.append(tokens_request(prompt, draw(outputs)))
    return trace_of(*requests)


def replay_full(digested: DigestedTrace, *, num_blocks: int, block_size: int, **options: Any) -> RunResult:
    """Replay with one group that reads everything."""
    return replay(digested, full_attention(num_blocks, block_size, digested.hash_block_size), **options)
