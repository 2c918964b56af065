"""The replay of a trace agrees with an obviously right cache in every figure, for every pool size."""

from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpool import build_info
from blockpool.replay import DigestedTrace, default_pool_sizes, full_attention, measure_need
from blockpool.traces import Trace, read_traces, synthetic_trace
from tests.sizes import property_settings

from .lru_oracle import oracle_outcome
from .trace_makers import id_traces, replay_full, token_traces

TRACES = Path(__file__).parents[2] / "../shared/traces"
MOONCAKE = TRACES / "mooncake/conversation_trace.jsonl"
SESSIONS = sorted((TRACES / "sessions").glob("*.json"))
COMPILED = all(build_info().compiled.values())

exact = property_settings(60)


def assert_agrees(trace: Trace, num_blocks: int, block_size: int, hash_block_size: int) -> None:
    result = replay_full(DigestedTrace(trace, hash_block_size), num_blocks=num_blocks, block_size=block_size)
    expected = asdict(oracle_outcome(trace.requests, num_blocks, block_size))
    assert {name: getattr(result, name) for name in expected} == expected
    assert (result.num_blocks, result.block_size) == (num_blocks, block_size)
    assert result.trace_requests == len(trace.requests)
    assert not result.interrupted


@pytest.mark.parametrize(
    ("unit", "block_size", "hash_block_size"),
    [(4, 4, 4), (4, 2, 2), (4, 4, 2), (4, 8, 4), (4, 8, 8), (8, 8, 2), (2, 12, 4)],
)
@exact
@given(data=st.data())
def test_id_traces(unit: int, block_size: int, hash_block_size: int, data: st.DataObject):
    trace = data.draw(id_traces(unit))
    assert_agrees(trace, data.draw(st.integers(2, 60)), block_size, hash_block_size)


@exact
@given(trace=token_traces(), num_blocks=st.integers(2, 60), sizes=st.sampled_from([(4, 4), (4, 2), (1, 1), (6, 3)]))
def test_token_traces(trace: Trace, num_blocks: int, sizes: tuple[int, int]):
    assert_agrees(trace, num_blocks, *sizes)


@pytest.mark.parametrize("num_blocks", [500, 3000, 30_000])
def test_the_built_in_workload(num_blocks: int):
    assert_agrees(synthetic_trace(), num_blocks, 16, 16)


def real_sizes(*sizes: int) -> list[int]:
    """Not compiled, one size of a real trace takes as long as all of them compiled."""
    return list(sizes) if COMPILED else list(sizes[:1])


@pytest.mark.skipif(not MOONCAKE.exists(), reason="no public traces beside the checkout")
@pytest.mark.parametrize("num_blocks", real_sizes(20_000, 200, 2_000, 100_000, 400_000))
def test_mooncake_conversations(num_blocks: int):
    assert_agrees(read_traces([str(MOONCAKE)]), num_blocks, 512, 512)


@pytest.mark.skipif(not MOONCAKE.exists(), reason="no public traces beside the checkout")
@pytest.mark.skipif(not COMPILED, reason="not compiled: minutes")
@pytest.mark.parametrize(("num_blocks", "block_size", "hash_block_size"), [(50_000, 128, 64), (9_000, 1024, 512)])
def test_mooncake_conversations_in_other_blocks(num_blocks: int, block_size: int, hash_block_size: int):
    assert_agrees(read_traces([str(MOONCAKE)]), num_blocks, block_size, hash_block_size)


# The longest session is ten times all the others together.
@pytest.mark.skipif(not SESSIONS, reason="no public traces beside the checkout")
@pytest.mark.parametrize("num_blocks", real_sizes(6_000, 1_000, 40_000))
def test_coding_sessions_together(num_blocks: int):
    paths = [str(path) for path in SESSIONS if COMPILED or path.stat().st_size < 1_000_000]
    assert_agrees(read_traces(paths), num_blocks, 64, 64)


@pytest.mark.skipif(not SESSIONS, reason="no public traces beside the checkout")
@pytest.mark.parametrize("path", SESSIONS, ids=lambda path: path.stem)
def test_coding_sessions_one_by_one(path: Path):
    if not COMPILED and path.stat().st_size > 1_000_000:
        pytest.skip("not compiled: minutes")
    trace = read_traces([str(path)])
    need = measure_need(DigestedTrace(trace, 64), full_attention(2, 64))
    for num_blocks in real_sizes(*default_pool_sizes(need), need.largest_request - 1):
        assert_agrees(trace, num_blocks, 64, 64)
