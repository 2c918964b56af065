"""The shelves against sets, and the ledger against a dict."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpool.pool import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from blockpool.wire import KVEventBatch, Mirror, decode_batch, encode_batch
from blockpool.wire.changes import changes_of, read_changes
from blockpool.wire.check import StreamCheck
from blockpool.wire.desk import Desk
from blockpool.wire.holdings import Catalogue, Holdings
from blockpool.wire.lean import Batch, Cleared, Removed, Stored
from blockpool.wire.ledger import Ledger, Overflow
from blockpool.wire.protocol import END, SNAPSHOT, snapshot_end
from blockpool.wire.shelf import key_words
from tests.sizes import property_settings

HASHES = [i.to_bytes(8, "big") * 4 for i in range(1, 41)] + [0, 1, -1, 2**64 - 2, 2**63]
#: One key: the signed and the unsigned form of an integer.
SAME = {-1: 2**64 - 1}


def apply(worker: Holdings, event: Stored | Removed | Cleared) -> None:
    worker.apply(changes_of(Batch(0.0, [event])), True)


@property_settings(60)
@given(seed=st.integers(0, 10**6), num_workers=st.sampled_from([1, 3, 64, 65, 130]))
def test_shelves(seed: int, num_workers: int) -> None:
    rng = random.Random(seed)
    catalogue = Catalogue()
    workers = [Holdings(catalogue) for _ in range(num_workers)]
    model: list[Counter[tuple[int, str, object]]] = [Counter() for _ in workers]
    for _ in range(60):
        at = rng.randrange(len(workers))
        worker, held = workers[at], model[at]
        group, medium = rng.randint(0, 1), rng.choice(["GPU", "CPU"])
        hashes = rng.choices(HASHES, k=rng.randint(0, 20))
        kind = rng.randrange(10)
        if kind < 5:
            apply(worker, Stored(hashes, 16, medium, group or None))
            held.update((group, medium, SAME.get(one, one)) for one in hashes)
        elif kind < 8:
            apply(worker, Removed(hashes, medium, group))
            held.subtract((group, medium, SAME.get(one, one)) for one in hashes)
            model[at] = held = Counter({key: n for key, n in held.items() if n > 0})
        elif kind == 8:
            gone = rng.choice([None, medium])
            apply(worker, Cleared(gone))
            for key in [key for key in held if gone in (None, key[1])]:
                del held[key]
        else:
            worker.leave()
            workers[at], model[at] = Holdings(catalogue), Counter()
        held = model[at]
        assert workers[at].num_keys == len(held)
        assert workers[at].num_all_copies == sum(held.values())
    for (group, medium), shelf in catalogue.shelves.items():
        there = {key[2] for held in model for key in held if key[:2] == (group, medium)}
        assert len(shelf) == len(there)
        masks = np.frombuffer(shelf.masks(key_words(HASHES), 0, 1), dtype="<u8").reshape(len(HASHES), -1)
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
        for row, one in zip(bits, HASHES, strict=True):
            for worker, held in zip(workers, model, strict=True):
                copies = held[group, medium, SAME.get(one, one)]
                assert worker.num_copies(one, group, medium) == copies
                assert row[worker.slot] == (copies > 0)


def test_a_shelf_grows_and_shrinks() -> None:
    catalogue = Catalogue()
    worker = Holdings(catalogue)
    rng = random.Random(1)
    hashes = [rng.randbytes(32) for _ in range(20_000)]
    apply(worker, Stored(hashes, 16))
    assert catalogue.num_keys == worker.num_keys == 20_000
    assert catalogue.num_bytes < 80 * 20_000
    assert all(worker.num_copies(one, 0, "GPU") == 1 for one in hashes)
    apply(worker, Removed(hashes[:-10]))
    assert all(worker.num_copies(one, 0, "GPU") == 0 for one in hashes[:-10])
    assert all(worker.num_copies(one, 0, "GPU") == 1 for one in hashes[-10:])
    assert catalogue.num_bytes < 20_000


def stored(chain: list[bytes], first: int, last: int, group: int = 0) -> BlockStored:
    extras: list[tuple[int] | None] = [None if at % 3 else (at,) for at in range(first, last)]
    return BlockStored(
        block_hashes=chain[first:last],  # type: ignore[arg-type]
        parent_block_hash=chain[first - 1] if first else None,
        token_ids=list(range(2 * first, 2 * last)),
        block_size=2,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=group,
        extra_keys=extras if any(extras) else None,  # type: ignore[arg-type]
    )


def told_by(ledger: Ledger) -> list[BlockStored]:
    """Its snapshot, read as anybody reads it."""
    events = [event for event in ledger.view().events() if event is not None]
    return decode_batch(encode_batch(KVEventBatch(0.0, events))).events  # type: ignore[arg-type, return-value]


def test_of_an_event_that_is_mostly_gone_little_is_kept() -> None:
    chain = [bytes([1, i]) * 16 for i in range(64)]
    ledger = Ledger()
    ledger.apply(stored(chain, 0, 64))

    def size() -> int:
        return sum(len(record.payload) for record in set(ledger._keys[0, "GPU"].values()))

    whole = size()
    ledger.remove((0, "GPU"), chain[4:])  # type: ignore[arg-type]
    assert size() < whole / 4
    assert told_by(ledger) == [stored(chain, 0, 4)]


def test_neighbours_are_told_as_one_event() -> None:
    """Whatever events announced them, and with the same bytes as if one had; what differs stays apart."""
    chain = [bytes([1, i]) * 16 for i in range(40)]
    ledger = Ledger()
    for at in (0, 1, 2, 4, 6):
        ledger.apply(stored(chain, at, at + (2 if at >= 2 else 1)))
    assert [len(event.block_hashes) for event in told_by(ledger)] == [1, 1, 2, 2, 2]  # extra keys at 0, 3, 6
    plain = Ledger()
    for at in range(40):
        plain.apply(msgspec.structs.replace(stored(chain, at, at + 1), extra_keys=None))
    whole = msgspec.structs.replace(stored(chain, 0, 40), extra_keys=None)
    assert told_by(plain) == [whole]
    (event,) = [event for event in plain.view().events() if event is not None]
    assert msgspec.msgpack.encode(event) == msgspec.msgpack.encode(whole)
    for field, value in (("lora_id", 1), ("medium", None), ("session_id", "s"), ("token_ids", [1])):
        odd = Ledger()
        for at in range(2):
            event = stored(chain, at + 1, at + 2)
            odd.apply(msgspec.structs.replace(event, **{field: value}) if at else event)
        assert len(told_by(odd)) == 2, field


def test_parents_come_first_over_all_tiers() -> None:
    chain = [bytes([1, i]) * 16 for i in range(3)]
    ledger = Ledger()
    ledger.apply(stored(chain, 0, 3))
    ledger.apply(msgspec.structs.replace(stored(chain, 0, 1), medium="CPU"))
    ledger.apply(BlockRemoved(block_hashes=[chain[0]], medium="GPU"))
    assert [(event.medium, len(event.block_hashes)) for event in told_by(ledger)] == [("CPU", 1), ("GPU", 2)]


def test_a_hash_twice_in_one_event_is_two_copies() -> None:
    chain = [bytes([1, 1]) * 16] * 2
    ledger = Ledger()
    ledger.apply(stored(chain, 0, 2))
    assert sum(len(event.block_hashes) for event in told_by(ledger)) == 2
    ledger.apply(BlockRemoved(block_hashes=chain[:1], medium="GPU"))
    assert sum(len(event.block_hashes) for event in told_by(ledger)) == 1


@pytest.mark.parametrize("through_overflow", [False, True])
@property_settings(60)
@given(seed=st.integers(0, 10**6))
def test_where_only_first_and_last_are_announced_again_means_nothing(through_overflow: bool, seed: int) -> None:
    """What a late reader is told is what an uninterrupted one has."""
    rng = random.Random(seed)
    chain = [bytes([1, i]) * 16 for i in range(6)]
    mirror = Mirror(convention="first_last", can_replay=False)
    desk = Desk("me", convention="first_last", max_queue_size=3 if through_overflow else 100, clock=lambda: 0.0)
    for seq in range(20):
        first = rng.randrange(6)
        hashes = rng.choices(chain[first:], k=rng.randint(1, 3))
        event: BlockStored | BlockRemoved
        if rng.random() < 0.5:
            event = msgspec.structs.replace(
                stored(chain, 0, 1),
                block_hashes=list(hashes),
                token_ids=[0] * 2 * len(hashes),
                extra_keys=None,
            )
        else:
            event = BlockRemoved(block_hashes=list(hashes), medium="GPU", group_idx=0)
        desk.put([event])
        mirror.receive(seq, encode_batch(KVEventBatch(0.0, [event])))
        if rng.random() < 0.1:
            desk.send_one(lambda frames: None)
    while desk.send_one(lambda frames: None):
        pass
    assert desk.ledger is not None
    told = [one for event in told_by(desk.ledger) for one in event.block_hashes]
    assert sorted(told) == sorted(one for one in chain if one in mirror)  # type: ignore[type-var]


def test_a_view_is_of_its_moment() -> None:
    chain = [bytes([1, i]) * 16 for i in range(64)]
    ledger = Ledger()
    ledger.apply(stored(chain, 0, 64))
    slices = ledger.view().events()
    ledger.apply(BlockRemoved(block_hashes=list(chain[1:]), medium="GPU"))  # written anew meanwhile
    assert next(event for event in slices if event is not None).block_hashes == chain
    assert told_by(ledger) == [stored(chain, 0, 1)]


@pytest.mark.parametrize("through_overflow", [False, True])
@property_settings(100)
@given(seed=st.integers(0, 10**6), counted=st.booleans())
def test_a_snapshot_is_everything_that_is_there(through_overflow: bool, seed: int, counted: bool) -> None:
    rng = random.Random(seed)
    chains = [[bytes([c, i]) * 16 for i in range(12)] for c in range(2)]
    ledger, overflow = Ledger(), Overflow(0)
    held: Counter[tuple[int, bytes]] = Counter()
    for seq in range(40):
        group, chain = rng.randint(0, 1), rng.choice(chains)
        first = rng.randint(0, 11)
        last = rng.randint(first + 1, 12)
        kind = rng.randrange(12)
        event: BlockStored | BlockRemoved | AllBlocksCleared
        if kind == 0:
            event = AllBlocksCleared(medium=rng.choice([None, "GPU", "CPU"]))
            if event.medium != "CPU":
                held.clear()
        elif kind < 6:
            run = [one for one in chain[first:last] if held[group, one]]
            event = BlockRemoved(block_hashes=run, medium="GPU", group_idx=group)  # type: ignore[arg-type]
            held.subtract((group, one) for one in run)
        else:
            while not counted and first < last and held[group, chain[first]]:
                first += 1
            last = next((at for at in range(first, last) if held[group, chain[at]] and not counted), last)
            event = stored(chain, first, last, group)
            held.update((group, one) for one in chain[first:last])
        if through_overflow and rng.random() < 0.7:
            overflow.add(seq, [event])
        else:
            for late in overflow.settle():
                ledger.apply(late)
            overflow = Overflow(seq)
            ledger.apply(event)
    for late in overflow.settle():
        ledger.apply(late)

    told: Counter[tuple[int, bytes]] = Counter()
    for event in told_by(ledger):
        chain = chains[event.block_hashes[0][0]]  # type: ignore[index]
        first = chain.index(event.block_hashes[0])  # type: ignore[arg-type]
        assert event == stored(chain, first, first + len(event.block_hashes), event.group_idx or 0)
        parent = event.parent_block_hash
        if parent is not None and held[event.group_idx, parent] > 0:  # type: ignore[index]
            assert told[event.group_idx, parent] > 0  # type: ignore[index]
        told.update((event.group_idx, one) for one in event.block_hashes)  # type: ignore[misc]
    assert told == Counter({key: n for key, n in held.items() if n > 0})
    assert len(ledger) == len(told)


ODD_EVENTS = {
    "a hash that is none": BlockRemoved(block_hashes=[[1]], medium="GPU"),  # type: ignore[list-item]
    "no hashes": BlockRemoved(block_hashes=None, medium="GPU"),  # type: ignore[arg-type]
    "a tier that is none": BlockRemoved(block_hashes=[b"x"], medium=["GPU"]),  # type: ignore[arg-type]
    "a group that is none": msgspec.structs.replace(stored([b"x"], 0, 1), group_idx={}),
    "a cleared tier that is none": AllBlocksCleared(medium=["GPU"]),  # type: ignore[arg-type]
    **{
        f"{field} {value!r}": msgspec.structs.replace(stored([b"x" * 32], 0, 1), **{field: value})
        for field, value in {
            "lora_id": "adapter-7",
            "session_id": 5,
            "token_ids": None,
            "block_size": "4",
            "extra_keys": ["x"],
            "lookahead_token_ids": [3],
            "parent_block_hash": "x",
            "lora_name": 5,
            "locality": 3,
        }.items()
    },
}


@pytest.mark.parametrize("odd", ODD_EVENTS.values(), ids=ODD_EVENTS)
@pytest.mark.parametrize("queue_size", [1, 100])
def test_an_odd_event_raises_nothing_where_it_is_handed_over(odd: KVCacheEvent, queue_size: int) -> None:
    """Sent or dropped: the step goes on, and so does the publisher. What it cannot follow ends its snapshots."""
    chain = [bytes([i]) * 32 for i in range(4)]
    desk = Desk("me", max_queue_size=queue_size, clock=lambda: 0.0)
    for at in range(2):
        assert desk.put([stored(chain, at, at + 1)]) == at
    assert desk.put([odd]) == 2
    assert desk.put([stored(chain, 2, 3)]) == 3
    while desk.send_one(lambda frames: None):
        pass
    assert desk.put([stored(chain, 3, 4)]) == 4
    assert desk.send_one(lambda frames: None)
    status = desk.status()
    assert (status.next_seq, status.snapshots) == (5, False)
    assert list(desk.answers(SNAPSHOT)) == [END]
    desk.put([AllBlocksCleared()])  # nothing of it is left
    desk.put([stored(chain, 0, 1)])
    while desk.send_one(lambda frames: None):
        pass
    assert desk.status().snapshots
    (frames, end) = [one for one in desk.answers(SNAPSHOT) if one is not None]
    assert decode_batch(frames[3]).events == [stored(chain, 0, 1)]
    assert end == snapshot_end(1)


@property_settings(100)
@given(seed=st.integers(0, 10**6))
def test_who_names_no_group_or_tier_means_group_0_and_the_gpu(seed: int) -> None:
    """The ledger, a mirror's holdings and the auditor agree, however events are mixed."""
    rng = random.Random(seed)
    chain = [bytes([i]) * 32 for i in range(6)]
    ledger, check = Ledger(), StreamCheck("per_copy")
    worker = Holdings(Catalogue())
    for seq in range(40):
        medium, group = rng.choice([None, "GPU", "CPU"]), rng.choice([None, 0, 1])
        first = rng.randint(0, 5)
        last = rng.randint(first + 1, 6)
        event: KVCacheEvent
        match rng.randrange(8):
            case 0:
                event = AllBlocksCleared(medium=medium)
            case 1 | 2 | 3:
                event = BlockRemoved(block_hashes=chain[first:last], medium=medium, group_idx=group)  # type: ignore[arg-type]
            case _:
                event = msgspec.structs.replace(stored(chain, first, last), medium=medium, group_idx=group)
        ledger.apply(event)
        payload = encode_batch(KVEventBatch(0.0, [event]))
        worker.apply(read_changes(payload), True)
        check.feed(seq, decode_batch(payload), payload)
    told: Counter[tuple[int, str, object]] = Counter()
    for event in told_by(ledger):
        told.update((event.group_idx or 0, event.medium or "GPU", one) for one in event.block_hashes)
    assert told == +check.keys
    assert told == Counter(
        {
            (group, medium, one): worker.num_copies(one, group, medium)
            for group in (0, 1)
            for medium in ("GPU", "CPU")
            for one in chain
            if worker.num_copies(one, group, medium)
        }
    )
