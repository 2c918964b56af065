"""The random engine over a memory of fingerprints, with lower tiers whose pages are those fingerprints."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from blockpool.cache import KVCacheManager
from blockpool.engine import FinishReason, Scheduler, SchedulerOutput, ShadowStore
from blockpool.offload import Namespace, Offloader, Tier
from tests.engine.shadow_engine import Case, Connection, ShadowEngine, random_workload, run_alone
from tests.offload.plain_tier import FaultyTier, PlainTier

NAMESPACE = Namespace(model="shadow")


class Tiers(Connection):
    """Transfers by hand: `carry_out` does a page or some of what is queued. With threads they come by themselves."""

    def __init__(
        self, c: random.Random, manager: KVCacheManager, store: ShadowStore, tiers: list[Tier], num_threads: int
    ) -> None:
        self.c = c
        self.num_threads = num_threads
        whens = ["completion", "completion", "completion", "eviction", "hits=1", "hits=2"]
        self.offloader = Offloader(
            manager,
            store,
            tiers,
            namespace=NAMESPACE,
            store_when={tier.name: c.choice(whens) for tier in tiers},
            guard=c.choice(["watch", "watch", "hold"]),
            evict_ahead=c.choice([1, 2, 8, 64]),
            num_threads=num_threads,
            most_pages=c.choice([1, 4, 4096, 4096]),
            events=len({tier.medium for tier in tiers}) == len(tiers) and c.random() < 0.5,
        )
        self.connector = self.offloader
        self.transfers: Any = self.offloader.transfers
        if c.random() < 0.7:
            self.transfers._piece_pages = c.choice([1, 2])  # so that much can happen in between

    def ran(self, output: SchedulerOutput) -> None:
        self.offloader.step_has_run(output)

    @property
    def is_busy(self) -> bool:
        return not self.transfers.is_idle or bool(self.offloader._failed) or self.offloader._num_asked() > 0

    def carry_out(self, scheduler: Scheduler) -> None:
        if self.num_threads:
            if self.is_busy and self.c.random() < 0.5:
                self.offloader.wait()
        else:
            for _ in range(self.c.choice([1, 1, 2, 5])):
                self.do_one()
        if self.c.random() < 0.8:
            self.offloader.poll(scheduler)

    def do_one(self) -> None:
        all_queues = (self.transfers._questions, self.transfers._loads, self.transfers._stores)
        queues = [queue for queue in all_queues if not queue.empty()]
        if queues:
            self.c.choice(queues).get()()


class TieredEngine(ShadowEngine):
    tells_stored = True

    def __init__(self, case: Case, c: random.Random, tiers: list[Tier], num_threads: int) -> None:
        self.tiers = tiers
        self.num_threads = num_threads
        super().__init__(case, c, with_loads=True)

    def connect(self) -> Tiers:
        self.connection = Tiers(self.c, self.manager, self.store, self.tiers, self.num_threads)
        return self.connection

    def schedule(self) -> bool:
        if self.c.random() < 0.5:
            self.connection.offloader.poll(self.scheduler)
        return super().schedule()

    def load(self) -> None:
        loading = [job.request_id for job in self.connection.offloader._loads.values()]
        if loading and self.c.random() < self.case.abort_rate * 2:
            self.scheduler.abort([self.c.choice(loading)])
        super().load()

    def tell(self, at: int) -> None:
        super().tell(at)
        if self.c.random() < 0.8:
            self.connection.offloader.poll(self.scheduler)

    def check(self) -> None:
        super().check()
        offloader = self.connection.offloader
        assert offloader.transfers.is_idle
        assert not offloader._loads
        assert not offloader._loading
        assert not offloader._aborted
        assert offloader._storer.is_idle
        for pool in self.manager.pools:
            assert pool.open_holds == []
            assert pool.dump()["watchers"] == []


def random_tiers(c: random.Random) -> list[Tier]:
    tiers: list[Tier] = []
    for number in range(c.choice([1, 1, 2, 3])):
        tier: Tier = PlainTier(c.choice([0, 2, 8, 1000, 1000, 1000]), f"tier{number}", c.choice(["CPU", "STORAGE"]))
        tier.is_remote = c.random() < 0.2  # then nobody announces it
        if c.random() < 0.5:
            tier = FaultyTier(tier, c, c.choice([0.02, 0.1, 0.5]))
        tiers.append(tier)
    return tiers


def run_tiered(seed: int, num_threads: int = 0) -> TieredEngine:
    """One random workload over random tiers, checked."""
    c = random.Random(seed)
    case, wanted = random_workload(c, 40)
    while not case.enable_caching:
        case, wanted = random_workload(c, 40)
    case = replace(case, abort_rate=c.choice([0.0, 0.01, 0.05]))
    engine = TieredEngine(case, c, random_tiers(c), num_threads)
    try:
        engine.run(wanted)
        engine.check()
    finally:
        engine.connection.offloader.close()
    for name, ended in engine.ended.items():
        if ended.reason is FinishReason.ERROR:
            assert run_alone(case, engine.wanted[name]).reason is FinishReason.ERROR, (name, ended.message)
    return engine
