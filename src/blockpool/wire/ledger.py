"""What a publisher has announced and not taken back: the stock that a snapshot is made of.

Kept as the encoded events themselves, so that a snapshot has everything they had (tokens, extra keys, adapters), and
a key costs one entry of a dict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import msgspec

from blockpool.pool import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from blockpool.wire.errors import BatchError
from blockpool.wire.holdings import place_key

BlockHash = bytes | int
Place = tuple[int, str]  # group, tier

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(BlockStored)
#: An event of which so little is left is written anew.
MOSTLY_GONE = 4
#: Blocks that are gone through in a row.
BREATH = 256


class _Record:
    """An event as it was announced, and how many of its keys are still there because of it."""

    __slots__ = ("num_left", "num_told", "number", "payload")

    def __init__(self, number: int, payload: bytes, num_told: int) -> None:
        self.number = number
        self.payload = payload
        self.num_told = num_told
        self.num_left = num_told


class Piece(msgspec.Struct, frozen=True):
    """Neighbours of one event that are still there."""

    place: Place
    event: BlockStored


class Ledger:
    """Follows one publisher's events, in either convention, as its own publisher sends them: without gaps."""

    def __init__(self) -> None:
        self._keys: dict[Place, dict[BlockHash, _Record]] = {}
        self._copies: dict[tuple[Place, BlockHash], int] = {}  # how many more than one
        self._num_records = 0

    def __len__(self) -> int:
        return sum(len(keys) for keys in self._keys.values())

    def apply(self, event: KVCacheEvent) -> None:
        if isinstance(event, BlockStored):
            self.store(event)
        elif isinstance(event, BlockRemoved):
            self.remove(place_key(event.group_idx, event.medium), event.block_hashes)
        else:
            self.clear(event)

    def store(self, event: BlockStored) -> None:
        hashes = event.block_hashes
        if not hashes:
            return
        place = place_key(event.group_idx, event.medium)
        keys = self._keys.setdefault(place, {})
        if not keys.keys().isdisjoint(hashes):
            for one in hashes:
                if one in keys:
                    self._copies[place, one] = self._copies.get((place, one), 0) + 1
            if all(one in keys for one in hashes):
                return
        self._num_records += 1
        record = _Record(self._num_records, _encoder.encode(event), 0)
        for one in hashes:
            if one not in keys:
                keys[one] = record
                record.num_told += 1
        record.num_left = record.num_told

    def remove(self, place: Place, hashes: list[BlockHash]) -> None:
        keys = self._keys.get(place, {})
        for one in hashes:
            if self._copies:
                more = self._copies.get((place, one), 0)
                if more:
                    self._copies[place, one] = more - 1
                    if more == 1:
                        del self._copies[place, one]
                    continue
            record = keys.pop(one, None)
            if record is None:
                continue
            record.num_left -= 1
            if 0 < record.num_left * MOSTLY_GONE < record.num_told:
                self._write_anew(record, keys)

    def clear(self, event: AllBlocksCleared) -> None:
        for place in list(self._keys):
            if event.medium is None or event.medium == place[1]:
                del self._keys[place]
        self._copies = {key: more for key, more in self._copies.items() if key[0] in self._keys}

    def _write_anew(self, record: _Record, keys: dict[BlockHash, _Record]) -> None:
        """Keep of an event only what is left of it, each run of neighbours as an event of its own."""
        event = _decoder.decode(record.payload)
        for first, last in _runs(event, record, keys):
            kept = _Record(record.number, _encoder.encode(part(event, first, last)), last - first)
            for one in event.block_hashes[first:last]:
                keys[one] = kept

    # -- the snapshot ----------------------------------------------------------------------------------

    def events(self, breathe: Callable[[], object] = lambda: None) -> Iterator[BlockStored]:
        """Everything that is there as events, parents before children; a copy more is told once more.

        `breathe` is called every few hundred blocks, so that other threads get on.
        """
        pieces = self._pieces(breathe)
        for number in _parents_first(pieces, breathe):
            yield pieces[number].event
        for (place, one), more in self._copies.items():
            event = self._one(place, one)
            for _ in range(more):
                yield event

    def _one(self, place: Place, one: BlockHash) -> BlockStored:
        event = _decoder.decode(self._keys[place][one].payload)
        at = event.block_hashes.index(one)
        return part(event, at, at + 1)

    def _pieces(self, breathe: Callable[[], object]) -> list[Piece]:
        pieces: list[Piece] = []
        for place, keys in self._keys.items():
            records: set[_Record] = set()
            every = iter(keys.values())
            while some := set(islice(every, BREATH)):
                records |= some
                breathe()
            num_blocks = 0
            for record in sorted(records, key=lambda record: record.number):
                num_blocks += record.num_told
                if num_blocks >= BREATH:
                    num_blocks = 0
                    breathe()
                event = _decoder.decode(record.payload)
                for first, last in _runs(event, record, keys):
                    pieces.append(Piece(place, part(event, first, last)))
        return pieces


def _runs(event: BlockStored, record: _Record, keys: dict[BlockHash, _Record]) -> list[tuple[int, int]]:
    """What is left of an event because of itself, as ranges first .. last-1 of its blocks."""
    out: list[tuple[int, int]] = []
    start = -1
    for at, one in enumerate([*event.block_hashes, None]):
        there = one is not None and keys.get(one) is record
        if there and start < 0:
            start = at
        elif not there and start >= 0:
            out.append((start, at))
            start = -1
    return out


def part(event: BlockStored, first: int, last: int) -> BlockStored:
    """Blocks first .. last-1 of an event, as an event."""
    if first == 0 and last == len(event.block_hashes):
        return event
    size = event.block_size
    extras = None if event.extra_keys is None else event.extra_keys[first:last]
    if extras is not None and all(extra is None for extra in extras):
        extras = None
    return msgspec.structs.replace(
        event,
        block_hashes=event.block_hashes[first:last],
        parent_block_hash=event.block_hashes[first - 1] if first else event.parent_block_hash,
        token_ids=event.token_ids[first * size : last * size],
        extra_keys=extras,
        lookahead_token_ids=None if event.lookahead_token_ids is None else event.lookahead_token_ids[first:last],
    )


def _parents_first(pieces: list[Piece], breathe: Callable[[], object]) -> list[int]:
    """An order of the pieces in which each comes behind the one that has its parent, if any has."""
    holder: dict[tuple[Place, BlockHash], int] = {}
    num_blocks = 0
    for number, piece in enumerate(pieces):
        num_blocks += len(piece.event.block_hashes)
        if num_blocks >= BREATH:
            num_blocks = 0
            breathe()
        for one in piece.event.block_hashes:
            holder[piece.place, one] = number
    order: list[int] = []
    placed = [False] * len(pieces)
    for number in range(len(pieces)):
        waiting: list[int] = []
        at: int | None = number
        while at is not None and not placed[at]:
            placed[at] = True
            waiting.append(at)
            parent = pieces[at].event.parent_block_hash
            at = None if parent is None else holder.get((pieces[at].place, parent))
        order.extend(reversed(waiting))
    return order


class Overflow:
    """Batches that were not sent: their numbers are spent, and what they did to the index, key by key.

    However many they are, it stays as small as the index: a key that came and went is no more than a zero. Odd events
    are not refused before `settle`, which is not called on the step's thread.
    """

    def __init__(self, first_seq: int) -> None:
        self.last_seq = first_seq
        self.num_batches = 0
        self._cleared: list[AllBlocksCleared] = []
        self._net: dict[tuple[Place, BlockHash], tuple[int, BlockStored | None, int]] = {}
        self._error: str | None = None  # what the events did is not known any more

    def add(self, seq: int, events: list[KVCacheEvent]) -> None:
        self.last_seq = seq
        self.num_batches += 1
        if self._error is None:
            try:
                self._add(events)
            except Exception as error:  # hashes that are none, a list of them that is none
                self._error = f"{error}"
                self._net.clear()

    def _add(self, events: list[KVCacheEvent]) -> None:
        net = self._net
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._clear(event)
                continue
            place = place_key(event.group_idx, event.medium)
            if isinstance(event, BlockStored):
                for at, one in enumerate(event.block_hashes):
                    net[place, one] = (net.get((place, one), (0,))[0] + 1, event, at)
            else:
                for one in event.block_hashes:
                    count, told, at = net.get((place, one), (0, None, 0))
                    net[place, one] = (count - 1, told, at)

    def _clear(self, event: AllBlocksCleared) -> None:
        if event.medium is None:
            self._cleared = [event]
            self._net.clear()
        else:
            if event not in self._cleared:
                self._cleared.append(event)
            for key in [key for key in self._net if key[0][1] == event.medium]:
                del self._net[key]

    def settle(self) -> Iterator[KVCacheEvent]:
        """The same in as few events as need be. Raises BatchError when one was no event that can be followed."""
        if self._error is not None:
            raise BatchError(f"not an event: {self._error}")
        yield from self._cleared
        for (place, one), (count, event, at) in self._net.items():
            if count < 0:
                yield BlockRemoved(block_hashes=[one] * -count, medium=place[1], group_idx=place[0])
            elif count > 0 and event is not None:
                for _ in range(count):
                    yield part(event, at, at + 1)
