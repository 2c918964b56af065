"""Blocks that somebody elsewhere may still be writing, though their request is gone."""

from __future__ import annotations

from typing import final

from blockpool.cache import KVCacheManager
from blockpool.engine.request import EngineRequest
from blockpool.pool import BlockPool, Hold


@final
class Leases:
    """Holds on the blocks of aborted loads, until the connector reports back, or for `lease` by the pools' clock."""

    def __init__(self, manager: KVCacheManager, lease: float | None) -> None:
        self.manager = manager
        self.lease = lease
        self.holds: dict[str, list[tuple[BlockPool, Hold]]] = {}
        self.load_ids: dict[str, int] = {}

    def take(self, request: EngineRequest) -> None:
        """Before a request is given back that is being loaded."""
        manager = self.manager
        holds: list[tuple[BlockPool, Hold]] = []
        self.holds[request.request_id] = holds
        self.load_ids[request.request_id] = request.load_id
        for group in manager.managers:
            pool = group.pool
            until: float | None = None
            if self.lease is not None and pool.clock is not None:
                until = pool.clock() + self.lease
            blocks = [block for block in reversed(group.block_ids(request.request_id)) if block]
            holds.append((pool, pool.hold(blocks, f"load of {request.request_id}", until=until)))

    def end(self, request_id: str, load_id: int) -> bool:
        """The connector has reported back; whether there was anything to end. `load_id`: -1 for whichever it is."""
        holds = self.holds.get(request_id)
        if holds is None or load_id not in (-1, self.load_ids[request_id]):
            return False
        self.forget(request_id)
        for pool, hold in holds:
            pool.release(hold)
        return True

    def expire(self) -> None:
        """Give back what was kept long enough; a report that comes later changes nothing."""
        if not self.holds or self.lease is None:
            return
        for pool in self.manager.pools:
            pool.expire_holds()
        for request_id in list(self.holds):
            if all(hold.released for _, hold in self.holds[request_id]):
                self.forget(request_id)

    def forget(self, request_id: str) -> None:
        del self.holds[request_id]
        del self.load_ids[request_id]
