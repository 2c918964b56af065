"""The shelves against sets, and the ledger against a dict."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpool.pool import AllBlocksCleared, BlockRemoved, BlockStored
from blockpool.wire.holdings import Catalogue, Holdings
from blockpool.wire.lean import Cleared, Removed, Stored
from blockpool.wire.ledger import Ledger, Overflow
from blockpool.wire.shelf import key_words
from tests.sizes import property_settings

HASHES = [i.to_bytes(8, "big") * 4 for i in range(1, 41)] + [0, 1, -1, 2**64 - 2, 2**63]
#: One key: the signed and the unsigned form of an integer.
SAME = {-1: 2**64 - 1}


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
            worker.apply([Stored(hashes, 16, medium, group or None)], True)
            held.update((group, medium, SAME.get(one, one)) for one in hashes)
        elif kind < 8:
            worker.apply([Removed(hashes, medium, group)], True)
            held.subtract((group, medium, SAME.get(one, one)) for one in hashes)
            model[at] = held = Counter({key: n for key, n in held.items() if n > 0})
        elif kind == 8:
            gone = rng.choice([None, medium])
            worker.apply([Cleared(gone)], True)
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
    worker.apply([Stored(hashes, 16)], True)
    assert catalogue.num_keys == worker.num_keys == 20_000
    assert catalogue.num_bytes < 80 * 20_000
    assert all(worker.num_copies(one, 0, "GPU") == 1 for one in hashes)
    worker.apply([Removed(hashes[:-10])], True)
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


def test_of_an_event_that_is_mostly_gone_little_is_kept() -> None:
    chain = [bytes([1, i]) * 16 for i in range(64)]
    ledger = Ledger()
    ledger.store(stored(chain, 0, 64))

    def size() -> int:
        return sum(len(record.payload) for record in set(ledger._keys[0, "GPU"].values()))

    whole = size()
    ledger.remove((0, "GPU"), chain[4:])  # type: ignore[arg-type]
    assert size() < whole / 4
    assert list(ledger.events()) == [stored(chain, 0, 4)]


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
    for event in ledger.events():
        chain = chains[event.block_hashes[0][0]]  # type: ignore[index]
        first = chain.index(event.block_hashes[0])  # type: ignore[arg-type]
        assert event == stored(chain, first, first + len(event.block_hashes), event.group_idx or 0)
        parent = event.parent_block_hash
        if parent is not None and held[event.group_idx, parent] > 0:  # type: ignore[index]
            assert told[event.group_idx, parent] > 0  # type: ignore[index]
        told.update((event.group_idx, one) for one in event.block_hashes)  # type: ignore[misc]
    assert told == Counter({key: n for key, n in held.items() if n > 0})
    assert len(ledger) == len(told)
