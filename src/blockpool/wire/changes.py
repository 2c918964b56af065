"""What a batch does to keys: runs of hashes that share their place, read from the payload's bytes.

Tokens and whatever else a reader of keys does not need is stepped over. Only what is written as this package and vLLM
write it is read here; anything else is msgspec's to read, or to refuse.
"""

from __future__ import annotations

from typing import Final, final

from librt.strings import read_f64_be, read_i16_be, read_i32_be, read_i64_be, read_i64_le
from librt.vecs import append, vec
from mypy_extensions import i64

from blockpool.wire import shelf
from blockpool.wire.lean import Batch, Cleared, Stored, read_lean
from blockpool.wire.shelf import high_word, low_word

STORED: Final = 0
REMOVED: Final = 1
CLEARED: Final = 2
IS_COMPILED: Final = not str(shelf.__file__).endswith(".py")
#: Deeper values are left to msgspec, which knows how deep is too deep.
DEEPEST: Final[i64] = 16


def _word(text: bytes) -> i64:
    return int.from_bytes(text, "big")


def _eight(text: bytes) -> i64:
    return read_i64_be(text, 0)


# Names as they stand in an event, eight bytes at a time.
TYPE: Final[i64] = _word(b"type")
K_HASHES: Final[i64] = _word(b"k_hashes")
OCK_SIZE: Final[i64] = _word(b"ock_size")
KV_CACHE: Final[i64] = _word(b"kv_cache")
SPEC: Final[i64] = _word(b"_spec_ki")
PEC_KIND: Final[i64] = _word(b"pec_kind")
SPEC_SLI: Final[i64] = _word(b"_spec_sl")
IDING_WI: Final[i64] = _word(b"iding_wi")
G_WINDOW: Final[i64] = _word(b"g_window")
CK_STORED: Final[i64] = _word(b"ckStored")
K_REMOVED: Final[i64] = _word(b"kRemoved")
ALL_BLOCK: Final[i64] = _word(b"AllBlock")
S_CLEARED: Final[i64] = _word(b"sCleared")
# The same with the byte before that says how long they are: what is in nearly each event is told by one comparison.
STORED_HEAD: Final[i64] = _eight(b"\xa4type\xabBl")
REMOVED_HEAD: Final[i64] = _eight(b"\xa4type\xacBl")
OCK_STORE: Final[i64] = _word(b"ockStore")
OCK_REMOV: Final[i64] = _word(b"ockRemov")
HASHES_HEAD: Final[i64] = _eight(b"\xacblock_h")
PARENT_HEAD: Final[i64] = _eight(b"\xb1parent_")
TOKENS_HEAD: Final[i64] = _eight(b"\xa9token_i")
SIZE_HEAD: Final[i64] = _eight(b"\xaablock_s")
LORA_ID_HEAD: Final[i64] = _eight(b"\xa7lora_id")
LORA_NAME_HEAD: Final[i64] = _eight(b"\xa9lora_na")
GROUP_HEAD: Final[i64] = _eight(b"\xa9group_i")
GROUP_TAIL: Final[i64] = _word(b"dx")
MEDIUM_HEAD: Final[i64] = _eight(b"\xa6medium\x00") >> 8
# Fields that few events have, 0 for all that are stepped over.
KIND: Final = 1
WINDOW: Final = 2


def byte_at(payload: bytes, at: i64) -> i64:
    """Not the first one: it is read with the one before, as two are faster than one."""
    return i64(read_i16_be(payload, at - 1)) & 0xFF


@final
class Run:
    """Neighbouring events that say the same of hashes first .. last-1 of their batch."""

    def __init__(
        self, what: int, group: int | None, medium: str | None, size: int, kind: str | None, window: int | None
    ) -> None:
        self.what = what
        self.group = group
        self.medium = medium
        self.size = size
        self.kind = kind
        self.window = window
        self.first: i64 = 0
        self.last: i64 = 0
        self.has_ints = False
        self.has_bytes = False


@final
class Changes:
    """A batch, as far as keys go. `words`: two for each hash."""

    def __init__(self, ts: float, runs: list[Run], words: vec[i64]) -> None:
        self.ts = ts
        self.runs = runs
        self.words = words

    @property
    def clears_all(self) -> bool:
        """Whether it empties every tier."""
        return any(run.what == CLEARED and run.medium is None for run in self.runs)


def read_changes(payload: bytes) -> Changes:
    """Raises BatchError for what is no batch."""
    if IS_COMPILED:  # interpreted, msgspec is faster
        found = scan(payload)
        if found is not None:
            return found
    return changes_of(read_lean(payload))


def changes_of(batch: Batch) -> Changes:
    """The same of events that have been decoded."""
    words = vec[i64]()
    runs: list[Run] = []
    for event in batch.events:
        if isinstance(event, Cleared):
            runs.append(Run(CLEARED, None, event.medium, 0, None, None))
            continue
        if isinstance(event, Stored):
            size: int = event.block_size
            kind: str | None = event.kv_cache_spec_kind
            window: int | None = event.kv_cache_spec_sliding_window
            run = Run(STORED, event.group_idx, event.medium, size, kind, window)
        else:
            run = Run(REMOVED, event.group_idx, event.medium, 0, None, None)
        hashes: list[bytes | int] = event.block_hashes
        run.first = len(words) // 2
        for one in hashes:
            words = append(words, low_word(one))
            words = append(words, high_word(one))
            if isinstance(one, bytes):
                run.has_bytes = True
            else:
                run.has_ints = True
        run.last = len(words) // 2
        runs.append(run)
    return Changes(batch.ts, runs, words)


def scan(payload: bytes) -> Changes | None:
    """None for what has to be read in another way, if it can be read at all."""
    try:
        return Scanner(payload).batch()
    except (IndexError, ValueError):  # it ends too early, or is not as expected
        return None


class _Unexpected(ValueError):
    pass


@final
class Scanner:
    """Where one payload is read, from its first byte to its last."""

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.end: i64 = len(payload)
        self.at: i64 = 0

    def batch(self) -> Changes:
        payload = self.payload
        head = i64(read_i16_be(payload, 0)) & 0xFFFF
        if head != 0x92CB and head != 0x93CB:
            raise _Unexpected
        has_rank = head == 0x93CB
        ts = read_f64_be(payload, 2)
        self.at = 10
        runs: list[Run] = []
        run: Run | None = None
        # Where the last tier and kind stand: the next one is mostly the same.
        medium_at: i64 = 0
        medium_size: i64 = -1
        medium: str | None = None
        kind_at: i64 = 0
        kind_size: i64 = -1
        kind: str | None = None
        # What the last event said, as numbers.
        last_group: i64 = 0
        last_size: i64 = 0
        last_window: i64 = 0
        num_events = self.array_size()
        words = vec[i64](capacity=2 * min(num_events, self.end // 16))
        at = self.at
        while num_events > 0:
            num_events -= 1
            head = i64(read_i32_be(payload, at))
            if (head >> 24) & 0xFF == 0xDE:
                fields = (head >> 8) & 0xFFFF
                at += 3
            else:
                fields = (head >> 24) & 0x0F
                if (head >> 24) & 0xF0 != 0x80:
                    raise _Unexpected
                at += 1
            fields -= 1
            if fields < 0:
                raise _Unexpected
            # the first entry is the type
            head = read_i64_be(payload, at)
            middle = read_i64_be(payload, at + 8)
            if head == STORED_HEAD and middle == OCK_STORE and read_i64_be(payload, at + 9) == CK_STORED:
                what = STORED
                at += 17
            elif head == REMOVED_HEAD and middle == OCK_REMOV and read_i64_be(payload, at + 10) == K_REMOVED:
                what = REMOVED
                at += 18
            else:
                self.at = at
                what = self.tag()
                at = self.at
            has_hashes = False
            has_ints = False
            has_bytes = False
            has_medium = False
            has_kind = False
            has_group = False
            has_window = False
            is_new = run is None  # says other things than the last one
            group: i64 = 0
            window: i64 = 0
            size: i64 = 0
            first: i64 = len(words) // 2
            while fields > 0:
                fields -= 1
                name = read_i64_be(payload, at)
                if name == HASHES_HEAD and read_i64_be(payload, at + 5) == K_HASHES:
                    if has_hashes:
                        raise _Unexpected
                    has_hashes = True
                    self.at = at + 13
                    count = self.array_size()
                    at = self.at
                    while count > 0:
                        count -= 1
                        head = i64(read_i16_be(payload, at)) & 0xFFFF
                        if head & 0xFF00 == 0xC400:
                            start = at + 2
                            at = start + (head & 0xFF)
                            if at >= start + 16:
                                low = read_i64_be(payload, at - 8)
                                high = read_i64_be(payload, at - 16)
                            else:
                                if at > self.end:
                                    raise _Unexpected
                                low = low_word(payload[start:at])
                                high = high_word(payload[start:at])
                            has_bytes = True
                        else:
                            self.at = at + 1
                            low = self.integer(head >> 8)
                            high = 0
                            at = self.at
                            has_ints = True
                        words = append(words, low)
                        words = append(words, high)
                elif name == PARENT_HEAD:
                    at = self.past(at + 18)
                elif name == TOKENS_HEAD:
                    at = self.past(at + 10)
                elif name == SIZE_HEAD and read_i64_be(payload, at + 3) == OCK_SIZE:
                    size = self.small_at(at + 11)
                    at = self.at
                elif name == LORA_ID_HEAD:
                    at = self.past(at + 8)
                elif name == LORA_NAME_HEAD:
                    at = self.past(at + 10)
                elif name >> 8 == MEDIUM_HEAD:
                    self.at = at + 7
                    length = self.text_size()
                    at = self.at
                    has_medium = length >= 0
                    if has_medium:
                        if length != medium_size or not self.same(medium_at, length):
                            medium = payload[at : at + length].decode()
                            is_new = True
                        medium_at = at
                        medium_size = length
                        at += length
                elif name == GROUP_HEAD and i64(read_i16_be(payload, at + 8)) == GROUP_TAIL:
                    has_group = byte_at(payload, at + 10) != 0xC0
                    at += 11
                    if has_group:
                        group = self.small_at(at - 1)
                        at = self.at
                else:
                    self.at = at
                    field = self.field()
                    if field == 0:
                        self.skip(0)
                    elif field == KIND:
                        length = self.text_size()
                        has_kind = length >= 0
                        if has_kind:
                            at = self.at
                            if length != kind_size or not self.same(kind_at, length):
                                kind = payload[at : at + length].decode()
                                is_new = True
                            kind_at = at
                            kind_size = length
                            self.at = at + length
                    else:
                        head = self.byte()
                        has_window = head != 0xC0
                        if has_window:
                            window = self.small(head)
                    at = self.at
            if (what != CLEARED and not has_hashes) or (what == STORED and size < 1):
                raise _Unexpected
            if what != STORED:
                size = 0
                window = 0
                has_kind = False
                has_window = False
            if (
                run is None
                or is_new
                or what == CLEARED
                or run.what != what
                or group != last_group
                or size != last_size
                or window != last_window
                or has_group != (run.group is not None)
                or has_medium != (run.medium is not None)
                or has_kind != (run.kind is not None)
                or has_window != (run.window is not None)
            ):
                this_group: int | None = int(group) if has_group else None
                this_medium = medium if has_medium else None
                this_kind = kind if has_kind else None
                this_window: int | None = int(window) if has_window else None
                run = Run(what, this_group, this_medium, int(size), this_kind, this_window)
                run.first = first
                runs.append(run)
                last_group = group
                last_size = size
                last_window = window
            run.last = len(words) // 2
            run.has_ints = run.has_ints or has_ints
            run.has_bytes = run.has_bytes or has_bytes
        self.at = at
        if has_rank:
            self.skip(0)
        if self.at != self.end:
            raise _Unexpected
        return Changes(ts, runs, words)

    def past(self, at: i64) -> i64:
        """Step over the value there; where it ends."""
        payload = self.payload
        head = byte_at(payload, at)
        if head == 0xC0:
            return at + 1
        if head == 0xC4:
            return at + 2 + byte_at(payload, at + 1)
        if head == 0xDC:
            self.at = at + 3
            self.skip_all(i64(read_i16_be(payload, at + 1)) & 0xFFFF, 0)
        else:
            self.at = at
            self.skip(0)
        return self.at

    def small_at(self, at: i64) -> i64:
        head = byte_at(self.payload, at)
        self.at = at + 1
        return head if head < 0x80 else self.small(head)

    def byte(self) -> i64:
        at = self.at
        self.at = at + 1
        return i64(read_i16_be(self.payload, at - 1)) & 0xFF

    def number(self, size: i64) -> i64:
        """`size` bytes, without a sign; eight have one."""
        payload = self.payload
        at = self.at
        self.at = at + size
        if size == 1:
            return byte_at(payload, at)
        if size == 2:
            return i64(read_i16_be(payload, at)) & 0xFFFF
        if size == 4:
            return i64(read_i32_be(payload, at)) & 0xFFFFFFFF
        return read_i64_be(payload, at)

    def array_size(self) -> i64:
        head = self.byte()
        if head & 0xF0 == 0x90:
            return head & 0x0F
        if head == 0xDC:
            return self.number(2)
        if head == 0xDD:
            return self.number(4)
        raise _Unexpected

    def text_size(self) -> i64:
        """-1 for none."""
        at = self.at + 1
        head = byte_at(self.payload, at - 1)
        size: i64 = -1
        if head & 0xE0 == 0xA0:
            size = head & 0x1F
        elif head == 0xD9:
            size = byte_at(self.payload, at)
            at += 1
        elif head != 0xC0:
            raise _Unexpected
        if at + size > self.end:
            raise _Unexpected
        self.at = at
        return size

    def integer(self, head: i64) -> i64:
        """64 bits, with a sign or without."""
        if head < 0x80:
            return head
        if head >= 0xE0:
            return head - 0x100
        if head == 0xCF or head == 0xD3:
            return self.number(8)
        if head == 0xCC:
            return self.number(1)
        if head == 0xCD:
            return self.number(2)
        if head == 0xCE:
            return self.number(4)
        payload = self.payload
        at = self.at
        if head == 0xD0:
            self.at = at + 1
            return (byte_at(payload, at) ^ 0x80) - 0x80
        if head == 0xD1:
            self.at = at + 2
            return i64(read_i16_be(payload, at))
        if head == 0xD2:
            self.at = at + 4
            return i64(read_i32_be(payload, at))
        raise _Unexpected

    def small(self, head: i64) -> i64:
        """An integer that has a sign."""
        value = self.integer(head)
        if head == 0xCF and value < 0:
            raise _Unexpected
        return value

    def same(self, other: i64, length: i64) -> bool:
        """Whether the bytes here are those there."""
        payload = self.payload
        at = self.at
        k: i64 = 0
        while k < length:
            if byte_at(payload, at + k) != byte_at(payload, other + k):
                return False
            k += 1
        return True

    def tag(self) -> int:
        """The first entry of an event that is neither stored nor removed: its type."""
        if self.byte() != 0xA4 or self.number(4) != TYPE or self.byte() != 0xB0:
            raise _Unexpected
        payload = self.payload
        at = self.at
        self.at = at + 16
        if read_i64_be(payload, at) == ALL_BLOCK and read_i64_be(payload, at + 8) == S_CLEARED:
            return CLEARED
        raise _Unexpected

    def field(self) -> int:
        """The name of the next entry of an event, one of those that few have."""
        payload = self.payload
        at = self.at + 1
        head = byte_at(payload, at - 1)
        if head & 0xE0 != 0xA0:  # longer than any that is looked at
            self.skip_name()
            return 0
        size = head & 0x1F
        self.at = at + size
        if size == 18:
            if (
                read_i64_be(payload, at) == KV_CACHE
                and read_i64_be(payload, at + 8) == SPEC
                and read_i64_be(payload, at + 10) == PEC_KIND
            ):
                return KIND
        elif size == 28:
            if (
                read_i64_be(payload, at) == KV_CACHE
                and read_i64_be(payload, at + 8) == SPEC_SLI
                and read_i64_be(payload, at + 16) == IDING_WI
                and read_i64_be(payload, at + 20) == G_WINDOW
            ):
                return WINDOW
        elif size < 6:
            raise _Unexpected  # a second type, or no name at all
        return 0

    def skip_name(self) -> None:
        size = self.text_size()
        if size < 32:  # which is written in one byte, or no text
            raise _Unexpected
        self.at += size

    def skip(self, depth: i64) -> None:
        """Step over a value."""
        at = self.at
        self.at = at + 1
        head = byte_at(self.payload, at)
        if head < 0x80 or head >= 0xE0 or head == 0xC0 or head == 0xC2 or head == 0xC3:
            return
        if head < 0x90:
            self.skip_all(2 * (head & 0x0F), depth)
        elif head < 0xA0:
            self.skip_all(head & 0x0F, depth)
        elif head < 0xC0:
            self.step(head & 0x1F)
        elif head == 0xC4 or head == 0xD9:
            self.step(self.number(1))
        elif head == 0xC5 or head == 0xDA:
            self.step(self.number(2))
        elif head == 0xCC or head == 0xD0:
            self.step(1)
        elif head == 0xCD or head == 0xD1:
            self.step(2)
        elif head == 0xCA or head == 0xCE or head == 0xD2:
            self.step(4)
        elif head == 0xCB or head == 0xCF or head == 0xD3:
            self.step(8)
        elif head == 0xDC:
            self.skip_all(self.number(2), depth)
        elif head == 0xDD:
            self.skip_all(self.number(4), depth)
        elif head == 0xDE:
            self.skip_all(2 * self.number(2), depth)
        else:
            raise _Unexpected

    def skip_all(self, count: i64, depth: i64) -> None:
        if depth >= DEEPEST:
            raise _Unexpected
        payload = self.payload
        at = self.at
        while count > 0:
            if count > 1 and at + 8 <= self.end:  # two numbers of up to 4 bytes each begin in eight bytes
                word = read_i64_le(payload, at)
                head = word & 0xFF
                if head & 0xFC == 0xCC and head != 0xCF:
                    width = 1 + (1 << (head & 3))
                    after = (word >> (8 * width)) & 0xFF
                    if after & 0xFC == 0xCC:
                        width_after = after & 3
                        at += width + 1 + (1 << width_after)
                        count -= 2
                        continue
            count -= 1
            head = byte_at(payload, at)
            if head & 0xFC == 0xCC:  # most tokens: a number of 1, 2, 4 or 8 bytes, told apart without a branch
                width = head & 3
                at += 1 + (1 << width)
            elif head < 0x80:
                at += 1
            else:
                self.at = at
                self.skip(depth + 1)
                at = self.at
        self.at = at

    def step(self, count: i64) -> None:
        """Past the end is noticed at the end."""
        self.at += count
