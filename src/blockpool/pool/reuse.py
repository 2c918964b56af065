"""Reuse callbacks: who is still reading a block that it no longer holds, and wants to know when that ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from blockpool.pool.layout import FLAGS, TURN, WATCHED, Records


@final
class ReuseHandle:
    """What `unpin_blocks` returns: the callbacks of one call that have not fired yet."""

    def __init__(self, watchers: ReuseWatchers, on_reuse: Callable[[int], object]) -> None:
        self.watchers = watchers
        self.on_reuse = on_reuse
        self.armed: dict[int, int] = {}  # block -> incarnation it was armed for

    def done(self) -> None:
        """The reader is finished: what has not fired never will. May be called twice."""
        for block in list(self.armed):
            self.watchers.disarm(block, self)
        self.armed.clear()


@final
class ReuseWatchers:
    """All armed callbacks of a pool: block -> handles, in the order of arming."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.by_block: dict[int, list[ReuseHandle]] = {}
        self.errors: list[BaseException] = []

    def arm(self, block: int, handle: ReuseHandle) -> None:
        records = self.records
        records.set(block, FLAGS, records.get(block, FLAGS) | WATCHED)
        if block not in handle.armed:
            handle.armed[block] = int(records.get(block, TURN))
            self.by_block.setdefault(block, []).append(handle)

    def disarm(self, block: int, handle: ReuseHandle) -> None:
        handles = self.by_block.get(block)
        if handles is None or handle not in handles:
            return
        handles.remove(handle)
        if not handles:
            self.forget(block)

    def forget(self, block: int) -> None:
        del self.by_block[block]
        records = self.records
        records.set(block, FLAGS, records.get(block, FLAGS) & ~WATCHED)

    def fire(self, block: int) -> None:
        """Call every reader of the block once; what they raise is kept for after the operation."""
        handles = self.by_block[block]
        self.forget(block)
        for handle in handles:
            if block in handle.armed:
                del handle.armed[block]
                try:
                    handle.on_reuse(block)
                except BaseException as error:
                    self.errors.append(error)

    def listing(self) -> list[dict[str, Any]]:
        """Block, incarnation and number of callbacks, for an audit."""
        out: list[dict[str, Any]] = []
        for block, handles in self.by_block.items():
            for turn in sorted({handle.armed[block] for handle in handles}):
                callbacks = sum(1 for handle in handles if handle.armed[block] == turn)
                out.append({"block": block, "incarnation": turn, "callbacks": callbacks})
        return out

    def fire_all(self) -> None:
        for block in list(self.by_block):
            self.fire(block)

    def raise_errors(self, note: str = "") -> None:
        """Raise what callbacks and metrics hooks raised: one error as it is, several as a group."""
        errors = self.errors
        if errors:
            self.errors = []
            if note:
                for error in errors:
                    error.add_note(note)
            if len(errors) == 1:
                raise errors[0]
            raise BaseExceptionGroup("callbacks of the pool failed", errors)
