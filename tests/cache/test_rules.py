"""Rules of the cache that random operations cannot state: steps, refusals, verified hashes, per-request control."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from blockpool.cache import (
    EMPTY_PLAN,
    ConfigError,
    KVCacheConfig,
    KVCacheManager,
    Refusal,
    RefusalReason,
    Request,
    RequestError,
    StalePlan,
    StatsBook,
    StepError,
    WhyNotMore,
)
from blockpool.hashing import BlockHasher, BlockHashes, ExtraKeys
from blockpool.managers import FullAttentionSpec, KVCacheGroupSpec
from blockpool.pool import BlockRemoved, BlockStored, FenceError

HASHER = BlockHasher(hash_block_size=4, seed="rules")
GROUP = KVCacheGroupSpec(("layer",), FullAttentionSpec(4))


def cache(usable_blocks: int = 20, **options: Any) -> KVCacheManager:
    return KVCacheManager(KVCacheConfig(usable_blocks + 1, (GROUP,)), events="first_last", **options)


def request(name: str, num_tokens: int, first: int = 0, **options: Any) -> Request:
    return Request(name, range(first, first + num_tokens), hasher=HASHER, **options)


def run(manager: KVCacheManager, r: Request, **options: Any) -> int:
    """Admit it and compute its prompt; the tokens it did not have to compute."""
    hit = manager.get_computed_blocks(r)
    blocks = manager.allocate_slots(r, r.num_tokens - hit.num_tokens, hit.num_tokens, hit, **options)
    assert blocks is not None
    r.num_computed_tokens = r.num_tokens
    return hit.num_tokens


class TestLookup:
    def test_why_a_hit_ends(self) -> None:
        manager = cache()
        assert manager.get_computed_blocks(request("a", 9)).why_not_more is WhyNotMore.MISS
        run(manager, request("a", 9))
        assert manager.get_computed_blocks(request("b", 9)).why_not_more is WhyNotMore.PROMPT_END
        assert manager.get_computed_blocks(request("b", 8)).num_tokens == 4  # the last token is always computed
        assert manager.get_computed_blocks(request("b", 30)).why_not_more is WhyNotMore.MISS
        assert manager.get_computed_blocks(Request("b", range(9))).why_not_more is WhyNotMore.NO_HASH
        skipping = request("b", 9, skip_reading_prefix_cache=True)
        assert manager.get_computed_blocks(skipping).why_not_more is WhyNotMore.SKIP_READING
        off = cache(enable_caching=False)
        run(off, request("a", 9))
        assert off.get_computed_blocks(request("b", 9)).why_not_more is WhyNotMore.CACHING_OFF

    def test_a_known_prefix_of_unknown_tokens(self) -> None:
        manager = cache()
        known = request("a", 12)
        run(manager, known)
        assert known.block_hashes is not None
        chain = BlockHashes.from_digests(known.block_hashes.raw(0, 2), digest_size=32, hash_block_size=4)
        hit = manager.get_computed_blocks(Request("b", num_prompt_tokens=40, block_hashes=chain))
        assert (hit.num_tokens, hit.why_not_more) == (8, WhyNotMore.NO_HASH)

    def test_a_chain_of_another_unit_is_refused(self) -> None:
        manager = cache()
        other = Request("a", range(20), hasher=BlockHasher(hash_block_size=8, seed="rules"))
        with pytest.raises(RequestError, match="8 tokens"):
            manager.get_computed_blocks(other)


class TestPlan:
    def test_eight_equal_prompts_in_one_step_cost_one(self) -> None:
        manager = cache(20)
        manager.begin_step(1)
        assert [run(manager, request(f"r{i}", 13)) for i in range(8)] == [0] + [12] * 7
        assert 20 - manager.pool.get_num_free_blocks() == 3 + 8

    def test_hits_that_others_hold_cost_nothing(self) -> None:
        manager = cache(5)
        run(manager, request("a", 16))  # 4 blocks, 3 of which the next one hits while they are held
        second = request("b", 13)
        hit = manager.get_computed_blocks(second)
        assert (hit.num_tokens, manager.pool.get_num_free_blocks()) == (12, 1)
        assert manager.allocate_slots(second, 1, 12, hit) is not None
        assert manager.pool.get_num_free_blocks() == 0

    def test_reasons_and_numbers_of_a_refusal(self) -> None:
        manager = cache(6)
        a = request("a", 16)
        run(manager, a)
        refusal = manager.plan(request("b", 12, 50), 12)
        assert isinstance(refusal, Refusal)
        assert refusal.reason is RefusalReason.NO_ROOM
        room = refusal.pools[0]
        assert (room.needed, room.withheld, room.free, room.deferred, room.held, room.next_fence) == (
            3,
            0,
            2,
            0,
            4,
            None,
        )
        assert not refusal
        assert "no_room" in str(refusal)
        manager.free(a, after=9)
        refusal = manager.plan(request("b", 12, 50), 12)
        assert isinstance(refusal, Refusal)
        assert (refusal.reason, refusal.pools[0].next_fence) == (RefusalReason.WAIT_FOR_FENCE, 9)
        refusal = manager.plan(request("b", 25, 50), 1, full_sequence_must_fit=True)
        assert isinstance(refusal, Refusal)
        assert refusal.reason is RefusalReason.NEVER_FITS
        with pytest.raises(RequestError):
            manager.commit(refusal)
        manager.pool.advance(9)
        assert manager.allocate_slots(request("b", 12, 50), 12) is not None

    def test_a_fence_that_frees_the_hit_itself_does_not_help(self) -> None:
        manager = cache(6)
        a, other = request("a", 9), request("other", 4, 90)
        run(manager, a)
        run(manager, other)
        manager.free(a, after=0)  # 3 blocks deferred, 2 of them the hit of the next
        r = Request("r", [*range(8), *range(50, 62)], hasher=HASHER)
        hit = manager.get_computed_blocks(r)
        refusal = manager.plan(r, 12, hit=hit)
        assert isinstance(refusal, Refusal)
        assert (hit.num_tokens, refusal.pools[0].needed, refusal.pools[0].free) == (8, 3, 2)
        assert (refusal.reason, refusal.pools[0].next_fence) == (RefusalReason.WAIT_FOR_FENCE, 0)
        longer = Request("longer", [*range(8), *range(50, 66)], hasher=HASHER)
        refusal = manager.plan(longer, 16, hit=manager.get_computed_blocks(longer))
        assert isinstance(refusal, Refusal)
        assert refusal.reason is RefusalReason.NO_ROOM  # 4 needed, 2 free, 1 to come

    def test_the_fence_named_is_the_one_that_makes_room(self) -> None:
        manager = cache(6)
        requests = [request(f"r{i}", 8, 20 * i) for i in range(3)]
        for fence, r in enumerate(requests):
            run(manager, r)
            manager.free(r, after=fence)
        for tokens, fence in ((8, 0), (12, 1), (20, 2)):
            refusal = manager.plan(request("new", tokens, 200), tokens)
            assert isinstance(refusal, Refusal)
            assert (refusal.reason, refusal.pools[0].next_fence) == (RefusalReason.WAIT_FOR_FENCE, fence)

    def test_a_chain_of_another_unit_is_refused_before_the_plan(self) -> None:
        manager = cache()
        other = Request("a", range(20), hasher=BlockHasher(hash_block_size=8, seed="rules"))
        with pytest.raises(RequestError, match="8 tokens"):
            manager.plan(other, 20)

    def test_hits_and_plans_of_another_cache_are_refused(self) -> None:
        one, two = cache(), cache()
        run(one, request("a", 9))
        run(two, request("b", 9, 50))
        r = request("r", 9)
        hit = one.get_computed_blocks(r)
        with pytest.raises(RequestError, match="another cache"):
            two.plan(r, 1, hit=hit)
        with pytest.raises(RequestError, match="another cache"):
            two.commit(one.plan(r, 1, hit=hit))

    def test_a_second_request_of_the_same_id_gets_nothing_of_the_first(self) -> None:
        manager = cache()
        run(manager, request("x", 9))
        second = request("x", 9, 50)
        with pytest.raises(RequestError, match="without blocks"):
            manager.allocate_slots(second, 9, 0, manager.get_computed_blocks(second))

    def test_hooks_that_raise_lose_nothing(self) -> None:
        class Failing:
            def on_allocated(self, block_id: int) -> None:
                raise KeyError(block_id)

            def on_accessed(self, block_id: int) -> None:
                raise KeyError(block_id)

            def on_evicted(self, block_id: int, had_hash: bool) -> None:
                pass

        manager = cache(metrics=Failing())
        a, b = request("a", 9), request("b", 13)
        for r, blocks in ((a, 3), (b, 4)):
            hit = manager.get_computed_blocks(r)
            with pytest.raises((KeyError, BaseExceptionGroup)):
                manager.allocate_slots(r, r.num_tokens - hit.num_tokens, hit.num_tokens, hit)
            assert len(manager.get_block_ids(r)[0]) == blocks
        assert manager.free(a) is True
        assert manager.free(b) is True
        assert manager.pool.get_num_free_blocks() == 20

    def test_a_hit_that_was_handed_out_since_is_stale(self) -> None:
        manager = cache(4)
        a = request("a", 9)
        run(manager, a)
        manager.free(a)
        again = request("again", 9)
        hit = manager.get_computed_blocks(again)
        assert hit.num_tokens == 8
        manager.pool.free_blocks(manager.pool.get_new_blocks(1))  # another version, the hit untouched
        assert not isinstance(manager.plan(again, 1, hit=hit), Refusal)
        manager.pool.free_blocks(manager.pool.get_new_blocks(4))
        refusal = manager.plan(again, 1, hit=hit)
        assert isinstance(refusal, Refusal)
        assert refusal.reason is RefusalReason.STALE_HIT

    def test_a_reset_makes_hits_stale(self) -> None:
        manager = cache(4)
        a = request("a", 9)
        run(manager, a)
        manager.free(a)
        hit = manager.get_computed_blocks(request("b", 9))
        assert manager.reset_prefix_cache()
        refusal = manager.plan(request("b", 9), 1, hit=hit)
        assert isinstance(refusal, Refusal)
        assert refusal.reason is RefusalReason.STALE_HIT

    def test_a_plan_of_another_version_is_refused_and_changes_nothing(self) -> None:
        manager = cache()
        r = request("r", 9)
        plan = manager.plan(r, 9)
        manager.pool.get_new_blocks(1)
        before = manager.pool.dump()
        with pytest.raises(StalePlan, match="'r'"):
            manager.commit(plan)
        assert manager.pool.dump() == before
        assert manager.get_block_ids(r) == ([],)

    def test_the_model_length_caps_the_slots(self) -> None:
        manager = cache(max_model_len=10)
        r = request("r", 9)
        blocks = manager.allocate_slots(r, 9, num_lookahead_tokens=50)
        assert blocks is not None
        assert blocks.num_blocks == 3

    def test_the_watermark_is_for_newcomers_beside_others(self) -> None:
        manager = cache(9, watermark=0.5)  # 5 of 10 blocks
        assert manager.allocate_slots(request("a", 17), 17, has_scheduled_reqs=True) is None
        a = request("a", 17)
        assert manager.allocate_slots(a, 17, has_scheduled_reqs=False) is not None
        a.num_computed_tokens = 17
        a.append_output_tokens(range(8))
        assert manager.allocate_slots(a, 8) is not None

    def test_an_unneeded_step_is_the_shared_empty_plan(self) -> None:
        manager = cache()
        r = request("r", 5)
        run(manager, r)
        r.append_output_tokens(9)
        version = manager.pool.version
        assert manager.plan(r, 1) is EMPTY_PLAN
        assert manager.commit(EMPTY_PLAN).num_blocks == 0
        assert manager.pool.version == version

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"num_new_tokens": -1}, "negative"),
            ({"num_new_tokens": 0}, "nothing to compute"),
            ({"num_new_tokens": 1, "num_lookahead_tokens": -1}, "negative"),
            ({"num_new_tokens": 1, "reserved_blocks": -1}, "negative"),
        ],
    )
    def test_calls_that_contradict_themselves(self, options: dict[str, int], words: str) -> None:
        with pytest.raises(RequestError, match=words):
            cache().plan(request("r", 9), **options)

    def test_hits_of_others_and_hits_for_running_requests_are_refused(self) -> None:
        manager = cache()
        a = request("a", 9)
        run(manager, a)
        hit = manager.get_computed_blocks(request("b", 9))
        with pytest.raises(RequestError, match="'b'"):
            manager.plan(request("c", 9), 1, hit=hit)
        b = request("b", 9)
        run(manager, b)
        with pytest.raises(RequestError, match="without blocks"):
            manager.plan(b, 1, hit=hit)
        c = request("c", 9)
        c.num_computed_tokens = 4
        with pytest.raises(RequestError, match="holds no blocks"):
            manager.plan(c, 1)
        with pytest.raises(RequestError, match="num_new_computed_tokens"):
            manager.allocate_slots(request("d", 9), 1, 4)


class TestControl:
    def test_no_store_leaves_nothing_but_may_hit(self) -> None:
        manager = cache()
        run(manager, request("a", 9))
        assert run(manager, request("b", 13, no_store=True)) == 8
        manager.free("b")
        assert manager.get_computed_blocks(request("c", 13)).num_tokens == 8
        manager.cache_blocks(request("b", 13, no_store=True), 13)
        assert manager.pool.audit() == []

    def test_delayed_registration(self) -> None:
        manager = cache()
        a = request("a", 9)
        run(manager, a, delay_cache_blocks=True)
        assert manager.get_computed_blocks(request("b", 9)).num_tokens == 0
        manager.cache_blocks(a, 5)
        assert manager.get_computed_blocks(request("b", 9)).num_tokens == 4
        manager.cache_blocks(a, 9)
        manager.cache_blocks(a, 9)
        assert manager.get_computed_blocks(request("b", 9)).num_tokens == 8

    def test_only_verified_tokens_are_registered(self) -> None:
        manager = cache()
        a = request("a", 6)
        assert manager.allocate_slots(a, 10) is not None  # 6 known tokens and 4 drafts
        a.num_computed_tokens = 6
        b = request("b", 9)
        assert manager.get_computed_blocks(b).num_tokens == 4

    def test_a_refused_free_changes_nothing(self) -> None:
        manager = cache()
        a = request("a", 9)
        run(manager, a)
        table = manager.get_block_ids(a)
        for after in (-1, 1.5, "soon"):
            with pytest.raises(FenceError):
                manager.free(a, after=after)
            assert manager.get_block_ids(a) == table
        assert manager.free(a) is True
        assert manager.pool.get_num_free_blocks() == 20

    def test_a_reset_names_the_holders(self) -> None:
        manager = cache()
        a, b = request("a", 9), request("b", 9, 50)
        run(manager, a)
        run(manager, b)
        manager.free(b, after=3)
        answer = manager.reset_prefix_cache()
        assert not answer
        assert answer.requests == {"a": 3}
        assert (answer.num_blocks_in_use, answer.num_blocks_deferred) == (6, 3)


class TestVerifiedHashes:
    def collide(self, name: str, tokens: range, **extra: Any) -> Request:
        """A request whose digests say nothing of its tokens."""
        chain = BlockHashes.from_digests(
            b"".join(hashlib.sha256(bytes([i])).digest() for i in range(len(tokens) // 4)),
            digest_size=32,
            hash_block_size=4,
        )
        return Request(name, tokens, block_hashes=chain, **extra)

    def test_equal_digests_of_other_tokens_are_a_miss_and_counted(self) -> None:
        manager = cache(verify_hashes=True)
        run(manager, self.collide("a", range(9)))
        hit = manager.get_computed_blocks(self.collide("b", range(100, 109)))
        assert (hit.num_tokens, hit.why_not_more, manager.num_collisions) == (0, WhyNotMore.COLLISION, 1)
        half = manager.get_computed_blocks(self.collide("c", range(9)))
        assert (half.num_tokens, manager.num_collisions) == (8, 1)
        run(manager, self.collide("b", range(100, 109)))
        assert manager.get_computed_blocks(self.collide("d", range(9))).num_tokens == 8  # the first entry stays
        assert manager.pool.audit() == []

    def test_a_partial_truth_is_a_shorter_hit(self) -> None:
        manager = cache(verify_hashes=True)
        run(manager, self.collide("a", range(9)))
        tokens = [*range(4), *range(50, 55)]
        chain = self.collide("x", range(9)).block_hashes
        hit = manager.get_computed_blocks(Request("b", tokens, block_hashes=chain))
        assert (hit.num_tokens, hit.blocks, hit.why_not_more) == (4, ([1],), WhyNotMore.COLLISION)

    def test_other_extra_keys_are_other_content(self) -> None:
        manager = cache(verify_hashes=True)
        run(manager, self.collide("a", range(9)))
        salted = self.collide("b", range(9), extra_keys=ExtraKeys(cache_salt="x"))
        assert manager.get_computed_blocks(salted).num_tokens == 0
        assert manager.num_collisions == 1

    def test_without_verification_the_digest_is_believed(self) -> None:
        manager = cache()
        run(manager, self.collide("a", range(9)))
        assert manager.get_computed_blocks(self.collide("b", range(100, 109))).num_tokens == 8
        assert manager.num_collisions == 0

    def test_true_hits_stay_hits(self) -> None:
        manager = cache(verify_hashes=True)
        keys = ExtraKeys(lora=("l", "/l"), cache_salt="s")
        a = Request("a", range(13), hasher=HASHER, extra_keys=keys)
        run(manager, a)
        manager.free(a)
        assert run(manager, Request("b", range(13), hasher=HASHER, extra_keys=keys)) == 12


class TestSteps:
    def test_events_wait_for_their_step(self) -> None:
        manager = cache()
        run(manager, request("before", 4, 90))
        manager.begin_step(0)
        run(manager, request("a", 9))
        manager.begin_step(1)
        run(manager, request("b", 5, 50))
        assert [len(e.block_hashes) for e in manager.take_events()] == [1]
        manager.acknowledge(0)
        assert [len(e.block_hashes) for e in manager.take_events()] == [2]
        manager.acknowledge(0)
        assert manager.take_events() == []
        manager.acknowledge(1)
        assert [len(e.block_hashes) for e in manager.take_events()] == [1]

    def test_acknowledging_frees_what_waited(self) -> None:
        manager = cache(4)
        a = request("a", 5)
        manager.begin_step(0)
        run(manager, a)
        manager.begin_step(1)
        manager.free(a, after=1)
        manager.acknowledge(0)
        assert manager.pool.get_usage_parts().deferred == 2
        manager.acknowledge(1)
        assert manager.pool.get_num_free_blocks() == 4

    def test_a_cancelled_step_was_never_seen(self) -> None:
        manager = cache(3)
        run(manager, request("old", 12, 50))
        manager.free("old")
        first = manager.take_events()
        manager.begin_step(0)
        a = request("a", 9)
        run(manager, a)
        manager.cancel_step(0)
        a.num_computed_tokens = 0
        events = manager.take_events()
        assert all(isinstance(event, BlockRemoved) for event in events)
        assert [h for e in events for h in e.block_hashes] == first[0].block_hashes[::-1]
        assert manager.get_computed_blocks(request("b", 9)).num_tokens == 0
        manager.begin_step(0)  # planned anew, under the same id
        assert manager.allocate_slots(a, 9) is not None
        manager.acknowledge(0)
        (stored,) = manager.take_events()
        assert isinstance(stored, BlockStored)
        assert len(stored.block_hashes) == 2
        assert manager.pool.audit() == []

    def test_after_a_cancelled_step_those_who_shared_its_blocks_register_them(self) -> None:
        manager = cache()
        manager.begin_step(0)
        a, b, c = request("a", 9), request("b", 9), request("c", 13)
        assert [run(manager, r) for r in (a, b, c)] == [0, 8, 8]
        manager.cancel_step(0)
        manager.free(a)
        for r in (b, c):
            r.num_computed_tokens = 0
        manager.begin_step(0)
        for r in (b, c):  # they share two blocks: one of them registers those
            assert manager.allocate_slots(r, r.num_tokens) is not None
        manager.acknowledge(0)
        assert sum(len(e.block_hashes) for e in manager.take_events()) == 3
        assert manager.get_computed_blocks(request("d", 20)).num_tokens == 12
        assert manager.pool.audit() == []

    def test_steps_out_of_order_are_refused(self) -> None:
        manager = cache()
        manager.begin_step(3)
        for call in (
            lambda: manager.begin_step(3),
            lambda: manager.begin_step(2),
            lambda: manager.acknowledge(4),
            lambda: manager.cancel_step(2),
        ):
            with pytest.raises(StepError):
                call()
        manager.begin_step(4)
        with pytest.raises(StepError):
            manager.cancel_step(3)
        manager.acknowledge(4)
        with pytest.raises(StepError):
            manager.cancel_step(4)


class TestEventWords:
    def test_what_a_stored_event_says(self) -> None:
        manager = cache()
        keys = ExtraKeys(lora=("adapter", "/p"), cache_salt="salt")
        r = Request("r", range(100, 109), hasher=HASHER, extra_keys=keys, lora_id=7, session_id="chat")
        run(manager, r)
        (event,) = manager.take_events()
        assert isinstance(event, BlockStored)
        assert r.block_hashes is not None
        assert event.block_hashes == list(r.block_hashes)
        assert event.token_ids == list(range(100, 108))
        assert (event.lora_id, event.lora_name, event.session_id) == (7, "adapter", "chat")
        assert event.extra_keys == [("adapter", "salt"), ("adapter",)]

    def test_lookahead_tokens_travel_along(self) -> None:
        hasher = BlockHasher(hash_block_size=4, seed="rules", num_hash_lookahead_tokens=2)
        manager = cache()
        run(manager, Request("r", range(11), hasher=hasher))
        (event,) = manager.take_events()
        assert isinstance(event, BlockStored)
        assert event.lookahead_token_ids == [[4, 5], [8, 9]]


class TestStats:
    def test_counted_once_at_admission_and_resumptions_apart(self) -> None:
        manager = cache()
        a = request("a", 9)
        manager.get_computed_blocks(a)
        manager.get_computed_blocks(a)
        assert manager.stats.total.requests == 0
        run(manager, a)
        manager.free(a)
        b = request("b", 13)
        run(manager, b)
        assert manager.stats.total.fields == (2, 22, 8, 0, 0, 0, 0, 0)
        manager.stats.mark()
        manager.free(b)
        b.num_computed_tokens = 0
        b.num_preemptions = 1
        run(manager, b)
        assert manager.stats.since_mark().fields == (0, 0, 0, 1, 13, 12, 0, 0)
        assert manager.stats.total.hit_rate == 8 / 22

    def test_the_rolling_window_forgets(self) -> None:
        book = StatsBook(window=2)
        assert book.rolling_hit_rate == 0.0
        book.admitted(10, 10, resumed=False)
        book.admitted(10, 0, resumed=False)
        book.admitted(100, 100, resumed=True)
        assert book.rolling_hit_rate == 0.5
        book.admitted(30, 0, resumed=False)
        assert book.rolling_hit_rate == 0.0
        assert book.total.requests == 3


class TestRequest:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"prompt_token_ids": []},
            {"num_prompt_tokens": 0},
            {"prompt_token_ids": [1, 2], "num_prompt_tokens": 3},
            {"num_prompt_tokens": 3, "hasher": HASHER},
            {"prompt_token_ids": [1], "hasher": HASHER, "block_hashes": HASHER.start()},
        ],
    )
    def test_what_contradicts_itself_is_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(RequestError):
            Request("r", **options)

    def test_bad_output_tokens_change_nothing(self) -> None:
        r = request("r", 9)
        with pytest.raises(ValueError, match="-5"):
            r.append_output_tokens([1, -5])
        assert (r.num_tokens, r.all_token_ids) == (9, list(range(9)))
        r.append_output_tokens(np.int64(5))
        assert r.all_token_ids == [*range(9), 5]
        with pytest.raises(RequestError):
            Request("u", num_prompt_tokens=3).append_output_tokens(1)

    def test_requests_can_be_subclassed(self) -> None:
        class EngineRequest(Request):
            def __init__(self, name: str) -> None:
                super().__init__(name, range(9), hasher=HASHER)
                self.arrival = 1.5

        manager = cache()
        r = EngineRequest("r")
        assert run(manager, r) == 0
        assert r.arrival == 1.5


@pytest.mark.parametrize(
    "make",
    [
        lambda: KVCacheConfig(0, (GROUP,)),
        lambda: KVCacheConfig(4, ()),
        lambda: KVCacheConfig(4, (GROUP,), hash_block_size=3),
        lambda: KVCacheConfig(4, (GROUP,), hash_block_size=0),
        lambda: KVCacheManager(KVCacheConfig(4, (GROUP,)), max_model_len=0),
        lambda: KVCacheManager(KVCacheConfig(4, (GROUP,)), watermark=1.5),
    ],
)
def test_a_cache_that_cannot_be_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()
