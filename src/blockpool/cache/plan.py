"""The answer to "is there room?": a plan that can be committed as it is, or a refusal that says what is missing."""

from __future__ import annotations

from enum import Enum

import msgspec

from blockpool.cache.hit import Hit
from blockpool.cache.request import Request


class RefusalReason(Enum):
    NO_ROOM = "no_room"  # others hold the blocks
    WAIT_FOR_FENCE = "wait_for_fence"  # enough is deferred: after `next_fence` there is room, if nobody else takes it
    NEVER_FITS = "never_fits"  # as planned, with this hit and this chunk, more than the empty pool has
    STALE_HIT = "stale_hit"  # the hit no longer holds: look up again
    STATE_NOT_READY = "state_not_ready"  # a longer hit can be used when the steps in flight are acknowledged
    PIN_CAP = "pin_cap"  # of pins: more than pinned blocks may be


class PoolRoom(msgspec.Struct, frozen=True):
    """What one pool would have to give, and has; all in blocks.

    `needed` counts new blocks and hits that stand in the free queue; `withheld` what watermark and reserve keep;
    `free` includes what the plan would drop. `next_fence` is the lowest fence that frees anything, for
    `wait_for_fence` the one after which there is room.
    """

    needed: int
    withheld: int
    free: int
    deferred: int
    held: int
    next_fence: int | None


class Refusal(msgspec.Struct, frozen=True):
    """Why there is no plan. Nothing has changed."""

    request_id: str
    reason: RefusalReason
    pools: tuple[PoolRoom, ...]

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        parts = [
            f"needs {room.needed} blocks"
            + (f" and {room.withheld} kept back" if room.withheld else "")
            + f", {room.free} free, {room.deferred} deferred"
            + (f" (next fence {room.next_fence})" if room.next_fence is not None else "")
            + f", {room.held} held"
            for room in self.pools
        ]
        return f"request {self.request_id}: {self.reason.value}: " + "; ".join(parts)


class AllocationPlan(msgspec.Struct, frozen=True):
    """What a commit will do, on exactly the version of the pools that it was made on.

    Per group: `num_new_blocks`, copies included, and `num_dropped_blocks`. `num_tokens_to_register`: how far blocks
    go into the prefix index. The rest are the lengths it was made for, in tokens: `num_tokens` have slots, of which
    `num_computed_tokens` are computed already, `num_external_tokens` of those elsewhere; up to `num_settled_tokens`
    nothing will be taken back.
    """

    request: Request | None
    manager: object
    version: int
    hit: Hit | None
    num_new_blocks: tuple[int, ...]
    num_dropped_blocks: tuple[int, ...]
    num_copies: int
    num_tokens: int
    num_tokens_without_lookahead: int
    num_computed_tokens: int
    num_external_tokens: int | None
    num_encoder_tokens: int
    num_settled_tokens: int
    num_tokens_to_register: int


#: The plan of every step that takes, drops and registers nothing: shared, so that such a step allocates nothing.
EMPTY_PLAN = AllocationPlan(None, None, -1, None, (), (), 0, 0, 0, 0, None, 0, 0, 0)
