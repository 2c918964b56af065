"""The common hit of several groups, against the definition: the greatest boundary that every group can resume at."""

from __future__ import annotations

import math
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from blockpool.managers import (
    Coordinator,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SingleTypeKVCacheManager,
    SlidingWindowSpec,
    make_manager,
)
from blockpool.pool import BlockPool
from tests.managers.rules import Rule, chain, chunked, ends_needed, full, reference, state, step_of, up, window
from tests.sizes import property_settings

UNIT = 2
NUM_DIGESTS = 24


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    size = draw(st.sampled_from([2, 4, 6]))
    kind = draw(st.sampled_from([full, window, chunked, reference, state]))
    if kind in (full, state):
        rule: Rule = kind(size)
    elif kind is chunked:
        rule = chunked(size, size * draw(st.integers(1, 3)))
    else:
        rule = kind(size, draw(st.integers(1, 14)))
    rule.margin = kind is not state and draw(st.integers(0, 3)) == 0
    return rule


def common_alignment(all_rules: list[Rule]) -> int:
    if all(rule.partial or rule.size == UNIT for rule in all_rules):
        return UNIT
    return math.lcm(*[rule.size for rule in all_rules])


def usable_alone(rule: Rule, cached: Callable[[int], int], boundary: int, num_hashed: int, alignment: int) -> bool:
    step = step_of(rule, alignment, UNIT)
    if boundary % step or boundary + (min(step, rule.size) if rule.margin else 0) > num_hashed:
        return False
    return all(cached(end) for end in ends_needed(rule, boundary, step).values())


def longest_alone(
    rule: Rule, cached: Callable[[int], int], boundaries: range, num_hashed: int, alignment: int
) -> int:
    return next((b for b in boundaries if usable_alone(rule, cached, b, num_hashed, alignment)), 0)


@property_settings(600)
@given(data=st.data())
def test_the_common_hit_is_the_greatest_boundary_of_all_groups(data: st.DataObject) -> None:
    group_rules = data.draw(st.lists(rules(), min_size=1, max_size=5))
    digests = chain(NUM_DIGESTS)
    pools = [BlockPool(400, hash_block_size=UNIT) for _ in range(data.draw(st.integers(1, 2)))]
    managers: list[SingleTypeKVCacheManager] = []
    caches: list[Callable[[int], int]] = []
    for group, rule in enumerate(group_rules):
        pool = pools[group % len(pools)]
        spec = KVCacheGroupSpec((f"layer{group}",), rule.spec, draft_margin=rule.margin)
        managers.append(make_manager(pool, group, spec))
        missing = data.draw(st.sets(st.integers(0, NUM_DIGESTS - 1), max_size=8))
        for digest in sorted(set(range(NUM_DIGESTS)) - missing):
            (block,) = pool.get_new_blocks(1)
            pool.cache_partial_block(block, digests[32 * digest :][:32], (digest + 1) * UNIT, group, rule.size)

        def cached(end: int, pool: BlockPool = pool, group: int = group) -> int:
            found = pool.get_cached_block(digests[32 * (end // UNIT - 1) :][:32], [group])
            return found[0] if found else 0

        caches.append(cached)
    coordinator = Coordinator(managers)
    alignment = common_alignment(group_rules)
    assert coordinator.alignment == alignment
    max_length = data.draw(st.integers(0, NUM_DIGESTS * UNIT + 3))
    versions = [pool.version for pool in pools]
    hit = coordinator.longest_common_hit(digests, max_length)

    boundaries = range(min(max_length, NUM_DIGESTS * UNIT), 0, -1)
    alone = [
        longest_alone(rule, cached, boundaries, NUM_DIGESTS * UNIT, alignment)
        for rule, cached in zip(group_rules, caches, strict=True)
    ]

    def usable(group: int, boundary: int) -> bool:
        rule = group_rules[group]
        if rule.whole:  # what it can resume from is a prefix
            return boundary <= alone[group] and boundary % step_of(rule, alignment, UNIT) == 0
        return usable_alone(rule, caches[group], boundary, NUM_DIGESTS * UNIT, alignment)

    expected = next((b for b in boundaries if all(usable(group, b) for group in range(len(group_rules)))), 0)
    assert hit.num_tokens == expected
    for rule, cached, found, manager, own in zip(group_rules, caches, hit.groups, managers, alone, strict=True):
        assert found.num_tokens == expected
        ends = ends_needed(rule, own if rule.whole else expected, step_of(rule, alignment, UNIT)) if expected else {}
        shown = rule.needed(expected) if expected else set()
        assert found.block_ids() == [cached(ends[p]) if p in shown else 0 for p in range(up(expected, rule.size))]
        assert manager.holds_still(found)
    for length, own in zip(hit.own_lengths, alone, strict=True):
        assert length is None or length == own
    assert hit.junction == max([0, *[n for n in hit.own_lengths if n is not None and n > expected]])
    if hit.vetoed_by is None:
        assert expected == max_length // alignment * alignment
    assert [pool.version for pool in pools] == versions  # a lookup changes nothing


def coordinator_of(pool: BlockPool, *specs: KVCacheSpec) -> Coordinator:
    return Coordinator([make_manager(pool, at, KVCacheGroupSpec((str(at),), spec)) for at, spec in enumerate(specs)])


def test_the_group_that_vetoed_is_named_and_what_others_know_is_the_junction() -> None:
    pool = BlockPool(50, hash_block_size=4)
    coordinator = coordinator_of(pool, FullAttentionSpec(4), SlidingWindowSpec(4, 5))
    digests = chain(6)
    table = pool.get_new_blocks(6)
    pool.cache_full_blocks(table, digests, 0, 6, 4, 0)
    others = pool.get_new_blocks(6)
    pool.cache_full_blocks(others, digests, 0, 3, 4, 1)
    hit = coordinator.longest_common_hit(digests, 24)
    assert (hit.num_tokens, hit.vetoed_by, hit.own_lengths, hit.junction) == (12, 1, (24, None), 24)
    assert [group.block_ids() for group in hit.groups] == [table[:3], [0, 0, others[2]]]


def test_without_a_group_that_is_cached_there_is_no_hit() -> None:
    pool = BlockPool(10, hash_block_size=4)
    hit = coordinator_of(pool, MambaSpec(4)).longest_common_hit(chain(4), 16)
    assert (hit.num_tokens, hit.vetoed_by, hit.groups[0].block_ids()) == (0, None, [])


def test_what_is_known_of_a_block_serves_a_shorter_boundary_inside_it() -> None:
    pool = BlockPool(50, hash_block_size=2)
    digests = chain(6)
    coordinator = Coordinator(
        [
            make_manager(pool, 0, KVCacheGroupSpec(("full",), FullAttentionSpec(2))),
            make_manager(pool, 1, KVCacheGroupSpec(("draft",), FullAttentionSpec(4), draft_margin=True)),
        ]
    )
    for group, size in ((0, 2), (1, 4)):
        for at in (0, 1, 3, 4, 5):  # nobody knows the boundary at 6 tokens
            (block,) = pool.get_new_blocks(1)
            pool.cache_partial_block(block, digests[32 * at :][:32], (at + 1) * 2, group, size)
    hit = coordinator.longest_common_hit(digests, 6)
    assert (hit.num_tokens, hit.own_lengths) == (4, (4, 6))
