"""The table of a state group before a step grew it, in case the step is cancelled."""

from __future__ import annotations

from typing import final

from librt.vecs import append, vec
from mypy_extensions import i32

from blockpool.managers import SingleTypeKVCacheManager


@final
class StateTable:
    """A step that ends earlier than the cancelled one needs its running state at another position."""

    def __init__(self, manager: SingleTypeKVCacheManager, request_id: str) -> None:
        table = manager.tables[request_id]
        self.manager = manager
        self.request_id = request_id
        self.table = table
        self.num_scratch = table.num_scratch
        self.num_registered = table.num_registered
        self.blocks = table.blocks[:]

    def restore(self) -> None:
        """Put the table back as it was, unless the request has gone; what it got since is given back."""
        table = self.manager.tables.get(self.request_id)
        if table is not self.table:
            return
        before = set(self.blocks)
        taken = vec[i32]()
        for b in table.deepest_first():
            if b != 0 and b not in before:
                taken = append(taken, b)
        table.blocks = self.blocks
        table.num_scratch = self.num_scratch
        table.num_registered = self.num_registered
        self.manager.pool.free_vec(taken, None)
