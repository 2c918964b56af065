"""vLLM on our books: its pool, block, queue and index classes, its request hasher and its manager, for vLLM 0.33.

The classes have the shape that vLLM's scheduler, connectors and tests expect; they can be imported without it.
`install()` puts them in vLLM's place in this process, `install(manager=True)` the KVCacheManager too, and
`uninstall()` puts vLLM's own back.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockpool.integrations.vllm.block import KVCacheBlock
    from blockpool.integrations.vllm.hash_map import BlockHashToBlockMap
    from blockpool.integrations.vllm.hasher import get_request_block_hasher
    from blockpool.integrations.vllm.managers import KVCacheManager
    from blockpool.integrations.vllm.pools import BlockPool, SharedEventQueueBlockPool
    from blockpool.integrations.vllm.queue import FreeKVCacheBlockQueue
    from blockpool.integrations.vllm.swap import (
        TESTED_VERSIONS,
        InstallError,
        Replacement,
        ShapeError,
        UntestedVersionError,
        VLLMNotFoundError,
        install,
        is_installed,
        uninstall,
    )

__all__ = [
    "TESTED_VERSIONS",
    "BlockHashToBlockMap",
    "BlockPool",
    "FreeKVCacheBlockQueue",
    "InstallError",
    "KVCacheBlock",
    "KVCacheManager",
    "Replacement",
    "ShapeError",
    "SharedEventQueueBlockPool",
    "UntestedVersionError",
    "VLLMNotFoundError",
    "get_request_block_hasher",
    "install",
    "is_installed",
    "uninstall",
]

_HOMES = {
    "BlockHashToBlockMap": "hash_map",
    "BlockPool": "pools",
    "FreeKVCacheBlockQueue": "queue",
    "KVCacheBlock": "block",
    "KVCacheManager": "managers",
    "SharedEventQueueBlockPool": "pools",
    "get_request_block_hasher": "hasher",
}


def __getattr__(name: str) -> Any:
    """Loaded when first asked for: vLLM loads the plugin beside in every process, wanted or not."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'swap')}"), name)
    globals()[name] = found
    return found
