"""The table of kinds, row by row, and the details that are easy to get wrong."""

from __future__ import annotations

import pytest

from blockpool.managers import (
    NOTHING_FOUND,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    GroupHit,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    ReferenceWindowSpec,
    RetentionPolicy,
    SingleTypeKVCacheManager,
    SlidingWindowSpec,
    make_manager,
)
from blockpool.managers.base import offer_blocks
from blockpool.pool import BlockPool
from tests.managers.rules import chain

WIDTH = 32
FULL = FullAttentionSpec(4)
STATE = MambaSpec(4, 0, "align")


def manager_of(
    spec: KVCacheSpec, pool: BlockPool | None = None, group_id: int = 0, *, draft_margin: bool = False
) -> SingleTypeKVCacheManager:
    pool = pool or BlockPool(60, hash_block_size=4)
    return make_manager(pool, group_id, KVCacheGroupSpec(("layer",), spec, draft_margin=draft_margin))


def start(manager: SingleTypeKVCacheManager, num_tokens: int, request_id: str = "r") -> list[int]:
    """A request without a hit, with room for so many tokens."""
    manager.adopt(request_id, NOTHING_FOUND)
    manager.grow(request_id, num_tokens)
    return manager.block_ids(request_id)


def store(manager: SingleTypeKVCacheManager, num_tokens: int, digests: bytes, request_id: str = "r") -> None:
    span = manager.unregistered(request_id, num_tokens, len(digests) // WIDTH)
    manager.register(request_id, span.start, span.stop, digests, 0, None)


def free(manager: SingleTypeKVCacheManager, request_id: str = "r") -> None:
    manager.pool.free_vec(manager.tables.pop(request_id).deepest_first(), None)


def digest(digests: bytes, end: int, unit: int) -> bytes:
    return digests[(end // unit - 1) * WIDTH : end // unit * WIDTH]


# -- the table -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "needed", "skipped"),
    [
        (FULL, {0: [], 4: [0], 12: [0, 1, 2]}, {0: 0, 100: 0}),
        (SlidingWindowSpec(4, 8), {4: [0], 8: [0, 1], 16: [2, 3]}, {0: 0, 7: 0, 8: 1, 20: 13}),
        (SlidingWindowSpec(4, 9), {16: [2, 3]}, {20: 12}),
        (SlidingWindowSpec(4, 10), {16: [1, 2, 3]}, {20: 11}),
        (SlidingWindowSpec(4, 1), {16: []}, {20: 20}),
        (ChunkedLocalAttentionSpec(4, 8), {4: [0], 8: [], 12: [2], 16: []}, {7: 0, 8: 8, 15: 8, 16: 16}),
        (ChunkedLocalAttentionSpec(4, 6), {8: [1], 12: [], 16: [3], 20: [4]}, {8: 6, 12: 12}),
        (ReferenceWindowSpec(4, 4), {12: [0, 1, 2]}, {100: 0}),
        (STATE, {4: [0], 8: [1], 16: [3]}, {0: 0, 1: 0, 16: 15}),
        (CircularBufferSpec(4), {16: []}, {16: 0}),
        (CrossAttentionSpec(4), {16: []}, {16: 0}),
    ],
)
def test_what_a_boundary_needs_and_the_next_token_no_longer_reads(
    spec: KVCacheSpec, needed: dict[int, list[int]], skipped: dict[int, int]
) -> None:
    manager = manager_of(spec)
    assert {boundary: list(manager.needed(boundary)) for boundary in needed} == needed
    assert {count: manager.num_skipped_tokens(count) for count in skipped} == skipped


def test_blocks_held() -> None:
    for spec in (FULL, SlidingWindowSpec(4, 9), ChunkedLocalAttentionSpec(4, 8), ReferenceWindowSpec(4, 9)):
        assert [manager_of(spec).num_blocks(n) for n in (0, 1, 4, 5, 17)] == [0, 1, 1, 2, 5]
    assert [manager_of(CircularBufferSpec(4)).num_blocks(n) for n in (1, 1000)] == [1, 1]
    cross = manager_of(CrossAttentionSpec(4))
    assert [cross.num_blocks(1000, 0, encoder) for encoder in (0, 4, 9)] == [0, 1, 3]
    for mode in ("none", "align"):
        assert manager_of(MambaSpec(4, 2, mode)).num_blocks(1000) == 3


def test_what_recycling_saves() -> None:
    """max_model_len 100, 16 tokens in flight."""

    def cap(spec: KVCacheSpec, prompt: int = 0) -> int | None:
        return manager_of(spec).most_blocks(100, 16, prompt)

    assert cap(FULL) is None
    assert cap(CrossAttentionSpec(4)) is None
    assert cap(SlidingWindowSpec(4, 9)) == (8 + 16) // 4 + 1
    assert cap(SlidingWindowSpec(4, 10)) == 7 + 1
    assert cap(ChunkedLocalAttentionSpec(4, 8)) == 6 + 1
    assert cap(SlidingWindowSpec(4, 1000)) == 25  # never more than a whole request
    assert cap(ReferenceWindowSpec(4, 8), 10) == 3 + 6 + 1
    assert cap(CircularBufferSpec(4)) == 1
    assert cap(MambaSpec(4, 2)) == 3
    assert cap(MambaSpec(4, 2, "align")) == 4


# -- hits ------------------------------------------------------------------------------------------------


def test_a_hit_shows_null_where_nothing_is_needed() -> None:
    manager = manager_of(SlidingWindowSpec(4, 8))
    digests = chain(5)
    table = start(manager, 20)
    store(manager, 20, digests)
    hit = manager.find_longest_hit(digests, 19, 4)
    assert (hit.num_tokens, hit.block_ids()) == (16, [0, 0, *table[2:4]])


def test_a_window_is_searched_from_the_right() -> None:
    manager = manager_of(SlidingWindowSpec(4, 8))
    digests = chain(8)
    table = start(manager, 32)
    store(manager, 32, digests)
    manager.pool.evict_blocks([table[5]])
    assert manager.find_longest_hit(digests, 32, 4).block_ids() == [0] * 6 + table[6:8]
    manager.pool.evict_blocks([table[7]])
    assert manager.find_longest_hit(digests, 32, 4).block_ids() == [0] * 3 + table[3:5]
    manager.pool.evict_blocks([table[4], table[2]])
    assert manager.find_longest_hit(digests, 32, 4).block_ids() == table[:2]  # a true prefix is as good
    manager.pool.evict_blocks([table[0]])
    assert manager.find_longest_hit(digests, 32, 4) is NOTHING_FOUND


def test_a_chunk_start_needs_nothing_cached() -> None:
    manager = manager_of(ChunkedLocalAttentionSpec(4, 8))
    hit = manager.find_longest_hit(chain(7), 27, 4)
    assert (hit.num_tokens, hit.block_ids()) == (24, [0] * 6)
    assert manager.num_evictable(hit) == 0
    assert manager.holds_still(hit)
    manager.adopt("r", hit)
    assert manager.num_new_blocks("other", 28, hit, 24) == 1


def test_only_the_newest_checkpoint_of_a_state_counts() -> None:
    manager = manager_of(STATE)
    digests = chain(8)
    start(manager, 8)
    store(manager, 8, digests)
    checkpoint = manager.block_ids("r")[1]
    manager.grow("r", 23, 8)
    store(manager, 23, digests)
    hit = manager.find_longest_hit(digests, 31, 4)
    assert (hit.num_tokens, hit.block_ids()) == (8, [0, checkpoint])


def test_hits_are_multiples_of_the_alignment() -> None:
    for spec, blocks in ((FULL, [1, 2, 3, 4]), (SlidingWindowSpec(4, 5), [0, 0, 0, 4])):
        manager = manager_of(spec)
        digests = chain(7)
        start(manager, 28)
        store(manager, 28, digests)
        hit = manager.find_longest_hit(digests, 27, 16)
        assert (hit.num_tokens, hit.block_ids()) == (16, blocks)


def test_groups_without_prefixes_find_and_register_nothing() -> None:
    for spec in (CircularBufferSpec(4), CrossAttentionSpec(4), MambaSpec(4, 0, "none")):
        manager = manager_of(spec)
        manager.adopt("r", NOTHING_FOUND)
        manager.grow("r", 16, 0, 0, 8)
        assert not manager.unregistered("r", 16, 4)
        assert manager.is_registered("r", 16)
        assert manager.find_longest_hit(chain(4), 16, 4) is NOTHING_FOUND
        assert manager.partial_boundary("r", 16, 15) == 0
        assert list(manager.drop("r", 16)) == []


def test_a_hit_that_lost_a_block_holds_no_longer() -> None:
    manager = manager_of(SlidingWindowSpec(4, 8))
    digests = chain(4)
    table = start(manager, 16)
    store(manager, 16, digests)
    hit = manager.find_longest_hit(digests, 16, 4)
    assert manager.num_evictable(hit) == 0
    free(manager)
    assert manager.num_evictable(hit) == 2
    by_hand = GroupHit(hit.blocks, hit.turns, hit.num_tokens)  # does not say where the nulls end
    assert manager.num_evictable(by_hand) == 2
    manager.pool.evict_blocks(table[:2])  # null there: not part of it
    assert manager.holds_still(hit)
    assert manager.holds_still(by_hand)
    manager.pool.evict_blocks([table[3]])
    assert not manager.holds_still(hit)


# -- the draft margin ----------------------------------------------------------------------------------


def test_the_margin_needs_one_unit_behind_the_boundary() -> None:
    for spec, blocks in ((FULL, [1, 2, 3]), (SlidingWindowSpec(4, 5), [0, 0, 3])):
        manager = manager_of(spec, draft_margin=True)
        digests = chain(5)
        table = start(manager, 20)
        store(manager, 16, digests)
        hit = manager.find_longest_hit(digests, 19, 4)
        assert (hit.num_tokens, hit.block_ids()) == (12, blocks)
        assert manager.find_longest_hit(digests, 12, 4).num_tokens == 12  # the margin lies beyond max_length
        assert manager.find_longest_hit(digests[: 3 * WIDTH], 12, 4).num_tokens == 8  # but not beyond the hashes
        manager.pool.evict_blocks([table[3]])
        assert manager.find_longest_hit(digests, 19, 4).num_tokens == 8


def test_the_margin_is_applied_once_however_often_the_groups_agree() -> None:
    """S6: full and window, a lookup that goes round until nothing changes."""

    def common(managers: list[SingleTypeKVCacheManager], digests: bytes, most: int) -> tuple[int, list[GroupHit]]:
        length = -1
        hits: list[GroupHit] = []
        while length != most:
            length = most
            hits = []
            for manager in managers:
                hits.append(manager.find_longest_hit(digests, most, 2))
                most = hits[-1].num_tokens
        return length, hits

    for drafts, expected in ((False, 12), (True, 10)):
        for widths in ((4,), (4, 6)):
            pool = BlockPool(100, hash_block_size=2)
            specs = [FullAttentionSpec(2), *(SlidingWindowSpec(2, width) for width in widths)]
            managers = [manager_of(spec, pool, group, draft_margin=drafts) for group, spec in enumerate(specs)]
            digests = chain(7)
            for manager in managers:
                start(manager, 12)
                store(manager, 12, digests)
                free(manager)
            for _ in range(2):
                length, hits = common(managers, digests, 14)
                assert length == expected
                assert all(len(hit) == expected // 2 for hit in hits)
                assert [sum(map(bool, hit.block_ids())) for hit in hits] == [expected // 2, 2, 3][: len(hits)]
                assert all(hits[1].block_ids()[-2:])


def test_a_replay_leaves_room_for_the_margin() -> None:
    plain, drafting = manager_of(FULL), manager_of(FULL, draft_margin=True)
    assert [plain.replay_boundary(n, 4) for n in (1, 4, 5, 16, 17, 40)] == [0, 0, 4, 12, 16, 36]
    assert [drafting.replay_boundary(n, 4) for n in (1, 4, 5, 16, 17, 40)] == [0, 0, 0, 12, 12, 36]
    assert plain.replay_boundary(40, 16) == 32


# -- what is stored --------------------------------------------------------------------------------------


def mask(spec: KVCacheSpec, alignment: int, interval: int | None, boundary: int = 0, *, margin: bool = False) -> str:
    kept = manager_of(spec, draft_margin=margin).retained(0, 12, [boundary], RetentionPolicy(alignment, interval))
    return "all" if kept is None else "".join(".x"[keep] for keep in kept)


def test_masks_for_windows() -> None:
    """Blocks of 4, aligned to 16, 12 blocks: worked examples of vLLM 0.33."""
    assert mask(SlidingWindowSpec(4, 5), 16, None) == "...x...x...x"
    assert mask(SlidingWindowSpec(4, 9), 16, None) == "..xx..xx..xx"
    assert mask(SlidingWindowSpec(4, 17), 16, None) == "all"
    assert mask(SlidingWindowSpec(4, 5), 16, None, margin=True) == "...xx..xx..x"
    assert mask(SlidingWindowSpec(4, 9), 16, None, margin=True) == "..xxx.xxx.xx"
    assert mask(SlidingWindowSpec(4, 9), 16, 0, 37) == "......xx...."
    assert mask(SlidingWindowSpec(4, 9), 16, 32, 37) == "......xx...."
    assert mask(SlidingWindowSpec(4, 9), 16, 32) == "......xx...."
    assert mask(SlidingWindowSpec(4, 5), 4, None) == "all"


def test_masks_for_states_and_chunks() -> None:
    assert mask(STATE, 4, 0, 37) == "........x..."
    assert mask(STATE, 4, 16, 37) == "...x...xx..x"
    assert mask(STATE, 4, None) == "all"
    assert mask(ChunkedLocalAttentionSpec(4, 16), 4, None) == "xxx.xxx.xxx."  # the last is needed nowhere
    assert mask(ChunkedLocalAttentionSpec(4, 16), 8, None) == "xx..xx..xx.."
    assert mask(ChunkedLocalAttentionSpec(4, 16), 16, 0, 24) == "............"


def test_kinds_that_read_the_whole_prefix_keep_all_of_it() -> None:
    for spec in (FULL, ReferenceWindowSpec(4, 5)):
        assert mask(spec, 16, 0) == "all"


def test_a_prompt_through_two_groups_step_by_step() -> None:
    """Full and window 5, blocks of 4, replay only: 40 tokens in chunks of 16 and 24, a worked run of vLLM 0.33."""
    pool = BlockPool(40, hash_block_size=4)
    full, window = manager_of(FULL, pool, 0), manager_of(SlidingWindowSpec(4, 5), pool, 1)
    digests = chain(10)
    policy = RetentionPolicy(4, 0)
    replay = full.replay_boundary(40, 4)

    for manager in (full, window):
        manager.adopt("r", NOTHING_FOUND)
    computed = 0
    for chunk in (16, 24):
        dropped = list(window.drop("r", computed))
        computed += chunk
        for manager in (full, window):
            manager.grow("r", computed, computed - chunk)
        for manager in (full, window):
            span = manager.unregistered("r", computed, 10)
            manager.register("r", span.start, span.stop, digests, 0, None, [replay], policy)
    assert dropped == [7, 6, 5]
    assert full.block_ids("r") == [1, 2, 3, 4, 7, 6, 5, 9, 10, 11]
    assert window.block_ids("r") == [0, 0, 0, 8, 12, 13, 14, 15, 16, 17]
    assert [block for block in range(40) if pool.get_block_hashes(block) and block in window.block_ids("r")] == [16]

    free(full)
    free(window)
    queue = pool.free_block_queue.get_all_free_blocks()
    assert queue[:6] == [17, 15, 14, 13, 12, 8]
    assert queue[-11:] == [11, 10, 9, 5, 6, 7, 4, 3, 2, 1, 16]
    assert full.find_longest_hit(digests, 39, 4).block_ids() == [1, 2, 3, 4, 7, 6, 5, 9, 10]
    hit = window.find_longest_hit(digests, 36, 4)
    assert (hit.num_tokens, hit.block_ids()) == (36, [0] * 8 + [16])
    sibling = digests[: 6 * WIDTH] + chain(4, "sibling")
    assert full.find_longest_hit(sibling, 39, 4).num_tokens == 24
    assert window.find_longest_hit(sibling, 24, 4).num_tokens == 0
    # the junction was shown: the next of the family keeps its tail, whatever the policy
    assert window.retained(0, 10, [replay, 24], policy) == [at in (5, 8) for at in range(10)]


# -- partial boundaries ----------------------------------------------------------------------------------


def fine(spec: KVCacheSpec, *, draft_margin: bool = False) -> SingleTypeKVCacheManager:
    return manager_of(spec, BlockPool(30, hash_block_size=4), draft_margin=draft_margin)


def tail_of(manager: SingleTypeKVCacheManager, prompt: int, computed: int, digests: bytes) -> int:
    boundary = manager.partial_boundary("r", prompt, computed)
    if boundary:
        manager.register_partial("r", boundary, digest(digests, boundary, 4))
    return boundary


def test_the_prompts_tail_is_registered_once_and_found_longest_first() -> None:
    manager = fine(FullAttentionSpec(16))
    digests = chain(8)
    table = start(manager, 30)
    store(manager, 30, digests)
    assert tail_of(manager, 30, 20, digests) == 0  # not computed that far
    assert tail_of(manager, 30, 30, digests) == 28
    assert tail_of(manager, 30, 30, digests) == 0
    hit = manager.find_longest_hit(digests, 31, 4)
    assert (hit.num_tokens, hit.block_ids()) == (28, table)
    assert manager.find_longest_hit(digests, 27, 4).num_tokens == 16  # only the tail, not each boundary on the way
    assert manager.find_longest_hit(digests, 31, 16).num_tokens == 16  # the model's groups do not all allow it
    assert manager.num_new_blocks("other", 29, hit, 28) == 1  # a copy of the last block
    assert manager.num_new_blocks("other", 33, hit, 28) == 2
    manager.adopt("other", hit)
    assert manager.unregistered("other", 32, 8) == range(1, 2)
    private = manager.pool.take(1)[0]
    assert manager.swap_block("other", 1, private) == table[1]
    assert manager.block_ids("other") == [table[0], private]

    store(manager, 32, digests)  # full now: one hash, the longer one
    assert manager.find_longest_hit(digests, 32, 4).block_ids() == table
    assert manager.find_longest_hit(digests, 31, 4).num_tokens == 16
    assert tail_of(manager, 30, 32, digests) == 0


def test_no_tail_on_a_block_that_has_a_longer_hash_or_ends_there() -> None:
    digests = chain(8)
    manager = fine(FullAttentionSpec(16))
    start(manager, 32)
    assert manager.partial_boundary("r", 33, 33) == 0  # ends with a block
    store(manager, 32, digests)
    assert manager.partial_boundary("r", 30, 32) == 0  # hashed already, as a full block
    assert manager.partial_boundary("nobody", 30, 32) == 0
    window = manager_of(SlidingWindowSpec(16, 8), BlockPool(9, hash_block_size=4))
    start(window, 30)
    assert window.partial_boundary("r", 30, 30) == 0  # cannot resume inside a block


def test_a_revoked_tail_is_registered_again() -> None:
    digests = chain(8)
    manager = fine(FullAttentionSpec(16))
    table = start(manager, 30)
    assert tail_of(manager, 30, 30, digests) == 28
    manager.pool.evict_blocks([table[1]])
    assert tail_of(manager, 30, 30, digests) == 0
    manager.unregister({table[1]})
    assert tail_of(manager, 30, 30, digests) == 28


def test_a_tail_serves_a_drafting_replay() -> None:
    """The margin's end is cached inside a block, and so is what lies before it in the same block."""
    digests = chain(8)
    manager = fine(FullAttentionSpec(16), draft_margin=True)
    table = start(manager, 28)
    store(manager, 28, digests)
    assert tail_of(manager, 28, 28, digests) == 28
    hit = manager.find_longest_hit(digests, 27, 4)
    assert (hit.num_tokens, hit.block_ids()) == (24, table)
    assert manager.find_longest_hit(digests, 19, 4).num_tokens == 12  # before a block that is cached to its end


def test_a_state_is_registered_only_where_a_step_ended() -> None:
    digests = chain(12)
    manager = fine(MambaSpec(16, 0, "align"))
    start(manager, 20)
    assert not manager.unregistered("r", 20, 12)  # block 0 was passed, its state never stood still there
    assert manager.is_registered("r", 20)
    assert tail_of(manager, 22, 20, digests) == 20
    manager.grow("r", 27, 20)
    assert tail_of(manager, 29, 27, digests) == 0
    assert manager.unregistered("r", 32, 12) == range(1, 2)
    assert not manager.is_registered("r", 32)
    hit = manager.find_longest_hit(digests, 40, 4)
    assert (hit.num_tokens, hit.block_ids()) == (20, [0, manager.block_ids("r")[1]])


# -- tables ---------------------------------------------------------------------------------------------


def test_a_window_drops_on_settled_tokens_deepest_first_and_once() -> None:
    manager = manager_of(SlidingWindowSpec(4, 9))
    table = start(manager, 24)
    assert list(manager.droppable("r", 11)) == []  # tokens 3 .. 11 are read: the whole block 0 stays
    assert list(manager.drop("r", 20)) == [table[2], table[1], table[0]]
    assert manager.block_ids("r") == [0, 0, 0, *table[3:]]
    assert manager.pool.free_block_queue.get_all_free_blocks()[:3] == [table[2], table[1], table[0]]
    assert manager.tables["r"].num_dropped == 3  # the next step looks only at what follows
    assert list(manager.drop("r", 20)) == []
    assert list(manager.drop("r", 19)) == []  # a settled count that was too high is not taken back twice
    assert list(manager.drop("nobody", 20)) == []


def test_dropped_blocks_wait_for_their_last_reader() -> None:
    manager = manager_of(SlidingWindowSpec(4, 9))
    table = start(manager, 24)
    free_before = manager.pool.get_num_free_blocks()
    manager.drop("r", 20, after=3)
    assert manager.block_ids("r")[:3] == [0, 0, 0]
    assert manager.pool.get_num_free_blocks() == free_before
    manager.pool.advance(3)
    assert manager.pool.get_num_free_blocks() == free_before + 3
    assert len(table) == 6


def test_the_reference_window_drops_the_gap_behind_the_prompt() -> None:
    manager = manager_of(ReferenceWindowSpec(4, 8))
    table = start(manager, 30)
    assert list(manager.drop("r", 18, 6)) == []  # from token 10: block 2 is still read
    assert list(manager.drop("r", 21, 6)) == [table[2]]
    assert list(manager.drop("r", 29, 6)) == [table[4], table[3]]
    assert manager.block_ids("r") == [*table[:2], 0, 0, 0, *table[5:]]


def test_the_reference_window_loads_the_prompt_and_the_window_only() -> None:
    manager = manager_of(ReferenceWindowSpec(4, 8))
    assert manager.num_new_blocks("r", 30, None, 29, 6) == 8 - 3
    manager.adopt("r", NOTHING_FOUND)
    added = list(manager.grow("r", 30, 29, 6))
    assert [bool(block) for block in added] == [True, True, False, False, False, True, True, True]


def test_external_tokens_outside_the_window_are_null() -> None:
    manager = manager_of(SlidingWindowSpec(4, 9))
    assert manager.num_new_blocks("r", 25, None, 20) == 4  # 12 of the 20 are no longer read
    manager.adopt("r", NOTHING_FOUND)
    assert [bool(block) for block in manager.grow("r", 25, 20)] == [False] * 3 + [True] * 4
    assert manager.num_new_blocks("r", 25, None, 20) == 0  # never negative
    assert manager.num_new_blocks("r", 8) == 0
    assert list(manager.grow("r", 8)) == []


def test_nulls_of_a_hit_cost_nothing() -> None:
    manager = manager_of(SlidingWindowSpec(4, 8))
    digests = chain(4)
    table = start(manager, 16)
    store(manager, 16, digests)
    hit = manager.find_longest_hit(digests, 16, 4)
    assert manager.num_new_blocks("other", 17, hit, 16) == 1
    manager.adopt("other", hit)
    assert manager.block_ids("other") == [0, 0, *table[2:]]
    assert [manager.pool.blocks[block].ref_cnt for block in table] == [1, 1, 2, 2]
    assert manager.unregistered("other", 20, 5) == range(4, 4)  # the table is not that long yet
    assert list(manager.drop("other", 16)) == []
    assert list(manager.drop("other", 20)) == [table[2]]


def test_a_ring_has_one_block_and_the_encoder_its_own() -> None:
    ring, cross = manager_of(CircularBufferSpec(4)), manager_of(CrossAttentionSpec(4))
    assert (ring.num_new_blocks("r", 500), len(start(ring, 500)), ring.num_new_blocks("r", 900)) == (1, 1, 0)
    assert cross.num_new_blocks("r", 500, None, 0, 0, 9) == 3
    cross.adopt("r", NOTHING_FOUND)
    assert len(cross.grow("r", 500, 0, 0, 9)) == 3
    assert cross.num_new_blocks("r", 900, None, 0, 0, 9) == 0


def test_draft_states_move_along_with_the_running_one() -> None:
    manager = manager_of(MambaSpec(4, 2, "align"))
    assert manager.num_new_blocks("r", 6) == 3
    assert start(manager, 6) == [0, 1, 2, 3]
    assert manager.num_new_blocks("r", 9, None, 6) == 1
    assert list(manager.grow("r", 9, 6)) == [4]
    assert manager.block_ids("r") == [0, 1, 2, 3, 4]  # the running state is where a draft's was
    manager.grow("r", 15, 9)
    assert manager.block_ids("r") == [0, 1, 2, 3, 4, 5]
    assert list(manager.grow("r", 40, 15)) == [0, 0, 0, 4, 5, 6]
    assert manager.block_ids("r") == [0, 1, 2, 3, 0, 0, 0, 0, 0, 4, 5, 6]
    assert list(manager.drop("r", 15)) == [2, 1]
    assert list(manager.drop("r", 40)) == [3]


def test_a_draft_state_that_others_hold_stays() -> None:
    manager = manager_of(MambaSpec(4, 2, "align"))
    start(manager, 4)
    manager.pool.touch([2])
    assert manager.num_new_blocks("r", 12, None, 4) == 2
    assert list(manager.grow("r", 12, 4)) == [4, 5]
    assert manager.block_ids("r") == [1, 2, 3, 4, 5]
    manager = manager_of(MambaSpec(4, 2, "align"))
    start(manager, 4)
    manager.pool.touch([2])
    assert manager.num_new_blocks("r", 16, None, 4) == 2
    assert list(manager.grow("r", 16, 4)) == [3, 4, 5]
    assert manager.block_ids("r") == [1, 2, 0, 3, 4, 5]


def test_a_state_from_elsewhere_gets_a_block_at_its_own_end() -> None:
    manager = manager_of(MambaSpec(4, 1, "align"))
    assert manager.num_new_blocks("r", 20, None, 8) == 3
    manager.adopt("r", NOTHING_FOUND)
    assert list(manager.grow("r", 20, 8)) == [0, 1, 0, 0, 2, 3]
    assert manager.num_new_blocks("other", 8, None, 7) == 2  # in the block that goes on
    manager.adopt("other", NOTHING_FOUND)
    assert list(manager.grow("other", 8, 7)) == [0, 4, 5]


def test_a_request_adopts_a_state_and_goes_on() -> None:
    manager = manager_of(STATE)
    digests = chain(4)
    start(manager, 8)
    store(manager, 8, digests)
    hit = manager.find_longest_hit(digests, 15, 4)
    assert manager.num_new_blocks("other", 15, hit, 8) == 1
    manager.adopt("other", hit)
    assert list(manager.grow("other", 15, 8)) == [0, 2]
    assert manager.block_ids("other") == [0, 1, 0, 2]
    assert list(manager.drop("other", 8)) == []
    assert list(manager.drop("other", 15)) == [1]


def test_picked_now_and_offered_later() -> None:
    """States can be found when their step has run: by then the table has moved on."""
    manager = manager_of(STATE)
    digests = chain(4)
    table = start(manager, 8)
    span = manager.unregistered("r", 8, 4)
    blocks = manager.pick("r", span.start, span.stop)
    manager.mark_registered("r", span.stop)
    assert not manager.unregistered("r", 8, 4)
    assert manager.find_longest_hit(digests, 8, 4) is NOTHING_FOUND
    manager.grow("r", 12, 8)
    offer_blocks(manager, blocks, span.start, digests, 0, None)
    assert manager.find_longest_hit(digests, 8, 4).block_ids() == [0, table[1]]


# -- kinds of others -------------------------------------------------------------------------------------


class EveryOther(SingleTypeKVCacheManager):
    """Interpreted: needs the last two blocks, by its own answer to `needed`."""

    def needed(self, boundary: int) -> range:
        end = -(-boundary // self.block_size)
        return range(max(0, end - 2), end)

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - 2 * self.block_size)

    def num_blocks(self, num_tokens: int, num_prompt_tokens: int = 0, num_encoder_tokens: int = 0) -> int:
        return -(-num_tokens // self.block_size)


class KeepsTheFirst(EveryOther):
    def unread(self, num_computed_tokens: int, num_prompt_tokens: int) -> tuple[int, int]:
        return 1, super().unread(num_computed_tokens, num_prompt_tokens)[1]

    def table_length(self, num_tokens: int, num_prompt_tokens: int = 0, num_encoder_tokens: int = 0) -> int:
        return self.num_blocks(num_tokens) + 1


def test_a_kind_derived_from_one_in_plain_python() -> None:
    manager = KeepsTheFirst(BlockPool(30, hash_block_size=4), 7, KVCacheGroupSpec(("layer",), FULL))
    assert manager.num_new_blocks("r", 24) == 7
    table = start(manager, 24)
    assert len(table) == 7
    assert list(manager.drop("r", 24)) == table[1:4][::-1]
    assert manager.most_blocks(100, 16) is None


def test_a_kind_written_in_plain_python() -> None:
    pool = BlockPool(30, hash_block_size=4)
    manager = EveryOther(pool, 7, KVCacheGroupSpec(("layer",), FULL))
    digests = chain(6)
    table = start(manager, 24)
    store(manager, 24, digests)
    hit = manager.find_longest_hit(digests, 23, 4)
    assert (hit.num_tokens, hit.block_ids()) == (20, [0, 0, 0, *table[3:5]])
    assert manager.retained(0, 6, [], RetentionPolicy(16)) == [at in (2, 3) for at in range(6)]
    assert list(manager.drop("r", 24)) == table[:4][::-1]
    with pytest.raises(NotImplementedError, match="num_skipped_tokens"):
        SingleTypeKVCacheManager(pool, 0, KVCacheGroupSpec(("layer",), FULL)).num_skipped_tokens(3)
    with pytest.raises(ValueError, match="group 7: alignment"):
        manager.find_longest_hit(digests, 23, 0)
