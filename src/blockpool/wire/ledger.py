"""What a publisher has announced and not taken back: the stock that a snapshot is made of.

Kept as the encoded events themselves, so that a snapshot has everything they had (tokens, extra keys, adapters), and
a key costs one entry of a dict.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from blockpool.pool import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from blockpool.wire.errors import BatchError
from blockpool.wire.holdings import place_key

BlockHash = bytes | int
Place = tuple[int, str]  # group, tier

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(BlockStored)
_any_event = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared)
#: An event of which so little is left is written anew.
MOSTLY_GONE = 4
#: Blocks of a snapshot that are gone through in a row.
SLICE = 256
#: Blocks of neighbouring events that are told as one event at most.
MOST_JOINED = 1024


class Told(msgspec.Struct, omit_defaults=True, tag="BlockStored", kw_only=True):
    """A BlockStored, with the same bytes, whose lists of tokens and extra keys stay as they are written."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: msgspec.Raw = msgspec.Raw()
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: msgspec.Raw = msgspec.Raw()


_told = msgspec.msgpack.Decoder(Told)


class _Record:
    """An event as it was announced, and how many of its keys are still there because of it."""

    __slots__ = ("hashes", "num_left", "num_told", "parent", "payload")

    def __init__(self, event: BlockStored, payload: bytes, num_told: int) -> None:
        self.hashes = event.block_hashes
        self.parent = event.parent_block_hash
        self.payload = payload
        self.num_told = num_told
        self.num_left = num_told


class Ledger:
    """Follows one publisher's events as its own publisher sends them: without gaps.

    `counted`: a key that is announced again is one copy more; False where only the first and the last are announced,
    so that again means nothing.
    """

    def __init__(self, counted: bool = True) -> None:
        self.counted = counted
        self._keys: dict[Place, dict[BlockHash, _Record]] = {}
        self._copies: dict[tuple[Place, BlockHash], int] = {}  # how many more than one

    def __len__(self) -> int:
        return sum(len(keys) for keys in self._keys.values())

    def apply(self, event: KVCacheEvent) -> None:
        """Raises BatchError for an event that could be written and not be read again."""
        payload = _encoder.encode(event)
        try:
            _any_event.decode(payload)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise BatchError(f"{type(event).__name__}: {error}") from None
        if isinstance(event, BlockStored):
            self._store(event, payload)
        elif isinstance(event, BlockRemoved):
            self.remove(place_key(event.group_idx, event.medium), event.block_hashes)
        else:
            self.clear(event)

    def _store(self, event: BlockStored, payload: bytes) -> None:
        hashes = event.block_hashes
        if len(set(hashes)) < len(hashes):  # each is one copy more of the one before
            for at in range(len(hashes)):
                one = part(event, at, at + 1)
                self._store(one, _encoder.encode(one))
            return
        if not hashes:
            return
        place = place_key(event.group_idx, event.medium)
        keys = self._keys.setdefault(place, {})
        if not keys.keys().isdisjoint(hashes):
            for one_hash in hashes:
                if self.counted and one_hash in keys:
                    self._copies[place, one_hash] = self._copies.get((place, one_hash), 0) + 1
            if all(one_hash in keys for one_hash in hashes):
                return
        record = _Record(event, payload, 0)
        for one_hash in hashes:
            if one_hash not in keys:
                keys[one_hash] = record
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
        for first, last in _runs(record, keys):
            left = part(event, first, last)
            kept = _Record(left, _encoder.encode(left), last - first)
            for one in left.block_hashes:
                keys[one] = kept

    def view(self) -> View:
        """What is there now, whatever is applied later."""
        return View({place: keys.copy() for place, keys in self._keys.items()}, self._copies.copy())


class View:
    """A ledger as it was at one moment. Records never change but for their counts, so references to them will do."""

    def __init__(
        self, keys: dict[Place, dict[BlockHash, _Record]], copies: dict[tuple[Place, BlockHash], int]
    ) -> None:
        self._keys = keys
        self._copies = copies

    def events(self) -> Iterator[Told | None]:
        """Everything that is there as events, parents before children; a copy more is told once more.

        Neighbours are told as one event. None, every few hundred blocks, says that there is more, and that others may
        get on meanwhile.
        """
        pieces: list[_Piece] = []
        for place, keys in self._keys.items():
            yield from _gather(place, keys, pieces)
        order: list[int] = []
        yield from _put_parents_first(pieces, order)
        yield from _joined(pieces, order)
        for number, ((place, one), more) in enumerate(self._copies.items(), 1):
            record = self._keys[place][one]
            at = record.hashes.index(one)
            event = _told_part(_Piece(place, record, at, at + 1))
            for _ in range(more):
                yield event
            if number % SLICE == 0:
                yield None


class _Piece:
    """Neighbours of one event that are still there: its blocks first .. last-1."""

    __slots__ = ("first", "last", "parent", "place", "record")

    def __init__(self, place: Place, record: _Record, first: int, last: int) -> None:
        self.place = place
        self.record = record
        self.first = first
        self.last = last
        self.parent = record.hashes[first - 1] if first else record.parent


def _gather(place: Place, keys: dict[BlockHash, _Record], pieces: list[_Piece]) -> Iterator[None]:
    seen: set[_Record] = set()
    num_blocks = 0
    for record in keys.values():
        num_blocks += 1
        if record not in seen:
            size = len(record.hashes)
            if size == 1:
                pieces.append(_Piece(place, record, 0, 1))
            else:
                seen.add(record)
                num_blocks += size
                pieces.extend(_Piece(place, record, first, last) for first, last in _runs(record, keys))
        if num_blocks >= SLICE:
            num_blocks = 0
            yield None


def _runs(record: _Record, keys: dict[BlockHash, _Record]) -> list[tuple[int, int]]:
    """What is left of an event because of itself, as ranges first .. last-1 of its blocks."""
    out: list[tuple[int, int]] = []
    start = -1
    for at, one in enumerate(record.hashes):
        there = keys.get(one) is record
        if there and start < 0:
            start = at
        elif not there and start >= 0:
            out.append((start, at))
            start = -1
    if start >= 0:
        out.append((start, len(record.hashes)))
    return out


def _put_parents_first(pieces: list[_Piece], order: list[int]) -> Iterator[None]:
    """An order of the pieces in which each comes behind the one that has its parent, if any has, in any tier."""
    holders: dict[Place, dict[BlockHash, int]] = {}
    num_blocks = 0
    for number, piece in enumerate(pieces):
        held = holders.setdefault(piece.place, {})
        for one in piece.record.hashes[piece.first : piece.last]:
            held[one] = number
        num_blocks += piece.last - piece.first
        if num_blocks >= SLICE:
            num_blocks = 0
            yield None
    # Of several tiers that have it, its own comes first.
    where = {
        place: [holders[place], *(held for other, held in holders.items() if other[0] == place[0] and other != place)]
        for place in holders
    }
    placed = bytearray(len(pieces))
    for start in range(len(pieces)):
        waiting: list[int] = []
        at: int | None = start
        while at is not None and not placed[at]:
            placed[at] = 1
            waiting.append(at)
            num_blocks += 1
            if num_blocks >= SLICE:
                num_blocks = 0
                yield None
            parent = pieces[at].parent
            place, at = pieces[at].place, None
            if parent is not None:
                at = next((held[parent] for held in where[place] if parent in held), None)
        order.extend(reversed(waiting))


def _joined(pieces: list[_Piece], order: list[int]) -> Iterator[Told | None]:
    """The pieces in that order, those that go on where the one before ended joined to it."""
    joined: list[Told] = []
    num_blocks = 0  # of them
    num_done = 0
    place: Place | None = None
    about: tuple[object, ...] | None = None
    for number in order:
        piece = pieces[number]
        event = _told_part(piece)
        size = len(event.block_hashes)
        before, about = about, _about(event)
        if joined and not (
            about is not None
            and about == before
            and num_blocks + size <= MOST_JOINED
            and piece.place == place
            and piece.parent == joined[-1].block_hashes[-1]
        ):
            yield _join(joined)
            joined, num_blocks = [], 0
        joined.append(event)
        num_blocks += size
        place = piece.place
        num_done += size
        if num_done >= SLICE:
            num_done = 0
            yield None
    if joined:
        yield _join(joined)


def _told_part(piece: _Piece) -> Told:
    payload = piece.record.payload
    if piece.last - piece.first < len(piece.record.hashes):
        payload = _encoder.encode(part(_decoder.decode(payload), piece.first, piece.last))
    return _told.decode(payload)


def _about(event: Told) -> tuple[object, ...] | None:
    """What events must have in common to be told as one; None when the counts of this one do not fit."""
    hashes = len(event.block_hashes)
    extras, lookahead = _list_at(event.extra_keys)[1], _list_at(event.lookahead_token_ids)[1]
    if _list_at(event.token_ids)[1] != hashes * event.block_size or not {extras, lookahead} <= {-1, hashes}:
        return None
    return (
        event.block_size,
        event.lora_id,
        event.medium,
        event.lora_name,
        event.group_idx,
        event.kv_cache_spec_kind,
        event.kv_cache_spec_sliding_window,
        event.locality,
        event.ownership,
        event.session_id,
        extras < 0,
        lookahead < 0,
    )


def _join(events: list[Told]) -> Told:
    if len(events) == 1:
        return events[0]
    first = events[0]
    return msgspec.structs.replace(
        first,
        block_hashes=[one for event in events for one in event.block_hashes],
        token_ids=_join_lists([event.token_ids for event in events]),
        extra_keys=_join_lists([event.extra_keys for event in events]),
        lookahead_token_ids=_join_lists([event.lookahead_token_ids for event in events]),
    )


def _list_at(raw: msgspec.Raw) -> tuple[int, int]:
    """Where the elements of a written list begin, and how many there are; -1 for no list."""
    written = memoryview(raw)
    if not len(written) or written[0] == 0xC0:
        return 0, -1
    if written[0] == 0xDC:
        return 3, int.from_bytes(written[1:3], "big")
    if written[0] == 0xDD:
        return 5, int.from_bytes(written[1:5], "big")
    return 1, written[0] & 0x0F


def _join_lists(lists: list[msgspec.Raw]) -> msgspec.Raw:
    places = [_list_at(one) for one in lists]
    count = sum(size for _, size in places)
    if count < 0:
        return lists[0]
    if count < 1 << 4:
        head = bytes([0x90 | count])
    elif count < 1 << 16:
        head = b"\xdc" + count.to_bytes(2, "big")
    else:
        head = b"\xdd" + count.to_bytes(4, "big")
    return msgspec.Raw(head + b"".join([memoryview(one)[at:] for one, (at, _) in zip(lists, places, strict=True)]))


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


class Overflow:
    """Batches that were not sent: their numbers are spent, and what they did to the index, key by key.

    However many they are, it stays as small as the index: a key that came and went is no more than a zero. Odd events
    are not refused before `settle`, which is not called on the step's thread. `counted`: see Ledger.
    """

    def __init__(self, first_seq: int, counted: bool = True) -> None:
        self.counted = counted
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
                    before = net.get((place, one), (0,))[0] if self.counted else 0
                    net[place, one] = (before + 1, event, at)
            else:
                for one in event.block_hashes:
                    count, told, at = net.get((place, one), (0, None, 0))
                    net[place, one] = (count - 1 if self.counted else -1, told, at)

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
