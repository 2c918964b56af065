"""Requests in the order in which they come to their turn."""

from __future__ import annotations

from bisect import bisect_left
from typing import final

from blockpool.engine.request import EngineRequest


@final
class RequestQueue:
    """`requests`, sorted by their `order`, which never changes: who is preempted stands before all who came later."""

    def __init__(self) -> None:
        self.requests: list[EngineRequest] = []
        self._orders: list[tuple[int, float, int]] = []

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: EngineRequest) -> None:
        at = bisect_left(self._orders, request.order)
        self._orders.insert(at, request.order)
        self.requests.insert(at, request)

    def remove(self, request: EngineRequest) -> None:
        at = bisect_left(self._orders, request.order)
        assert self.requests[at] is request
        del self._orders[at]
        del self.requests[at]
