"""Figures that are known from elsewhere or obvious from the trace."""

from pathlib import Path

import pytest

from blockpool.replay import DigestedTrace, RunResult
from blockpool.traces import Trace, TraceRequest, read_traces

from .trace_makers import ids_request, replay_full, tokens_request, trace_of

MOONCAKE = Path(__file__).parents[2] / "../shared/traces/mooncake/conversation_trace.jsonl"


def run(*requests: TraceRequest, num_blocks: int = 100, block_size: int = 4) -> RunResult:
    return replay_full(DigestedTrace(trace_of(*requests), block_size), num_blocks=num_blocks, block_size=block_size)


def hit_tokens_unlimited(trace: Trace, *, whole_ids: bool) -> list[int]:
    """Hit tokens per request when nothing is ever evicted. `whole_ids`: a partial last id can be reused too."""
    seen: set[int] = set()
    hits = []
    for request in trace.requests:
        ids, num_tokens, unit = request.hash_ids.tolist(), request.num_prompt_tokens, request.unit
        usable = ids if whole_ids else ids[: (num_tokens - 1) // unit]
        num_hits = 0
        while num_hits < len(usable) and usable[num_hits] in seen:
            num_hits += 1
        hits.append(min(num_hits * unit, num_tokens))
        seen.update(ids if whole_ids else ids[: num_tokens // unit])
    return hits


@pytest.mark.skipif(not MOONCAKE.exists(), reason="no public traces beside the checkout")
def test_the_known_hit_rate_of_the_mooncake_conversations():
    trace = read_traces([str(MOONCAKE)])
    half = len(trace.requests) // 2
    prompt_tokens = sum(request.num_prompt_tokens for request in trace.requests[half:])
    # Published by two independent tools: partial last ids count as reusable there.
    whole_ids = sum(hit_tokens_unlimited(trace, whole_ids=True)[half:])
    assert round(100 * whole_ids / prompt_tokens, 1) == 39.8
    # Ours can reuse full blocks only, and computes at least one token.
    full_blocks = hit_tokens_unlimited(trace, whole_ids=False)
    assert sum(full_blocks[half:]) < whole_ids
    unlimited = sum(len(request.hash_ids) + 8 for request in trace.requests)
    both = replay_full(DigestedTrace(trace, 512), num_blocks=unlimited, block_size=512)
    first = Trace(requests=trace.requests[:half], names=trace.names)
    first_half = replay_full(DigestedTrace(first, 512), num_blocks=unlimited, block_size=512)
    assert both.evicted_blocks == 0
    assert both.hit_tokens == sum(full_blocks)
    assert both.hit_tokens - first_half.hit_tokens == sum(full_blocks[half:])


def test_a_repeated_prompt_hits_its_full_blocks_but_never_its_last_token():
    for num_prompt_tokens, hit_tokens in ((4, 0), (5, 4), (8, 4), (9, 8)):
        request = tokens_request(range(num_prompt_tokens))
        assert run(request, request).hit_tokens == hit_tokens


def test_output_takes_blocks_and_leaves_nothing_behind():
    first = tokens_request(range(8), num_output_tokens=9)
    result = run(first, tokens_request(range(30)))
    assert result.peak_held_blocks == 8, "30 tokens; before that 8 + 9 took 5"
    assert result.hit_tokens == 8
    assert run(first).peak_held_blocks == 5


def test_the_generated_part_of_a_context_is_not_hit():
    # The second prompt goes on where the first one's output was: its content is not known to the cache.
    result = run(tokens_request(range(8), num_output_tokens=8), tokens_request(range(17)))
    assert result.hit_tokens == 8


def test_a_request_that_fits_exactly_is_replayed_and_one_block_more_is_refused():
    request = tokens_request(range(10), num_output_tokens=6)
    fits = run(request, num_blocks=5)
    assert (fits.refused_requests, fits.peak_held_blocks, fits.prompt_tokens) == (0, 4, 10)
    refused = run(request, num_blocks=4)
    assert (refused.requests, refused.refused_requests, refused.prompt_tokens) == (1, 1, 0)
    assert (refused.hit_rate, refused.peak_held_blocks) == (0.0, 0)


def test_a_refused_request_leaves_no_trace():
    small, large = tokens_request(range(9)), tokens_request(range(9), num_output_tokens=100)
    result = run(small, large, small, num_blocks=10)
    assert (result.requests, result.refused_requests) == (3, 1)
    assert (result.prompt_tokens, result.hit_tokens) == (18, 8)


def test_an_enormous_request_is_refused_at_once():
    result = run(ids_request([1], num_prompt_tokens=2**40, num_output_tokens=2**40))
    assert result.refused_requests == 1


def test_evicted_before_any_reuse():
    a, b, c = (tokens_request([letter] * 9) for letter in range(3))
    # Two prompts of 3 blocks fill the pool; the third evicts a's two full blocks, which were hit, then the fourth
    # evicts b's, which were not.
    result = run(a, a, b, c, num_blocks=6)
    assert (result.evicted_blocks, result.evicted_unused_blocks) == (2, 0)
    result = run(a, a, b, c, a, num_blocks=6)
    assert (result.evicted_blocks, result.evicted_unused_blocks) == (4, 2)


def test_a_prompt_without_ids_is_computed_whole():
    request = ids_request([], num_prompt_tokens=40)
    assert run(request, request).hit_tokens == 0


def test_nothing_is_measured_in_no_requests_left():
    assert run(tokens_request(range(40)), num_blocks=2).hit_rate == 0.0
