"""The public traces are read whole."""

from pathlib import Path

import pytest

from blockpool.traces import read_traces

TRACES = Path(__file__).parents[2] / "../shared/traces"
MOONCAKE = TRACES / "mooncake/conversation_trace.jsonl"
SESSIONS = sorted((TRACES / "sessions").glob("*.json"))


@pytest.mark.skipif(not MOONCAKE.exists(), reason="no public traces beside the checkout")
def test_mooncake_conversations():
    trace = read_traces([str(MOONCAKE)])
    assert len(trace.requests) == 12_031
    assert sum(len(request.hash_ids) for request in trace.requests) == 288_500
    first, last = trace.requests[0], trace.requests[-1]
    assert (first.num_prompt_tokens, first.num_output_tokens, first.hash_ids.tolist()) == (6758, 500, list(range(14)))
    assert last.source.endswith(":12031")


@pytest.mark.skipif(not SESSIONS, reason="no public traces beside the checkout")
def test_coding_sessions():
    trace = read_traces([str(path) for path in SESSIONS])
    assert len(trace.requests) == 663
    assert trace.units() == (64,)
    assert len({request.scope for request in trace.requests}) == len(SESSIONS) == 25
    arrivals = [request.arrival_s for request in trace.requests]
    assert arrivals == sorted(arrivals)
    nested = [request for request in trace.requests if request.source.count("requests[") == 2]
    assert len(nested) == 14
    assert nested[0].arrival_s == pytest.approx(134.227)


AZURE = TRACES / "azure/AzureLLMInferenceTrace_code.csv"


@pytest.mark.skipif(not AZURE.exists(), reason="no public traces beside the checkout")
def test_azure_lengths():
    trace = read_traces([str(AZURE)])
    assert len(trace.requests) == 8_819
    assert sum(request.num_prompt_tokens for request in trace.requests) == 18_059_974
    assert trace.units() == ()
    assert trace.requests[0].num_prompt_tokens == 4_808
