"""A whole engine over the reference model: its tokens are those of each request alone, whatever happens to it."""

from __future__ import annotations

import random

import pytest

from blockpool import build_info
from blockpool.cache import BlockCopy, KVCacheConfig, KVCacheManager
from blockpool.engine import (
    CheckedStore,
    Engine,
    EngineRequest,
    FinishReason,
    ReferenceModel,
    Scheduler,
    Worker,
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
