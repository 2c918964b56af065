"""All keys of many workers, shelf by shelf, and what one of them has: the part of a mirror that events change."""

from __future__ import annotations

from threading import RLock
from typing import Final, final

from mypy_extensions import i64

from blockpool.wire.changes import CLEARED, REMOVED, Changes, Run
from blockpool.wire.shelf import Place, Shelf

GPU = "GPU"
#: What one worker's events may say of groups and tiers: each that has keys, and each (block size, kind, window).
MOST_SAID: Final = 256


def place_key(group: int | None, medium: str | None) -> tuple[int, str]:
    """Group and tier: who names none means group 0, and the GPU."""
    return (0 if group is None else group, GPU if medium is None else medium)


@final
class Catalogue:
    """Shelves by group and tier, shared by all workers. `lock`: taken by whoever reads or changes it."""

    def __init__(self) -> None:
        self.shelves: dict[tuple[int, str], Shelf] = {}
        self.num_words: i64 = 1
        self.unused: list[int] = []
        self.num_slots = 0
        self.lock = RLock()

    def new_slot(self) -> int:
        """A worker's place in the words of bits."""
        if self.unused:
            return self.unused.pop()
        self.num_slots += 1
        if self.num_slots > 64 * self.num_words:
            self.num_words += 1
            for shelf in self.shelves.values():
                shelf.widen(self.num_words)
        return self.num_slots - 1

    def shelf(self, group: int, medium: str) -> Shelf:
        """The shelf for one place more."""
        key = (group, medium)
        found = self.shelves.get(key)
        if found is None:
            found = Shelf(self.num_words)
            self.shelves[key] = found
        found.num_places += 1
        return found

    def drop(self, group: int, medium: str) -> None:
        """One place less is on this shelf; one without any goes."""
        shelf = self.shelves[group, medium]
        shelf.num_places -= 1
        if shelf.num_places == 0:
            del self.shelves[group, medium]

    @property
    def num_keys(self) -> int:
        return sum(len(shelf) for shelf in self.shelves.values())

    @property
    def num_bytes(self) -> int:
        """Memory of the shelves' cells."""
        return sum(shelf.num_bytes for shelf in self.shelves.values())


@final
class Holdings:
    """One worker's keys. `facts`: what its events said of each group: (block size, kind, window).

    `is_full`: they said more than a model has groups and tiers, and what came since is not in here.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.slot = catalogue.new_slot()
        self.places: dict[tuple[int, str], Place] = {}
        self.facts: dict[int, list[tuple[int, str | None, int | None]]] = {}
        self.has_int_hashes = False
        self.has_byte_hashes = False
        self.num_said = 0
        self.is_full = False
        self.num_repeated = 0
        self.num_unknown = 0

    def apply(self, changes: Changes, counted: bool) -> int:
        """Change what they say, in order; how many hashes they named."""
        words = changes.words
        for run in changes.runs:
            if run.what == CLEARED:
                self.clear(run.medium)
                continue
            if run.first == run.last:
                continue
            place = self.place_of(run)
            if run.what == REMOVED:
                if place is None:
                    self.num_unknown += int(run.last - run.first)
                else:
                    self.num_unknown += place.remove(words, run.first, run.last)
            elif place is not None:
                self.has_int_hashes = self.has_int_hashes or run.has_ints
                self.has_byte_hashes = self.has_byte_hashes or run.has_bytes
                self.num_repeated += place.store(words, run.first, run.last, counted)
        return len(words) // 2

    def place_of(self, run: Run) -> Place | None:
        """Where the hashes of a run belong; None where nothing is, and nothing can be stored."""
        key = place_key(run.group, run.medium)
        place = self.places.get(key)
        if run.what == REMOVED:
            return place
        if place is None:
            if not self.has_room():
                return None
            place = Place(self.catalogue.shelf(key[0], key[1]), self.slot, key[0])
            self.places[key] = place
        if run.size != place.block_size or run.kind != place.kind or run.window != place.window:
            place.block_size = run.size
            place.kind = run.kind
            place.window = run.window
            fact = (run.size, run.kind, run.window)
            told = self.facts.setdefault(key[0], [])
            if fact not in told and self.has_room():
                told.append(fact)
        return place

    def has_room(self) -> bool:
        """Whether the events may say one thing more of groups and tiers."""
        self.num_said += 1
        self.is_full = self.num_said > MOST_SAID
        return not self.is_full

    def clear(self, medium: str | None) -> None:
        """Nothing is left in a tier, or anywhere."""
        if medium is None:
            self.has_int_hashes = False
            self.has_byte_hashes = False
        for key, place in self.places.items():
            if medium is None or key[1] == medium:
                place.clear()

    def forget(self) -> None:
        """Nothing is left, and what was said of the groups is not believed either: the worker begins anew."""
        self.clear(None)
        for key in self.places:
            self.catalogue.drop(key[0], key[1])
        self.places = {}
        self.facts = {}
        self.num_said = 0
        self.is_full = False

    def leave(self) -> None:
        """The worker's bit is free for another one."""
        self.forget()
        self.catalogue.unused.append(self.slot)

    def num_copies(self, block_hash: bytes | int, group: int, medium: str) -> int:
        place = self.places.get((group, medium))
        return 0 if place is None else place.num_copies(block_hash)

    @property
    def num_keys(self) -> int:
        return sum(int(place.count) for place in self.places.values())

    @property
    def num_all_copies(self) -> int:
        return sum(place.num_all_copies() for place in self.places.values())

    def tiers(self) -> dict[str, int]:
        """Keys in each tier."""
        out: dict[str, int] = {}
        for key, place in self.places.items():
            out[key[1]] = out.get(key[1], 0) + int(place.count)
        return out
