"""What the worker was told of a table, so that it is told only what has changed."""

from __future__ import annotations

from typing import final

from mypy_extensions import i64

from blockpool.managers import SingleTypeKVCacheManager


@final
class ToldTable:
    """One group's table as the worker knows it: `blocks` from position `first` on, nothing but nulls before.

    Of a table that only grows, how many there are is enough: `blocks` stays empty.
    """

    def __init__(self, only_grows: bool) -> None:
        self.only_grows = only_grows
        self.first = 0
        self.blocks: list[int] = []
        self.num_blocks = 0

    def tell_all(self, manager: SingleTypeKVCacheManager, request_id: str) -> list[int]:
        """The whole table."""
        table = manager.block_ids(request_id)
        self.num_blocks = len(table)
        self.first = 0
        if not self.only_grows:
            self.blocks = list(table)
            self.forget_nulls()
        return table

    def tell(self, manager: SingleTypeKVCacheManager, request_id: str, nulled: list[int]) -> list[int]:
        """What was appended since; `nulled` gets the positions that became null."""
        if self.only_grows:
            appended = list(manager.tables[request_id].blocks[self.num_blocks :])
            self.num_blocks += len(appended)
            return appended
        now = list(manager.tables[request_id].blocks[self.first :])
        at = 0
        for block in self.blocks:
            if block != 0 and now[at] == 0:
                nulled.append(self.first + at)
            at += 1
        self.blocks = now
        self.forget_nulls()
        return now[at:]

    def forget_nulls(self) -> None:
        """What is null stays null: the positions before the first block need no second look."""
        blocks = self.blocks
        count: i64 = 0
        for block in blocks:
            if block != 0:
                break
            count += 1
        if count:
            self.blocks = blocks[count:]
            self.first += count
