"""The event log of a pool: collects what left and what came while an operation runs, in its order."""

from __future__ import annotations

from typing import Final, final

from mypy_extensions import i64

from blockpool.pool.events import AllBlocksCleared, BlockRemoved, KVCacheEvent, Told, stored

OFF: Final[i64] = 0
FIRST_LAST: Final[i64] = 1  # a key is announced with its first block and removed with its last
PER_COPY: Final[i64] = 2  # every block of a key is announced


@final
class EventLog:
    def __init__(self, events: str, medium: str) -> None:
        modes: dict[str, int] = {"off": 0, "first_last": 1, "per_copy": 2}
        if events not in modes:
            raise ValueError(f'events must be "off", "first_last" or "per_copy", not {events!r}')
        self.name = events
        self.mode: i64 = modes[events]
        self.medium = medium
        self.events: list[KVCacheEvent] = []
        self.gone: list[bytes] = []
        self.gone_group: i64 = -1

    def removed(self, digest: bytes, group: i64) -> None:
        """A key left the index. Neighbours of one group share an event."""
        if group != self.gone_group:
            self.flush()
            self.gone_group = group
        self.gone.append(digest)

    def flush(self) -> None:
        """The removals since the last event become one."""
        if self.gone:
            group: int = self.gone_group
            self.events.append(BlockRemoved(block_hashes=list(self.gone), medium=self.medium, group_idx=group))
            self.gone = []
        self.gone_group = -1

    def stored(self, told: Told, first: int, hashes: list[bytes], parent: bytes | None, group: int) -> None:
        self.flush()
        self.events.append(stored(told, first, hashes, parent, group, self.medium))

    def cleared(self) -> None:
        self.flush()
        self.events.append(AllBlocksCleared(medium=self.medium))

    def take(self) -> list[KVCacheEvent]:
        self.flush()
        events = self.events
        self.events = []
        return events
