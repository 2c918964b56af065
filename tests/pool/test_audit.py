"""Every invariant, broken once on purpose: the audit names it, and names the block."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from blockpool.pool import BlockPool, DumpError, Fault, audit_dump

Dump = dict[str, Any]


def key(i: int) -> str:
    return (hashlib.sha256(bytes([i])).digest() + bytes(4)).hex()


def sound() -> Dump:
    """Blocks 1-3 cached (3 free, 1 and 2 held), 4 deferred until fence 9, 5-7 plain and free; 1 watched."""
    pool = BlockPool(8, clock=lambda: 0.0)
    blocks = pool.get_new_blocks(4)
    chain = b"".join(hashlib.sha256(bytes([i])).digest() for i in range(3))
    pool.cache_full_blocks(blocks, chain, 0, 3, 16, 0)
    pool.free_blocks([blocks[2]])
    pool.free_blocks([blocks[3]], after=9)
    pool.touch([blocks[0]])
    pool.unpin_blocks([blocks[0]], print)
    pool.hold([blocks[1]], "reader", until=5.0)
    pool.hold([blocks[0]], "step", after=9)
    return pool.dump()


def test_a_sound_pool_has_no_faults() -> None:
    assert audit_dump(sound()) == []


BREAKS: list[tuple[str, int | None, Callable[[Dump], Any]]] = [
    ("ref_cnt is not negative", 2, lambda d: d["blocks"][2].update(ref_cnt=-1)),
    ("the null block is never held or hashed", 0, lambda d: d["blocks"][0].update(ref_cnt=1)),
    ("the null block is never held or hashed", 0, lambda d: d["blocks"][0]["hashes"].append({"key": key(9)})),
    ("the queue holds each block at most once", 5, lambda d: d["queue"].append(5)),
    ("the null block is never queued", 0, lambda d: d["queue"].insert(0, 0)),
    ("the queue holds known blocks", 77, lambda d: d["queue"].append(77)),
    ("queued exactly while ref_cnt is 0", 5, lambda d: d["blocks"][5].update(ref_cnt=1)),
    ("queued exactly while ref_cnt is 0", 6, lambda d: d["queue"].remove(6)),
    ("queued exactly while ref_cnt is 0", 1, lambda d: d["blocks"][1].update(ref_cnt=0)),
    ("the free count is the queue's length", None, lambda d: d.update(num_free_blocks=3)),
    ("the queue reads the same from both ends", 5, lambda d: d["queue_backwards"].reverse()),
    ("the queue reads the same from both ends", None, lambda d: d["queue_backwards"].pop(0)),
    ("free, deferred and held blocks are all blocks", None, lambda d: d.update(num_free_blocks=5)),
    ("the index lists each key once", None, lambda d: d["index"].append(copy.deepcopy(d["index"][0]))),
    ("a key in the index has a block", None, lambda d: d["index"].append({"key": key(9), "blocks": []})),
    ("the null block is never in the index", 0, lambda d: d["index"][0]["blocks"].append(0)),
    ("the index lists a block once per key", 1, lambda d: row_of(d, 1)["blocks"].append(1)),
    ("hashed exactly while the index lists it", 1, lambda d: d["blocks"][1]["hashes"].clear()),
    ("hashed exactly while the index lists it", 1, lambda d: row_of(d, 1)["blocks"].clear()),
    ("hashed exactly while the index lists it", 5, lambda d: d["blocks"][5]["hashes"].append({"key": key(0)})),
    ("a block carries a hash once", 1, lambda d: d["blocks"][1]["hashes"].append({"key": key(0)})),
    ("a key is a digest and a group id", 5, lambda d: d["blocks"][5]["hashes"].append({"key": "abcd"})),
    ("no hashes while caching is off", 1, lambda d: d.update(enable_caching=False)),
    ("pending references are references", 4, lambda d: d["pending"][0]["blocks"].append(4)),
    ("pending references are references", 5, lambda d: d["pending"].append({"fence": 12, "blocks": [5]})),
    ("no release waits for a fence that was reached", None, lambda d: d.update(fence=9)),
    ("no release waits for a fence that was reached", None, lambda d: d.update(fence=9, pending=[])),
    ("references of holds are references", 2, lambda d: again(d["holds"][0], 2)),
    ("references of holds are references", 1, lambda d: again(d["holds"][1], 2)),
    ("references of holds are references", 1, lambda d: d["pending"].append({"fence": 12, "blocks": [1, 1]})),
    ("holds keep real blocks", 0, lambda d: d["holds"][0].update(blocks=[0])),
    ("holds keep real blocks", 88, lambda d: d["holds"][0].update(blocks=[88])),
    ("a hold keeps its blocks as they were", 2, lambda d: d["blocks"][2].update(incarnation=5)),
    ("a hold keeps its blocks as they were", None, lambda d: d["holds"][0]["incarnations"].clear()),
    ("a hold that has ended is gone", None, lambda d: d["holds"][1].update(released=True)),
    ("callbacks watch real blocks", 0, lambda d: d["watchers"][0].update(block=0)),
    ("callbacks only for the incarnation they were armed for", 1, lambda d: d["watchers"][0].update(incarnation=7)),
]


def row_of(dump: Dump, block: int) -> Any:
    return next(row for row in dump["index"] if block in row["blocks"])


def again(hold: Any, times: int) -> None:
    """The hold names its first block so many times more."""
    hold["blocks"] += hold["blocks"][:1] * times
    hold["incarnations"] += hold["incarnations"][:1] * times


@pytest.mark.parametrize(("invariant", "block", "damage"), BREAKS)
def test_a_broken_invariant_is_named(invariant: str, block: int | None, damage: Callable[[Dump], Any]) -> None:
    dump = sound()
    damage(dump)
    faults = audit_dump(dump)
    assert (invariant, block) in [(fault.invariant, fault.block_id) for fault in faults]
    assert all(isinstance(fault, Fault) and fault.detail for fault in faults)


def test_every_invariant_that_the_audit_knows_is_broken_above() -> None:
    """A rule without a test that breaks it could be dead."""
    import inspect
    import re

    from blockpool.pool import audit

    named = set(re.findall(r'fault\(\s*"([^"]+)"', inspect.getsource(audit)))
    assert named == {invariant for invariant, _, _ in BREAKS}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: d.pop("queue"), "queue"),
        (lambda d: d.update(num_free_blocks="many"), "num_free_blocks"),
        (lambda d: d.update(num_gpu_blocks=0), "num_gpu_blocks"),
        (lambda d: d.update(num_gpu_blocks=10**12), "blocks must list"),
        (lambda d: d["blocks"].pop(), "blocks"),
        (lambda d: d["blocks"][3].update(id=2), "repeated"),
        (lambda d: d["blocks"][3].update(id=99), "99"),
        (lambda d: d["blocks"][3].pop("ref_cnt"), "ref_cnt"),
        (lambda d: d.update(format="other/1"), "format"),
    ],
)
def test_what_is_no_dump_is_refused(damage: Callable[[Dump], Any], words: str) -> None:
    dump = sound()
    damage(dump)
    with pytest.raises(DumpError, match=words):
        audit_dump(dump)


def test_without_an_index_hashes_are_not_checked() -> None:
    dump = sound()
    del dump["index"]
    assert audit_dump(dump) == []


def test_a_hold_without_incarnations_is_one() -> None:
    dump = sound()
    dump["holds"] = [{"owner": "x", "blocks": [2]}]
    assert audit_dump(dump) == []


def test_a_minimal_dump_of_another_engine_can_be_audited() -> None:
    dump = {
        "num_gpu_blocks": 3,
        "num_free_blocks": 1,
        "queue": [2],
        "blocks": [{"id": 0, "ref_cnt": 0}, {"id": 1, "ref_cnt": 2}, {"id": 2, "ref_cnt": 0}],
    }
    assert audit_dump(dump) == []


def test_damage_to_a_living_pool_is_seen() -> None:
    pool = BlockPool(8)
    pool.free_block_queue.popleft()  # by hand, past the pool
    assert [fault.invariant for fault in pool.audit()] == [
        "queued exactly while ref_cnt is 0",
        "free, deferred and held blocks are all blocks",
    ]
