"""What is read from a payload's bytes is what msgspec reads, or is left to it."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpool.pool import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from blockpool.wire import BatchError, KVEventBatch, encode_batch
from blockpool.wire.changes import CLEARED, Changes, changes_of, read_changes, scan
from blockpool.wire.lean import read_lean
from tests.sizes import property_settings

WIDTHS = (0, 1, 7, 8, 9, 15, 16, 20, 32, 255, 256, 70_000)
INTS = (0, 1, 127, 128, 255, 256, 65_535, 65_536, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
SIGNED = (-1, -32, -33, -128, -129, -32_768, -32_769, -(2**31) - 1, -(2**63))


def one_hash(rng: random.Random) -> bytes | int:
    match rng.randrange(8):
        case 0:
            return rng.choice((*INTS, *SIGNED))
        case 1:
            return rng.randbytes(rng.choice(WIDTHS[:-1]))
        case _:
            return rng.randbytes(32)


def one_event(rng: random.Random) -> KVCacheEvent:
    medium = rng.choice([None, "GPU", "GPU", "CPU", "GPV", "ein Speicher mit langem Namen, größer als 31 Zeichen"])
    hashes = [one_hash(rng) for _ in range(rng.choice([0, 1, 1, 2, 20]))]
    match rng.randrange(6):
        case 0:
            return AllBlocksCleared(medium=medium)
        case 1 | 2:
            return BlockRemoved(block_hashes=hashes, medium=medium, group_idx=rng.choice([None, 0, 1, 300]))
    count = len(hashes)
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=rng.choice([None, 5, bytes(32)]),
        token_ids=[rng.choice(INTS) for _ in range(rng.choice([0, 3, 16, 300]))],
        block_size=rng.choice([1, 16, 16, 1000]),
        lora_id=rng.choice([None, 3]),
        medium=medium,
        lora_name=rng.choice([None, "name", "n" * 300]),
        extra_keys=rng.choice([None, [None] * count, [("a", 1, b"x", 1.5, True, ["deep", {"er": None}])] * count]),
        group_idx=rng.choice([None, 0, 1, 300]),
        kv_cache_spec_kind=rng.choice([None, "full_attention", "sliding_window"]),
        kv_cache_spec_sliding_window=rng.choice([None, 0, 128, 100_000]),
        locality=rng.choice([None, "here"]),
        session_id=rng.choice([None, "s" * 40]),
        lookahead_token_ids=rng.choice([None, [[1, 2, 3]] * count]),
    )


def told(changes: Changes) -> list[Any]:
    """Hash by hash, whatever runs they were in."""
    out: list[Any] = [repr(changes.ts)]  # no number, too
    words = list(changes.words)
    for run in changes.runs:
        place = (run.what, run.group, run.medium, run.size, run.kind, run.window)
        if run.what == CLEARED:
            out.append(place)
        out += [(*place, words[2 * at], words[2 * at + 1]) for at in range(int(run.first), int(run.last))]
    forms = [any(run.has_ints for run in changes.runs), any(run.has_bytes for run in changes.runs)]
    return [*out, forms, changes.clears_all]


@property_settings(200)
@given(seed=st.integers(0, 10**6), rank=st.sampled_from([None, 0, 300]))
def test_what_is_written_as_usual(seed: int, rank: int | None) -> None:
    rng = random.Random(seed)
    events = [one_event(rng) for _ in range(rng.choice([0, 1, 5, 20]))]
    payload = encode_batch(KVEventBatch(rng.random(), events, rank))  # type: ignore[arg-type]
    scanned = scan(payload)
    has_wide = any(isinstance(one, bytes) and len(one) > 255 for event in events for one in _hashes(event))
    assert (scanned is None) == has_wide  # else msgspec's time is spent for nothing
    assert told(read_changes(payload)) == told(changes_of(read_lean(payload)))
    if scanned is not None:
        assert told(scanned) == told(changes_of(read_lean(payload)))


@property_settings(200)
@given(seed=st.integers(0, 10**6))
def test_what_is_damaged(seed: int) -> None:
    rng = random.Random(seed)
    good = encode_batch(KVEventBatch(1.5, [one_event(rng) for _ in range(3)]))  # type: ignore[arg-type]
    for _ in range(20):
        payload = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(payload))
            match rng.randrange(4):
                case 0:
                    payload[at] = rng.randrange(256)
                case 1:
                    payload[at] ^= 1 << rng.randrange(8)
                case 2:
                    del payload[at : at + rng.choice([1, 9])]
                case _:
                    payload[at:at] = rng.randbytes(rng.choice([1, 9]))
            if not payload:
                break
        scanned = scan(bytes(payload))
        if scanned is not None:
            assert told(scanned) == told(changes_of(read_lean(bytes(payload))))


def test_what_is_written_in_another_way_is_left_to_msgspec() -> None:
    hashes = [bytes(32), 7]
    usual = msgspec.msgpack.encode([0.0, [{"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}]])
    as_array = msgspec.msgpack.encode([0.0, [["BlockRemoved", hashes, "GPU"]], None])
    tag_last = msgspec.msgpack.encode([0.0, [{"block_hashes": hashes, "medium": "GPU", "type": "BlockRemoved"}]])
    with_more = msgspec.msgpack.encode(
        [0.0, [{"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}], 0, 1]
    )
    more = {"later_field": {"a": [1]}, "a_field_with_a_name_that_is_longer_than_any": 0}
    unknown = msgspec.msgpack.encode(
        [0.0, [{"type": "BlockRemoved", "block_hashes": hashes, **more, "medium": "GPU"}], None]
    )
    long_name = usual.replace(b"\xa6medium", b"\xd9\x06medium")
    assert len(long_name) == len(usual) + 1
    for payload in (as_array, tag_last, with_more, long_name):
        assert scan(payload) is None
        assert told(read_changes(payload)) == told(read_changes(usual))
    for payload in (usual, unknown):
        scanned = scan(payload)
        assert scanned is not None
        assert told(scanned) == told(changes_of(read_lean(usual)))


def test_what_is_no_batch() -> None:
    stored = {"type": "BlockStored", "block_hashes": [b"x"], "block_size": 0}
    twice = b"\x83\xa4type\xacBlockRemoved\xacblock_hashes\x91\x01\xacblock_hashes\x91\x02"
    events = msgspec.msgpack.encode([0.0, [1]])[:-1]
    for payload in (
        b"",
        b"?",
        msgspec.msgpack.encode([0.0, [stored]]),
        msgspec.msgpack.encode([0.0, [stored | {"block_size": 2**63}]]),
        msgspec.msgpack.encode([0.0, [{"type": "BlockRemoved"}]]),
        msgspec.msgpack.encode([0.0, [{"type": "BlockRemoved", "block_hashes": [1], "group_idx": 2**63}]]),
        msgspec.msgpack.encode([0.0, [{"type": "BlockRemoved", "block_hashes": [1]}], 0])[:-1] + b"\x91" * 100_000,
        msgspec.msgpack.encode([0.0, [{"type": "BlockRemoved", "block_hashes": [1.5]}]]),
        msgspec.msgpack.encode([0.0, []]) + b"\x00",
        events + twice,
        events + b"\x80",
        b"\x93" + events[1:] + b"\x80\xa4type\xb0AllBlocksCleared\xc0",  # an event without a field
    ):
        assert scan(payload) is None
        try:
            changes = changes_of(read_lean(payload))
        except (BatchError, OverflowError):
            continue
        assert told(changes) == told(read_changes(payload))


def _hashes(event: KVCacheEvent) -> list[bytes | int]:
    return [] if isinstance(event, AllBlocksCleared) else event.block_hashes


def usual_events() -> list[KVCacheEvent]:
    stored = BlockStored(
        block_hashes=[bytes(range(32)), 7],
        parent_block_hash=bytes(32),
        token_ids=[1, 200, 70_000, 2**40, 300, 2**40, 2**40, 5, 301],
        block_size=16,
        lora_id=None,
        medium="GPU",
        lora_name="name",
        group_idx=1,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=128,
    )
    return [stored, BlockRemoved(block_hashes=[b"x"], medium="GPU", group_idx=0), AllBlocksCleared(medium=None)]


@pytest.mark.parametrize("rank", [None, 0])
def test_no_byte_of_what_is_usual_goes_unread(rank: int | None) -> None:
    for event in usual_events():
        good = encode_batch(KVEventBatch(1.5, [event], rank))  # type: ignore[list-item]
        assert scan(good) is not None
        for at in range(len(good)):
            assert scan(good[:at]) is None
            for flipped in (0x01, 0x20, 0x80):
                payload = good[:at] + bytes([good[at] ^ flipped]) + good[at + 1 :]
                scanned = scan(payload)
                if scanned is not None:
                    assert told(scanned) == told(changes_of(read_lean(payload)))


def test_names_that_begin_or_end_like_others() -> None:
    near = ("block_hXshes", "block_hashez", "block_sXze", "block_sizes", "group_iXx", "group_idy", "mediun")
    near += ("parent_block_hasX", "token_idX", "lora_iX", "lora_namX", "kv_cache_spec_kinX")
    for name in near:
        event = {"type": "BlockRemoved", "block_hashes": [b"x" * 32], name: [1, 2**40, {"a": 300}], "medium": "CPU"}
        payload = msgspec.msgpack.encode([0.0, [event, event]])
        scanned = scan(payload)
        assert scanned is not None
        assert told(scanned) == told(changes_of(read_lean(payload)))


def test_neighbours_that_differ_in_one_thing_are_apart() -> None:
    first = {"type": "BlockStored", "block_hashes": [b"x" * 32], "block_size": 16}
    others: list[dict[str, Any]] = [
        {"group_idx": None},
        {"group_idx": 0},
        {"group_idx": 1},
        {"medium": "GPU"},
        {"medium": "CPU"},
        {"block_size": 32},
        {"kv_cache_spec_kind": "full_attention"},
        {"kv_cache_spec_sliding_window": 0},
        {"kv_cache_spec_sliding_window": 5},
        {"type": "BlockRemoved"},
    ]
    for one in others:
        for two in others:
            payload = msgspec.msgpack.encode([0.0, [first | one, first | two, first, first | two]])
            scanned = scan(payload)
            assert scanned is not None
            assert told(scanned) == told(changes_of(read_lean(payload)))
