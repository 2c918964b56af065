"""A whole engine over the reference model: its tokens are those of each request alone, whatever happens to it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from blockpool import build_info
from blockpool.cache import BlockCopy, KVCacheConfig, KVCacheManager
from blockpool.engine import (
    CheckedStore,
    Engine,
    EngineError,
    EngineRequest,
    FinishReason,
    ReferenceModel,
    ResultError,
    Scheduler,
    Worker,
    WorkerError,
)
from blockpool.hashing import BlockHasher
from blockpool.managers import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    ReferenceWindowSpec,
    SlidingWindowSpec,
)
from tests.engine.hand_made import alone
from tests.sizes import LONG

HASHER = BlockHasher(hash_block_size=2, seed="engine")
SEEDS = 300 if LONG else 8 if build_info().is_compiled else 5

#: The specs of each model's groups, and how many blocks its longest request needs.
MODELS: dict[str, tuple[int, tuple[KVCacheSpec, ...]]] = {
    "full": (8, (FullAttentionSpec(4),)),
    "full, window and recurrence": (26, (FullAttentionSpec(4), SlidingWindowSpec(4, 7), MambaSpec(4, 2, "align"))),
    "hits inside blocks": (26, (FullAttentionSpec(8), SlidingWindowSpec(2, 5), MambaSpec(8, 2, "align"))),
    "chunk and reference window": (18, (ChunkedLocalAttentionSpec(4, 6), ReferenceWindowSpec(4, 6))),
    "recurrence without checkpoints": (14, (FullAttentionSpec(4), MambaSpec(64, 2, "none"))),
}


class CountingStore(CheckedStore):
    num_copies = 0

    def copy(self, order: BlockCopy) -> None:
        self.num_copies += 1
        super().copy(order)


def groups_of(specs: tuple[KVCacheSpec, ...]) -> tuple[KVCacheGroupSpec, ...]:
    return tuple(
        KVCacheGroupSpec((f"{at}.0", f"{at}.1") if at == 0 else (f"{at}.0",), spec) for at, spec in enumerate(specs)
    )


def run(name: str, seed: int) -> Engine:
    """Random prompts that share prefixes, in a pool that holds little more than the longest of them."""
    c = random.Random(seed)
    least, specs = MODELS[name]
    groups = groups_of(specs)
    steps = c.randint(1, 4)
    config = KVCacheConfig(1 + least + c.choice([0, 0, 2, 6]), groups, hash_block_size=2)
    model = ReferenceModel(config)
    caching = "without checkpoints" not in name
    manager = KVCacheManager(config, max_steps_in_flight=steps, enable_caching=caching, max_in_flight_tokens=16)
    scheduler = Scheduler(manager, max_num_seqs=4, max_num_batched_tokens=c.choice([5, 16]))
    engine = Engine(scheduler, Worker(config, CountingStore(config, model.store()), model), steps)
    shared = [c.randrange(64) for _ in range(16)]
    prompts: dict[str, list[int]] = {}
    expected: dict[str, list[int]] = {}
    requests: dict[str, EngineRequest] = {}
    roomy = KVCacheConfig(60, groups, hash_block_size=2)
    for number in range(8):
        request_id = f"r{number}"
        prompt = shared[: c.choice([0, 5, 8, 11, 16])] + [c.randrange(64) for _ in range(c.randint(1, 5))]
        if number == 5:
            prompt = list(prompts["r0"])
        num_outputs = c.randint(1, 10)
        prompts[request_id] = prompt
        expected[request_id] = alone(roomy, model, model.store(), prompt, num_outputs)
        requests[request_id] = EngineRequest(request_id, prompt, max_tokens=num_outputs, hasher=HASHER)
        engine.add_request(requests[request_id])
        for _ in range(c.randrange(4)):
            engine.step()
            for drafted in requests.values():
                if c.random() < 0.5:
                    right = expected[drafted.request_id][drafted.num_output_tokens :][:2]
                    scheduler.set_drafts(
                        drafted.request_id, [*right[:1], *[(t + c.randrange(2)) % 64 for t in right[1:]]]
                    )
    ended = engine.run()
    assert {one.reason for one in ended} == {FinishReason.LENGTH}, ended
    for request_id, request in requests.items():
        assert request.output_token_ids == expected[request_id], request_id
    for pool in manager.pools:
        assert pool.audit() == []
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    return engine


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_a_request_alone(name: str) -> None:
    hits = preemptions = copies = 0
    for seed in range(SEEDS):
        try:
            engine = run(name, seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        hits += engine.scheduler.manager.stats.total.hits
        preemptions += engine.scheduler.num_preemptions
        assert isinstance(engine.worker.store, CountingStore)
        copies += engine.worker.store.num_copies
    assert hits > 0 or "without checkpoints" in name
    assert preemptions > 0
    assert copies > 0 or name != "hits inside blocks"


def test_results_come_when_enough_steps_are_in_flight() -> None:
    groups = groups_of((FullAttentionSpec(4),))
    config = KVCacheConfig(20, groups)
    model = ReferenceModel(config)
    manager = KVCacheManager(config, max_steps_in_flight=3)
    scheduler = Scheduler(manager, max_num_seqs=2, max_num_batched_tokens=8)
    engine = Engine(scheduler, Worker(config, model.store(), model), 3)
    assert engine.step() is None
    request = EngineRequest("a", [1, 2, 3], max_tokens=4, hasher=BlockHasher(hash_block_size=4))
    engine.add_request(request)
    assert engine.step() is not None
    assert engine.step() is not None
    assert request.num_output_tokens == 0
    assert engine.step() is not None
    assert request.num_output_tokens == 1
    engine.abort(["a"])
    ended = engine.run()
    assert [one.reason for one in ended] == [FinishReason.ABORT]
    assert engine.in_flight == type(engine.in_flight)()


# -- a worker that fails -----------------------------------------------------------------------------


def small_engine(steps: int = 1, model_of: type[ReferenceModel] = ReferenceModel) -> Engine:
    config = KVCacheConfig(20, groups_of((FullAttentionSpec(4),)))
    model = model_of(config, vocab_size=8)
    manager = KVCacheManager(config, max_steps_in_flight=steps)
    scheduler = Scheduler(manager, max_num_seqs=4, max_num_batched_tokens=16)
    return Engine(scheduler, Worker(config, model.store(), model), steps)


def request(name: str, tokens: list[int], max_tokens: int = 4) -> EngineRequest:
    return EngineRequest(name, tokens, max_tokens=max_tokens, hasher=BlockHasher(hash_block_size=4))


def is_broken(engine: Engine, step: int, reason: str) -> None:
    """Nothing goes on, and every call says why."""
    for call in (engine.run, engine.step, lambda: engine.add_request(request("later", [1]))):
        with pytest.raises(EngineError, match="the engine is broken, make a new one: ") as caught:
            call()
        assert f"step {step} has failed with {reason}" in str(caught.value)
        assert caught.value.__cause__ is not None
    assert "later" not in engine.scheduler.requests


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("token", [8, 99])
def test_a_token_that_the_model_does_not_have_is_named_before_anything_is_computed(steps: int, token: int) -> None:
    engine = small_engine(steps)
    engine.add_request(request("good", [1, 2, 3]))
    engine.add_request(request("bad", [1, token]))
    message = f"request 'bad': token 1 is {token}, where the model's tokens are 0 to 7"
    with pytest.raises(WorkerError, match=message):
        engine.run()
    assert not any(
        array.any()
        for group in engine.worker.store.layers  # type: ignore[attr-defined]
        for layer in group
        for array in layer
    )
    is_broken(engine, 0, f"WorkerError: {message}")


class Failing(ReferenceModel):
    """Fails at its third step, as it is told."""

    error: BaseException | None = None
    num_steps = 0

    def forward(self, steps, store):  # type: ignore[no-untyped-def]
        self.num_steps += 1
        if self.num_steps < 3:
            return super().forward(steps, store)
        if self.error is not None:
            raise self.error
        return [[-1] for _ in steps]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("error", [RuntimeError("out of order"), KeyboardInterrupt()])
def test_whatever_a_model_raises_breaks_the_engine(steps: int, error: BaseException) -> None:
    engine = small_engine(steps, Failing)
    engine.worker.model.error = error  # type: ignore[attr-defined]
    engine.add_request(request("short", [1, 2], max_tokens=1))
    engine.add_request(request("long", [1, 2], max_tokens=9))
    with pytest.raises(type(error)) as caught:
        engine.run()
    assert caught.value is error
    is_broken(engine, 2, f"{type(error).__name__}: {error}")
    if steps == 1:
        assert [one.request_id for one in engine.scheduler.take_finished()] == ["short"]


def test_a_result_that_cannot_be_breaks_the_engine() -> None:
    engine = small_engine(1, Failing)
    engine.add_request(request("long", [1, 2], max_tokens=9))
    with pytest.raises(ResultError, match="step 2, request 'long': -1"):
        engine.run()
    is_broken(engine, 2, "ResultError: step 2, request 'long': -1")


def test_a_hook_that_fails_behind_a_settled_step_breaks_nothing() -> None:
    engine = small_engine()
    engine.add_request(request("a", [1, 2, 3]))

    class FailsOnce:
        """A scheduler with a hook that fails when its first step has been settled."""

        def __init__(self, sound: Scheduler) -> None:
            self.sound, self.has_failed = sound, False

        def __getattr__(self, name: str) -> Any:
            return getattr(self.sound, name)

        def update(self, step_id: int, results: dict[str, list[int]]) -> dict[str, list[int]]:
            new = self.sound.update(step_id, results)
            if self.has_failed:
                return new
            self.has_failed = True
            raise RuntimeError("a hook")

    engine.scheduler = FailsOnce(engine.scheduler)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="a hook"):
        engine.run()
    assert [one.reason for one in engine.run()] == [FinishReason.LENGTH]


@pytest.mark.parametrize("steps", [1, 3])
def test_a_request_known_by_its_hashes_alone_is_the_workers_error(steps: int) -> None:
    engine = small_engine(steps)
    hashes = BlockHasher(hash_block_size=4).start([1] * 8)
    engine.add_request(EngineRequest("h", block_hashes=hashes, num_prompt_tokens=8))
    message = "request 'h': 0 of 8 tokens of its prompt are known"
    with pytest.raises(WorkerError, match=message):
        engine.run()
    is_broken(engine, 0, f"WorkerError: {message}")


def test_a_prompt_that_ended_when_it_was_added_is_told_by_the_run() -> None:
    engine = small_engine()
    engine.add_request(request("a", [1]))
    engine.abort(["a"])
    assert [one.request_id for one in engine.run()] == ["a"]
