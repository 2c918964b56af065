"""Which slot of a tier has which page: the books of the tiers that keep pages in slots of their own."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from blockpool.offload.arc import ArcPolicy
from blockpool.offload.errors import PolicyError, TierSizeError
from blockpool.offload.lru import LruPolicy
from blockpool.offload.namespace import namespace_of
from blockpool.offload.policy import Policy
from blockpool.offload.tally import count_loads, count_stores
from blockpool.offload.tier import Change, ChangeKind, Loaded, Stored, TierStats

#: In the place of a slot: there is none.
NO_SLOT: Final = -1
#: So many changes, and some for each slot, are kept as they come; then those that undo each other go.
FEW_CHANGES = 1000

# what a slot is
FREE: Final = 0
WRITING: Final = 1  # its page cannot be found yet
PRESENT: Final = 2  # its page is in the index
LEAVING: Final = 3  # out of the index, and held by readers or by who wipes it


def policy_named(name: str, num_slots: int) -> Policy[bytes]:
    """Raises PolicyError."""
    if name == "lru":
        return LruPolicy()
    if name == "arc":
        return ArcPolicy(num_slots)
    raise PolicyError(f"policy {name!r} is not known; there are 'lru' and 'arc'")


class Share:
    """The slots that the pages of a namespace, or of all that have no quota, may take."""

    def __init__(self, num_slots: int, policy: Policy[bytes]) -> None:
        self.num_slots = num_slots
        self.num_taken = 0
        self.policy = policy


class Reads(NamedTuple):
    """One call's pages: places in it and slots of those that are there, in the lengths that are asked for."""

    num_asked: int
    places: list[int]
    slots: list[int]
    num_bytes: list[int]


class Writes(NamedTuple):
    """One call's pages. Of those that are to be written: their places in it, slots, keys, and moments of use.

    `answers`: of the others, place by place: PRESENT holds its slot as a reader does, NO_ROOM has none.
    """

    answers: list[Stored | None]
    all_slots: list[int]
    lengths: Sequence[int]
    newest: int  # the moment of the first page; the others are just before
    places: list[int]
    slots: list[int]
    keys: list[bytes]
    last_uses: list[int]


class Kept(NamedTuple):
    """A page that was there before: of a file."""

    key: bytes
    slot: int
    num_bytes: int
    last_use: int


def net_changes(changes: list[Change]) -> list[Change]:
    """What these come to: at most two for each slot, however many there were and though nobody takes them."""
    first_is_store: dict[bytes, bool] = {}
    last_is_store: dict[bytes, bool] = {}
    net: list[Change] = []
    for change in changes:
        kind, key = change
        if kind is ChangeKind.CLEARED:
            net = [change]
            first_is_store.clear()
            last_is_store.clear()
            continue
        is_store = kind is ChangeKind.STORED
        first_is_store.setdefault(key, is_store)
        last_is_store.pop(key, None)  # in the order of what came last
        last_is_store[key] = is_store
    for wanted, kind in ((False, ChangeKind.REMOVED), (True, ChangeKind.STORED)):
        for key, is_store in last_is_store.items():
            if is_store is first_is_store[key] is wanted:
                net.append(Change(kind, key))
    return net


class Shelf:
    """Slots, keys, readers, order and quotas. Each method is one atomic step; no bytes are touched here.

    A page is read between `begin_reads` and `end_reads`, and written between `begin_writes` and `end_writes`: it is
    not evicted meanwhile, and not found before. Slots that a method hands out to be wiped stay taken until
    `release`. What a call uses or writes becomes recent from its last page to its first: of a prefix, the end is
    evicted before the beginning.
    """

    def __init__(self, num_slots: int, page_bytes: int, policy: str, quotas: Mapping[bytes, int]) -> None:
        """`quotas`: bytes by namespace prefix. Raises TierSizeError and PolicyError."""
        if num_slots < 1:
            raise TierSizeError(f"the capacity is less than one page of {page_bytes} bytes")
        by_namespace = {prefix: quota // page_bytes for prefix, quota in quotas.items()}
        if any(quota < 0 for quota in quotas.values()):
            raise TierSizeError(f"a quota is negative: {min(quotas.values())} bytes")
        num_others = num_slots - sum(by_namespace.values())
        if num_others < 0:
            raise TierSizeError(f"the quotas are {-num_others} pages more than the capacity of {num_slots} pages")
        self.num_slots = num_slots
        self.page_bytes = page_bytes
        self._shares = {prefix: Share(own, policy_named(policy, own)) for prefix, own in by_namespace.items()}
        self._others = Share(num_others, policy_named(policy, num_others))
        self._index: dict[bytes, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._state = [FREE] * num_slots
        self._keys: list[bytes] = [b""] * num_slots
        self._num_bytes = array("Q", bytes(8 * num_slots))
        self._readers = [0] * num_slots
        self._last_use = array("Q", bytes(8 * num_slots))
        self._writing: set[int] = set()
        self._void: set[int] = set()  # of these, discarded while they are written
        self._now = 1
        self._used_bytes = 0
        self._stats = TierStats()
        self._changes: list[Change] = []
        self._most_changes = 4 * num_slots + FEW_CHANGES
        self.reports_changes = False
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [key in self._index for key in keys]

    def keys(self) -> list[bytes]:
        with self._lock:
            return list(self._index)

    def stats(self) -> TierStats:
        with self._lock:
            return msgspec.structs.replace(self._stats)

    def take_changes(self) -> list[Change]:
        with self._lock:
            taken, self._changes = self._changes, []
            return taken

    def begin_reads(self, keys: Sequence[bytes], lengths: Sequence[int]) -> Reads:
        """Pages that are there, and as long."""
        with self._lock:
            places, slots, num_bytes = [], [], []
            place = -1
            for key in keys:
                place += 1
                slot = self._index.get(key, NO_SLOT)
                if slot == NO_SLOT or self._num_bytes[slot] != lengths[place]:
                    continue
                self._readers[slot] += 1
                places.append(place)
                slots.append(slot)
                num_bytes.append(lengths[place])
            return Reads(place + 1, places, slots, num_bytes)

    def end_reads(self, reads: Reads, found: list[Loaded]) -> tuple[list[Loaded], list[int]]:
        """What came of each page asked for, and the slots to wipe: corrupt pages are discarded."""
        num_asked, places, slots, num_bytes = reads
        ok, corrupt = Loaded.OK, Loaded.CORRUPT
        results = [Loaded.MISSING] * num_asked
        wipes = []
        with self._lock:
            count_loads(self._stats, found, num_bytes)
            self._stats.missing_pages += num_asked - len(slots)
            now = self._advance(num_asked)
            for at in range(len(slots) - 1, -1, -1):
                slot = slots[at]
                result = found[at]
                results[places[at]] = result
                if self._state[slot] != PRESENT:
                    self._let_go(slot)
                elif result is corrupt:
                    self._leave(slot)
                    wipes.append(slot)  # the reader's hold is now that of who wipes it
                else:
                    if result is ok:
                        self._use(slot, now - places[at])
                    self._readers[slot] -= 1
        return results, wipes

    def begin_writes(self, keys: Sequence[bytes], lengths: Sequence[int]) -> Writes:
        """A slot for each page that is not there. Pages of one call never evict each other."""
        with self._lock:
            count = len(keys)
            newest = self._advance(count)
            find = self._index.get
            all_slots = [find(key, NO_SLOT) for key in keys]
            answers: list[Stored | None] = [None] * count
            for place, slot in enumerate(all_slots):
                if slot != NO_SLOT:
                    self._readers[slot] += 1
                    answers[place] = Stored.PRESENT
            writes = Writes(answers, all_slots, lengths, newest, [], [], [], [])
            places, slots, new_keys, last_uses = writes.places, writes.slots, writes.keys, writes.last_uses
            others = None if self._shares else self._others
            for place in range(count):
                if all_slots[place] != NO_SLOT:
                    continue
                key = keys[place]
                slot = self._take(others or self._share_of(key))
                if slot == NO_SLOT:
                    answers[place] = Stored.NO_ROOM
                    continue
                all_slots[place] = slot
                self._state[slot] = WRITING
                self._keys[slot] = key
                self._num_bytes[slot] = lengths[place]
                self._writing.add(slot)
                places.append(place)
                slots.append(slot)
                new_keys.append(key)
                last_uses.append(newest - place)
            return writes

    def end_writes(self, writes: Writes, written: list[bool]) -> tuple[list[Stored], list[int]]:
        """What came of each page, and the slots to wipe: of pages that may not be found after all. `written`: of
        each page that was to be written.
        """
        answers, all_slots, lengths, newest, places, _, keys, _ = writes
        ok, failed, present = Stored.OK, Stored.FAILED, Stored.PRESENT
        results = [failed] * len(answers)
        wipes = []
        at = len(places)
        with self._lock:
            for place in range(len(answers) - 1, -1, -1):
                slot = all_slots[place]
                answer = answers[place]
                if answer is not None:
                    results[place] = answer
                    if answer is present:
                        if self._state[slot] == PRESENT:
                            self._use(slot, newest - place)
                        self._let_go(slot)
                    continue
                at -= 1
                key = keys[at]
                self._writing.remove(slot)
                is_void = bool(self._void) and slot in self._void
                if is_void:
                    self._void.remove(slot)
                if not written[at]:
                    self._free_slot(slot)
                elif is_void or key in self._index:
                    # discarded right after it was stored, or stored by somebody else at the same time
                    results[place] = ok if is_void else present
                    self._state[slot] = LEAVING
                    self._readers[slot] += 1
                    wipes.append(slot)
                else:
                    results[place] = ok
                    self._enter(slot, newest - place)
                    if self.reports_changes:
                        self._note(ChangeKind.STORED, key)
            count_stores(self._stats, results, lengths)
        return results, wipes

    def discard(self, keys: Sequence[bytes]) -> list[int]:
        """The slots to wipe. A page that is being written is forgotten as well, once it is."""
        with self._lock:
            wipes = []
            for key in keys:
                slot = self._index.get(key, NO_SLOT)
                if slot != NO_SLOT:
                    self._readers[slot] += 1
                    self._leave(slot)
                    wipes.append(slot)
            if self._writing:
                forgotten = set(keys)
                for slot in self._writing:
                    if self._keys[slot] in forgotten:
                        self._void.add(slot)
            return wipes

    def clear(self) -> list[int]:
        """The slots of all pages, to be wiped. Pages that are being written are forgotten as well, once they are."""
        with self._lock:
            wipes = list(self._index.values())
            for slot in wipes:
                self._readers[slot] += 1
                self._state[slot] = LEAVING
            self._void |= self._writing
            self._index.clear()
            self._used_bytes = 0
            for share in (*self._shares.values(), self._others):
                share.policy.clear()
            self._note(ChangeKind.CLEARED, b"")
            return wipes

    def release(self, slots: Iterable[int]) -> None:
        """These are wiped."""
        with self._lock:
            for slot in slots:
                self._let_go(slot)

    def adopt(self, pages: Iterable[Kept]) -> list[int]:
        """Pages of before, into an empty shelf: the newest that the quotas allow. The slots of the others."""
        with self._lock:
            chosen: list[Kept] = []
            surplus = []
            known: set[bytes] = set()
            for page in sorted(pages, key=lambda page: page.last_use, reverse=True):
                share = self._share_of(page.key)
                if page.key in known or share.num_taken == share.num_slots:
                    surplus.append(page.slot)
                    continue
                known.add(page.key)
                share.num_taken += 1
                chosen.append(page)
            for page in reversed(chosen):
                self._keys[page.slot] = page.key
                self._num_bytes[page.slot] = page.num_bytes
                self._enter(page.slot, page.last_use)
                self._now = page.last_use + 1
            self._free = [slot for slot in range(self.num_slots - 1, -1, -1) if self._state[slot] == FREE]
            return surplus

    def last_uses(self) -> list[Kept]:
        """All pages that can be found."""
        with self._lock:
            return [Kept(key, slot, self._num_bytes[slot], self._last_use[slot]) for key, slot in self._index.items()]

    def audit(self) -> list[str]:
        """What is wrong with the books while nobody reads or writes: nothing."""
        with self._lock:
            shares = [*self._shares.values(), self._others]
            by_key = {key: slot for slot, key in enumerate(self._keys) if self._state[slot] == PRESENT}
            wrong = []
            if by_key != self._index:
                wrong.append("the index does not list the pages that are present")
            if sorted(self._free) != [slot for slot in range(self.num_slots) if self._state[slot] == FREE]:
                wrong.append("the free list does not list the slots that are free")
            if len(self._free) + len(self._index) != self.num_slots:
                wrong.append("a slot is neither free nor present")
            if any(self._readers) or self._writing or self._void:
                wrong.append("somebody reads or writes")
            if sum(len(share.policy) for share in shares) != len(self._index):
                wrong.append("the policies do not order the pages that are present")
            if any(not len(share.policy) == share.num_taken <= share.num_slots for share in shares):
                wrong.append("a share has other pages than it counts, or more than it may")
            if any(key not in self._share_of(key).policy for key in self._index):
                wrong.append("a page is in the order of another share")
            if self._used_bytes != sum(self._num_bytes[slot] for slot in self._index.values()):
                wrong.append("the bytes in use are not those of the pages that are present")
            return wrong

    def _share_of(self, key: bytes) -> Share:
        if not self._shares:
            return self._others
        return self._shares.get(namespace_of(key), self._others)

    def _advance(self, count: int) -> int:
        """The newest of so many moments."""
        self._now += count
        return self._now - 1

    def _take(self, share: Share) -> int:
        if share.num_taken < share.num_slots:
            share.num_taken += 1
            return self._free.pop()
        for key in share.policy.victims():
            slot = self._index[key]
            if not self._readers[slot]:
                break
        else:
            return NO_SLOT
        share.policy.evicted(key)
        del self._index[key]
        self._used_bytes -= self._num_bytes[slot]
        self._stats.evicted_pages += 1
        if self.reports_changes:
            self._note(ChangeKind.REMOVED, key)
        return slot

    def _enter(self, slot: int, last_use: int) -> None:
        key = self._keys[slot]
        self._state[slot] = PRESENT
        self._last_use[slot] = last_use
        self._index[key] = slot
        self._used_bytes += self._num_bytes[slot]
        (self._share_of(key) if self._shares else self._others).policy.added(key)

    def _use(self, slot: int, last_use: int) -> None:
        key = self._keys[slot]
        self._last_use[slot] = last_use
        (self._share_of(key) if self._shares else self._others).policy.used(key)

    def _leave(self, slot: int) -> None:
        """Out of the index; somebody holds the slot."""
        key = self._keys[slot]
        del self._index[key]
        self._state[slot] = LEAVING
        self._used_bytes -= self._num_bytes[slot]
        self._share_of(key).policy.removed(key)
        self._note(ChangeKind.REMOVED, key)

    def _let_go(self, slot: int) -> None:
        self._readers[slot] -= 1
        if self._state[slot] == LEAVING and not self._readers[slot]:
            self._free_slot(slot)

    def _free_slot(self, slot: int) -> None:
        self._share_of(self._keys[slot]).num_taken -= 1
        self._keys[slot] = b""
        self._state[slot] = FREE
        self._free.append(slot)

    def _note(self, kind: ChangeKind, key: bytes) -> None:
        if not self.reports_changes:
            return
        self._changes.append(Change(kind, key))
        if len(self._changes) > self._most_changes:
            self._changes = net_changes(self._changes)
