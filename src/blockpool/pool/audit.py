"""The invariants of a pool, checked on its dump: the same rules for a living pool and for a file.

Not compiled, and written against the dump alone: it shares no code with what it checks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from blockpool.pool.errors import DumpError

FORMAT = "blockpool.dump/1"


class Fault(msgspec.Struct, frozen=True):
    """One broken invariant: its name, the block it was seen on (None: the pool), and what was seen."""

    invariant: str
    block_id: int | None
    detail: str


class HashRow(msgspec.Struct, frozen=True):
    key: str
    num_tokens: int = 0


class BlockRow(msgspec.Struct, frozen=True):
    id: int
    ref_cnt: int
    incarnation: int = 0
    hashes: list[HashRow] = []


class IndexRow(msgspec.Struct, frozen=True):
    key: str
    blocks: list[int]


class PendingRow(msgspec.Struct, frozen=True):
    fence: int
    blocks: list[int]


class HoldRow(msgspec.Struct, frozen=True):
    owner: str
    blocks: list[int]
    incarnations: list[int] | None = None
    until: float | None = None
    after: int | None = None
    released: bool = False


class WatcherRow(msgspec.Struct, frozen=True):
    block: int
    incarnation: int
    callbacks: int = 1


class Dump(msgspec.Struct, frozen=True):
    """A pool's `dump()`. What another engine's writer leaves out is not checked: without `index`, no hash is."""

    num_gpu_blocks: int
    num_free_blocks: int
    queue: list[int]
    blocks: list[BlockRow]
    format: str = FORMAT
    queue_backwards: list[int] | None = None
    index: list[IndexRow] | None = None
    pending: list[PendingRow] = []
    holds: list[HoldRow] = []
    watchers: list[WatcherRow] = []
    enable_caching: bool = True
    hash_block_size: int = 16
    digest_size: int = 32
    medium: str = "GPU"
    version: int = 0
    fence: int = -1


def read_dump(dump: Mapping[str, Any]) -> Dump:
    """A dump's values, typed. Raises DumpError naming the field that is missing or wrong."""
    try:
        read = msgspec.convert(dump, Dump)
    except msgspec.ValidationError as error:
        raise DumpError(f"not a pool dump: {error}") from None
    if read.format != FORMAT:
        raise DumpError(f"format {read.format!r} is not {FORMAT!r}")
    if read.num_gpu_blocks < 1:
        raise DumpError(f"num_gpu_blocks must be at least 1, not {read.num_gpu_blocks}")
    ids = [row.id for row in read.blocks]
    if len(ids) != read.num_gpu_blocks or sorted(ids) != list(range(read.num_gpu_blocks)):
        repeated = sorted(block for block, times in Counter(ids).items() if times > 1)
        outside = sorted(block for block in set(ids) if not 0 <= block < read.num_gpu_blocks)
        raise DumpError(
            f"blocks must list each id from 0 to {read.num_gpu_blocks - 1} once: {len(ids)} rows,"
            f" repeated {repeated[:5]}, outside {outside[:5]}"
        )
    return read


def audit_dump(dump: Mapping[str, Any]) -> list[Fault]:
    """Every broken invariant of a dump, by name. Raises DumpError when it is not a dump at all."""
    read = read_dump(dump)
    rows = {row.id: row for row in read.blocks}
    faults: list[Fault] = []

    def fault(invariant: str, block_id: int | None, detail: str) -> None:
        faults.append(Fault(invariant, block_id, detail))

    check_references(read, rows, fault)
    check_queue(read, rows, fault)
    check_index(read, rows, fault)
    check_pending(read, rows, fault)
    check_holds(read, rows, fault)
    check_watchers(read, rows, fault)
    return faults


Report = Callable[[str, int | None, str], None]


def check_references(dump: Dump, rows: dict[int, BlockRow], fault: Report) -> None:
    for row in dump.blocks:
        if row.ref_cnt < 0:
            fault("ref_cnt is not negative", row.id, f"ref_cnt {row.ref_cnt}")
    null = rows[0]
    if null.ref_cnt != 0 or null.hashes:
        fault("the null block is never held or hashed", 0, f"ref_cnt {null.ref_cnt}, hashes {len(null.hashes)}")


def check_queue(dump: Dump, rows: dict[int, BlockRow], fault: Report) -> None:
    times = Counter(dump.queue)
    for block, count in times.items():
        if count > 1:
            fault("the queue holds each block at most once", block, f"queued {count} times")
        if block == 0:
            fault("the null block is never queued", 0, "it is in the queue")
        elif block not in rows:
            fault("the queue holds known blocks", block, f"ids end at {dump.num_gpu_blocks - 1}")
        elif rows[block].ref_cnt != 0:
            fault("queued exactly while ref_cnt is 0", block, f"queued with ref_cnt {rows[block].ref_cnt}")
    for row in dump.blocks:
        if row.id != 0 and row.ref_cnt == 0 and row.id not in times:
            fault("queued exactly while ref_cnt is 0", row.id, "ref_cnt 0, but not in the queue")
    if len(dump.queue) != dump.num_free_blocks:
        fault("the free count is the queue's length", None, f"{dump.num_free_blocks} against {len(dump.queue)}")
    if dump.queue_backwards is not None and dump.queue_backwards[::-1] != dump.queue:
        there = dump.queue_backwards[::-1]
        at = next((i for i, pair in enumerate(zip(dump.queue, there, strict=False)) if pair[0] != pair[1]), -1)
        fault(
            "the queue reads the same from both ends",
            dump.queue[at] if at >= 0 else None,
            f"{len(dump.queue)} blocks forwards, {len(there)} backwards"
            + (f", different from place {at} on" if at >= 0 else ""),
        )
    held = sum(1 for row in dump.blocks if row.id != 0 and row.ref_cnt > 0)
    if held + dump.num_free_blocks != dump.num_gpu_blocks - 1:
        fault(
            "free, deferred and held blocks are all blocks",
            None,
            f"{dump.num_free_blocks} free and {held} with references of {dump.num_gpu_blocks - 1}",
        )


def check_index(dump: Dump, rows: dict[int, BlockRow], fault: Report) -> None:
    listed: set[tuple[str, int]] = set()
    index = dump.index or []
    keys = Counter(row.key for row in index)
    for key, count in keys.items():
        if count > 1:
            fault("the index lists each key once", None, f"{key[:16]}… {count} times")
    for entry in index:
        if not entry.blocks:
            fault("a key in the index has a block", None, f"{entry.key[:16]}… has none")
        for block in entry.blocks:
            if block == 0:
                fault("the null block is never in the index", 0, f"under {entry.key[:16]}…")
            if (entry.key, block) in listed:
                fault("the index lists a block once per key", block, f"under {entry.key[:16]}…")
            listed.add((entry.key, block))
    carried: set[tuple[str, int]] = set()
    for row in dump.blocks:
        for one in row.hashes:
            if (one.key, row.id) in carried:
                fault("a block carries a hash once", row.id, f"{one.key[:16]}…")
            carried.add((one.key, row.id))
            if len(one.key) != 2 * (dump.digest_size + 4):
                fault("a key is a digest and a group id", row.id, f"{len(one.key) // 2} bytes")
        if row.hashes and not dump.enable_caching:
            fault("no hashes while caching is off", row.id, f"{len(row.hashes)} hashes")
    if dump.index is None:
        return
    for key, block in sorted(carried - listed):
        fault("hashed exactly while the index lists it", block, f"carries {key[:16]}…, not listed")
    for key, block in sorted(listed - carried):
        fault("hashed exactly while the index lists it", block, f"listed under {key[:16]}…, does not carry it")


def check_pending(dump: Dump, rows: dict[int, BlockRow], fault: Report) -> None:
    pending: Counter[int] = Counter()
    for release in dump.pending:
        if release.fence <= dump.fence:
            fault("no release waits for a fence that was reached", None, f"{release.fence} <= {dump.fence}")
        pending.update(release.blocks)
    for block, count in sorted(pending.items()):
        refs = rows[block].ref_cnt if block in rows else 0
        if count > refs:
            fault("pending references are references", block, f"{count} pending, ref_cnt {refs}")


def check_holds(dump: Dump, rows: dict[int, BlockRow], fault: Report) -> None:
    kept: Counter[int] = Counter()
    for hold in dump.holds:
        whose = f"the hold of {hold.owner!r}"
        if hold.released:
            fault("a hold that has ended is gone", None, whose)
        if hold.after is not None and hold.after <= dump.fence:
            fault("no release waits for a fence that was reached", None, f"{whose}: {hold.after} <= {dump.fence}")
        for block in hold.blocks:
            if block == 0 or block not in rows:
                fault("holds keep real blocks", block, f"{whose}: no such block")
        kept.update(hold.blocks)
        if hold.incarnations is None:
            continue
        if len(hold.incarnations) != len(hold.blocks):
            counts = f"{len(hold.incarnations)} incarnations of {len(hold.blocks)} blocks"
            fault("a hold keeps its blocks as they were", None, f"{whose}: {counts}")
        for block, incarnation in zip(hold.blocks, hold.incarnations, strict=False):
            if block in rows and rows[block].incarnation != incarnation:
                now = f"made at incarnation {incarnation}, the block is at {rows[block].incarnation}"
                fault("a hold keeps its blocks as they were", block, f"{whose}: {now}")
    pending = Counter(block for release in dump.pending for block in release.blocks)
    for block, count in sorted(kept.items()):
        if block in rows and count + pending[block] > rows[block].ref_cnt:
            waiting = f" and {pending[block]} pending" if pending[block] else ""
            fault(
                "references of holds are references", block, f"{count} kept{waiting}, ref_cnt {rows[block].ref_cnt}"
            )


def check_watchers(dump: Dump, rows: dict[int, BlockRow], fault: Report) -> None:
    for watcher in dump.watchers:
        row = rows.get(watcher.block)
        if row is None or watcher.block == 0:
            fault("callbacks watch real blocks", watcher.block, "no such block")
        elif row.incarnation != watcher.incarnation:
            fault(
                "callbacks only for the incarnation they were armed for",
                watcher.block,
                f"armed for {watcher.incarnation}, the block is at {row.incarnation}",
            )
