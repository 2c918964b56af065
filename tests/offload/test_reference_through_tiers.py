"""A decoder's tokens are the same whatever tiers its memory went through, and whatever failed there."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from blockpool import build_info
from blockpool.cache import KVCacheConfig, KVCacheManager
from blockpool.engine import CheckedStore, Engine, EngineRequest, FinishReason, ReferenceModel, Scheduler, Worker
from blockpool.offload import DiskTier, HostTier, Namespace, Offloader, Tier, ValkeyTier
from tests.engine.hand_made import alone
from tests.engine.test_engine import HASHER, MODELS, groups_of
from tests.offload.plain_tier import FaultyTier
from tests.offload.servers import Server, need_a_server
from tests.sizes import LONG

SEEDS = 60 if LONG else 3 if build_info().is_compiled else 1
NAMESPACE = Namespace(model="reference")
NAMES = [name for name in MODELS if "without checkpoints" not in name]


class Run:
    """Rounds of random prompts that share prefixes, in a pool of little more than the longest needs."""

    def __init__(self, name: str, c: random.Random) -> None:
        least, specs = MODELS[name]
        self.c = c
        self.groups = groups_of(specs)
        self.config = KVCacheConfig(1 + least + c.choice([0, 2, 6]), self.groups, hash_block_size=2)
        self.model = ReferenceModel(self.config)
        self.steps = c.randint(1, 3)
        self.manager = KVCacheManager(
            self.config, max_steps_in_flight=self.steps, max_in_flight_tokens=16, tells_stored=True
        )
        self.store = CheckedStore(self.config, self.model.store())
        self.page_bytes = max(self.store.page_bytes(at) for at in range(len(specs)))
        self.shared = [[c.randrange(64) for _ in range(16)] for _ in range(3)]
        self.num_requests = 0

    def start(self, tiers: list[Tier], **options: Any) -> None:
        self.offloader = Offloader(self.manager, self.store, tiers, namespace=NAMESPACE, **options)
        scheduler = Scheduler(
            self.manager, max_num_seqs=4, max_num_batched_tokens=self.c.choice([5, 16]), connector=self.offloader
        )
        worker = Worker(self.config, self.store, self.model)
        self.engine = Engine(scheduler, worker, self.steps, transfers=self.offloader)

    def round(self, count: int) -> None:
        """Some requests, to the end: each says what it would say alone."""
        c = self.c
        roomy = KVCacheConfig(60, self.groups, hash_block_size=2)
        model = ReferenceModel(roomy)
        requests: dict[str, EngineRequest] = {}
        for _ in range(count):
            request_id = f"r{self.num_requests}"
            self.num_requests += 1
            own = [c.randrange(64) for _ in range(c.randint(1, 4))]
            tokens = c.choice(self.shared)[: c.choice([4, 8, 12, 16])] + own
            requests[request_id] = EngineRequest(request_id, tokens, max_tokens=c.randint(1, 6), hasher=HASHER)
            self.engine.add_request(requests[request_id])
        for ended in self.engine.run():
            assert ended.reason is FinishReason.LENGTH, ended
        for request_id, request in requests.items():
            prompt = request.tokens[: request.num_prompt_tokens]
            expected = alone(roomy, model, model.store(), prompt, request.max_tokens)
            assert request.output_token_ids == expected, request_id

    def finish(self) -> None:
        self.offloader.drain(self.engine.scheduler)
        self.offloader.close()
        for pool in self.manager.pools:
            assert pool.audit() == []
            assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
            assert pool.open_holds == []


@pytest.mark.parametrize("name", NAMES)
def test_through_memory_and_disk(name: str, tmp_path: Path) -> None:
    loaded = 0
    for seed in range(SEEDS):
        c = random.Random(f"{name}{seed}")
        run = Run(name, c)
        page = run.page_bytes
        host = HostTier(c.choice([2, 6, 40]) * page, page, policy=c.choice(["lru", "arc"]))
        disk = DiskTier(tmp_path / str(seed), 200 * page, page)
        tiers: list[Tier] = [host, disk]
        if seed % 2:
            tiers = [FaultyTier(host, c, 0.1), FaultyTier(disk, c, 0.1)]
        run.start(tiers, store_when=c.choice(["completion", "completion", "eviction"]))
        for _ in range(4):
            run.round(5)
        loaded += run.offloader.num_loaded_tokens
        run.finish()
        disk.close()
        host.close()
    assert loaded > 0


def test_through_a_server_that_is_killed_and_comes_back(tmp_path: Path) -> None:
    need_a_server()
    server = Server(tmp_path)
    try:
        run = Run("full, window and recurrence", random.Random(5))
        tier = ValkeyTier(server.url, run.page_bytes, namespace=NAMESPACE, retry_after_s=0.0)
        run.start([tier])
        run.round(6)
        run.round(6)
        loaded = run.offloader.num_loaded_tokens
        assert loaded > 0
        server.kill()
        run.round(6)
        server.start()
        for _ in range(30):  # until a prefix is wanted again that went down since
            run.round(6)
            if run.offloader.num_loaded_tokens > loaded:
                break
        run.finish()
        assert run.offloader.num_loaded_tokens > loaded
        assert run.offloader.losses["store: unreachable"] > 0
        tier.close()
    finally:
        server.kill()
