"""Blocks of no pool that were registered with one: vLLM's pool takes them, so ours lists them, apart from its own."""

from __future__ import annotations

from typing import final

from mypy_extensions import i64

from blockpool.integrations.vllm.block import KVCacheBlock, loose
from blockpool.integrations.vllm.keys import Keys
from blockpool.pool.index import BlockHashToBlockMap as Index


@final
class Strays:
    """Each key of a stray is an entry of the index that belongs to no block; what it names is kept here."""

    def __init__(self, index: Index, keys: Keys) -> None:
        self.index = index
        self.keys = keys
        self.by_entry: dict[int, KVCacheBlock] = {}

    def at(self, entry: i64) -> KVCacheBlock:
        return self.by_entry[int(entry)]

    def fits(self, block: KVCacheBlock, num_tokens: int) -> bool:
        """Whether a block has no key, or that of a prefix which is known to be shorter."""
        own = loose(block)
        return own.block_hash is None or (own.num_tokens is not None and own.num_tokens < num_tokens)

    def register(self, block: KVCacheBlock, block_hash: bytes, group: i64, num_tokens: int | None) -> None:
        """Give a block that has no key its key, and list it."""
        index = self.index
        own = loose(block)
        own.block_hash = block_hash + int(group).to_bytes(4, "big")
        own.num_tokens = num_tokens
        if not index.spare:
            index.grow()
        digest = self.keys.keep(block_hash)
        entry = index.spare.pop()
        index.add(entry, digest, 0, group, 0 if num_tokens is None else num_tokens, index.mix_at(digest, 0, group))
        self.by_entry[entry] = block

    def forget(self, block: KVCacheBlock) -> list[bytes]:
        """Take a block off the index. The keys that it had there."""
        gone: list[bytes] = []
        for entry, known in list(self.by_entry.items()):
            if known is block:
                gone.append(self.keys.key_of(entry))
                self.index.drop(entry, self.index.mix_of(entry))
                self.index.spare.append(entry)
                del self.by_entry[entry]
        loose(block).block_hash = None
        loose(block).num_tokens = None
        return gone

    def clear(self) -> None:
        """The index has forgotten every key."""
        self.index.spare.extend(self.by_entry)
        for block in self.by_entry.values():
            loose(block).block_hash = None
            loose(block).num_tokens = None
        self.by_entry.clear()
