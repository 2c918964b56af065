"""The prefix index: which blocks hold the content of a key (digest + group id).

An open-addressing table with linear probing and backward-shift deletion, sized so that it stays at most
half full: no tombstones, no growth while blocks have one hash each. A table word is 31 bits of the key's mix
above the 32-bit entry number. The digest itself lies in the entry's record, so "the block has a hash" and "the index
lists it" are one fact. Entries that share a key form a ring in the order of registration; only the first
stands in the table.
"""

from __future__ import annotations

from operator import index
from typing import Any, Final, SupportsIndex, final

from librt.strings import BytesWriter, read_i32_le, read_i64_le, write_i32_le
from librt.vecs import append, vec
from mypy_extensions import i32, i64

from blockpool.pool.errors import DigestError, GroupError, UnknownBlockError
from blockpool.pool.layout import (
    COPY_NEXT,
    COPY_PREV,
    DIGEST,
    FIELDS,
    FLAGS,
    GROUP_SHIFT,
    HASHED,
    LATER,
    LOW_BITS,
    MARK,
    MAX_BLOCKS,
    MAX_DIGEST,
    MAX_GROUP,
    MORE,
    OF_HASH,
    REF,
    TOKENS,
    Records,
    zeros64,
)

LOW32: Final[i64] = 0xFFFFFFFF
LOW31: Final[i64] = 0x7FFFFFFF


def mix(first: i64, last: i64, group: i64) -> i64:
    """31 well-spread bits of a key. No product leaves 63 bits, so interpreted code computes the same."""
    m = (first & LOW32) * 0x1B8735B5 + ((first >> 32) & LOW32) * 0x0E6546B5
    m += (last & LOW32) * 0x15EBCA6B + ((last >> 32) & LOW32) * 0x07D4EB2F + group * 0x165667B1
    return (m ^ (m >> 29) ^ (m >> 47)) & LOW31


def same_digest(meta: vec[i32], start: i64, width: i64, digests: bytes, offset: i64) -> bool:
    k: i64 = 0
    while k < width:
        if meta[start + k] != read_i32_le(digests, offset + 4 * k):
            return False
        k += 1
    return True


@final
class BlockHashToBlockMap:
    """Several blocks per key (nothing is de-duplicated), several keys per block.

    A key is `digest_size` bytes of digest, then the group id as 4 bytes, big endian. The map of a pool shares
    the pool's records; one made by hand, `BlockHashToBlockMap(num_blocks)`, has its own.
    """

    def __init__(self, num_blocks: int, digest_size: int = 32, records: Records | None = None) -> None:
        if num_blocks < 1 or num_blocks > MAX_BLOCKS:
            raise ValueError(f"num_blocks must be from 1 to {MAX_BLOCKS}, not {num_blocks}")
        if digest_size < 8 or digest_size > MAX_DIGEST or digest_size % 8 != 0:
            raise DigestError(f"digest_size must be 8, 16, 24 or 32 bytes, not {digest_size}")
        n: i64 = num_blocks
        self.size: i64 = n
        self.width: i64 = digest_size // 4  # fields
        self.records = Records(n) if records is None else records
        capacity: i64 = 16
        while capacity < 2 * n:
            capacity *= 2
        self.slots = zeros64(capacity)
        self.mask: i64 = capacity - 1
        self.num_keys: i64 = 0
        self.sink: i64 = 0
        # additional hashes: rare, so a dict of entry numbers per block and a list of unused entries
        self.more: dict[int, list[int]] = {}
        self.spare: list[int] = []

    def __len__(self) -> int:
        """Number of different keys."""
        return self.num_keys

    # -- by key --------------------------------------------------------------------------------------

    def get_one_block(self, key: bytes) -> int | None:
        """The block registered first under the key, or None."""
        group = self.group_of(key)
        entry = self.find(key, 0, group)
        return None if entry == 0 else self.block_of(entry)

    def get_blocks(self, key: bytes) -> list[int]:
        """Every block registered under the key, the first registered first."""
        first = self.find(key, 0, self.group_of(key))
        if first == 0:
            return []
        out: list[int] = [self.block_of(first)]
        entry = self.records.get(first, COPY_NEXT)
        while entry != 0 and entry != first:
            out.append(self.block_of(entry))
            entry = self.records.get(entry, COPY_NEXT)
        return out

    def contain(self, key: bytes, block_id: SupportsIndex) -> bool:
        """Whether this block is registered under this key."""
        return self.entry_of(self.known(block_id), key, 0, self.group_of(key)) != 0

    def insert(self, key: bytes, block_id: SupportsIndex, num_tokens: int = 0) -> None:
        """Register a block under a key: as its primary hash if it has none, else as an additional one.

        Already there: nothing happens.
        """
        b = self.known(block_id)
        group = self.group_of(key)
        if self.entry_of(b, key, 0, group) == 0:
            self.put(b, key, 0, group, num_tokens)

    def pop(self, key: bytes, block_id: SupportsIndex) -> int | None:
        """Take the block off the key. The block's id, or None when it was not registered there."""
        b = self.known(block_id)
        entry = self.entry_of(b, key, 0, self.group_of(key))
        if entry == 0:
            return None
        self.take_off(b, entry)
        return b

    def keys(self) -> list[bytes]:
        """Every key, in no particular order."""
        out: list[bytes] = []
        for slot in self.slots:
            if slot != 0:
                out.append(self.key_of(slot & LOW32))
        return out

    def listing(self) -> list[dict[str, Any]]:
        """Every key with its blocks, first registered first: what the table says, for an audit."""
        out: list[dict[str, Any]] = []
        for key in sorted(self.keys()):
            out.append({"key": key.hex(), "blocks": self.get_blocks(key)})
        return out

    # -- one entry -----------------------------------------------------------------------------------

    def block_of(self, entry: i64) -> i64:
        return entry if entry < self.size else self.records.get(entry, REF)

    def group_at(self, entry: i64) -> i64:
        return self.records.get(entry, FLAGS) >> GROUP_SHIFT

    def digest_of(self, entry: i64) -> bytes:
        writer = BytesWriter()
        meta = self.records.meta
        k = self.records.base + entry * FIELDS + DIGEST
        end = k + self.width
        while k < end:
            write_i32_le(writer, meta[k])
            k += 1
        return writer.getvalue()

    def key_of(self, entry: i64) -> bytes:
        group: int = self.group_at(entry)
        return self.digest_of(entry) + group.to_bytes(4, "big")

    def entries_of(self, b: i64) -> list[int]:
        """A block's entries: the primary hash first, additional ones in the order of registration."""
        flags = self.records.get(b, FLAGS)
        if flags & HASHED == 0:
            return []
        if flags & MORE == 0:
            return [b]
        return [b, *self.more[b]]

    def entry_of(self, b: i64, digests: bytes, offset: i64, group: i64) -> i64:
        """The entry that says this block holds this key, or 0."""
        for entry in self.entries_of(b):
            e: i64 = entry
            if self.group_at(e) == group and self.holds(e, digests, offset):
                return e
        return 0

    # -- the table -----------------------------------------------------------------------------------

    def mix_at(self, digests: bytes, offset: i64, group: i64) -> i64:
        last = offset + 4 * self.width - 8
        return mix(read_i64_le(digests, offset), read_i64_le(digests, last), group)

    def mix_of(self, entry: i64) -> i64:
        meta = self.records.meta
        start = self.records.base + entry * FIELDS + DIGEST
        last = start + self.width - 2
        return mix(
            (i64(meta[start]) & LOW32) | (i64(meta[start + 1]) << 32),
            (i64(meta[last]) & LOW32) | (i64(meta[last + 1]) << 32),
            self.group_at(entry),
        )

    def holds(self, entry: i64, digests: bytes, offset: i64) -> bool:
        start = self.records.base + entry * FIELDS + DIGEST
        return same_digest(self.records.meta, start, self.width, digests, offset)

    def find(self, digests: bytes, offset: i64, group: i64) -> i64:
        """The entry registered first under the key whose digest stands at `offset`, or 0."""
        return self.find_mixed(digests, offset, group, self.mix_at(digests, offset, group))

    def find_mixed(self, digests: bytes, offset: i64, group: i64, h: i64) -> i64:
        slots = self.slots
        meta = self.records.meta
        base = self.records.base
        mask = self.mask
        j = h & mask
        while True:
            slot = slots[j]
            if slot == 0:
                return 0
            if slot >> 32 == h:
                entry = slot & LOW32
                o = base + entry * FIELDS
                if i64(meta[o + FLAGS]) >> GROUP_SHIFT == group:
                    if same_digest(meta, o + DIGEST, self.width, digests, offset):
                        return entry
            j = (j + 1) & mask

    def mixes(self, digests: bytes, offset: i64, count: i64, step: i64, group: i64) -> vec[i64]:
        """The mixes of `count` digests, `step` bytes apart."""
        back = 4 * self.width - 8
        out = vec[i64](capacity=count)
        k: i64 = 0
        while k < count:
            out = append(out, mix(read_i64_le(digests, offset), read_i64_le(digests, offset + back), group))
            offset += step
            k += 1
        return out

    def warm_slots(self, hs: vec[i64]) -> None:
        """Read the slots of these mixes: a short loop, so that many cache misses overlap."""
        slots = self.slots
        mask = self.mask
        seen: i64 = 0
        for h in hs:
            seen ^= slots[h & mask]
        self.sink = seen

    def warm_entries(self, hs: vec[i64]) -> None:
        """Read a field of the records that the slots of these mixes name."""
        slots = self.slots
        meta = self.records.meta
        base = self.records.base
        mask = self.mask
        seen: i32 = 0
        for h in hs:
            seen ^= meta[base + (slots[h & mask] & LOW32) * FIELDS]
        self.sink = i64(seen)

    def find_run(self, digests: bytes, offset: i64, count: i64, step: i64, group: i64) -> vec[i32]:
        """Blocks of the hits among `count` digests, `step` bytes apart, up to the first miss."""
        out = vec[i32]()
        ahead: i64 = 32  # a run that misses early should not pay for the rest
        while count > 0:
            n = min(ahead, count)
            hs = self.mixes(digests, offset, n, step, group)
            self.warm_slots(hs)
            self.warm_entries(hs)
            for h in hs:
                entry = self.find_mixed(digests, offset, group, h)
                if entry == 0:
                    return out
                out = append(out, i32(self.block_of(entry)))
                offset += step
            count -= n
            ahead = 1024
        return out

    def put(self, b: i64, digests: bytes, offset: i64, group: i64, num_tokens: i64) -> bool:
        """Register a key for a block; True when no other entry had it. The block must not have it yet."""
        h = self.mix_at(digests, offset, group)
        if self.records.get(b, FLAGS) & HASHED == 0:
            return self.add(b, digests, offset, group, num_tokens, h)
        if not self.spare:
            self.grow()
        entry: i64 = self.spare.pop()
        self.records.set(entry, REF, b)
        first = self.add(entry, digests, offset, group, num_tokens, h)
        self.records.set(b, FLAGS, self.records.get(b, FLAGS) | MORE)
        self.more.setdefault(int(b), []).append(int(entry))
        return first

    def add(self, entry: i64, digests: bytes, offset: i64, group: i64, num_tokens: i64, h: i64) -> bool:
        """Write a key into an entry that has none and list it; True when the key was not listed yet."""
        slots = self.slots
        meta = self.records.meta
        mask = self.mask
        o = self.records.base + entry * FIELDS
        k = o + DIGEST
        end = k + self.width
        at = offset
        while k < end:
            meta[k] = read_i32_le(digests, at)
            k += 1
            at += 4
        meta[o + TOKENS] = i32(num_tokens)
        meta[o + FLAGS] = i32((i64(meta[o + FLAGS]) & LOW_BITS & ~MARK) | HASHED | (group << GROUP_SHIFT))
        j = h & mask
        while True:
            slot = slots[j]
            if slot == 0:
                slots[j] = (h << 32) | entry
                self.num_keys += 1
                return True
            if slot >> 32 == h:
                first = slot & LOW32
                if self.group_at(first) == group and self.holds(first, digests, offset):
                    break
            j = (j + 1) & mask
        self.join(entry, first)
        return False

    def join(self, entry: i64, first: i64) -> None:
        """Put an entry behind the others of its key."""
        records = self.records
        last = records.get(first, COPY_PREV)
        if last == 0:
            last = first
        records.set(entry, FLAGS, records.get(entry, FLAGS) | LATER)
        records.set(entry, COPY_PREV, last)
        records.set(entry, COPY_NEXT, first)
        records.set(last, COPY_NEXT, entry)
        records.set(first, COPY_PREV, entry)

    def drop(self, entry: i64, h: i64) -> bool:
        """Take an entry's key away; True when no other entry has it now. `h` is the key's mix."""
        slots = self.slots
        meta = self.records.meta
        mask = self.mask
        o = self.records.base + entry * FIELDS
        flags = i64(meta[o + FLAGS])
        meta[o + FLAGS] = i32(flags & LOW_BITS & ~OF_HASH)
        meta[o + TOKENS] = 0
        if meta[o + COPY_NEXT] != 0:
            self.leave(entry, h, flags & LATER == 0)
            return False
        j = self.slot_of(entry, h)
        k = (j + 1) & mask
        slot = slots[k]
        while slot != 0:
            if ((k - (slot >> 32)) & mask) >= ((k - j) & mask):
                slots[j] = slot
                j = k
            k = (k + 1) & mask
            slot = slots[k]
        slots[j] = 0
        self.num_keys -= 1
        return True

    def leave(self, entry: i64, h: i64, was_first: bool) -> None:
        """Take an entry out of the ring of its key, which has others; the next one becomes the first."""
        records = self.records
        after = records.get(entry, COPY_NEXT)
        before = records.get(entry, COPY_PREV)
        records.set(entry, COPY_PREV, 0)
        records.set(entry, COPY_NEXT, 0)
        if was_first:
            self.slots[self.slot_of(entry, h)] = (h << 32) | after
            records.set(after, FLAGS, records.get(after, FLAGS) & ~LATER)
        alone = before == after  # a ring of one is no ring
        records.set(before, COPY_NEXT, 0 if alone else after)
        records.set(after, COPY_PREV, 0 if alone else before)

    def slot_of(self, entry: i64, h: i64) -> i64:
        """Where in the table an entry stands that is the first of its key."""
        slots = self.slots
        j = h & self.mask
        while slots[j] & LOW32 != entry:
            j = (j + 1) & self.mask
        return j

    def take_off(self, b: i64, entry: i64) -> bool:
        """Take one key off a block; True when no block has it now."""
        last = self.drop(entry, self.mix_of(entry))
        if entry != b:
            self.forget_additional(b, entry)
        elif self.records.get(b, FLAGS) & MORE:  # its oldest additional hash takes the place
            heir: i64 = self.more[int(b)][0]
            self.rename(heir, b)
            self.forget_additional(b, heir)
        return last

    def forget_additional(self, b: i64, entry: i64) -> None:
        others = self.more[int(b)]
        others.remove(int(entry))
        if not others:
            del self.more[int(b)]
            self.records.set(b, FLAGS, self.records.get(b, FLAGS) & ~MORE)
        self.records.set(entry, REF, 0)
        self.spare.append(int(entry))

    def rename(self, old: i64, new: i64) -> None:
        """Entry `new`, which has no key, takes over the key of `old`, and its place among the copies."""
        records = self.records
        flags = records.get(old, FLAGS)
        h = self.mix_of(old)
        for field in range(DIGEST, DIGEST + self.width):
            records.set(new, field, records.get(old, field))
        records.set(new, TOKENS, records.get(old, TOKENS))
        records.set(old, TOKENS, 0)
        records.set(new, FLAGS, (records.get(new, FLAGS) & LOW_BITS) | (flags & (OF_HASH | ~LOW_BITS)))
        records.set(old, FLAGS, flags & LOW_BITS & ~OF_HASH)
        if flags & LATER == 0:
            self.slots[self.slot_of(old, h)] = (h << 32) | new
        after = records.get(old, COPY_NEXT)
        if after != 0:
            before = records.get(old, COPY_PREV)
            records.set(before, COPY_NEXT, new)
            records.set(after, COPY_PREV, new)
            records.set(new, COPY_NEXT, after)
            records.set(new, COPY_PREV, before)
            records.set(old, COPY_NEXT, 0)
            records.set(old, COPY_PREV, 0)

    def clear(self) -> None:
        """Forget every key."""
        records = self.records
        entry: i64 = 0
        while entry < records.num_entries:
            flags = records.get(entry, FLAGS)
            if flags & HASHED:
                records.set(entry, FLAGS, flags & LOW_BITS & ~(OF_HASH | MORE))
                records.set(entry, TOKENS, 0)
                records.set(entry, COPY_PREV, 0)
                records.set(entry, COPY_NEXT, 0)
            entry += 1
        for others in self.more.values():
            for one in others:
                records.set(one, REF, 0)
            self.spare.extend(others)
        self.more.clear()
        self.slots = zeros64(self.mask + 1)
        self.num_keys = 0

    # -- room for additional hashes ------------------------------------------------------------------

    def grow(self) -> None:
        """Double the room for additional hashes. Primary ones never need it."""
        old = self.records.num_entries
        added: i64 = max(64, old - self.size)
        self.records.grow(added)
        self.spare.extend(range(old + added - 1, old - 1, -1))
        capacity = self.mask + 1
        while capacity < 2 * (old + added):
            capacity *= 2
        self.rehash(capacity)

    def rehash(self, capacity: i64) -> None:
        """A larger table. The order among copies of one key lies in their ring, not in the table."""
        mask = capacity - 1
        if mask == self.mask:
            return
        slots = zeros64(mask + 1)
        for slot in self.slots:
            if slot != 0:
                j = (slot >> 32) & mask
                while slots[j] != 0:
                    j = (j + 1) & mask
                slots[j] = slot
        self.slots = slots
        self.mask = mask

    # -- the public door -----------------------------------------------------------------------------

    def known(self, block: SupportsIndex) -> i64:
        number = index(block)
        limit: int = self.size
        if number < 1 or number >= limit:
            raise UnknownBlockError(f"block {number} cannot be indexed: ids run from 1 to {self.size - 1}")
        return number

    def group_of(self, key: bytes) -> i64:
        if len(key) != 4 * self.width + 4:
            raise DigestError(
                f"a key is {4 * self.width} bytes of digest and 4 of group id, this one has {len(key)} bytes"
            )
        group = int.from_bytes(key[-4:], "big")
        if group > MAX_GROUP:
            raise GroupError(f"group id {group} is not below {MAX_GROUP + 1}")
        return group
