"""Tiers below several groups: a request resumes where all of them can, and only what is still read is loaded."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpool.cache import Hit, KVCacheConfig, KVCacheManager, Request
from blockpool.hashing import BlockHashes
from blockpool.models import parse_groups
from blockpool.replay import DigestedTrace, LossReason, RunResult, hash_unit, replay, verdict
from blockpool.replay.below import Below
from blockpool.replay.expand import DIGEST_BYTES
from blockpool.replay.tiers import StoreWhen, TierOrder, TierSpec, TierStack
from blockpool.traces import Trace
from tests.sizes import property_settings

from .test_replay_groups import hybrids, unit_of
from .trace_makers import id_traces, ids_request, trace_of

exact = property_settings(100)
ENDLESS = 1 << 40
stores = st.sampled_from([(StoreWhen.COMPLETION, 0), (StoreWhen.EVICTION, 0), (StoreWhen.HITS, 1)])


def page_bytes(groups: str) -> tuple[int, ...]:
    """Another size for each group."""
    return tuple(10 + number for number in range(len(parse_groups(groups))))


def run(trace: Trace, groups: str, num_blocks: int, *tiers: TierSpec, chunk: int = 64) -> RunResult:
    specs = parse_groups(groups)
    config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_groups=specs,
        hash_block_size=hash_unit(trace, specs),
        partial_hits=False,
    )
    stack = TierStack(tiers=tiers, page_bytes=page_bytes(groups)) if tiers else None
    return replay(DigestedTrace(trace, config.unit), config, max_num_batched_tokens=chunk, tiers=stack)


def read_positions(kind: str, boundary: int) -> range:
    """The blocks that a request which goes on at `boundary` reads of a group; straight from what the kind means."""
    name, _, numbers = kind.partition("=")
    if name in ("window", "chunk", "reference"):
        length, size = map(int, numbers.split(":"))
        first_token = {
            "window": max(0, boundary - (length - 1)),  # the next token reads itself and length - 1 before
            "chunk": boundary - boundary % length,
        }.get(name)
        assert first_token is not None, kind
        return range(first_token // size, boundary // size) if first_token < boundary else range(0)
    name, _, number = kind.partition(":")
    size = int(number)
    return range(boundary // size - 1, boundary // size) if name == "mamba" else range(boundary // size)


KINDS = (
    "full:4",
    "full:8",
    "window=9:4",
    "window=3:4",
    "window=20:8",
    "chunk=16:4",
    "mamba:4",
    "mamba:8",
    "mamba:16",
)
# Two that each take away what the other could resume at, more often than not.
AT_ODDS = ("window=9:4,mamba:4", "mamba:8,window=20:8", "window=9:4,mamba:4,chunk=16:4")
some_groups = st.sampled_from(AT_ODDS) | st.lists(st.sampled_from(KINDS), min_size=1, max_size=3).map(",".join)


class Watched:
    """Every lookup of a replay beside one that tries all boundaries; and what would have to be loaded then."""

    def __init__(self, groups: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kinds = groups.split(",")
        self.sizes = [int(kind.rpartition(":")[2]) for kind in self.kinds]
        self.unit = unit_of(groups)
        self.num_loaded: Counter[str] = Counter()
        self.num_further = 0
        look_up, ended = Below.look_up, Below.ended

        def watched(below: Below, hit: Hit, chain: bytes, most: int) -> int:
            reach = look_up(below, hit, chain, most)
            assert reach == self.furthest(below, hit.num_tokens, chain, most)
            self.num_further += reach > hit.num_tokens
            return reach

        def watched_end(below: Below, hit: Hit, chain: bytes, reach: int) -> None:
            if reach > hit.num_tokens:
                for _, key in self.pages(below, hit.num_tokens, chain, reach):
                    self.num_loaded[next(tier.spec.name for tier in below._tiers if key in tier.pages)] += 1
            ended(below, hit, chain, reach)

        monkeypatch.setattr(Below, "look_up", watched)
        monkeypatch.setattr(Below, "ended", watched_end)

    def pages(self, below: Below, start: int, chain: bytes, boundary: int) -> list[tuple[int, bytes]]:
        unit = below._manager.pool.hash_block_size
        keys = []
        for group, (kind, size) in enumerate(zip(self.kinds, self.sizes, strict=True)):
            for position in read_positions(kind, boundary):
                if position * size >= start:
                    end = (position + 1) * size // unit * DIGEST_BYTES
                    keys.append((group, chain[end - DIGEST_BYTES : end] + group.to_bytes(2, "big")))
        return keys

    def furthest(self, below: Below, start: int, chain: bytes, most: int) -> int:
        known = len(chain) // DIGEST_BYTES * below._manager.pool.hash_block_size
        there = {key for tier in below._tiers for key in tier.pages}
        boundaries = [
            boundary
            for boundary in range(self.unit, min(most, known) + 1, self.unit)
            if boundary > start and all(key in there for _, key in self.pages(below, start, chain, boundary))
        ]
        return max(boundaries, default=start)


@exact
@given(
    trace=id_traces(4),
    groups=some_groups,
    num_blocks=st.integers(4, 80),
    chunk=st.sampled_from([1, 5, 16, 64]),
    host=st.tuples(st.integers(1, 40), stores, st.sampled_from(TierOrder)),
    disk=st.tuples(st.integers(1, 200), stores, st.sampled_from(TierOrder)),
)
def test_a_lookup_finds_the_furthest_boundary(
    trace: Trace, groups: str, num_blocks: int, chunk: int, host: Any, disk: Any
):
    tiers = []
    for name, (capacity, (store, num_hits), order) in (("host", host), ("disk", disk)):
        tiers.append(TierSpec(name=name, capacity_bytes=capacity * 13, store=store, num_hits=num_hits, order=order))
    with pytest.MonkeyPatch.context() as monkeypatch:
        watched = Watched(groups, monkeypatch)
        result = run(trace, groups, num_blocks, *tiers, chunk=chunk)
    assert result.tiers is not None
    assert sum(loss.tokens for loss in result.losses) == result.reusable_tokens - result.found_tokens
    for one in result.tiers.tiers:
        assert one.loaded_pages == watched.num_loaded[one.name]
        assert one.stored_pages + one.promoted_pages == one.held_pages + one.evicted_pages
        assert one.distinct_pages <= one.stored_pages + one.promoted_pages
        assert 0 <= one.held_bytes <= one.capacity_bytes
        assert one.hit_tokens >= 0
    assert result.tiers.hit_tokens == 0 or watched.num_further > 0


@exact
@given(trace=id_traces(4), groups=hybrids(), num_blocks=st.integers(2, 120), chunk=st.sampled_from([5, 16, 64]))
def test_no_tier_finds_more_than_was_there(trace: Trace, groups: str, num_blocks: int, chunk: int):
    """Of all kinds; and losses add up."""
    tiered = run(trace, groups, num_blocks, TierSpec(name="host", capacity_bytes=ENDLESS), chunk=chunk)
    full = run(trace, f"full:{unit_of(groups)}", 5_000)
    assert tiered.found_tokens <= full.hit_tokens
    assert sum(loss.tokens for loss in tiered.losses) == tiered.reusable_tokens - tiered.found_tokens
    kinds = {loss.reason for loss in tiered.losses}
    assert LossReason.EVICTED not in kinds
    assert LossReason.CHECKPOINT_EVICTED not in kinds


def test_a_window_is_loaded_alone():
    """Prompts of 5 blocks of 4 and one token. Behind 20 tokens a window of 5 reads one block, a window of 6 two."""
    one, other = ids_request(range(6), 21), ids_request(range(10, 16), 21)
    host = TierSpec(name="host", capacity_bytes=ENDLESS)
    for window, pages in ((5, 1), (6, 2), (1, 0)):
        groups = f"full:4,window={window}:4"
        result = run(trace_of(one, other, one), groups, 13, host)
        assert result.tiers is not None
        (tier,) = result.tiers.tiers
        assert (result.hit_tokens, tier.hit_tokens) == (0, 20)
        assert (tier.loaded_pages, tier.loaded_bytes) == (5 + pages, 5 * 10 + pages * 11)


def test_what_is_part_on_the_gpu_and_part_in_a_tier():
    """The state is in the tier alone, and what it needs beside it is on the GPU alone: no load brings that."""
    found: set[LossReason] = set()
    for num_blocks in range(12, 40):
        requests = [ids_request([10 * n + at for at in range(5)], 17, 8) for n in range(4)]
        trace = trace_of(*requests, *requests)
        result = run(
            trace,
            "full:4,mamba:4",
            num_blocks,
            TierSpec(name="host", capacity_bytes=ENDLESS, store=StoreWhen.EVICTION),
            chunk=4,
        )
        found |= {loss.reason for loss in result.losses}
        assert sum(loss.tokens for loss in result.losses) == result.reusable_tokens - result.found_tokens
        if any(loss.reason is LossReason.APART for loss in result.losses):
            assert any("part on the GPU, part in tiers (" in sentence for sentence in verdict([result]))
    assert LossReason.APART in found


@pytest.mark.parametrize(("window_pages", "reach"), [((3, 4, 7, 8), 20), ((4, 7, 8), 0), ((6, 7, 8), 32)])
def test_a_group_is_asked_again_when_another_shortened_the_hit(window_pages: tuple[int, ...], reach: int):
    """The window can resume at 36; the state cannot, but at 32 and 20, where the window may lack a page."""
    specs = parse_groups("window=9:4,mamba:4")
    manager = KVCacheManager(
        KVCacheConfig(num_blocks=50, kv_cache_groups=specs, partial_hits=False), events="first_last"
    )
    below = Below(manager, TierStack(tiers=(TierSpec(name="host", capacity_bytes=ENDLESS),), page_bytes=(1, 1)))
    digests = [bytes([at]) * DIGEST_BYTES for at in range(1, 10)]
    chain = b"".join(digests)
    for group, positions in enumerate((window_pages, (4, 7))):
        for position in positions:
            below._tiers[0].store(digests[position] + group.to_bytes(2, "big"), 1)
    hashes = BlockHashes.from_digests(chain, digest_size=DIGEST_BYTES, hash_block_size=4)
    hit = manager.get_computed_blocks(Request("r", num_prompt_tokens=37, block_hashes=hashes))
    assert below.look_up(hit, chain, 36) == reach
