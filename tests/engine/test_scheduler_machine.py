"""Random arrivals, aborts, drafts, shortages and late results: nobody starves, and the worker knows every table."""

from __future__ import annotations

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from blockpool.cache import KVCacheManager
from blockpool.engine import EngineRequest, FinishReason
from blockpool.managers import ChunkedLocalAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from tests.engine.driver import FULL, Driver, cache, prompt
from tests.sizes import machine_settings

MODELS: list[list[KVCacheSpec]] = [
    [FULL],
    [SlidingWindowSpec(4, 6)],
    [FULL, SlidingWindowSpec(4, 6)],
    [FULL, MambaSpec(4, 2, "align")],
    [MambaSpec(4, 2, "align")],
    [FULL, SlidingWindowSpec(2, 3), MambaSpec(4, 2, "align")],
    [ChunkedLocalAttentionSpec(2, 6), FULL],
]
BASE = [at % 7 for at in range(40)]


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.requests: dict[str, EngineRequest] = {}

    @initialize(
        model=st.sampled_from(MODELS),
        usable_blocks=st.integers(3, 24),
        num_seqs=st.integers(1, 6),
        num_tokens=st.sampled_from([2, 5, 16, 64]),
        steps=st.integers(1, 4),
        policy=st.sampled_from(["fcfs", "priority"]),
        unit=st.sampled_from([2, 4]),
        interval=st.sampled_from([None, 0]),
    )
    def start(
        self,
        model: list[KVCacheSpec],
        usable_blocks: int,
        num_seqs: int,
        num_tokens: int,
        steps: int,
        policy: str,
        unit: int,
        interval: int | None,
    ) -> None:
        self.unit = min([unit, *[spec.block_size for spec in model]])
        self.model, self.usable_blocks, self.interval = model, usable_blocks, interval
        manager = self.cache(usable_blocks, max_steps_in_flight=steps)
        self.driver = Driver(manager, num_seqs=num_seqs, num_tokens=num_tokens, policy=policy)

    def cache(self, usable_blocks: int, **options: int) -> KVCacheManager:
        return cache(usable_blocks, *self.model, unit=self.unit, interval=self.interval, max_model_len=48, **options)

    @rule(
        shared=st.sampled_from([0, 4, 7, 8, 13, 16, 24]),
        own=st.integers(1, 6),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 2),
        stop=st.booleans(),
    )
    def arrive(self, shared: int, own: int, max_tokens: int, priority: int, stop: bool) -> None:
        self.number += 1
        request = self.request(f"r{self.number}", BASE[:shared] + [90 + self.number % 3] * own, max_tokens, priority)
        if stop:
            request.stop_token_ids = frozenset(range(10))
        self.requests[request.request_id] = request
        self.driver.add(request)

    def request(self, name: str, tokens: list[int], max_tokens: int, priority: int = 0) -> EngineRequest:
        return prompt(name, tokens, self.unit, max_tokens=max_tokens, priority=priority)

    @rule(count=st.integers(1, 4))
    def schedule(self, count: int) -> None:
        for _ in range(count):
            self.driver.schedule()

    @precondition(lambda self: self.driver.pending)
    @rule(data=st.data())
    def tell(self, data: st.DataObject) -> None:
        self.driver.tell(data.draw(st.sampled_from(sorted(self.driver.pending))))

    @precondition(lambda self: self.driver.pending)
    @rule()
    def tell_all(self) -> None:
        while self.driver.pending:
            self.driver.tell()

    @precondition(lambda self: self.driver.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.driver.scheduler.requests)))
        assert self.driver.scheduler.abort([name, "nobody"]) == [name]

    @precondition(lambda self: self.driver.scheduler.requests)
    @rule(data=st.data(), drafts=st.lists(st.integers(0, 49), min_size=1, max_size=4))
    def draft(self, data: st.DataObject, drafts: list[int]) -> None:
        name = data.draw(st.sampled_from(sorted(self.driver.scheduler.requests)))
        known = self.driver.worker.requests.get(name)
        if known is not None and data.draw(st.booleans()):  # the first ones are right
            for at in range(len(drafts) - 1):
                drafts[at] = self.driver.model.token_after(int(known.prints.with_more(drafts[:at])[-1]))
        self.driver.scheduler.set_drafts(name, drafts)

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.run()
        self.driver.all_free()
        assert self.driver.ended.keys() == self.requests.keys()
        for name, ended in self.driver.ended.items():
            request = self.requests[name]
            if ended.reason is FinishReason.ABORT:
                continue
            lone = self.request("lone", request.tokens[: request.num_prompt_tokens], request.max_tokens)
            lone.stop_token_ids = request.stop_token_ids
            # Nobody fails who could have ended alone in this pool; the others give what they give in any pool.
            blocks = self.usable_blocks if ended.reason is FinishReason.ERROR else 100
            alone = Driver(self.cache(blocks))
            alone.add(lone)
            alone.run()
            assert alone.reason(lone) is ended.reason, (name, ended)
            if ended.reason is not FinishReason.ERROR:
                assert lone.output_token_ids == request.output_token_ids


def test_everybody_ends_as_alone_and_gives_all_back() -> None:
    # Not shrunk: that takes minutes.
    generate = settings(machine_settings(60, 40), phases=[Phase.explicit, Phase.generate])
    run_state_machine_as_test(Machine, settings=generate)
