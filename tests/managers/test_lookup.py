"""Random kinds over random caches: lookups, masks and drops against trying everything."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpool.build_info import build_info
from blockpool.managers import (
    NOTHING_FOUND,
    GroupHit,
    RetentionPolicy,
    SingleTypeKVCacheManager,
    SlidingWindowSpec,
)
from blockpool.pool import BlockPool
from tests.managers.rules import (
    CACHEABLE,
    GROUP,
    Rule,
    chain,
    chunked,
    full,
    longest,
    reference,
    resumable,
    sink,
    state,
    step_of,
    up,
    window,
    worth,
)
from tests.sizes import property_settings

UNIT = 2
WIDTH = 32
DIGESTS = chain(64)


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    size = draw(st.sampled_from([2, 4, 6, 8]))
    make = draw(st.sampled_from(CACHEABLE))
    if make in (window, chunked, reference):
        rule = make(size, draw(st.integers(1, 5 * size)))  # type: ignore[call-arg]
    else:
        rule = make(size)  # type: ignore[call-arg]
    rule.margin = make is not state and draw(st.booleans())
    return rule


def alignments(rule: Rule) -> st.SearchStrategy[int]:
    return st.sampled_from([rule.size, rule.size, UNIT, 2 * rule.size, 3 * rule.size, 3, 8])


def cached_in(pool: BlockPool, end: int) -> int:
    at = (end // UNIT - 1) * WIDTH
    found = pool.get_cached_block(DIGESTS[at : at + WIDTH], [GROUP])
    return 0 if found is None else found[0]


def check_hit(manager: SingleTypeKVCacheManager, hit: GroupHit, boundary: int, blocks: list[int]) -> None:
    assert (hit.num_tokens, hit.block_ids()) == (boundary, blocks)
    turns = [manager.pool.blocks[block].incarnation if block else 0 for block in blocks]
    assert list(hit.turns) == turns
    assert manager.holds_still(hit)
    assert manager.num_evictable(hit) == sum(
        1 for block in blocks if block and manager.pool.blocks[block].ref_cnt == 0
    )
    assert hit.first == next((at for at, block in enumerate(blocks) if block), len(blocks))


@given(st.data())
@property_settings(600)
def test_the_hit_is_the_greatest_boundary_whose_needs_are_cached(data: st.DataObject) -> None:
    rule = data.draw(rules())
    alignment = data.draw(alignments(rule))
    num_hashed = data.draw(st.integers(0, 20)) * UNIT
    pool = BlockPool(64, hash_block_size=UNIT)
    manager = rule.manager(pool)
    positions = num_hashed // rule.size
    table = pool.get_new_blocks(up(num_hashed, rule.size) + 1)
    # long runs, so that not only short hits are found
    missing = data.draw(st.sets(st.integers(0, max(positions, 1)), max_size=4))
    mask = [position not in missing for position in range(positions)]
    pool.cache_full_blocks(table, DIGESTS, 0, positions, rule.size, GROUP, mask)
    for end in data.draw(st.sets(st.integers(1, max(num_hashed // UNIT, 1)), max_size=3)):
        position = end * UNIT // rule.size
        if end * UNIT <= num_hashed and end * UNIT % rule.size and not pool.get_block_hashes(table[position]):
            at = (end - 1) * WIDTH
            pool.cache_partial_block(table[position], DIGESTS[at : at + WIDTH], end * UNIT, GROUP, rule.size)
    pool.free_blocks(table[:: data.draw(st.sampled_from([-1, -2]))])
    pool.get_new_blocks(data.draw(st.integers(0, pool.get_num_free_blocks())))

    max_length = data.draw(st.integers(0, num_hashed + 2 * rule.size))
    digests = DIGESTS[: num_hashed // UNIT * WIDTH]
    version = pool.version
    hit = manager.find_longest_hit(digests, max_length, alignment)
    expected = longest(rule, lambda end: cached_in(pool, end), num_hashed, max_length, alignment, UNIT)
    check_hit(manager, hit, *expected)
    assert pool.version == version
    if hit is not NOTHING_FOUND:
        again = manager.find_longest_hit(digests, max_length, alignment)
        assert (again.num_tokens, again.block_ids()) == expected
        if manager.reads_whole_prefix():
            shorter = hit.cut(data.draw(st.integers(1, hit.num_tokens)), rule.size)
            assert shorter.block_ids() == hit.block_ids()[: len(shorter)]
            assert len(shorter) == -(-shorter.num_tokens // rule.size)
            assert manager.holds_still(shorter)


def small_rules() -> list[Rule]:
    """Every kind with blocks of 4, widths from nothing to more than there is, with and without margin."""
    out = []
    for margin in (False, True):
        made = [full(4), sink(4), reference(4, 5), *(window(4, width) for width in (1, 2, 5, 6, 9, 10, 30))]
        made += [chunked(4, chunk) for chunk in (1, 4, 6, 8, 12, 30)] + ([] if margin else [state(4)])
        for rule in made:
            rule.margin = margin
            out.append(rule)
    return out


def test_every_lookup_in_every_small_cache() -> None:
    """Each subset of 8 boundaries is cached, in blocks of two."""
    rules = small_rules()
    digests = DIGESTS[: 8 * WIDTH]
    for subset in range(256):
        pool = BlockPool(12, hash_block_size=UNIT)
        cached = {0: 0}
        for at in range(8):
            end = (at + 1) * UNIT
            cached[end] = 0
            if subset >> at & 1:
                cached[end] = pool.get_new_blocks(1)[0]
                pool.cache_partial_block(cached[end], digests[at * WIDTH : (at + 1) * WIDTH], end, GROUP, 4)
        for rule in rules:
            manager = rule.manager(BlockPool(12, hash_block_size=UNIT))
            manager.pool = pool
            for alignment in (2, 4, 8):
                for most in (16, 13):
                    hit = manager.find_longest_hit(digests, most, alignment)
                    expected = longest(rule, cached.__getitem__, 16, most, alignment, UNIT)
                    assert (hit.num_tokens, hit.block_ids()) == expected, (rule, alignment, most, cached)


@pytest.mark.skipif(build_info().compiled["blockpool.pool.index"], reason="compiled calls cannot be watched")
def test_no_block_is_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []

    def watched(digests: bytes, offset: int, group: int, mixed: int) -> int:
        looked_at.append(offset // WIDTH)
        return find(digests, offset, group, mixed)

    digests = DIGESTS[: 32 * WIDTH]
    for rule in small_rules():
        for seed in range(20):
            pool = BlockPool(60, hash_block_size=UNIT)
            manager = rule.manager(pool)
            rng = random.Random(seed)
            mask = [rng.random() < seed / 20 for _ in range(16)]
            pool.cache_full_blocks(pool.get_new_blocks(16), digests, 0, 16, 4, GROUP, mask)
            find = pool.index.find_mixed
            monkeypatch.setattr(pool.index, "find_mixed", watched)
            for alignment in (2, 4, 8):
                looked_at.clear()
                hit = manager.find_longest_hit(digests, 64, alignment)
                assert len(set(looked_at)) == len(looked_at)
                if rule.whole and alignment == 4:
                    assert len(looked_at) <= len(hit) + 1 + rule.margin  # up to the first miss
            if seed == 0 and isinstance(rule.spec, SlidingWindowSpec):
                per_window = up(rule.spec.sliding_window - 1, 4) + rule.margin
                assert len(looked_at) <= 16 // max(per_window, 1) + 1  # one block per window


def test_every_small_mask() -> None:
    """Whole, and block by block as decoding fills them."""
    for rule in small_rules():
        manager = rule.manager(BlockPool(12, hash_block_size=UNIT))
        for alignment in (2, 4, 8, 12):
            for interval in (None, 0, alignment, 2 * alignment):
                policy = RetentionPolicy(alignment, interval)
                expected = worth(rule, policy, UNIT, [22], 0, 12)
                assert (manager.retained(0, 12, [22], policy) or [True] * 12) == expected, (rule, policy)
                for at in range(12):
                    assert (manager.retained(at, at + 1, [22], policy) or [True]) == expected[at : at + 1]


@st.composite
def policies(draw: st.DrawFn, alignment: int) -> RetentionPolicy:
    return RetentionPolicy(alignment, draw(st.sampled_from([None, 0, alignment, 2 * alignment, 4 * alignment])))


@given(st.data())
@property_settings(400)
def test_stored_is_what_promised_boundaries_need_and_those_are_hit_when_resent(data: st.DataObject) -> None:
    rule = data.draw(rules())
    alignment = data.draw(alignments(rule))
    policy = data.draw(policies(alignment))
    num_tokens = data.draw(st.integers(1, 60))
    pool = BlockPool(80, hash_block_size=UNIT)
    manager = rule.manager(pool)
    step = step_of(rule, alignment, UNIT)
    replay = manager.replay_boundary(num_tokens, alignment)
    named = [replay, *data.draw(st.lists(st.integers(0, num_tokens), max_size=2))]
    last = num_tokens // rule.size
    expected = worth(rule, policy, UNIT, named, 0, last)

    table = pool.get_new_blocks(last + 1)
    cuts = sorted({0, last, *data.draw(st.lists(st.integers(0, last), max_size=4))})
    for first, end in pairwise(cuts):
        mask = manager.retained(first, end, named, policy)
        assert (mask or [True] * (end - first)) == expected[first:end]
        pool.cache_full_blocks(table, DIGESTS, first, end, rule.size, GROUP, mask)
    if rule.partial and step % rule.size:
        for b in named:  # as the prompt's tail is
            end = b // step * step + (min(step, rule.size) if rule.margin else 0)
            position = end // rule.size
            if 0 < end <= num_tokens and end % rule.size and not pool.get_block_hashes(table[position]):
                pool.cache_partial_block(
                    table[position], DIGESTS[(end // UNIT - 1) * WIDTH :][:WIDTH], end, GROUP, rule.size
                )
    num_hashed = num_tokens // UNIT * UNIT
    digests = DIGESTS[: num_hashed // UNIT * WIDTH]
    margin = min(step, rule.size) if rule.margin else 0
    for boundary in resumable(policy, step, named, num_tokens):
        if boundary + margin > num_hashed or (step % rule.size and boundary // rule.size * rule.size != boundary):
            continue  # ends in a block that is not full, of which only the prompt's tail is kept
        if step % rule.size and rule.margin:
            continue
        hit = manager.find_longest_hit(digests, boundary, alignment)
        assert hit.num_tokens == boundary
    if step % rule.size == 0:
        assert manager.find_longest_hit(digests, num_tokens - 1, alignment).num_tokens >= replay
        assert replay % step == 0
        assert replay + step > min(num_tokens - 1, num_hashed - margin)


@given(st.data())
@property_settings(300)
def test_a_table_drops_what_no_token_reads_each_once_and_grows_by_what_was_counted(data: st.DataObject) -> None:
    make = data.draw(st.sampled_from([full, window, chunked, reference, state]))
    size = data.draw(st.sampled_from([2, 4, 6]))
    wide = data.draw(st.integers(1, 4 * size))
    drafts = data.draw(st.integers(0, 3))
    rule = (
        make(size, wide)
        if make in (window, chunked, reference)
        else make(size, drafts)
        if make is state
        else make(size)
    )  # type: ignore[call-arg, operator]
    pool = BlockPool(200, hash_block_size=UNIT)
    manager = rule.manager(pool)
    prompt = data.draw(st.integers(1, 40))
    manager.adopt("r", NOTHING_FOUND)
    computed = 0
    most_in_flight = 0
    given_back: list[int] = []
    cap = 0
    for new in data.draw(st.lists(st.integers(1, 15), min_size=1, max_size=12)):
        settled = computed  # the step before has run
        expected = rule.dropped(settled, prompt)
        before = manager.block_ids("r")
        gone = [before[p] for p in sorted(expected, reverse=True) if p < len(before) and before[p]]
        assert list(manager.droppable("r", settled, prompt)) == gone
        free = pool.get_num_free_blocks()
        assert list(manager.drop("r", settled, prompt)) == gone
        assert pool.get_num_free_blocks() == free + len(gone)
        if gone:
            assert pool.free_block_queue.get_all_free_blocks()[: len(gone)] == gone
        assert list(manager.drop("r", settled, prompt)) == []
        given_back += gone
        table = [0 if p in expected else block for p, block in enumerate(before)]
        assert manager.block_ids("r") == table

        computed += new
        most_in_flight = max(most_in_flight, new)
        counted = manager.num_new_blocks("r", computed, None, settled, prompt)
        taken = pool.get_num_free_blocks()
        added = manager.grow("r", computed, settled, prompt)
        assert taken - pool.get_num_free_blocks() == counted
        after = manager.block_ids("r")
        assert after[len(table) :] == list(added)
        assert len(after) == manager.table_length(computed, prompt)
        if make is not state:
            assert after[: len(table)] == table  # append-only
            assert all(added)
        held = [block for block in after if block]
        assert len(set(held)) == len(held)
        cap = manager.most_blocks(1000, most_in_flight, prompt) or len(after)
        assert len(held) <= cap
        if make is state:
            running = up(computed, size) - 1
            assert all(after[running:])
            assert len(after) - running == 1 + drafts
            assert settled == 0 or after[(settled - 1) // size]  # the state that this step starts from
        else:
            assert all(after[p] for p in range(settled // size, len(after)))
    pool.free_vec(manager.tables.pop("r").deepest_first(), None)
    assert pool.get_num_free_blocks() == 199
    assert pool.audit() == []
