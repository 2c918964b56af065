"""Steps in flight: what they announced is held back until they are acknowledged, or taken back with them."""

from __future__ import annotations

from collections import Counter, deque

from blockpool.cache.errors import StepError
from blockpool.managers import SingleTypeKVCacheManager
from blockpool.pool import BlockRemoved, BlockStored, KVCacheEvent

# the blocks that were registered in one table of a group
Registered = tuple[SingleTypeKVCacheManager, list[int]]


class Step:
    """One step between `begin_step` and its acknowledgement."""

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self.events: list[KVCacheEvent] = []
        self.registered: list[Registered] = []


class StepLog:
    """The steps in flight, oldest first, and the events that may be seen outside."""

    def __init__(self) -> None:
        self.in_flight: deque[Step] = deque()
        self.newest = -1
        self.acknowledged = -1
        self.released: list[KVCacheEvent] = []

    @property
    def current(self) -> Step | None:
        """The newest step, while it is in flight: what happens now belongs to it."""
        return self.in_flight[-1] if self.in_flight else None

    def collect(self, events: list[KVCacheEvent]) -> None:
        """Events that the pool emitted since the last call."""
        step = self.current
        (self.released if step is None else step.events).extend(events)

    def begin(self, step_id: int) -> None:
        if step_id < 0 or step_id <= self.newest:
            raise StepError(f"step {step_id} cannot begin after step {self.newest}: ids rise from 0")
        self.newest = step_id
        self.in_flight.append(Step(step_id))

    def acknowledge(self, step_id: int) -> None:
        """Release the events of this step and of those before it."""
        if step_id > self.newest and self.newest >= 0:
            raise StepError(f"step {step_id} was never begun, the newest is {self.newest}")
        while self.in_flight and self.in_flight[0].step_id <= step_id:
            self.released.extend(self.in_flight.popleft().events)
        self.acknowledged = max(self.acknowledged, step_id)

    def cancel(self, step_id: int) -> Step:
        """Take the newest step out of flight; its events are still on it."""
        step = self.current
        if step is None or step.step_id != step_id:
            raise StepError(
                f"step {step_id} cannot be cancelled: only the newest step in flight can"
                f" ({'none is' if step is None else step.step_id})"
            )
        self.in_flight.pop()
        self.newest = self.in_flight[-1].step_id if self.in_flight else self.acknowledged
        return step

    def take(self) -> list[KVCacheEvent]:
        events = self.released
        self.released = []
        return events


def without_revoked(events: list[KVCacheEvent]) -> list[KVCacheEvent]:
    """The events of a cancelled step, all of whose registrations were revoked: what it stored, and the removal of
    that, was never seen outside; other removals are true.
    """
    kept: list[KVCacheEvent] = []
    unseen: Counter[tuple[int | None, bytes | int]] = Counter()
    for event in events:
        if isinstance(event, BlockStored):
            unseen.update((event.group_idx, digest) for digest in event.block_hashes)
        elif isinstance(event, BlockRemoved):
            seen: list[bytes | int] = []
            for digest in event.block_hashes:
                key = (event.group_idx, digest)
                if unseen[key]:
                    unseen[key] -= 1
                else:
                    seen.append(digest)
            if seen:
                kept.append(BlockRemoved(block_hashes=seen, medium=event.medium, group_idx=event.group_idx))
        else:
            unseen.clear()
            kept.append(event)
    return kept
