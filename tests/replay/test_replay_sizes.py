"""Sizes derived from a trace mean what they say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpool.replay import (
    DigestedTrace,
    ReplayError,
    blocks_in_memory,
    default_block_size,
    default_pool_sizes,
    full_attention,
    measure_need,
)
from blockpool.traces import Trace, synthetic_trace
from tests.sizes import property_settings

from .trace_makers import id_traces, ids_request, replay_full, token_traces, tokens_request, trace_of

exact = property_settings(60)


def check_need(trace: Trace, block_size: int, hash_block_size: int) -> None:
    digested = DigestedTrace(trace, hash_block_size)
    need = measure_need(digested, full_attention(2, block_size, hash_block_size))
    assert replay_full(digested, num_blocks=need.largest_request, block_size=block_size).refused_requests == 0
    if need.largest_request > 2:
        assert replay_full(digested, num_blocks=need.largest_request - 1, block_size=block_size).refused_requests > 0
    assert replay_full(digested, num_blocks=need.whole_trace, block_size=block_size).evicted_blocks == 0
    sizes = default_pool_sizes(need)
    assert sizes == sorted(set(sizes))
    assert sizes[0] >= need.largest_request
    assert sizes[-1] == need.whole_trace


@pytest.mark.parametrize(("unit", "block_size", "hash_block_size"), [(4, 4, 4), (4, 8, 2), (8, 4, 4), (4, 8, 8)])
@exact
@given(data=st.data())
def test_the_need_of_id_traces(unit: int, block_size: int, hash_block_size: int, data: st.DataObject):
    check_need(data.draw(id_traces(unit)), block_size, hash_block_size)


@exact
@given(trace=token_traces())
def test_the_need_of_token_traces(trace: Trace):
    check_need(trace, 4, 2)


def test_the_need_of_the_built_in_workload_is_tight():
    digested = DigestedTrace(synthetic_trace(), 16)
    need = measure_need(digested, full_attention(2, 16))
    result = replay_full(digested, num_blocks=need.whole_trace, block_size=16)
    assert result.evicted_blocks == 0
    # A twentieth less would not do.
    assert replay_full(digested, num_blocks=need.whole_trace * 19 // 20, block_size=16).evicted_blocks > 0


@pytest.mark.parametrize(
    ("units", "block_size"),
    [([512], 512), ([7], 7), ([], 16), ([64, 512], 64), ([48, 512], 16), ([4, 8], 4)],
)
def test_the_default_block_size(units: list[int], block_size: int):
    requests = [ids_request([1], num_prompt_tokens=1, unit=unit) for unit in units]
    assert default_block_size(trace_of(*requests, tokens_request([1]))) == block_size


def test_units_without_a_sensible_common_block_are_not_guessed():
    requests = [ids_request([1], num_prompt_tokens=1, unit=unit) for unit in (511, 512)]
    with pytest.raises(ReplayError, match=r"511, 512 tokens: choose --block-size"):
        default_block_size(trace_of(*requests))


def test_blocks_in_memory():
    assert blocks_in_memory(40 * 2**30, 160 * 1024, 16) == 16384
    assert blocks_in_memory(2 * 10 * 16 + 319, 10, 16) == 3
    with pytest.raises(ReplayError, match="hold 1 of the blocks"):
        blocks_in_memory(319, 10, 16)
