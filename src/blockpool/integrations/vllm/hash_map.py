"""The prefix index as vLLM handles it: keys to blocks. A pool's map is a view of its books, one by hand a dict."""

from __future__ import annotations

from typing import Any, final

from blockpool.integrations.vllm.block import KVCacheBlock, register_key
from blockpool.integrations.vllm.errors import StrangerError
from blockpool.integrations.vllm.home import Home
from blockpool.integrations.vllm.strays import Strays


@final
class BlockHashToBlockMap:
    """Several blocks per key, in the order of insertion: nothing is de-duplicated.

    `BlockHashToBlockMap()` belongs to no pool and takes any key and any block. What is inserted into a pool's map, or
    taken from it, is so on the block as well.
    """

    def __init__(self) -> None:
        self._home: Home | None = None
        self._members: Any = None
        self._strays: Strays | None = None
        self._loose: dict[bytes, dict[int, KVCacheBlock]] = {}

    def __len__(self) -> int:
        """Number of different keys."""
        home = self._home
        if home is None or home.books is None:
            return len(self._loose)
        return len(home.books.index)

    def get_one_block(self, key: bytes) -> KVCacheBlock | None:
        """The block registered first under the key, or None."""
        home = self._home
        if home is None or home.books is None or home.keys is None:
            for block in self._loose.get(key, {}).values():
                return block
            return None
        block_hash, group = home.keys.split(key)
        index = home.books.index
        entry = index.find(home.keys.digest(block_hash), 0, group)
        if entry == 0:
            return None
        place = int(index.block_of(entry))
        if place == 0 and self._strays is not None:
            return self._strays.at(entry)
        found: KVCacheBlock = self._members[place]
        return found

    def contain(self, key: bytes, block_id: int) -> bool:
        """Whether the block with this id is registered under this key."""
        if self._home is None:
            return block_id in self._loose.get(key, {})
        return self._entry(key, block_id) != 0

    def insert(self, key: bytes, block: KVCacheBlock) -> None:
        """Register a block under a key. In a pool's map it becomes the block's primary key, or an additional one."""
        home = self._home
        if home is None:
            self._loose.setdefault(key, {})[block.__index__()] = block
        elif block._home is None and self._strays is not None and home.keys is not None:
            block_hash, group = home.keys.split(key)
            self._strays.register(block, block_hash, group, None)
        elif block._home is not home or block.is_null:
            raise StrangerError(f"{block} cannot be listed in this pool's index")
        else:
            register_key(home, block._place, key, None)

    def pop(self, key: bytes, block_id: int) -> KVCacheBlock | None:
        """Take the block off the key. The block, or None when it was not registered there."""
        home = self._home
        if home is None or home.books is None:
            return self._pop_loose(key, block_id)
        entry = self._entry(key, block_id)
        if entry == 0:
            return None
        home.books.index.take_off(block_id, entry)
        home.books.changes += 1
        found: KVCacheBlock = self._members[block_id]
        return found

    def _pop_loose(self, key: bytes, block_id: int) -> KVCacheBlock | None:
        blocks = self._loose.get(key)
        if blocks is None:
            return None
        block = blocks.pop(block_id, None)
        if not blocks:
            del self._loose[key]
        return block

    def _entry(self, key: bytes, block_id: int) -> int:
        """The entry of the index that says so, or 0."""
        home = self._home
        if home is None or home.books is None or home.keys is None:
            return 0
        if block_id < 1 or block_id >= home.books.num_gpu_blocks:
            return 0
        block_hash, group = home.keys.split(key)
        return int(home.books.index.entry_of(block_id, home.keys.digest(block_hash), 0, group))


def map_of(home: Home, members: Any, strays: Strays) -> BlockHashToBlockMap:
    """The view of a pool's index."""
    view = BlockHashToBlockMap()
    view._home = home
    view._members = members
    view._strays = strays
    return view
