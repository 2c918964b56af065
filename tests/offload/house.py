"""One small engine over tiers, by hand: transfers move when a test says so, or by threads of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blockpool.cache import KVCacheConfig, KVCacheManager
from blockpool.engine import (
    Engine,
    EngineRequest,
    FinishedRequest,
    Scheduler,
    SchedulerOutput,
    ShadowModel,
    ShadowStore,
    Worker,
)
from blockpool.hashing import BlockHasher, ExtraKeys
from blockpool.managers import FullAttentionSpec, KVCacheGroupSpec, KVCacheSpec
from blockpool.offload import Namespace, Offloader, Tier

HASHER = BlockHasher(hash_block_size=4, seed="offload")
NAMESPACE = Namespace(model="shadow")
FULL = FullAttentionSpec(4)


def prompt(name: str, tokens: int | Sequence[int], keys: ExtraKeys | None = None, **options: Any) -> EngineRequest:
    """A request; a number n stands for the tokens 0 .. n-1."""
    ids = list(range(tokens)) if isinstance(tokens, int) else list(tokens)
    options.setdefault("max_tokens", 1)
    return EngineRequest(name, ids, hasher=HASHER, extra_keys=keys, **options)


class House:
    """`usable_blocks`: without the null block. `num_threads`: 0, and `move` does what is queued."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        usable_blocks: int = 8,
        specs: Sequence[KVCacheSpec] = (FULL,),
        *,
        num_threads: int = 0,
        lease: float | None = None,
        clock: Any = None,
        num_tokens: int = 64,
        namespace: Namespace = NAMESPACE,
        **options: Any,
    ) -> None:
        groups = tuple(KVCacheGroupSpec((f"layer{at}",), spec) for at, spec in enumerate(specs))
        config = KVCacheConfig(usable_blocks + 1, groups, hash_block_size=4)
        self.manager = KVCacheManager(config, tells_stored=True, clock=clock, max_steps_in_flight=2)
        self.pool = self.manager.pool
        self.store = ShadowStore(config)
        self.offloader = Offloader(
            self.manager, self.store, tiers, namespace=namespace, num_threads=num_threads, **options
        )
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=8,
            max_num_batched_tokens=num_tokens,
            connector=self.offloader,
            lease=lease,
        )
        self.worker = Worker(config, self.store, ShadowModel(config, vocab_size=50))
        self.engine = Engine(self.scheduler, self.worker, transfers=self.offloader)

    def move(self, count: int = 1000) -> int:
        """Do at most so many of the tasks that are queued; how many there were."""
        transfers: Any = self.offloader.transfers
        done = 0
        for queue in (transfers._questions, transfers._loads, transfers._stores):
            while done < count and not queue.empty():
                queue.get()()
                done += 1
        return done

    def step(self) -> SchedulerOutput | None:
        return self.engine.step()

    def run(self, *requests: EngineRequest) -> list[FinishedRequest]:
        """To the end, moving what there is to move between the steps."""
        for request in requests:
            self.engine.add_request(request)
        ended: list[FinishedRequest] = []
        for _ in range(200):
            if not self.scheduler.has_work:
                break
            self.engine.step()
            self.move()
        else:
            raise AssertionError("the engine stands still")
        self.poll()
        self.move()
        self.poll()
        ended += self.scheduler.take_finished()
        return ended

    def poll(self) -> int:
        return self.offloader.poll(self.scheduler)

    def computed(self, request: EngineRequest) -> int:
        """Run a request; the tokens of its prompt that had to be computed."""
        self.engine.add_request(request)
        count = 0
        for _ in range(200):
            if not self.scheduler.has_work:
                break
            output = self.engine.step()
            count += sum(output.num_scheduled_tokens.values()) if output is not None else 0
            self.move()
        else:
            raise AssertionError("the engine stands still")
        self.poll()
        self.move()
        self.poll()
        return count

    def forget(self) -> None:
        """What the engine's memory knows is gone: others were given all of its blocks."""
        assert self.manager.reset_prefix_cache()

    def sound(self) -> None:
        """Nothing is held, queued, watched or on its way."""
        assert self.pool.audit() == []
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        assert self.pool.open_holds == []
        assert self.pool.dump()["watchers"] == []
        assert self.offloader.transfers.is_idle
        assert self.offloader._storer.is_idle
        assert not self.offloader._num_asked()
        assert not self.offloader._loads
        assert not self.offloader._loading
        assert not self.offloader._aborted
