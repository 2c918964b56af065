"""The replay of several groups of layers: what bounds its hits, what its figures add up to, and whom it blames."""

from __future__ import annotations

import sys
from math import lcm
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from blockpool.cache import Hit, KVCacheConfig, KVCacheManager
from blockpool.models import parse_groups
from blockpool.replay import (
    DigestedTrace,
    LossReason,
    ReplayError,
    RunResult,
    by_kind,
    drive,
    hash_unit,
    measure_need,
    replay,
)
from blockpool.replay.expand import num_known_hash_blocks
from blockpool.replay.losses import LossBook
from blockpool.traces import Trace, TraceRequest
from tests.sizes import property_settings

from .trace_makers import id_traces, ids_request, token_traces, trace_of

# Larger than whatever the small traces here can fill.
ENDLESS = 5_000
exact = property_settings(100)
KINDS = (
    *("full:4", "full:8", "window=9:4", "window=3:4", "window=20:8", "chunk=16:4", "reference=6:4"),
    *("mamba:4", "mamba:8", "mamba:16", "running-mamba:8", "ring:4"),
)


def run(trace: Trace, groups: str, num_blocks: int = ENDLESS, chunk: int = 64, **options: Any) -> RunResult:
    specs = parse_groups(groups)
    config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_groups=specs,
        hash_block_size=hash_unit(trace, specs),
        partial_hits=False,
        **options,
    )
    return replay(DigestedTrace(trace, config.unit), config, max_num_batched_tokens=chunk)


def unit_of(groups: str) -> int:
    return lcm(*(spec.block_size for spec in parse_groups(groups) if spec.kv_cache_spec.prefix_cacheable))


@st.composite
def hybrids(draw: st.DrawFn) -> str:
    """Two to four groups over blocks of 4, 8 or 16 tokens."""
    kinds = st.sampled_from(KINDS)
    return ",".join(["full:4", *draw(st.lists(kinds, min_size=1, max_size=3))])


# -- bounds ----------------------------------------------------------------------------------------------


@exact
@given(trace=id_traces(4), groups=hybrids(), num_blocks=st.integers(2, 120), chunk=st.sampled_from([1, 5, 16, 64]))
def test_no_model_hits_more_than_full_attention_at_the_same_unit(
    trace: Trace, groups: str, num_blocks: int, chunk: int
):
    limited = run(trace, groups, num_blocks, chunk)
    unlimited = run(trace, groups, ENDLESS, chunk)
    full = run(trace, f"full:{unit_of(groups)}")
    assert unlimited.evicted_blocks == full.evicted_blocks == 0
    assert limited.hit_tokens <= full.hit_tokens
    assert unlimited.hit_tokens <= full.hit_tokens
    assert full.hit_tokens <= full.reusable_tokens == unlimited.reusable_tokens


@exact
@given(trace=st.one_of(id_traces(4), token_traces()), groups=hybrids(), chunk=st.sampled_from([3, 16, 64]))
def test_without_evictions_and_with_dense_retention_every_model_hits_as_full_attention(
    trace: Trace, groups: str, chunk: int
):
    unit = unit_of(groups)
    # Windows keep every resume point by themselves; states where steps end, so the interval makes them end there.
    dense = run(trace, groups, chunk=chunk, retention_interval=unit)
    full = run(trace, f"full:{unit}")
    assert dense.evicted_blocks == 0
    assert dense.hit_tokens == full.hit_tokens
    if "mamba" not in groups:
        assert run(trace, groups, chunk=chunk).hit_tokens == full.hit_tokens


@exact
@given(trace=id_traces(4), groups=hybrids(), chunk=st.sampled_from([7, 64]))
def test_what_is_kept_for_later_is_found(trace: Trace, groups: str, chunk: int):
    """A prompt that comes once more resumes at its replay boundary, whatever is kept beside that."""
    twice = Trace(requests=tuple(one for one in trace.requests for _ in range(2)), names=trace.names)
    unit = unit_of(groups)
    sparse = run(twice, groups, chunk=chunk, retention_interval=0)
    boundaries = [(one, (one.num_prompt_tokens - 1) // unit * unit) for one in trace.requests]
    assert sparse.evicted_blocks == 0
    assert sparse.hit_tokens >= sum(end for one, end in boundaries if num_known_hash_blocks(one, 1) >= end)


# -- figures ---------------------------------------------------------------------------------------------


@exact
@given(
    trace=st.one_of(id_traces(4), token_traces()),
    groups=hybrids(),
    num_blocks=st.integers(2, 120),
    chunk=st.sampled_from([1, 6, 16, 64]),
    interval=st.sampled_from([None, 0, 1, 2]),
)
def test_the_figures_add_up(trace: Trace, groups: str, num_blocks: int, chunk: int, interval: int | None):
    policy = None if interval is None else interval * unit_of(groups)
    result = run(trace, groups, num_blocks, chunk, retention_interval=policy)
    assert sum(loss.tokens for loss in result.losses) == result.reusable_tokens - result.hit_tokens
    assert all(loss.tokens > 0 < loss.requests <= result.replayed_requests for loss in result.losses)
    assert all(hits <= result.replayed_requests for hits in result.shortened_hits.values())
    assert set(result.shortened_hits) == {result.groups[loss.group].kind for loss in result.losses}
    assert sum(group.evicted_blocks for group in result.groups) == result.evicted_blocks
    assert sum(group.held_at_peak for group in result.groups) == result.peak_held_blocks <= num_blocks - 1
    assert sum(group.cached_blocks for group in result.groups) <= num_blocks - 1
    kinds = by_kind(result)
    assert sorted(at for kind in kinds for at in kind.groups) == list(range(len(result.groups)))
    assert sum(kind.lost_tokens for kind in kinds) == result.reusable_tokens - result.hit_tokens
    if not result.evicted_blocks:
        assert not {LossReason.EVICTED, LossReason.CHECKPOINT_EVICTED} & {loss.reason for loss in result.losses}


@property_settings(60)
@given(trace=id_traces(4, max_requests=8), groups=hybrids(), num_blocks=st.integers(2, 120))
def test_answers_by_blocks_are_answers_by_tokens(trace: Trace, groups: str, num_blocks: int):
    by_blocks = run(trace, groups, num_blocks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[drive.__module__], "gcd", lambda *sizes: 1)
        by_tokens = run(trace, groups, num_blocks)
    assert by_blocks == by_tokens


def prompt(ids: list[int], num_output_tokens: int = 0) -> TraceRequest:
    return ids_request(ids, 4 * len(ids), num_output_tokens)


def test_a_window_holds_itself_and_one_chunk():
    # 40 blocks of 4; window 8 reads 7 tokens back. Chunks of 32: 8 blocks of the chunk and 2 before it.
    result = run(trace_of(prompt(list(range(40)))), "full:4,window=8:4", chunk=32)
    assert [group.held_at_peak for group in result.groups] == [40, 10]
    # In one chunk, all of it.
    result = run(trace_of(prompt(list(range(40)))), "full:4,window=8:4", chunk=1000)
    assert [group.held_at_peak for group in result.groups] == [40, 40]


def test_a_long_answer_does_not_fill_a_window():
    # 16 prompt tokens in chunks of 8, 400 of answer: a window of 8 in blocks of 4 stands in 3 at a time.
    result = run(trace_of(prompt([1, 2, 3, 4], 400)), "full:4,window=8:4", chunk=8)
    assert result.refused_requests == 0
    assert [group.held_at_peak for group in result.groups] == [104, 3]


def test_states_are_few():
    # The running state, and the checkpoint before it while a chunk is computed.
    result = run(trace_of(prompt(list(range(64)))), "full:4,mamba:16", chunk=64)
    assert [group.held_at_peak for group in result.groups] == [64, 2]
    # 256 tokens in chunks of 64: states at 64, 128, 192 and, for the replay, 240; the one at 256 ends a block too.
    assert [group.cached_blocks for group in result.groups] == [64, 5]


def test_what_does_not_fit_is_refused_before_anything_changes():
    trace = trace_of(prompt([1, 2, 3, 4]), prompt(list(range(5, 40))), prompt([1, 2, 3, 4, 99]))
    result = run(trace, "full:4,window=8:4", num_blocks=18)
    assert result.refused_requests == 1
    assert result.evicted_blocks == 0
    assert result.hit_tokens == 16


# -- whom it blames --------------------------------------------------------------------------------------


def losses_of(result: RunResult) -> dict[tuple[LossReason, int], tuple[int, int]]:
    return {(loss.reason, loss.group): (loss.requests, loss.tokens) for loss in result.losses}


def test_full_attention_loses_by_eviction():
    trace = trace_of(prompt([1, 2, 3, 4]), prompt([11, 12, 13]), prompt([1, 2, 3, 4, 5]))
    result = run(trace, "full:4", num_blocks=6)
    # The second prompt takes the plain block and the two deepest of the first.
    assert result.hit_tokens == 8
    assert losses_of(result) == {(LossReason.EVICTED, 0): (1, 8)}


def test_a_window_whose_tail_is_gone():
    # Replays only: the window keeps what the prompt itself resumes at, 28, and not what resuming at 24 needs.
    first, second = list(range(1, 9)), [1, 2, 3, 4, 5, 6, 77, 78]
    trace = trace_of(prompt(first), prompt(second))
    result = run(trace, "full:4,window=5:4", retention_interval=0)
    assert result.hit_tokens == 0
    assert losses_of(result) == {(LossReason.WINDOW_GONE, 1): (1, 24)}
    # The junction is known then, and kept for the third.
    third = [1, 2, 3, 4, 5, 6, 88]
    assert (
        run(
            trace_of(prompt(first), prompt(second), prompt(third)), "full:4,window=5:4", retention_interval=0
        ).hit_tokens
        == 24
    )


def test_a_state_without_a_checkpoint():
    first, second = list(range(1, 9)), [1, 2, 3, 4, 77]
    result = run(trace_of(prompt(first), prompt(second)), "full:4,mamba:4")
    assert losses_of(result) == {(LossReason.NO_CHECKPOINT, 1): (1, 16)}
    result = run(trace_of(prompt(first), prompt(second)), "full:4,mamba:4", chunk=16)
    assert result.hit_tokens == 16


def test_a_state_that_was_evicted():
    # One state at a time fits beside the full blocks; the other request's states push it out, not the blocks of the
    # first, which were hit in between.
    first, other = [1, 2, 3], [21, 22, 23]
    trace = trace_of(prompt(first), prompt(other), prompt([1, 2, 3, 4]))
    reasons = {loss.reason for size in range(6, 14) for loss in run(trace, "full:4,mamba:4", size).losses}
    assert LossReason.CHECKPOINT_EVICTED in reasons


@pytest.mark.parametrize("interval", [0, None, 16])
def test_nothing_is_blamed_on_evictions_where_there_are_none(interval: int | None):
    """A step that ends at a boundary keeps its state only if the policy asks for it."""
    first, second = list(range(1, 33)), [*range(1, 18), 77]
    result = run(trace_of(prompt(first), prompt(second)), "full:4,mamba:8", chunk=16, retention_interval=interval)
    assert result.evicted_blocks == 0
    reasons = {loss.reason for loss in result.losses}
    assert reasons <= {LossReason.NO_CHECKPOINT, LossReason.UNIT_TOO_COARSE}
    assert (LossReason.NO_CHECKPOINT in reasons) == (interval == 0)


def test_only_what_was_kept_can_have_been_evicted():
    """A state was kept at 16, and in some pools it is gone; none was ever kept from there to 208."""
    short, long = [1, 2, 3, 4, 5], [1, 2, 3, 4, *range(10, 70)]
    seen = set()
    for filler in range(4, 80):
        trace = trace_of(
            prompt(short), prompt(long), prompt(list(range(200, 200 + filler))), prompt([*long[:52], 99])
        )
        result = run(trace, "full:4,mamba:16", 84, chunk=1000)
        losses = losses_of(result)
        if losses.get((LossReason.EVICTED, 0), (0, 0))[1] == 0:
            assert losses[LossReason.NO_CHECKPOINT, 1][1] in (192, 192 + 16)
            seen.add(losses.get((LossReason.CHECKPOINT_EVICTED, 1), (0, 0))[1])
    assert seen == {0, 16}


def test_each_group_answers_for_what_lies_beyond_its_own_reach():
    """Full attention has lost the end of the prefix, the window also what is before it."""

    class Fixed:
        def __init__(self, group_id: int, length: int, *, is_state: bool = False) -> None:
            self.group_id, self.is_state, self.prefix_cacheable, self.block_size = group_id, is_state, True, 4
            self.length = length

        def find_longest_hit(self, chain: bytes, most: int, unit: int) -> Any:
            return SimpleNamespace(num_tokens=min(self.length, most))

    managers = [Fixed(0, 16), Fixed(1, 8)]
    specs = parse_groups("full:4,window=9:4")
    book = LossBook(
        cast(
            KVCacheManager,
            SimpleNamespace(
                managers=managers,
                alignment=4,
                config=SimpleNamespace(kv_cache_groups=specs),
                pool=SimpleNamespace(hash_block_size=4),
            ),
        )
    )
    hit = cast(Hit, SimpleNamespace(num_tokens=8, own_lengths=(16, None), vetoed_by=1))
    assert book.found(hit, b"", 46) == [
        (LossReason.UNIT_TOO_COARSE, 0, 2),
        (LossReason.EVICTED, 0, 28),
        (LossReason.WINDOW_GONE, 1, 8),
    ]
    # Both have nothing: the one that is asked first, whatever its number.
    hit = cast(Hit, SimpleNamespace(num_tokens=0, own_lengths=(None, 0), vetoed_by=1))
    managers[0].length = 0
    assert book.found(hit, b"", 44) == [(LossReason.WINDOW_GONE, 1, 44)]
    managers[0].length = 16
    # Each alone resumes at 8, together at 4 only: the one that had the last word.
    hit = cast(Hit, SimpleNamespace(num_tokens=4, own_lengths=(16, None), vetoed_by=1))
    assert book.found(hit, b"", 44)[-1] == (LossReason.WINDOW_GONE, 1, 4)


def test_cross_attention_holds_the_encoder_of_each_request():
    result = replay(
        DigestedTrace(trace_of(prompt([1, 2])), 4),
        KVCacheConfig(num_blocks=40, kv_cache_groups=parse_groups("full:4,cross:4"), partial_hits=False),
        num_encoder_tokens=50,
    )
    assert [group.held_at_peak for group in result.groups] == [2, 13]


@exact
@given(
    trace=st.one_of(id_traces(4), token_traces()),
    groups=hybrids(),
    chunk=st.sampled_from([1, 6, 16, 64]),
    num_encoder_tokens=st.sampled_from([0, 9]),
)
def test_a_pool_as_large_as_the_largest_request_refuses_none(
    trace: Trace, groups: str, chunk: int, num_encoder_tokens: int
):
    specs = parse_groups(groups)
    unit = hash_unit(trace, specs)
    digested = DigestedTrace(trace, unit)
    config = KVCacheConfig(num_blocks=1, kv_cache_groups=specs, hash_block_size=unit, partial_hits=False)
    options = {"max_num_batched_tokens": chunk, "num_encoder_tokens": num_encoder_tokens}
    need = measure_need(digested, config, **options).largest_request
    enough = replay(digested, replace(config, num_blocks=need), **options)
    assert enough.refused_requests == 0
    assert enough.peak_held_blocks <= need - 1
    # With one block less the largest one is refused, unless a hit or a state lets its chunks fall better.
    alone = [trace_of(request) for request in trace.requests]
    if need > 2 and "mamba" not in groups:
        less = replace(config, num_blocks=need - 1)
        assert any(replay(DigestedTrace(one, unit), less, **options).refused_requests for one in alone)


def test_units_that_are_too_coarse():
    first, second, third = list(range(1, 9)), [1, 2, 3, 4, 5, 6, 77], [1, 2, 88]
    result = run(trace_of(prompt(first), prompt(second), prompt(third)), "window=9:4,full:16")
    assert losses_of(result) == {
        (LossReason.UNIT_TOO_COARSE, 1): (1, 8),
        (LossReason.TOO_SHORT, 1): (1, 8),
    }
    assert result.block_size == 16
    assert result.hit_tokens == 16


def test_a_config_of_another_unit_is_refused():
    trace = trace_of(prompt([1, 2]))
    config = KVCacheConfig(num_blocks=9, kv_cache_groups=parse_groups("full:4"))
    with pytest.raises(ReplayError, match="digests of 32 bytes per 2 tokens, the cache 32 bytes per 4"):
        replay(DigestedTrace(trace, 2), config)
    with pytest.raises(ReplayError, match="max_num_batched_tokens must be at least 1"):
        replay(DigestedTrace(trace, 4), config, max_num_batched_tokens=0)
    assert replay(DigestedTrace(trace, 2), replace(config, hash_block_size=2, partial_hits=False)).requests == 1


@pytest.mark.parametrize(
    ("unit", "groups", "common"),
    [(512, "full:544,mamba:544", 32), (64, "full:16", 16), (64, "full:80,mamba:80", 16), (4, "full:4", 4)],
)
def test_the_unit_of_trace_and_groups(unit: int, groups: str, common: int):
    assert hash_unit(trace_of(ids_request([1], 1, unit=unit)), parse_groups(groups)) == common


def test_units_that_have_too_little_in_common():
    with pytest.raises(ReplayError, match="blocks of 17 tokens and ids of 64 tokens have only 1 in common"):
        hash_unit(trace_of(ids_request([1], 1, unit=64)), parse_groups("full:17"))
