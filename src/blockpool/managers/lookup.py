"""The longest usable prefix of a chain in one group: the same search for every kind of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from librt.vecs import append, vec
from mypy_extensions import i32, i64

from blockpool.managers.resume import margin_behind, parts_of, parts_to_resume, step_between
from blockpool.managers.tables import NO_BLOCKS, NOTHING_FOUND, GroupHit
from blockpool.pool.layout import FIELDS, TURN, zeros32

if TYPE_CHECKING:
    from blockpool.managers.base import SingleTypeKVCacheManager


def longest_hit(manager: SingleTypeKVCacheManager, digests: bytes, max_length: int, alignment: int) -> GroupHit:
    """The greatest boundary that can be resumed at, from the right, and its blocks.

    The blocks of a boundary are looked at from left to right. A missing one rules out every boundary that ends
    behind it, and what was found before it is what the next boundary needs at its right end: no position is
    looked at twice, and those between the two not at all.
    """
    step: i64 = step_between(manager, alignment)
    margin: i64 = margin_behind(manager, int(step))
    unit: i64 = manager.block_size
    hash_unit: i64 = manager.pool.hash_block_size
    hashed = i64(len(digests)) // manager.pool.digest_size * hash_unit
    boundary = min(i64(max_length), hashed - margin)
    boundary -= boundary % step
    known = NO_BLOCKS  # cached blocks at the positions from known_from on
    known_from = hashed
    while boundary > 0:
        first, last, tail, tail_behind = parts_to_resume(manager, boundary, margin)
        stop = min(last, known_from)
        if first < stop:
            run = run_of(manager, digests, first, stop)
            count: i64 = len(run)
            if count < stop - first:
                known = run
                known_from = first
                boundary = (first + count + 1) * unit - 1 - margin
                boundary -= boundary % step
                continue
            at = stop
            while at < last:
                run = append(run, known[at - known_from])
                at += 1
            known = run
            known_from = first
        inside: i64 = 0
        behind: i64 = 0
        if tail > 0:
            inside = block_at(manager, digests, tail // hash_unit - 1)
        if tail_behind > 0:
            behind = block_at(manager, digests, tail_behind // hash_unit - 1)
        if (tail > 0 and inside == 0) or (tail_behind > 0 and behind == 0):
            boundary -= step
            continue
        if tail == 0 and boundary % unit != 0 and boundary // unit == tail_behind // unit:
            inside = behind
        return hit_at(manager, boundary, known, known_from, inside)
    return NOTHING_FOUND


def run_of(manager: SingleTypeKVCacheManager, digests: bytes, first: i64, last: i64) -> vec[i32]:
    """The blocks cached for the full blocks first, first+1, … before `last`, up to the first that is not."""
    factor: i64 = manager.factor
    if manager.awaited is not None:
        found = vec[i32]()
        while first < last:
            one = block_at(manager, digests, (first + 1) * factor - 1)
            if one == 0:
                break
            found = append(found, i32(one))
            first += 1
        return found
    if last - first > 1:
        return manager.pool.lookup_vec(digests, (first + 1) * factor - 1, last * factor, factor, manager.group_id)
    block = block_at(manager, digests, (first + 1) * factor - 1)
    if block == 0:
        return NO_BLOCKS
    run = vec[i32](capacity=1)
    return append(run, i32(block))


def block_at(manager: SingleTypeKVCacheManager, digests: bytes, digest: i64) -> i64:
    """The block cached under one digest of the chain, or 0."""
    index = manager.pool.index
    width: i64 = manager.pool.digest_size
    entry = index.find(digests, digest * width, manager.group_id)
    if entry != 0:
        return index.block_of(entry)
    awaited = manager.awaited
    return 0 if awaited is None else i64(awaited.get(digests[digest * width : (digest + 1) * width], 0))


def hit_at(
    manager: SingleTypeKVCacheManager, boundary: i64, known: vec[i32], known_from: i64, inside: i64
) -> GroupHit:
    """The hit that ends at a boundary: null before what it needs; `inside`, if any, is its last block."""
    unit: i64 = manager.block_size
    full = boundary // unit
    length = full if full * unit == boundary else full + 1
    first, last, tail = parts_of(manager, boundary)
    if first == last and tail == 0:
        first = length
    whole = length if inside == 0 else length - 1
    if first == 0 and known_from == 0 and inside == 0:
        blocks = known if i64(len(known)) == length else known[:length]
    else:
        blocks = zeros32(length)
        at = first
        while at < whole:
            blocks[at] = known[at - known_from]
            at += 1
        if inside > 0:
            blocks[length - 1] = i32(inside)
    meta = manager.pool.records.meta
    base = manager.pool.records.base
    turns = zeros32(length)
    at = first
    while at < length:
        turns[at] = meta[base + i64(blocks[at]) * FIELDS + TURN]
        at += 1
    return GroupHit(blocks, turns, int(boundary), int(first))
