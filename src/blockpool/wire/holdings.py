"""All keys of many workers, shelf by shelf, and what one of them has: the part of a mirror that events change."""

from __future__ import annotations

from threading import RLock
from typing import final

from mypy_extensions import i64

from blockpool.wire.lean import Cleared, Removed, Stored
from blockpool.wire.shelf import Place, Shelf

GPU = "GPU"


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
        key = (group, medium)
        found = self.shelves.get(key)
        if found is None:
            found = Shelf(self.num_words)
            self.shelves[key] = found
        return found

    @property
    def num_keys(self) -> int:
        return sum(len(shelf) for shelf in self.shelves.values())

    @property
    def num_bytes(self) -> int:
        """Memory of the shelves' cells."""
        return sum(shelf.num_bytes for shelf in self.shelves.values())


@final
class Holdings:
    """One worker's keys. `facts`: what its events said of each group: (block size, kind, window)."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.slot = catalogue.new_slot()
        self.places: dict[tuple[int, str], Place] = {}
        self.facts: dict[int, list[tuple[int, str | None, int | None]]] = {}
        self.has_int_hashes = False
        self.has_byte_hashes = False
        self.num_repeated = 0
        self.num_unknown = 0

    def apply(self, events: list[Stored | Removed | Cleared], counted: bool) -> int:
        """Change what the events say, in order; how many hashes they named."""
        named: i64 = 0
        # Events of one batch mostly tell of one group and tier.
        place: Place | None = None
        last_group: object = None
        last_medium: str | None = None
        for event in events:
            if isinstance(event, Stored):
                hashes: list[bytes | int] = event.block_hashes
                group: object = event.group_idx
                medium: str | None = event.medium
                if place is None or group is not last_group or medium != last_medium:
                    place = self.place_of(event.group_idx, medium)
                    last_group = group
                    last_medium = medium
                size: int = event.block_size
                kind: str | None = event.kv_cache_spec_kind
                window: int | None = event.kv_cache_spec_sliding_window
                if size != place.block_size or kind != place.kind or window != place.window:
                    place.block_size = size
                    place.kind = kind
                    place.window = window
                    fact = (size, kind, window)
                    told = self.facts[place.group]
                    if fact not in told:
                        told.append(fact)
                if hashes:
                    if isinstance(hashes[0], bytes):
                        self.has_byte_hashes = True
                    else:
                        self.has_int_hashes = True
                repeated = place.store(hashes, counted)
                if repeated:
                    self.num_repeated += repeated
                named += len(hashes)
            elif isinstance(event, Removed):
                gone: list[bytes | int] = event.block_hashes
                group = event.group_idx
                medium = event.medium
                if place is None or group is not last_group or medium != last_medium:
                    place = self.place_of(event.group_idx, medium)
                    last_group = group
                    last_medium = medium
                unknown = place.remove(gone)
                if unknown:
                    self.num_unknown += unknown
                named += len(gone)
            else:
                self.clear(event.medium)
        return int(named)

    def place_of(self, group: int | None, medium: str | None) -> Place:
        """Older events name no group or tier: there was one."""
        key = (0 if group is None else group, GPU if medium is None else medium)
        place = self.places.get(key)
        if place is None:
            place = Place(self.catalogue.shelf(key[0], key[1]), self.slot, key[0])
            self.places[key] = place
            self.facts.setdefault(key[0], [])
        return place

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
        for told in self.facts.values():
            told.clear()
        for place in self.places.values():
            place.block_size = 0
            place.kind = None
            place.window = None

    def leave(self) -> None:
        """The worker's bit is free for another one."""
        self.clear(None)
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
