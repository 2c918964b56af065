"""Ctrl-C ends a run with what was measured so far."""

import pytest

from blockpool.replay import DigestedTrace, ReplayInterrupted
from blockpool.replay import simulate as simulate_module

from .lru_oracle import oracle_outcome
from .trace_makers import replay_full, tokens_request, trace_of

REQUESTS = [tokens_request(range(number % 40 + 1), number % 5) for number in range(600)]


def interrupt_at(progress_call: int):
    calls = iter(range(progress_call))

    def on_progress(num_done: int) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt

    return on_progress


def test_the_result_is_that_of_the_requests_done():
    digested = DigestedTrace(trace_of(*REQUESTS), 4)
    with pytest.raises(ReplayInterrupted) as caught:
        replay_full(digested, num_blocks=30, block_size=4, on_progress=interrupt_at(2))
    result = caught.value.result
    done = 2 * simulate_module.PROGRESS_EVERY
    assert result.interrupted
    assert (result.requests, result.trace_requests) == (done, 600)
    expected = oracle_outcome(REQUESTS[:done], 30, 4)
    assert (result.hit_tokens, result.prompt_tokens) == (expected.hit_tokens, expected.prompt_tokens)
    assert result.evicted_blocks == expected.evicted_blocks
    assert isinstance(caught.value, KeyboardInterrupt), "who does not ask for the result sees a Ctrl-C"


def test_before_the_first_request():
    with pytest.raises(ReplayInterrupted, match="after 0 of 600 requests") as caught:
        replay_full(DigestedTrace(trace_of(*REQUESTS), 4), num_blocks=30, block_size=4, on_progress=interrupt_at(0))
    assert caught.value.result.hit_rate == 0.0


@pytest.mark.parametrize("place", ["get_computed_blocks", "plan", "commit", "free"])
def test_a_request_is_counted_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch, place: str):
    """Wherever Ctrl-C strikes within the 100th request."""
    manager_class = simulate_module.KVCacheManager
    original = getattr(manager_class, place)
    calls = iter(range(99))

    def interrupted(self, *args, **kwargs):
        answer = original(self, *args, **kwargs)
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr(manager_class, place, interrupted)
    with pytest.raises(ReplayInterrupted) as caught:
        replay_full(DigestedTrace(trace_of(*REQUESTS), 4), num_blocks=30, block_size=4)
    result, expected = caught.value.result, oracle_outcome(REQUESTS[:99], 30, 4)
    assert result.requests == 99
    assert (result.hit_tokens, result.prompt_tokens) == (expected.hit_tokens, expected.prompt_tokens)


def test_progress_counts_up_to_all_requests():
    seen: list[int] = []
    replay_full(DigestedTrace(trace_of(*REQUESTS), 4), num_blocks=30, block_size=4, on_progress=seen.append)
    assert seen == [0, 256, 512, 600]
