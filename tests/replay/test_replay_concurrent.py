"""The replay in which requests overlap: its time by hand, and what it has in common with the sequential one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from blockpool.cache import KVCacheConfig
from blockpool.models import parse_groups
from blockpool.replay import (
    ConcurrentRun,
    DigestedTrace,
    ReplayError,
    StepCost,
    concurrent_rows,
    concurrent_verdict,
    full_attention,
    hash_unit,
    replay,
    replay_concurrently,
)
from blockpool.replay.concurrent import percentiles
from blockpool.replay.concurrent_report import seconds
from blockpool.traces import Trace, TraceRequest
from tests.sizes import property_settings

from .trace_makers import id_traces, ids_request, trace_of

ENDLESS = 5_000
# A step takes a second, a prompt token a hundredth, decoding half a second.
COST = StepCost(step_overhead_us=1e6, prefill_tokens_per_s=100.0, decode_ms=500.0)


def at(arrival_s: float, request: TraceRequest) -> TraceRequest:
    return replace(request, arrival_s=arrival_s)


def run(trace: Trace, num_blocks: int = ENDLESS, groups: str = "full:4", **options: Any) -> ConcurrentRun:
    specs = parse_groups(groups)
    unit = hash_unit(trace, specs)
    config = KVCacheConfig(num_blocks=num_blocks, kv_cache_groups=specs, hash_block_size=unit, partial_hits=False)
    return replay_concurrently(DigestedTrace(trace, unit), config, COST, **options)


def test_one_request_by_hand():
    result = run(trace_of(at(7.0, ids_request(range(5), 20, 3))))
    # 20 tokens of prompt, then two steps that decode: the third token needs no step after it.
    assert (result.steps, result.computed_tokens) == (3, 22)
    assert result.first_token.p50 == pytest.approx(1.2)
    assert result.last_token.p50 == pytest.approx(1.2 + 1.5 + 1.5)
    assert (result.seconds, result.busy_seconds) == (pytest.approx(4.2), pytest.approx(4.2))
    assert result.queueing.p99 == 0.0
    assert (result.most_running, result.most_waiting, result.preemptions) == (1, 0, 0)


def test_who_comes_during_a_step_waits_for_the_next_one():
    first, second = ids_request(range(5), 20, 2), ids_request(range(10, 15), 20, 1)
    result = run(trace_of(at(0.0, first), at(0.5, second)))
    # 0 to 1.2: the first prompt. 1.2 to 2.9: its second token, and the second prompt.
    assert result.steps == 2
    assert result.queueing.p99 == pytest.approx(0.7)
    assert result.first_token.p99 == pytest.approx(2.4)
    assert result.seconds == pytest.approx(2.9)


def test_who_comes_later_finds_what_is_there():
    same = ids_request(range(5), 20, 1)
    result = run(trace_of(at(0.0, same), at(0.1, same), at(100.0, same)))
    # All but the last block of each: one token at least is computed, in its block.
    assert result.hit_tokens == 2 * 16
    assert result.seconds == pytest.approx(100.0 + 1.04)
    assert result.busy_seconds == pytest.approx(1.2 + 1.04 + 1.04)
    without = run(trace_of(at(0.0, same), at(0.1, same), at(100.0, same)), enable_caching=False)
    assert without.hit_tokens == 0
    assert without.computed_tokens == 60


def test_too_many_for_the_pool_wait_and_are_preempted():
    # 10 blocks; each of two prompts takes 4, and each answer 2 more: they begin together, and cannot end so.
    requests = [at(0.0, ids_request(range(10 * n, 10 * n + 4), 16, 8)) for n in range(2)]
    result = run(trace_of(*requests), num_blocks=11)
    assert result.requests == 2
    assert result.refused_requests == 0
    assert result.preemptions == 1
    assert run(trace_of(*requests), num_blocks=14).preemptions == 0
    queued = run(trace_of(*requests), max_num_seqs=1)
    assert queued.most_running == 1
    assert queued.queueing.p99 > 0.0


def test_a_request_that_never_fits_is_refused_and_holds_up_nobody():
    result = run(trace_of(ids_request(range(20), 80, 1), ids_request([50], 4, 1)), num_blocks=10)
    assert (result.requests, result.refused_requests) == (2, 1)
    assert any("1 of 2 requests never fit" in sentence for sentence in concurrent_verdict([result]))


def test_the_budget_of_a_step():
    result = run(trace_of(ids_request(range(5), 20, 1)), max_num_batched_tokens=8)
    assert (result.steps, result.computed_tokens) == (3, 20)


@property_settings(60)
@given(
    trace=id_traces(4, max_requests=12),
    groups=st.sampled_from(["full:4", "full:4,window=9:4", "window=5:4,full:8", "full:4,mamba:8", "mamba:4,full:16"]),
    chunk=st.sampled_from([6, 20, 64]),
)
def test_far_apart_it_is_the_sequential_replay(trace: Trace, groups: str, chunk: int):
    apart = [at(1e4 * number, request) for number, request in enumerate(trace.requests)]
    trace = Trace(requests=tuple(apart), names=trace.names)
    specs = parse_groups(groups)
    unit = hash_unit(trace, specs)
    config = KVCacheConfig(num_blocks=ENDLESS, kv_cache_groups=specs, hash_block_size=unit, partial_hits=False)
    sequential = replay(DigestedTrace(trace, unit), config, max_num_batched_tokens=chunk)
    concurrent = run(trace, groups=groups, max_num_batched_tokens=chunk)
    assert concurrent.evicted_blocks == sequential.evicted_blocks == 0
    assert (concurrent.hit_tokens, concurrent.prompt_tokens) == (sequential.hit_tokens, sequential.prompt_tokens)
    assert concurrent.preemptions == concurrent.most_waiting == 0


@property_settings(60)
@given(
    trace=id_traces(4, max_requests=12),
    groups=st.sampled_from(["full:4", "full:4,window=9:4", "full:4,mamba:8", "chunk=8:4,full:4"]),
    num_blocks=st.integers(3, 60),
    budget=st.sampled_from([3, 16, 64]),
    gap=st.sampled_from([0.0, 0.5, 3.0]),
)
def test_every_request_ends_and_the_times_are_in_order(
    trace: Trace, groups: str, num_blocks: int, budget: int, gap: float
):
    requests = tuple(at(gap * number, request) for number, request in enumerate(trace.requests))
    trace = Trace(requests=requests, names=trace.names)
    for enable_caching in (True, False):
        result = run(trace, num_blocks, groups, max_num_batched_tokens=budget, enable_caching=enable_caching)
        assert result.requests == len(requests)
        assert result.busy_seconds <= result.seconds + 1e-6
        assert result.queueing.p50 <= result.first_token.p50 <= result.last_token.p50
        assert result.hit_tokens <= (result.prompt_tokens if enable_caching else 0)
        assert result == run(trace, num_blocks, groups, max_num_batched_tokens=budget, enable_caching=enable_caching)


def test_percentiles_are_times_that_were_measured():
    assert percentiles([]).p99 == 0.0
    assert percentiles([3.0, 1.0, 2.0]).p50 == 2.0
    assert percentiles([float(n) for n in range(1, 101)]) == percentiles([float(n) for n in range(100, 0, -1)])
    hundred = percentiles([float(n) for n in range(1, 101)])
    assert (hundred.p50, hundred.p90, hundred.p99) == (50.0, 90.0, 99.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_overhead_us": -1.0}, "step_overhead_us must be a time of at least 0, not -1.0"),
        ({"decode_ms": float("nan")}, "decode_ms must be a time"),
        ({"prefill_tokens_per_s": 0.0}, "prefill_tokens_per_s must be above 0, not 0.0"),
    ],
)
def test_costs_that_cannot_be(options: dict[str, float], message: str):
    with pytest.raises(ReplayError, match=message):
        StepCost(**options)


def test_digests_of_another_unit_are_refused():
    trace = trace_of(ids_request([1, 2], 8))
    with pytest.raises(ReplayError, match="digests of 32 bytes per 2 tokens, the cache 32 bytes per 4"):
        replay_concurrently(DigestedTrace(trace, 2), full_attention(9, 4), COST)


def test_the_rows_and_the_sentences():
    requests = [at(0.0, ids_request(range(10 * n, 10 * n + 4), 16, 8)) for n in range(2)]
    trace = trace_of(*requests)
    runs = [run(trace, num_blocks=11), run(trace, num_blocks=11, enable_caching=False)]
    on, off = concurrent_rows(runs)
    assert on[:4] == ("11", "on", "2", "0")
    assert off[1] == "off"
    said = concurrent_verdict(runs)
    assert any("lost their blocks to others 1 time" in sentence for sentence in said)
    assert any("the cache spared" in sentence for sentence in said)


def test_a_request_that_is_given_up_counts_nowhere_but_as_refused():
    """It may have run, and been preempted, before that was known: prompt and first token fit, the answer does not."""
    result = run(trace_of(ids_request(range(3), 12, 3)), num_blocks=4)
    assert (result.requests, result.refused_requests, result.preemptions) == (1, 1, 0)
    assert result.first_token.p99 == result.last_token.p99 == result.queueing.p99 == 0.0
    assert concurrent_verdict([result]) == [
        "At 4 blocks nothing was replayed: every request needs more than the whole pool."
    ]
    both = run(trace_of(ids_request(range(3), 12, 3), ids_request([9], 4, 2)), num_blocks=4)
    assert (both.requests, both.refused_requests) == (2, 1)
    assert both.first_token.p50 > 0.0


def test_times_are_shown_to_the_millisecond():
    assert [seconds(time) for time in (0.0, 0.0123, 9.9994, 12.34, 4321.0)] == [
        *("0.000", "0.012", "9.999"),
        *("12.3", "4,321.0"),
    ]
