"""Least recently used goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic

from blockpool.offload.policy import Key


class LruPolicy(Generic[Key]):
    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()  # least recent first

    def added(self, key: Key) -> None:
        assert key not in self._order
        self._order[key] = None

    def used(self, key: Key) -> None:
        self._order.move_to_end(key)

    def removed(self, key: Key) -> None:
        del self._order[key]

    def evicted(self, key: Key) -> None:
        del self._order[key]

    def victims(self) -> Iterator[Key]:
        return iter(self._order)

    def clear(self) -> None:
        self._order.clear()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: object) -> bool:
        return key in self._order
