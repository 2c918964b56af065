"""The replay with tiers agrees with tiers that are obviously right, and a tier takes nothing away."""

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from blockpool.replay import DigestedTrace, LossReason, ReplayError, RunResult, verdict
from blockpool.replay.tier_run import TierRun
from blockpool.replay.tiers import StoreWhen, TierOrder, TierSpec, TierStack
from blockpool.traces import Trace, synthetic_trace
from tests.sizes import property_settings

from .lru_oracle import naive_keys
from .tier_oracle import OracleTier, TieredOracle, TierOutcome
from .trace_makers import id_traces, ids_request, replay_full, token_traces, trace_of

exact = property_settings(120)
PAGE = 7
ENDLESS = 5_000
STORES = ("completion", "eviction", "hits=1", "hits=2")


def tier(name: str, capacity: int, store: str = "completion", order: str = "lru", page: int = PAGE) -> TierSpec:
    when, _, number = store.partition("=")
    return TierSpec(
        name=name,
        # With or without a rest in which no page has room.
        capacity_bytes=capacity * page + (page - 1 if capacity % 2 == 0 else 0),
        store=StoreWhen(when),
        num_hits=int(number or 0),
        order=TierOrder(order),
    )


def stack(*tiers: TierSpec, **speeds: Any) -> TierStack:
    return TierStack(tiers=tiers, page_bytes=(PAGE,), **speeds)


def run(trace: Trace, num_blocks: int, *tiers: TierSpec, block_size: int = 4, unit: int | None = None) -> RunResult:
    return replay_full(
        DigestedTrace(trace, unit or block_size),
        num_blocks=num_blocks,
        block_size=block_size,
        tiers=stack(*tiers) if tiers else None,
    )


def tiers_of(result: RunResult) -> tuple[TierRun, ...]:
    assert result.tiers is not None
    return result.tiers.tiers


@st.composite
def tier_lists(draw: st.DrawFn) -> list[tuple[int, str]]:
    """One to three tiers: room for so many pages, and what they store."""
    return draw(st.lists(st.tuples(st.integers(1, 30), st.sampled_from(STORES)), min_size=1, max_size=3))


def assert_agrees(trace: Trace, num_blocks: int, block_size: int, unit: int, wanted: list[tuple[int, str]]) -> None:
    specs = [tier(f"t{number}", *one) for number, one in enumerate(wanted)]
    result = run(trace, num_blocks, *specs, block_size=block_size, unit=unit)
    oracle = TieredOracle(num_blocks, block_size, [OracleTier(*one) for one in wanted])
    for request in trace.requests:
        oracle.run(naive_keys(request, block_size), request.num_prompt_tokens, request.num_output_tokens)
    expected = asdict(oracle.outcome)
    assert {name: getattr(result, name) for name in expected} == expected
    for found, outcome in zip(tiers_of(result), oracle.outcomes(), strict=True):
        assert TierOutcome(**{name: getattr(found, name) for name in asdict(outcome)}) == outcome
        for what in ("loaded", "stored", "promoted", "distinct", "held"):
            assert getattr(found, f"{what}_bytes") == PAGE * getattr(found, f"{what}_pages")
    assert sum(loss.tokens for loss in result.losses) == result.reusable_tokens - result.found_tokens


@pytest.mark.parametrize(("unit", "block_size", "hash_block_size"), [(4, 4, 4), (4, 2, 2), (4, 8, 4), (8, 8, 2)])
@exact
@given(data=st.data())
def test_id_traces(unit: int, block_size: int, hash_block_size: int, data: st.DataObject):
    trace = data.draw(id_traces(unit))
    assert_agrees(trace, data.draw(st.integers(2, 60)), block_size, hash_block_size, data.draw(tier_lists()))


@exact
@given(trace=token_traces(), num_blocks=st.integers(2, 40), tiers=tier_lists())
def test_token_traces(trace: Trace, num_blocks: int, tiers: list[tuple[int, str]]):
    assert_agrees(trace, num_blocks, 4, 4, tiers)


@pytest.mark.parametrize("store", STORES)
def test_the_built_in_workload(store: str):
    assert_agrees(synthetic_trace(), 600, 64, 64, [(200, store), (1_000, "eviction"), (4_000, "completion")])


# -- what a tier can do ----------------------------------------------------------------------------------


@exact
@given(trace=id_traces(4), num_blocks=st.integers(2, 60))
def test_an_endless_tier_is_as_good_as_an_endless_pool(trace: Trace, num_blocks: int):
    tiered = run(trace, num_blocks, tier("host", ENDLESS))
    fitting = [one for one in trace.requests if -(-(one.num_prompt_tokens + one.num_output_tokens) // 4) < num_blocks]
    if not fitting:
        assert tiered.found_tokens == 0
        return
    assert tiered.found_tokens == run(trace_of(*fitting), ENDLESS).hit_tokens


@exact
@given(
    trace=id_traces(4), num_blocks=st.integers(2, 60), tiers=tier_lists(), orders=st.lists(st.sampled_from(TierOrder))
)
def test_a_tier_takes_nothing_away(
    trace: Trace, num_blocks: int, tiers: list[tuple[int, str]], orders: list[TierOrder]
):
    plain = run(trace, num_blocks)
    specs = [tier(f"t{number}", *one) for number, one in enumerate(tiers)]
    specs = [replace(one, order=order) for one, order in zip(specs, orders + [TierOrder.LRU] * 3, strict=False)]
    tiered = run(trace, num_blocks, *specs)
    same = ("hit_tokens", "evicted_blocks", "evicted_unused_blocks", "peak_held_blocks", "reusable_tokens", "groups")
    assert {name: getattr(tiered, name) for name in same} == {name: getattr(plain, name) for name in same}
    assert plain.hit_tokens <= tiered.found_tokens <= tiered.reusable_tokens


def test_what_moves_and_what_time_it_takes():
    """A pool of 4 blocks, prompts of 3 full blocks and one token: each evicts the other from the GPU."""
    one, other = ids_request([0, 1, 2, 3], 13), ids_request([4, 5, 6, 7], 13)
    trace = trace_of(one, other, one, other, one)
    specs = (tier("host", 2), tier("disk", 6))
    result = run(trace, 5, *specs)
    assert (result.hit_tokens, result.found_tokens, result.reusable_tokens) == (0, 36, 36)
    host, disk = tiers_of(result)
    # Host has the two pages in front of the last prompt, and none of the one that comes.
    assert (host.hit_tokens, host.loaded_pages, host.stored_pages) == (0, 0, 6)
    assert (host.promoted_pages, host.distinct_pages, host.evicted_pages, host.evicted_unread_pages) == (9, 6, 13, 13)
    assert (disk.hit_tokens, disk.loaded_pages, disk.stored_pages, disk.evicted_pages) == (36, 9, 6, 0)
    assert (host.written_bytes, host.write_amplification, host.written_per_loaded) == (15 * PAGE, 2.5, None)
    assert (disk.write_amplification, disk.written_per_loaded) == (1.0, 6 / 9)
    assert result.tiers is not None
    assert (result.tiers.load_s, result.tiers.recompute_s, result.tiers.saved_s) == (None, None, None)
    speeds = (replace(specs[0], read_bytes_per_s=1e9), replace(specs[1], read_bytes_per_s=9.0))
    timed = replay_full(
        DigestedTrace(trace, 4), num_blocks=5, block_size=4, tiers=stack(*speeds, prefill_tokens_per_s=18.0)
    )
    assert timed.tiers is not None
    assert (timed.tiers.load_s, timed.tiers.recompute_s, timed.tiers.saved_s) == (7.0, 2.0, -5.0)
    assert any("5.000 s are lost by loading" in sentence for sentence in verdict([timed]))
    assert not any("tokens/s" in sentence or " s at" in sentence for sentence in verdict([result]))


def test_what_is_found_in_a_tier_is_no_loss():
    one, other = ids_request([0, 1, 2, 3], 13), ids_request([4, 5, 6, 7], 13)
    trace = trace_of(one, other, one)
    assert [loss.reason for loss in run(trace, 5).losses] == [LossReason.EVICTED]
    tiered = run(trace, 5, tier("host", 6))
    assert tiered.losses == ()
    assert tiered.shortened_hits == {}
    assert not any("computed again" in sentence for sentence in verdict([tiered]))
    # With room for the page in front alone, the others are lost.
    small = run(trace, 5, tier("host", 1, "eviction"))
    assert [(loss.reason, loss.tokens) for loss in small.losses] == [(LossReason.EVICTED, 8)]
    assert tiers_of(small)[0].hit_tokens == 4


def test_frequent_pages_outlast_a_scan_in_an_arc_tier():
    chat = ids_request([0, 1, 2, 3], 13)
    scan = [ids_request([10 * n, 10 * n + 1, 10 * n + 2, 10 * n + 3], 13) for n in range(1, 9)]
    trace = trace_of(chat, scan[0], chat, *scan[1:], chat)
    assert tiers_of(run(trace, 5, tier("host", 8)))[0].hit_tokens == 12
    assert tiers_of(run(trace, 5, tier("host", 8, order="arc")))[0].hit_tokens == 24


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: stack(), "there is none"),
        (lambda: stack(tier("a", 1), tier("a", 1)), "each another: a, a"),
        (lambda: stack(tier("a", 0)), "tier a: 6 bytes do not hold one page of 7 bytes"),
        (lambda: TierStack(tiers=(tier("a", 1),), page_bytes=(0,)), "at least 1 byte, not 0"),
        (lambda: stack(tier("a", 1), prefill_tokens_per_s=0.0), "more than 0 tokens/s, not 0.0"),
        (lambda: replace(tier("a", 1), read_bytes_per_s=0.0), "more than 0 bytes/s, not 0.0"),
        (lambda: replace(tier("a", 1), num_hits=1), "goes with storing by hits only"),
    ],
)
def test_what_no_stack_can_be(build: Any, says: str):
    with pytest.raises(ReplayError, match=says):
        build()


def test_as_many_sizes_of_pages_as_groups():
    pages = TierStack(tiers=(tier("a", 1),), page_bytes=(PAGE, PAGE))
    with pytest.raises(ReplayError, match="1 groups need as many page_bytes, not 2"):
        replay_full(DigestedTrace(trace_of(ids_request([0], 4)), 4), num_blocks=5, block_size=4, tiers=pages)
