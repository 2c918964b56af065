"""A pool so simple that it is obviously right: lists and dicts, and every rule written as it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Key = tuple[bytes, int]  # digest, group


class Refused(Exception):
    """The model's word for every named error; the state is as it was."""


class ModelHold:
    def __init__(
        self, blocks: list[int], turns: list[int], owner: str, until: float | None, after: int | None
    ) -> None:
        self.blocks = blocks
        self.turns = turns
        self.owner = owner
        self.until = until
        self.after = after
        self.released = False


class ModelPool:
    def __init__(self, num_blocks: int, unit: int, events: str) -> None:
        self.n = num_blocks
        self.unit = unit
        self.mode = events
        self.queue = list(range(1, num_blocks))
        self.ref = [0] * num_blocks
        self.turn = [0] * num_blocks
        self.hashes: list[list[tuple[Key, int]]] = [[] for _ in range(num_blocks)]
        self.index: dict[Key, list[int]] = {}
        self.used: list[bool] = [False] * num_blocks  # touched since it got its hash
        self.pending: list[tuple[int, list[int], ModelHold | None]] = []
        self.holds: list[ModelHold] = []  # all that were ever made
        self.late = 0
        self.fence = -1
        self.armed: list[tuple[int, Callable[[int], object]]] = []
        self.events: list[Any] = []
        self.evicted = 0
        self.evicted_unused = 0
        self.evicted_by_group: dict[int, int] = {}

    # -- hashes ---------------------------------------------------------------------------------------

    def add(self, block: int, key: Key, num_tokens: int, parent: bytes | None) -> None:
        if not self.hashes[block]:
            self.used[block] = False
        self.hashes[block].append((key, num_tokens))
        self.index.setdefault(key, []).append(block)
        if self.mode == "per_copy" or (self.mode == "first_last" and len(self.index[key]) == 1):
            self.events.append(("stored", *key, parent, num_tokens))

    def drop(self, block: int) -> None:
        for key, _ in self.hashes[block]:
            self.index[key].remove(block)
            last = not self.index[key]
            if last:
                del self.index[key]
            if self.mode == "per_copy" or (self.mode == "first_last" and last):
                self.events.append(("removed", *key))
        self.hashes[block] = []

    def cache_full(self, table: list[int], chain: list[bytes], first: int, last: int, size: int, group: int) -> None:
        k = size // self.unit
        blocks = [b for b in table[first:last] if b]
        if len(set(blocks)) < len(blocks):
            raise Refused
        for i in range(first, last):
            block = table[i]
            if block and self.hashes[block] and not i * size < self.hashes[block][0][1] < (i + 1) * size:
                raise Refused
        for block in blocks:
            self.drop(block)
        for i in range(first, last):
            if table[i]:
                parent = chain[i * k - 1] if i else None
                self.add(table[i], (chain[(i + 1) * k - 1], group), (i + 1) * size, parent)

    def cache_partial(self, block: int, digest: bytes, num_tokens: int, group: int, replace: bool) -> None:
        if block == 0:
            return
        there = (digest, group) in [key for key, _ in self.hashes[block]]
        if there and not (replace and len(self.hashes[block]) > 1):
            return
        if replace or (self.hashes[block] and self.hashes[block][0][1] < num_tokens):
            self.drop(block)
        self.add(block, (digest, group), num_tokens, None)

    def move(self, src: int, dst: int) -> None:
        if src == 0 or dst == 0 or self.hashes[dst]:
            raise Refused
        for key, _ in self.hashes[src]:
            self.index[key].remove(src)
            self.index[key].append(dst)
        self.hashes[dst] = self.hashes[src]
        self.used[dst] = False
        self.hashes[src] = []

    def lookup(self, digests: list[bytes], group: int) -> list[int]:
        found = []
        for digest in digests:
            if (digest, group) not in self.index:
                break
            found.append(self.index[digest, group][0])
        return found

    def cached_by_group(self) -> dict[int, int]:
        groups = [hashes[0][0][1] for hashes in self.hashes if hashes]
        return {group: groups.count(group) for group in groups}

    # -- references -----------------------------------------------------------------------------------

    def get_new_blocks(self, n: int) -> list[int]:
        if not 0 <= n <= len(self.queue):
            raise Refused
        out = [self.queue.pop(0) for _ in range(n)]
        self.fire(out)
        for block in out:
            if self.hashes[block]:
                self.evicted += 1
                group = self.hashes[block][0][0][1]
                self.evicted_by_group[group] = self.evicted_by_group.get(group, 0) + 1
                self.evicted_unused += not self.used[block]
            self.drop(block)
        for block in out:
            self.ref[block] = 1
            self.turn[block] += 1
        return out

    def fire(self, blocks: list[int]) -> None:
        for block in blocks:
            due = [callback for watched, callback in self.armed if watched == block]
            self.armed = [(watched, callback) for watched, callback in self.armed if watched != block]
            for callback in due:
                callback(block)

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            if block:
                if self.ref[block] == 0:
                    self.queue.remove(block)
                self.ref[block] += 1
                self.used[block] = self.used[block] or bool(self.hashes[block])

    def waiting(self, block: int) -> int:
        return sum(blocks.count(block) for _, blocks, _ in self.pending)

    def kept(self, block: int) -> int:
        return sum(h.blocks.count(block) for h in self.holds if h.after is None and not h.released)

    def givable(self, block: int) -> int:
        return self.ref[block] - self.waiting(block) - self.kept(block)

    def spoken_for(self) -> list[int]:
        """Blocks with references that are not for others to give back."""
        return [block for block in range(self.n) if self.givable(block) < self.ref[block]]

    def check_release(self, blocks: list[int]) -> None:
        for block in set(blocks) - {0}:
            if blocks.count(block) > self.givable(block):
                raise Refused

    def lower(self, blocks: list[int]) -> list[int]:
        gone = []
        for block in blocks:
            if block:
                self.ref[block] -= 1
                if self.ref[block] == 0:
                    gone.append(block)
        return gone

    def free(self, blocks: list[int], after: int | None = None) -> None:
        self.check_release(blocks)
        if after is not None and after > self.fence:
            self.pending.append((after, [block for block in blocks if block], None))
            return
        gone = self.lower(blocks)
        plain = [block for block in gone if not self.hashes[block]]
        cached = [block for block in gone if self.hashes[block]]
        self.queue = plain + self.queue + cached

    def advance(self, fence: int) -> None:
        if fence <= self.fence:
            return
        self.fence = fence
        due = [release for release in self.pending if release[0] <= fence]
        self.pending = [release for release in self.pending if release[0] > fence]
        for _, blocks, hold in due:
            if hold:
                hold.released = True
            self.free(blocks)

    def hold(self, blocks: list[int], owner: str, until: float | None, after: int | None, clock: bool) -> int:
        blocks = [block for block in blocks if block]
        if (until is not None and (after is not None or not clock)) or (after is not None and after < 0):
            raise Refused
        if any(self.ref[block] == 0 and not self.hashes[block] for block in blocks):
            raise Refused
        self.touch(blocks)
        hold = ModelHold(blocks, [self.turn[block] for block in blocks], owner, until, after)
        self.holds.append(hold)
        if after is not None:
            self.pending.append((after, blocks, hold))
            if after <= self.fence:
                self.end(hold)
        return len(self.holds)

    def end(self, hold: ModelHold) -> None:
        hold.released = True
        self.pending = [release for release in self.pending if release[2] is not hold]
        self.free(hold.blocks)

    def release(self, number: int) -> bool:
        hold = self.holds[number]
        if hold.released:
            self.late += 1
            return False
        self.end(hold)
        return True

    def expire(self, now: float) -> list[int]:
        due = []
        for time in sorted({h.until for h in self.holds if h.until is not None and h.until <= now}):
            due += [i for i, h in enumerate(self.holds) if h.until == time and not h.released]
        for number in due:
            self.end(self.holds[number])
        return due

    def held_by(self) -> dict[str, int]:
        kept = {h.owner: set[int]() for h in self.holds}
        for h in self.holds:
            if not h.released:
                kept[h.owner] |= set(h.blocks)
        return {owner: len(blocks) for owner, blocks in kept.items() if blocks}

    def pinned(self) -> int:
        return sum(1 for block in range(self.n) if self.kept(block))

    def unpin(self, blocks: list[int], callback: Callable[[int], object]) -> None:
        if 0 in blocks:
            raise Refused
        self.check_release(blocks)
        for block in dict.fromkeys(blocks):
            self.armed.append((block, callback))
        self.queue += self.lower(blocks)

    def evict(self, blocks: list[int]) -> None:
        for block in blocks:
            self.drop(block)

    def reset(self) -> bool:
        if len(self.queue) < self.n - 1:
            return False
        self.fire([block for block, _ in list(self.armed)])
        self.index = {}
        self.hashes = [[] for _ in range(self.n)]
        if self.mode != "off":
            self.events.append(("cleared",))
        return True

    def deferred(self) -> int:
        return sum(1 for b in range(1, self.n) if self.ref[b] and self.ref[b] == self.waiting(b))
