"""The prefix index against a dict of lists: few keys, many copies, keys that share table places."""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpool.pool import BlockHashToBlockMap
from tests.sizes import property_settings


def check(index: BlockHashToBlockMap, model: dict[bytes, list[int]], keys_of: dict[int, list[bytes]]) -> None:
    for (
        block,
        keys,
    ) in keys_of.items():  # the first is the primary one; when it goes, the oldest other takes its place
        assert [index.key_of(entry) for entry in index.entries_of(block)] == keys
    assert len(index) == len(model)
    assert sorted(index.keys()) == sorted(model)
    for key, blocks in model.items():
        assert index.get_blocks(key) == blocks
        assert index.get_one_block(key) == blocks[0]


@property_settings(80)
@given(
    num_blocks=st.integers(2, 30),
    num_keys=st.integers(1, 12),
    seed=st.integers(0, 2**32),
    crowded=st.booleans(),
)
def test_any_operations_keep_what_a_dict_of_lists_keeps(
    num_blocks: int, num_keys: int, seed: int, crowded: bool
) -> None:
    rng = random.Random(seed)
    index = BlockHashToBlockMap(num_blocks)
    if crowded:  # every second key starts from the last place of the table: runs wrap around its end
        keys = []
        candidate = 0
        while len(keys) < num_keys:
            key = hashlib.sha256(candidate.to_bytes(4, "big")).digest() + bytes(4)
            candidate += 1
            if len(keys) % 2 or index.mix_at(key, 0, 0) & index.mask == index.mask:
                keys.append(key)
    else:
        keys = [hashlib.sha256(bytes([i // 2])).digest() + (i % 2).to_bytes(4, "big") for i in range(num_keys)]
    model: dict[bytes, list[int]] = {}
    keys_of: dict[int, list[bytes]] = {block: [] for block in range(1, num_blocks)}
    for _ in range(300):
        key, block = rng.choice(keys), rng.randrange(1, num_blocks)
        blocks = model.get(key, [])
        assert index.contain(key, block) == (block in blocks)
        if rng.random() < 0.5:
            index.insert(key, block)
            if block not in blocks:
                model.setdefault(key, []).append(block)
                keys_of[block].append(key)
        elif blocks and rng.random() < 0.5:  # often the first: its successor takes its place in the table
            keys_of[blocks[0]].remove(key)
            assert index.pop(key, blocks[0]) == blocks.pop(0)
        else:
            assert index.pop(key, block) == (block if block in blocks else None)
            if block in blocks:
                blocks.remove(block)
                keys_of[block].remove(key)
        if not model.get(key, True):
            del model[key]
        check(index, model, keys_of)


@pytest.mark.parametrize("order", ["oldest first", "newest first", "random"])
def test_copies_leave_in_any_order(order: str) -> None:
    index = BlockHashToBlockMap(200)
    key = hashlib.sha256(b"copies").digest() + bytes(4)
    blocks = list(range(1, 200))
    for block in blocks:
        index.insert(key, block)
    leaving = {
        "oldest first": blocks[:],
        "newest first": blocks[::-1],
        "random": random.Random(1).sample(blocks, 199),
    }
    for block in leaving[order]:
        assert index.pop(key, block) == block
        blocks.remove(block)
        assert index.get_blocks(key) == blocks
    assert len(index) == 0
