"""One shelf of an index: the keys of one group in one tier, and for each the workers that have it, as bits.

Open addressing with linear probing and backward-shift deletion. A cell is the key's 128 bits and one bit per worker,
in words of 64; a cell without any bit is empty. The table is cut into segments by the key's mix, so that one that
grows makes nobody wait long.
"""

from __future__ import annotations

from typing import Final, final

from librt.strings import BytesWriter, read_i64_be, write_i64_le
from librt.vecs import append, vec
from mypy_extensions import i64

from blockpool.pool.index import mix
from blockpool.pool.layout import zeros64

SEGMENTS: Final[i64] = 64
SEGMENT_SHIFT: Final[i64] = 25  # a mix has 31 bits
LEAST_CELLS: Final[i64] = 4
OVER_63_BITS: Final = 1 << 63
LAST_BIT: Final[i64] = -(1 << 63)  # the same bit pattern, in words with a sign
BITS_64: Final = 1 << 64


def low_word(one: bytes | int) -> i64:
    """The 64-bit form of a hash, as it is announced: the last 8 bytes, or the integer, signed or not."""
    if isinstance(one, bytes):
        size: i64 = len(one)
        if size >= 8:
            return read_i64_be(one, size - 8)
        return int.from_bytes(one, "big")
    if one >= OVER_63_BITS:
        one -= BITS_64
    return one


def high_word(one: bytes | int) -> i64:
    """The 8 bytes before those, as far as there are any: 0 for what is announced as an integer."""
    if isinstance(one, bytes):
        size: i64 = len(one)
        if size >= 16:
            return read_i64_be(one, size - 16)
        if size > 8:
            return int.from_bytes(one[: size - 8], "big")
    return 0


@final
class Segment:
    """A table of cells of `2 + num_words` words. At most three quarters are full."""

    def __init__(self, num_words: i64) -> None:
        self.stride: i64 = 2 + num_words
        self.mask: i64 = LEAST_CELLS - 1
        self.count: i64 = 0
        self.cells = zeros64(LEAST_CELLS * self.stride)

    def is_empty(self, at: i64) -> bool:
        cells = self.cells
        k = at * self.stride + 2
        end = k - 2 + self.stride
        while k < end:
            if cells[k] != 0:
                return False
            k += 1
        return True

    def find(self, a: i64, b: i64, h: i64) -> i64:
        """Where the key stands, or would: at a cell that is its own or empty."""
        cells = self.cells
        stride = self.stride
        mask = self.mask
        at = h & mask
        while True:
            k = at * stride
            if cells[k] == a and cells[k + 1] == b:
                return at  # its own, or one that is empty and was its own: as good
            if cells[k + 2] == 0 and (stride == 3 or self.is_empty(at)):
                return at
            at = (at + 1) & mask

    def put(self, a: i64, b: i64, h: i64, word: i64, bit: i64) -> bool:
        """Set a worker's bit; False when it was set."""
        at = self.find(a, b, h)
        cells = self.cells
        k = at * self.stride
        bits = cells[k + 2 + word]
        if bits == 0 and self.is_empty(at):
            if (self.count + 1) * 4 > (self.mask + 1) * 3:
                self.resize(2 * (self.mask + 1))
                k = self.find(a, b, h) * self.stride
                cells = self.cells
            self.count += 1
            cells[k] = a
            cells[k + 1] = b
        elif bits & bit:
            return False
        cells[k + 2 + word] = bits | bit
        return True

    def take(self, a: i64, b: i64, h: i64, word: i64, bit: i64) -> bool:
        """Clear a worker's bit; False when it was not set."""
        at = self.find(a, b, h)
        k = at * self.stride + 2 + word
        bits = self.cells[k]
        if bits & bit == 0:
            return False
        self.cells[k] = bits & ~bit
        if self.is_empty(at):
            self.close_gap(at)
            self.count -= 1
            if self.count * 8 < self.mask and self.mask > LEAST_CELLS:
                self.resize((self.mask + 1) // 2)
        return True

    def close_gap(self, at: i64) -> None:
        """Move what stands behind an empty cell and belongs at it or before it."""
        cells = self.cells
        stride = self.stride
        mask = self.mask
        gap = at
        probe = (at + 1) & mask
        while not self.is_empty(probe):
            k = probe * stride
            home = mix(cells[k], cells[k + 1], 0) & mask
            if ((probe - home) & mask) >= ((probe - gap) & mask):
                self.move(probe, gap)
                gap = probe
            probe = (probe + 1) & mask
        k = gap * stride
        end = k + stride
        while k < end:
            cells[k] = 0
            k += 1

    def move(self, source: i64, target: i64) -> None:
        cells = self.cells
        k: i64 = 0
        while k < self.stride:
            cells[target * self.stride + k] = cells[source * self.stride + k]
            k += 1

    def resize(self, capacity: i64) -> None:
        self.rebuild(capacity, self.stride - 2)

    def rebuild(self, capacity: i64, num_words: i64) -> None:
        """The cells that are not empty, in a table of another size or with other words."""
        old = self.cells
        old_stride = self.stride
        old_count = self.mask + 1
        kept = min(old_stride, 2 + num_words)
        self.cells = zeros64(capacity * (2 + num_words))
        self.stride = 2 + num_words
        self.mask = capacity - 1
        cells = self.cells
        at: i64 = 0
        while at < old_count:
            k = at * old_stride
            seen: i64 = 0
            w: i64 = 2
            while w < old_stride:
                seen |= old[k + w]
                w += 1
            if seen != 0:
                j = self.find(old[k], old[k + 1], mix(old[k], old[k + 1], 0)) * self.stride
                w = 0
                while w < kept:
                    cells[j + w] = old[k + w]
                    w += 1
            at += 1

    def clear_bit(self, word: i64, bit: i64) -> None:
        """Nobody's bit `bit` from now on."""
        cells = self.cells
        left: i64 = 0
        gone: i64 = 0
        at: i64 = 0
        while at <= self.mask:
            if not self.is_empty(at):
                k = at * self.stride + 2 + word
                cells[k] = cells[k] & ~bit
                if self.is_empty(at):
                    gone += 1
                else:
                    left += 1
            at += 1
        if gone:
            capacity: i64 = LEAST_CELLS
            while left * 4 > capacity * 3:
                capacity *= 2
            self.count = left
            self.rebuild(capacity, self.stride - 2)


@final
class Shelf:
    """Which workers have which keys. `num_words`: words of 64 workers."""

    def __init__(self, num_words: i64) -> None:
        self.num_words: i64 = num_words
        self.num_places: i64 = 0  # workers that have one here
        self.sink: i64 = 0  # what `warm` read, so that it is read
        self.segments: list[Segment] = [Segment(num_words) for _ in range(int(SEGMENTS))]

    def __len__(self) -> int:
        total: i64 = 0
        for segment in self.segments:
            total += segment.count
        return int(total)

    @property
    def num_bytes(self) -> int:
        """Memory of the cells."""
        total: i64 = 0
        for segment in self.segments:
            total += (segment.mask + 1) * segment.stride * 8
        return int(total)

    def widen(self, num_words: i64) -> None:
        """Room for more workers."""
        if num_words > self.num_words:
            self.num_words = num_words
            for segment in self.segments:
                segment.rebuild(segment.mask + 1, num_words)

    def clear_bit(self, word: i64, bit: i64) -> None:
        if word < self.num_words:
            for segment in self.segments:
                if segment.count:
                    segment.clear_bit(word, bit)

    def warm(self, keys: vec[i64], first: i64, last: i64) -> None:
        """Read where each key's search begins, and the line behind it: a short loop, so that cache misses overlap."""
        seen: i64 = 0
        while first < last:
            h = mix(keys[2 * first], keys[2 * first + 1], 0)
            segment = self.segments[h >> SEGMENT_SHIFT]
            cells = segment.cells
            seen ^= cells[(h & segment.mask) * segment.stride + 2]
            seen ^= cells[((h + 2) & segment.mask) * segment.stride + 2]
            first += 1
        self.sink = seen

    def masks(self, keys: vec[i64], first: i64, step: i64) -> bytes:
        """For every `step`-th key from the `first` on, `num_words` words of bits, little endian.

        `keys`: two words for each key.
        """
        writer = BytesWriter()
        words = self.num_words
        end: i64 = len(keys) // 2
        while first < end:
            a = keys[2 * first]
            b = keys[2 * first + 1]
            h = mix(a, b, 0)
            segment = self.segments[h >> SEGMENT_SHIFT]
            at = segment.find(a, b, h)
            k = at * segment.stride + 2
            w: i64 = 0
            while w < words:
                write_i64_le(writer, segment.cells[k + w])
                w += 1
            first += step
        return writer.getvalue()


def key_words(hashes: list[bytes | int]) -> vec[i64]:
    """Two words per hash: what `Shelf.masks` looks for."""
    out = vec[i64](capacity=2 * len(hashes))
    for one in hashes:
        out = append(out, low_word(one))
        out = append(out, high_word(one))
    return out


def low_words(hashes: list[bytes | int]) -> vec[i64]:
    """The same for workers that announce the 64-bit form."""
    out = vec[i64](capacity=2 * len(hashes))
    for one in hashes:
        out = append(out, low_word(one))
        out = append(out, i64(0))
    return out


@final
class Place:
    """What one worker has on one shelf: its bit there, how many keys, and the keys that it has in several copies.

    `block_size`, `kind`, `window`: what its last event here said of the group.
    """

    def __init__(self, shelf: Shelf, slot: i64, group: int) -> None:
        self.shelf = shelf
        self.group = group
        self.word: i64 = slot // 64
        place = slot % 64
        shift: int = place  # as an int: mypyc writes a shifted 1 as C's, which has 32 bits
        self.bit: i64 = LAST_BIT if place == 63 else 1 << shift
        self.count: i64 = 0
        self.copies: dict[tuple[int, int], int] = {}  # how many more than one
        self.block_size = 0
        self.kind: str | None = None
        self.window: int | None = None

    def store(self, words: vec[i64], first: i64, last: i64, counted: bool) -> int:
        """The worker has keys first .. last-1 (two words each); how many of them it had already.

        `counted`: those have a copy more now.
        """
        segments = self.shelf.segments
        self.shelf.warm(words, first, last)
        repeated: i64 = 0
        k = 2 * first
        while k < 2 * last:
            a = words[k]
            b = words[k + 1]
            k += 2
            h = mix(a, b, 0)
            if not segments[h >> SEGMENT_SHIFT].put(a, b, h, self.word, self.bit):
                repeated += 1
                if counted:
                    key = (int(a), int(b))
                    self.copies[key] = self.copies.get(key, 0) + 1
        self.count += last - first - repeated
        return int(repeated)

    def remove(self, words: vec[i64], first: i64, last: i64) -> int:
        """The worker has one copy less of each; how many of them it did not have."""
        segments = self.shelf.segments
        self.shelf.warm(words, first, last)
        unknown: i64 = 0
        k = 2 * first
        while k < 2 * last:
            a = words[k]
            b = words[k + 1]
            k += 2
            if self.copies and self.one_copy_less(int(a), int(b)):
                continue
            h = mix(a, b, 0)
            if segments[h >> SEGMENT_SHIFT].take(a, b, h, self.word, self.bit):
                self.count -= 1
            else:
                unknown += 1
        return int(unknown)

    def one_copy_less(self, a: int, b: int) -> bool:
        key = (a, b)
        more = self.copies.get(key, 0)
        if more == 0:
            return False
        if more == 1:
            del self.copies[key]
        else:
            self.copies[key] = more - 1
        return True

    def num_copies(self, one: bytes | int) -> int:
        """How many copies of a key the worker has, 0 for none."""
        a = low_word(one)
        b = high_word(one)
        h = mix(a, b, 0)
        segment = self.shelf.segments[h >> SEGMENT_SHIFT]
        k = segment.find(a, b, h) * segment.stride + 2 + self.word
        if segment.cells[k] & self.bit == 0:
            return 0
        return 1 + self.copies.get((int(a), int(b)), 0)

    def clear(self) -> None:
        """The worker has nothing here."""
        if self.count:
            self.shelf.clear_bit(self.word, self.bit)
        self.count = 0
        self.copies = {}

    def num_all_copies(self) -> int:
        return int(self.count) + sum(self.copies.values())
