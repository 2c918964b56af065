"""The two implementations that are compared, each as the set of names that vLLM's modules hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


def nothing() -> None:
    pass


@dataclass(frozen=True)
class Side:
    name: str
    install: Callable[[], object]
    uninstall: Callable[[], object]
    BlockPool: Any
    SharedEventQueueBlockPool: Any
    KVCacheBlock: Any
    FreeKVCacheBlockQueue: Any
    BlockHashToBlockMap: Any
    get_request_block_hasher: Any
    KVCacheManager: Any

    @contextmanager
    def installed(self) -> Iterator[None]:
        """vLLM's modules hold this side's names for as long as the block lasts. Checked, so that nothing is ever
        compared with itself."""
        from vllm.v1.core import kv_cache_coordinator
        from vllm.v1.core.sched import scheduler

        self.install()
        try:
            if kv_cache_coordinator.BlockPool is not self.BlockPool:
                raise RuntimeError(f"vLLM's coordinator would build {kv_cache_coordinator.BlockPool}")
            if scheduler.KVCacheManager is not self.KVCacheManager:
                raise RuntimeError(f"vLLM's scheduler would build {scheduler.KVCacheManager}")
            yield
        finally:
            self.uninstall()


def vllm_side() -> Side:
    """vLLM's own. Call it before anything is installed."""
    from vllm.v1.core import block_pool, kv_cache_manager, kv_cache_utils
    from vllm.v1.hisparse import block_pool as hisparse

    side = Side(
        "vllm",
        nothing,
        nothing,
        BlockPool=block_pool.BlockPool,
        SharedEventQueueBlockPool=hisparse.SharedEventQueueBlockPool,
        KVCacheBlock=kv_cache_utils.KVCacheBlock,
        FreeKVCacheBlockQueue=kv_cache_utils.FreeKVCacheBlockQueue,
        BlockHashToBlockMap=block_pool.BlockHashToBlockMap,
        get_request_block_hasher=kv_cache_utils.get_request_block_hasher,
        KVCacheManager=kv_cache_manager.KVCacheManager,
    )
    for name, thing in vars(side).items():
        if name not in ("name", "install", "uninstall") and not thing.__module__.startswith("vllm."):
            raise RuntimeError(f"{name} is {thing.__module__}'s, not vLLM's: something is installed already")
    return side


def our_side(manager: bool = False) -> Side:
    """Our pool and hasher; with `manager`, our KVCacheManager too. Call it before anything is installed."""
    from vllm.v1.core import kv_cache_manager

    from blockpool.integrations import vllm as ours

    def install() -> None:
        ours.install(manager=manager)

    return Side(
        "blockpool's manager" if manager else "blockpool",
        install,
        ours.uninstall,
        BlockPool=ours.BlockPool,
        SharedEventQueueBlockPool=ours.SharedEventQueueBlockPool,
        KVCacheBlock=ours.KVCacheBlock,
        FreeKVCacheBlockQueue=ours.FreeKVCacheBlockQueue,
        BlockHashToBlockMap=ours.BlockHashToBlockMap,
        get_request_block_hasher=ours.get_request_block_hasher,
        KVCacheManager=ours.KVCacheManager if manager else kv_cache_manager.KVCacheManager,
    )
