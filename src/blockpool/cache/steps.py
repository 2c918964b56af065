"""Steps in flight: what they announced is held back until they are acknowledged, or taken back with them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import final

from msgspec.structs import replace

from blockpool.cache.block_copy import BlockCopy
from blockpool.cache.errors import StepError
from blockpool.cache.state_table import StateTable
from blockpool.cache.stored import Span
from blockpool.cache.waiting import Waiting
from blockpool.managers import SingleTypeKVCacheManager
from blockpool.pool import BlockRemoved, BlockStored, Hold, KVCacheEvent


@final
class HeldCopy:
    """A copy to be made, and the references that keep both ends until it is."""

    def __init__(self, order: BlockCopy, hold: Hold) -> None:
        self.order = order
        self.hold = hold


@final
class Moved:
    """What the index says of a state went from block `source` of a table to block `target`, a copy of it to be."""

    def __init__(self, manager: SingleTypeKVCacheManager, request_id: str, source: int, target: int) -> None:
        self.manager = manager
        self.request_id = request_id
        self.table = manager.tables[request_id]
        self.source = source
        self.target = target


@final
class Step:
    """One step between `begin_step` and its acknowledgement."""

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self.events: list[KVCacheEvent] = []
        self.registered: dict[str, list[Span]] = {}  # by request
        self.written: dict[int, set[int]] = {}  # group -> its registered blocks, where hits may end inside
        self.waiting: dict[str, list[Waiting]] = {}  # by request
        self.kept: list[Span] = []  # of requests that are gone
        self.kept_waiting: list[Waiting] = []
        self.states: list[StateTable] = []
        self.moved: list[Moved] = []
        self.copies: list[HeldCopy] = []
        self.clears: list[tuple[int, int]] = []  # group, block

    def all_registered(self) -> list[Span]:
        return self.kept + [one for some in self.registered.values() for one in some]

    def all_waiting(self) -> list[Waiting]:
        return self.kept_waiting + [waiting for some in self.waiting.values() for waiting in some]

    def take(self, request_id: str) -> tuple[list[Span], list[Waiting]]:
        """What the step is to write for a request, out of its books."""
        return self.registered.pop(request_id, []), self.waiting.pop(request_id, [])

    def keep(self, request_id: str) -> None:
        """The request is gone, and the step computes it all the same: what it left is nobody's to take back alone."""
        self.kept += self.registered.pop(request_id, [])
        self.kept_waiting += self.waiting.pop(request_id, [])


@final
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
        """Events that a pool emitted since the last call."""
        step = self.current
        (self.released if step is None else step.events).extend(events)

    def begin(self, step_id: int) -> Step:
        last = max(self.newest, self.acknowledged)
        if step_id < 0 or step_id <= last:
            raise StepError(f"step {step_id} cannot begin after step {last}: ids rise from 0")
        self.newest = step_id
        step = Step(step_id)
        self.in_flight.append(step)
        return step

    def acknowledge(self, step_id: int) -> None:
        """This step and those before it have run: `next_done` takes them out of flight."""
        if step_id > self.newest and self.newest >= 0:
            raise StepError(f"step {step_id} was never begun, the newest is {self.newest}")
        self.acknowledged = max(self.acknowledged, step_id)

    def next_done(self) -> Step | None:
        """The oldest acknowledged step, which is no longer in flight then; None when there is none left."""
        if self.in_flight and self.in_flight[0].step_id <= self.acknowledged:
            return self.in_flight.popleft()
        return None

    def announce(self, events: list[KVCacheEvent]) -> None:
        """What became findable with the step that was acknowledged last.

        A key that a step in flight has seen go before is announced behind that, or readers would believe it gone.
        """
        if not events:
            return
        goes: dict[tuple[int | None, bytes | int], Step] = {}  # key -> the last step in which it goes
        for step in self.in_flight:
            for event in step.events:
                if isinstance(event, BlockRemoved):
                    for digest in event.block_hashes:
                        goes[event.group_idx, digest] = step
        for event in events:
            if goes and isinstance(event, BlockStored):
                for at, digest in enumerate(event.block_hashes):
                    later = goes.get((event.group_idx, digest))
                    (self.released if later is None else later.events).append(stored_alone(event, at))
            else:
                self.released.append(event)

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


def without_revoked(
    events: list[KVCacheEvent], is_cached: Callable[[bytes | int, int | None], bool]
) -> list[KVCacheEvent]:
    """The events of a cancelled step, all of whose registrations were revoked: what it stored, and the removal of
    that, was never seen outside; other removals are true, and so is a key that another block has meanwhile.
    """
    kept: list[KVCacheEvent] = []
    unseen: Counter[tuple[int | None, bytes | int]] = Counter()
    for event in events:
        if isinstance(event, BlockStored):
            for at, digest in enumerate(event.block_hashes):
                if is_cached(digest, event.group_idx):
                    kept.append(stored_alone(event, at))
                else:
                    unseen[event.group_idx, digest] += 1
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


def stored_alone(event: BlockStored, at: int) -> BlockStored:
    """What an event says of one of its blocks."""
    size = event.block_size
    extras, lookahead = event.extra_keys, event.lookahead_token_ids
    return replace(
        event,
        block_hashes=[event.block_hashes[at]],
        parent_block_hash=event.block_hashes[at - 1] if at else event.parent_block_hash,
        token_ids=event.token_ids[at * size : (at + 1) * size],
        extra_keys=None if extras is None or extras[at] is None else [extras[at]],
        lookahead_token_ids=None if lookahead is None else [lookahead[at]],
    )
