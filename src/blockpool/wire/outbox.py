"""Between the step's thread and the publisher's: a bounded queue that never makes the step wait."""

from __future__ import annotations

from collections import deque
from threading import Lock

import msgspec

from blockpool.pool import KVCacheEvent
from blockpool.wire.ledger import Overflow


class Waiting(msgspec.Struct, frozen=True):
    """A batch that is to be sent."""

    seq: int
    ts: float
    events: list[KVCacheEvent]


class Outbox:
    """Batches in order. One that finds the queue full is not sent: its number is spent, which readers see as a gap.

    What it did to the index is kept all the same (see Overflow), so that snapshots stay true. `counted`: see Ledger.
    """

    def __init__(self, max_batches: int, counted: bool = True) -> None:
        self.max_batches = max_batches
        self.counted = counted
        self.next_seq = 0
        self.num_batches = 0
        self.num_dropped = 0
        self._lock = Lock()  # held for a handful of instructions, by either side
        self._items: deque[Waiting | Overflow] = deque()

    def put(self, ts: float, events: list[KVCacheEvent]) -> int:
        """The batch's sequence number, whether it will be sent or not."""
        with self._lock:
            seq = self.next_seq
            self.next_seq = seq + 1
            items = self._items
            if self.num_batches < self.max_batches:
                items.append(Waiting(seq, ts, events))
                self.num_batches += 1
                return seq
            self.num_dropped += 1
            last = items[-1] if items else None
            if not isinstance(last, Overflow):
                last = Overflow(seq, self.counted)
                items.append(last)
            last.add(seq, events)
            return seq

    def get(self) -> Waiting | Overflow | None:
        """The next item, None when there is none."""
        with self._lock:
            if not self._items:
                return None
            item = self._items.popleft()
            if isinstance(item, Waiting):
                self.num_batches -= 1
            return item

    def __len__(self) -> int:
        return len(self._items)
