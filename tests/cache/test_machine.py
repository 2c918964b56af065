"""Random requests through a KVCacheManager and through its model, compared exactly after each operation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from blockpool.cache import (
    EMPTY_PLAN,
    AllocationPlan,
    KVCacheConfig,
    KVCacheManager,
    Refusal,
    Request,
    StalePlan,
)
from blockpool.hashing import BlockHasher
from blockpool.managers import FullAttentionSpec, KVCacheGroupSpec
from blockpool.pool import BlockRemoved, BlockStored
from tests.cache.model import ModelCache, ModelRequest, chain_of
from tests.sizes import machine_settings

SIZE = 4
#: Prompts share prefixes of every length with one another.
PROMPTS = [
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13],
    [1, 2, 3, 4, 5, 6, 7, 8, 20, 21, 22, 23],
    [1, 2, 3, 4, 30, 31, 32, 33, 34],
    [1, 2, 3, 4, 5, 6, 7, 8],
    [40, 41, 42],
    [50, 51, 52, 53, 54],
]


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 14), watermark=st.sampled_from([0.0, 0.0, 0.3]), unit=st.sampled_from([2, 4])
    )
    def start(self, num_blocks: int, watermark: float, unit: int) -> None:
        groups = (KVCacheGroupSpec(("layer",), FullAttentionSpec(SIZE)),)
        config = KVCacheConfig(num_blocks, groups, hash_block_size=unit, partial_hits=False)
        self.manager = KVCacheManager(config, events="first_last", watermark=watermark)
        self.hasher = BlockHasher(hash_block_size=unit, seed="tests")
        self.model = ModelCache(num_blocks, SIZE, int(watermark * num_blocks))
        self.live: dict[str, Request] = {}
        self.held_plan: tuple[AllocationPlan, int] | None = None
        self.mirror: set[bytes] = set()
        self.names: dict[bytes, bytes] = {}  # the real digest -> the model's
        self.count = 0
        self.step = -1

    def learn(self, request: Request, r: ModelRequest) -> None:
        assert request.block_hashes is not None
        view = request.block_hashes.with_block_size(SIZE)
        self.names.update(zip(view, chain_of(r.tokens, SIZE), strict=True))

    @rule(prompt=st.sampled_from(PROMPTS), skip=st.booleans(), no_store=st.sampled_from([False, False, True]))
    def arrive(self, prompt: list[int], skip: bool, no_store: bool) -> None:
        name = f"r{self.count}"
        self.count += 1
        self.live[name] = Request(
            name,
            prompt,
            hasher=self.hasher,
            skip_reading_prefix_cache=skip and self.count % 3 == 0,
            no_store=no_store,
        )
        r = ModelRequest(name, list(prompt), len(prompt), skip=skip and self.count % 3 == 0, no_store=no_store)
        self.model.requests[name] = r
        self.learn(self.live[name], r)

    def pick(self, data: st.DataObject, *, holding: bool) -> tuple[Request, ModelRequest] | None:
        names = [n for n in self.live if (self.model.requests[n].table is not None) == holding]
        if not names:
            return None
        name = data.draw(st.sampled_from(names))
        return self.live[name], self.model.requests[name]

    @rule(
        data=st.data(),
        lookahead=st.sampled_from([0, 0, 1, 6]),
        reserved=st.sampled_from([0, 0, 2]),
        whole=st.booleans(),
        chunk=st.sampled_from([1, 3, 100]),
        keep=st.booleans(),
    )
    def admit(self, data: st.DataObject, lookahead: int, reserved: int, whole: bool, chunk: int, keep: bool) -> None:
        pair = self.pick(data, holding=False)
        if pair is None:
            return
        request, r = pair
        hit = self.manager.get_computed_blocks(request)
        expected = self.model.lookup(r)
        assert hit.num_tokens == len(expected) * SIZE
        assert (hit.blocks[0] if hit.groups else []) == expected
        new = min(chunk, len(r.tokens) - hit.num_tokens)
        plan = self.manager.plan(
            request,
            new,
            hit=hit,
            num_lookahead_tokens=lookahead,
            reserved_blocks=reserved,
            full_sequence_must_fit=whole,
        )
        answer, wanted = self.model.plan(r, new, expected, lookahead, reserved, whole)
        if answer != "ok":
            assert isinstance(plan, Refusal)
            assert plan.reason.value == answer
            return
        assert isinstance(plan, AllocationPlan)
        assert plan.num_new_blocks == (wanted,)
        if keep:
            self.held_plan = (plan, self.manager.pool.version)
            return
        blocks = self.manager.commit(plan)
        assert blocks.get_block_ids() == (self.model.commit(r, new, expected, wanted),)
        request.num_computed_tokens = r.computed = len(expected) * SIZE + new

    @rule(data=st.data(), lookahead=st.sampled_from([0, 0, 2, 5]), chunk=st.sampled_from([1, 2, 100]))
    def go_on(self, data: st.DataObject, lookahead: int, chunk: int) -> None:
        pair = self.pick(data, holding=True)
        if pair is None:
            return
        request, r = pair
        if r.computed == len(r.tokens):
            token = 100 + len(r.tokens) % 3
            request.append_output_tokens(token)
            r.tokens.append(token)
            self.learn(request, r)
        new = min(chunk, len(r.tokens) - r.computed)
        answer, wanted = self.model.plan(r, new, [], lookahead, 0, False)
        version = self.manager.pool.version
        blocks = self.manager.allocate_slots(request, new, num_lookahead_tokens=lookahead)
        if answer != "ok":
            assert blocks is None
            assert self.manager.last_refusal is not None
            assert self.manager.last_refusal.reason.value == answer
            assert self.manager.pool.version == version
            return
        assert blocks is not None
        assert [b for group in blocks.get_block_ids() for b in group] == self.model.commit(r, new, [], wanted)
        request.num_computed_tokens = r.computed = r.computed + new

    @rule(data=st.data())
    def a_step_without_need_is_the_shared_empty_plan(self, data: st.DataObject) -> None:
        pair = self.pick(data, holding=True)
        if pair is None or pair[1].computed >= len(pair[1].tokens) or pair[1].no_store:
            return
        request, r = pair
        assert r.table is not None
        full = min(r.computed + 1, len(r.tokens)) // SIZE
        plan = self.manager.plan(request, 1)
        if self.model.blocks_for(r.computed + 1) <= len(r.table):
            assert (plan is EMPTY_PLAN) == (r.registered >= full)

    @precondition(lambda self: self.held_plan is not None)
    @rule()
    def an_old_plan_is_refused(self) -> None:
        assert self.held_plan is not None
        plan, version = self.held_plan
        self.held_plan = None
        if version != self.manager.pool.version:
            with pytest.raises(StalePlan):
                self.manager.commit(plan)

    @rule(data=st.data(), after=st.none() | st.integers(0, 3))
    def leave(self, data: st.DataObject, after: int | None) -> None:
        if not self.live:
            return
        name = data.draw(st.sampled_from(list(self.live)))
        fence = None if after is None else max(0, self.step + after)
        assert self.manager.free(self.live[name], after=fence) == self.model.free(self.model.requests[name], fence)
        assert self.manager.free(name) is False
        del self.live[name]

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        pair = self.pick(data, holding=True)
        if pair is None:
            return
        request, r = pair
        assert self.manager.free(request) is self.model.free(r, None) is True
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        r.preempted = True

    @rule(data=st.data())
    def register_late(self, data: st.DataObject) -> None:
        pair = self.pick(data, holding=True)
        if pair is not None:
            self.manager.cache_blocks(pair[0], pair[1].computed)
            self.model.register(pair[1], pair[1].computed)

    @rule()
    def begin_step(self) -> None:
        self.step += 1
        self.manager.begin_step(self.step)
        self.model.begin(self.step)

    @rule(back=st.integers(0, 2))
    def acknowledge(self, back: int) -> None:
        step = self.step - back
        if step >= 0:
            self.manager.acknowledge(step)
            self.model.acknowledge(step)

    @precondition(lambda self: bool(self.model.in_flight))
    @rule()
    def cancel_step(self) -> None:
        self.manager.cancel_step(self.step)
        self.model.cancel()
        self.step = self.model.in_flight[-1].step_id if self.model.in_flight else self.manager._steps.acknowledged

    @rule()
    def reset(self) -> None:
        answer = self.manager.reset_prefix_cache()
        assert bool(answer) == self.model.pool.reset()
        if not answer:
            tables = {r.name: len(r.table) for r in self.model.requests.values() if r.table is not None}
            assert answer.requests == tables
            assert answer.num_blocks_deferred == self.model.pool.deferred()

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager, model = self.manager, self.model
        assert manager.pool.free_block_queue.get_all_free_blocks() == model.pool.queue
        assert [b.ref_cnt for b in manager.pool.blocks] == model.pool.ref
        for name, request in self.live.items():
            assert manager.get_block_ids(request) == (model.requests[name].table or [],)
        assert manager.stats.total.fields == (*model.stats, 0, 0)
        self.follow(manager.take_events())
        assert self.mirror == model.announced()
        assert manager.pool.audit() == []

    def follow(self, events: list[Any]) -> None:
        """A reader of the events: every key is stored once before it is removed once."""
        for event in events:
            if isinstance(event, BlockStored):
                names = {self.names[digest] for digest in event.block_hashes}
                assert not names & self.mirror
                self.mirror |= names
            elif isinstance(event, BlockRemoved):
                names = {self.names[digest] for digest in event.block_hashes}
                assert names <= self.mirror
                self.mirror -= names
            else:
                self.mirror.clear()


CacheMachine.TestCase.settings = machine_settings(150, 50)
TestCacheMachine = CacheMachine.TestCase
