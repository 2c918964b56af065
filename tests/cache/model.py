"""A cache manager so simple that it is obviously right: one full-attention group over the model pool."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from tests.pool.model import ModelPool


def chain_of(tokens: list[int], size: int) -> list[bytes]:
    """Any digests will do, as long as equal prefixes and only those have equal ones."""
    return [hashlib.sha256(repr(tokens[:end]).encode()).digest() for end in range(size, len(tokens) + 1, size)]


@dataclass
class ModelRequest:
    name: str
    tokens: list[int]
    prompt: int
    skip: bool = False
    no_store: bool = False
    computed: int = 0
    preempted: bool = False
    table: list[int] | None = None
    registered: int = 0


@dataclass
class ModelStep:
    step_id: int
    before: set[bytes]
    registered: list[tuple[int, int]] = field(default_factory=list)  # block, turn


class ModelCache:
    def __init__(self, num_blocks: int, size: int, watermark: int) -> None:
        self.pool = ModelPool(num_blocks, size, "first_last")
        self.size = size
        self.watermark = watermark
        self.requests: dict[str, ModelRequest] = {}
        self.in_flight: list[ModelStep] = []
        self.stats = [0, 0, 0, 0, 0, 0]
        self.outside: set[bytes] = set()  # what a reader of the events may believe

    def blocks_for(self, tokens: int) -> int:
        return (tokens + self.size - 1) // self.size

    def lookup(self, r: ModelRequest) -> list[int]:
        if r.skip:
            return []
        usable = (len(r.tokens) - 1) // self.size
        return self.pool.lookup(chain_of(r.tokens, self.size)[:usable], 0)

    def plan(
        self, r: ModelRequest, new: int, hit: list[int], lookahead: int, reserved: int, whole: bool
    ) -> tuple[str, int]:
        """("ok", new blocks) or (reason, 0)."""
        held = len(r.table or [])
        total = r.computed + len(hit) * self.size
        slots = self.blocks_for(total + new + lookahead)
        wanted = max(0, slots - held - len(hit))
        if wanted == 0 and not hit and held:
            return "ok", 0
        from_queue = sum(1 for block in hit if self.pool.ref[block] == 0)
        needed = wanted + from_queue
        everything = self.blocks_for(len(r.tokens)) if whole else 0
        if max(slots, everything) > self.pool.n - 1:
            return "never_fits", 0
        if whole:
            needed = max(needed, everything - held - len(hit) + from_queue)
        kept = reserved + (self.watermark if held == 0 else 0)
        if needed + kept > len(self.pool.queue):
            # a deferred block that the request would adopt stays with it: that fence frees others only
            others = [b for b in range(1, self.pool.n) if b not in hit]
            coming = [b for b in others if 0 < self.pool.ref[b] == self.pool.waiting(b)]
            helps = needed + kept <= len(self.pool.queue) + len(coming)
            return ("wait_for_fence" if helps else "no_room"), 0
        return "ok", wanted

    def commit(self, r: ModelRequest, new: int, hit: list[int], wanted: int) -> list[int]:
        if r.table is None:
            self.pool.touch(hit)
            r.table = list(hit)
            r.registered = len(hit)
            if not r.skip:
                at = 3 if r.preempted else 0
                for i, amount in enumerate((1, len(r.tokens), len(hit) * self.size)):
                    self.stats[at + i] += amount
        blocks = self.pool.get_new_blocks(wanted)
        r.table += blocks
        self.register(r, r.computed + len(hit) * self.size + new)
        return blocks

    def register(self, r: ModelRequest, computed: int) -> None:
        if r.table is None or r.no_store:
            return
        chain = chain_of(r.tokens, self.size)
        last = min(computed, len(r.tokens)) // self.size
        last = min(last, len(r.table))
        for position in range(r.registered, last):
            block = r.table[position]
            if self.pool.hashes[block]:  # a sharer registered it, after a step of both was cancelled
                continue
            self.pool.add(block, (chain[position], 0), (position + 1) * self.size, None)
            if self.in_flight:
                self.in_flight[-1].registered.append((block, self.pool.turn[block]))
        r.registered = max(r.registered, last)

    def free(self, r: ModelRequest, after: int | None) -> bool:
        if r.table is None:
            return False
        self.pool.free(r.table[::-1], after)
        r.table = None
        r.registered = 0
        r.computed = 0
        return True

    # -- steps ----------------------------------------------------------------------------------------

    def keys(self) -> set[bytes]:
        return {digest for digest, _ in self.pool.index}

    def begin(self, step_id: int) -> None:
        self.in_flight.append(ModelStep(step_id, self.keys()))

    def acknowledge(self, step_id: int) -> None:
        while self.in_flight and self.in_flight[0].step_id <= step_id:
            self.in_flight.pop(0)
        self.pool.advance(step_id)

    def cancel(self) -> None:
        step = self.in_flight.pop()
        for block, turn in step.registered:
            if self.pool.turn[block] == turn:
                self.pool.drop(block)
        revoked = {block for block, _ in step.registered}
        for r in self.requests.values():
            lost = [position for position, block in enumerate(r.table or []) if block in revoked]
            r.registered = min([r.registered, *lost])

    def announced(self) -> set[bytes]:
        """The index as it was when the oldest unacknowledged step began; now, when none is in flight."""
        return self.in_flight[0].before if self.in_flight else self.keys()
