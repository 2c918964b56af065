"""The keys that blocks have besides their primary one, as vLLM's connectors read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class AdditionalKeys(Mapping[int, set[bytes]]):
    """A view: block id to the set of its additional keys. Blocks with one key or none are not in it."""

    __slots__ = ("_index", "_keys")

    def __init__(self, index: Any, keys: Any) -> None:
        self._index = index
        self._keys = keys

    def __getitem__(self, block_id: int) -> set[bytes]:
        if block_id not in self._index.more:
            raise KeyError(block_id)
        return set(self._keys.keys_of(block_id)[1:])

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._index.more))

    def __len__(self) -> int:
        return len(self._index.more)

    def __repr__(self) -> str:
        return repr(dict(self))
