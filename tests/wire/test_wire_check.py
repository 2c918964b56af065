"""The auditor: a pool's own stream is clean, and each way to break a rule is named where it happens."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpool.cache import KVCacheConfig, KVCacheManager, Request
from blockpool.hashing import BlockHasher
from blockpool.managers import FullAttentionSpec, KVCacheGroupSpec
from blockpool.pool import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from blockpool.wire import BatchError, KVEventBatch, RecordingError, decode_batch, encode_batch
from blockpool.wire.check import RULES, StreamCheck, first_of_each
from blockpool.wire.codec import with_int_hashes
from blockpool.wire.diff import compare_with_dumps
from blockpool.wire.recording import read_recording, record_line
from tests.sizes import property_settings
from tests.wire.world import TracedPool

CHAIN = [bytes([i]) * 32 for i in range(1, 9)]


def stored(first: int, last: int, **changes: Any) -> BlockStored:
    event = BlockStored(
        block_hashes=list(CHAIN[first:last]),
        parent_block_hash=CHAIN[first - 1] if first else None,
        token_ids=list(range(4 * first, 4 * last)),
        block_size=4,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )
    return msgspec.structs.replace(event, **changes)


def removed(first: int, last: int, **changes: Any) -> BlockRemoved:
    event = BlockRemoved(block_hashes=list(CHAIN[first:last]), medium="GPU", group_idx=0)
    return msgspec.structs.replace(event, **changes)


def faults(*batches: tuple[int, list[KVCacheEvent]], **options: Any) -> list[tuple[str, int, int | None]]:
    check = StreamCheck(**options)
    out = []
    for seq, events in batches:
        batch = KVEventBatch(0.0, events)  # type: ignore[arg-type]
        out += [(one.rule, one.seq, one.event) for one in check.feed(seq, batch, encode_batch(batch))]
    return out


@pytest.mark.parametrize("events", ["first_last", "per_copy"])
@property_settings(60)
@given(seed=st.integers(0, 10**6), ints=st.booleans())
def test_the_stream_of_a_pool_is_clean_and_says_its_index(events: str, seed: int, ints: bool) -> None:
    """But for parents: random operations cut chains."""
    rng = random.Random(seed)
    traced = TracedPool(rng.randint(2, 12), events, rng)
    check = StreamCheck(events, traced.pool.num_gpu_blocks - 1 if events == "per_copy" else None)
    seq = 0
    for _ in range(30):
        traced.change()
        told = traced.pool.take_events()
        if told:
            batch = KVEventBatch(0.0, [with_int_hashes(event) if ints else event for event in told])
            assert [one for one in check.feed(seq, batch) if one.rule not in ("parent", "capacity")] == []
            seq += 1
    assert compare_with_dumps(check.keys, [traced.pool.dump()], events == "per_copy") == []
    if len(+check.keys):
        check.keys[next(iter(+check.keys))] += 1
        per_copy = compare_with_dumps(check.keys, [traced.pool.dump()], True)
        assert [one.in_events - one.in_dump for one in per_copy if events == "per_copy"] in ([1], [])
        assert compare_with_dumps({}, [traced.pool.dump()], False) != []


BROKEN: list[tuple[str, int | None, list[KVCacheEvent]]] = [
    ("tokens", 0, [stored(0, 2, token_ids=[1])]),
    ("tokens", 0, [stored(0, 2, block_size=0, token_ids=[])]),
    ("tokens", 1, [stored(0, 1), stored(1, 2, block_size=-4)]),
    ("empty", 0, [stored(0, 0)]),
    ("empty", 1, [stored(0, 1), removed(0, 0)]),
    ("extra_keys", 0, [stored(0, 2, extra_keys=[None])]),
    ("extra_keys", 0, [stored(0, 2, lookahead_token_ids=[[1], [2], [3]])]),
    ("form", 1, [stored(0, 1), stored(1, 2, block_hashes=[7])]),
    ("form", 1, [stored(0, 1), stored(1, 2, block_hashes=[b"x" * 16])]),
    ("group", 1, [stored(0, 1), stored(1, 2, kv_cache_spec_kind="mla_attention")]),
    ("group", 1, [stored(0, 1), stored(1, 2, block_size=6, token_ids=[0] * 6)]),
    ("tier", 0, [stored(0, 1, medium="HBM")]),
    ("tier", 0, [AllBlocksCleared(medium="HBM")]),
    ("parent", 0, [stored(2, 4)]),
    ("parent", 1, [stored(0, 2), stored(4, 5)]),
    ("parent", 2, [stored(0, 2), removed(1, 2), stored(2, 3)]),
    ("removed", 0, [removed(0, 1)]),
    ("removed", 1, [stored(0, 1), removed(0, 1, group_idx=1)]),
    ("removed", 1, [stored(0, 1), removed(0, 1, medium="CPU")]),
    ("removed", 2, [stored(0, 1), removed(0, 1), removed(0, 1)]),
]


@pytest.mark.parametrize(("rule", "event", "events"), BROKEN)
def test_a_broken_rule_is_named_with_its_first_event(
    rule: str, event: int | None, events: list[KVCacheEvent]
) -> None:
    assert faults((0, events)) == [(rule, 0, event)]


def test_rules_that_need_more_than_one_batch() -> None:
    assert faults((0, [stored(0, 1)]), (2, [stored(1, 2)])) == [("sequence", 2, None)]
    assert faults((0, [stored(0, 1)]), (0, [stored(0, 1)])) == [("duplicate", 0, None)]
    assert faults((0, [stored(0, 1)]), (1, [stored(1, 2)]), (0, [stored(0, 2)])) == [("restart", 0, None)]
    assert faults(*[(at, [stored(at, at + 1)]) for at in (0, 1, 2, 0, 3)]) == [("duplicate", 0, None)]
    again = (0, [stored(0, 1), stored(0, 1)])
    assert faults(again, convention="first_last") == [("repeated", 0, 1)]
    assert faults(again) == []
    assert faults((0, [stored(0, 3)]), num_blocks=2) == [("capacity", 0, 0)]
    # A reader that begins in the middle knows neither parents nor what is removed.
    assert faults((5, [stored(2, 3), removed(0, 1)])) == []
    with pytest.raises(ValueError, match="convention"):
        StreamCheck("none")


def test_windows_have_no_known_parents() -> None:
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 9}
    assert faults((0, [stored(2, 3, **window)])) == []


def test_a_boundary_inside_a_block_has_no_known_parent() -> None:
    """Hashes of 2 tokens, blocks of 4: what is before a boundary is inside its block."""
    inside = {"block_size": 2, "token_ids": [0, 0], "parent_block_hash": b"?" * 32}
    assert faults((0, [stored(0, 2), stored(2, 3, **inside)])) == []
    assert faults((0, [stored(0, 1), stored(2, 3, **inside)])) == []
    assert faults((0, [stored(2, 3, **inside), stored(0, 1)])) == []  # which of the two it is shows later
    whole = {"parent_block_hash": b"?" * 32}
    assert faults((0, [stored(2, 3, **inside), stored(0, 1), stored(1, 2, **whole)])) == [("parent", 0, 2)]
    assert faults((0, [stored(0, 2), stored(2, 3, **whole)])) == [("parent", 0, 1)]


def test_the_stream_of_an_engine_whose_hits_end_inside_blocks_is_clean() -> None:
    group = KVCacheGroupSpec(("layer",), FullAttentionSpec(16))
    manager = KVCacheManager(KVCacheConfig(50, (group,), hash_block_size=4), events="first_last")
    hasher = BlockHasher(hash_block_size=4, seed="check")
    check = StreamCheck("first_last")
    boundaries = 0
    prompts = [list(range(30)), [*range(28), *[9] * 30], [*range(28), *[9] * 30, *[3] * 11], [5] * 14]
    for seq, tokens in enumerate(prompts):
        request = Request(f"{seq}", tokens, hasher=hasher)
        hit = manager.get_computed_blocks(request)
        manager.allocate_slots(request, len(tokens) - hit.num_tokens, new_computed_blocks=hit)
        manager.take_block_copies()
        manager.free(request)
        events = manager.take_events()
        boundaries += sum(isinstance(event, BlockStored) and event.block_size == 4 for event in events)
        assert check.feed(seq, KVEventBatch(0.0, list(events))) == []
    assert boundaries == 4


def test_every_rule_is_broken_above() -> None:
    others = {"batch", "frames", "sequence", "duplicate", "restart", "repeated", "capacity"}
    assert {rule for rule, _, _ in BROKEN} | others == set(RULES)
    check = StreamCheck()
    found = check.feed(0, KVEventBatch(0.0, [removed(0, 2), removed(0, 1)]))
    assert [(fault.detail[:4], times, fault.why) for fault, times in first_of_each(found)] == [
        ("0101", 3, RULES["removed"])
    ]
    (wrong_place,) = StreamCheck().feed(0, KVEventBatch(0.0, [stored(0, 1), removed(0, 1, group_idx=1)]))
    assert wrong_place.detail.endswith("it is in group 0, GPU")


# -- recordings ------------------------------------------------------------------------------------------


def test_a_recording_gives_back_the_bytes(tmp_path: Path) -> None:
    payloads = [
        encode_batch(KVEventBatch(1.5, [stored(0, 2), removed(0, 1), AllBlocksCleared()], 3)),
        encode_batch(KVEventBatch(2.5, [stored(0, 1, block_hashes=[2**64 - 1], parent_block_hash=7)])),
        encode_batch(KVEventBatch(2.5, [stored(0, 1, extra_keys=[("salt", 3)], session_id="x")])),
        encode_batch(KVEventBatch(2.5, [stored(0, 1, extra_keys=[(b"embeds", "salt")])])),
        msgspec.msgpack.encode([3.5, [["BlockStored", [1], None, [1, 2], 2, None]]]),
    ]
    file = tmp_path / "events.jsonl"
    file.write_bytes(b"".join(record_line(7 + at, payload) for at, payload in enumerate(payloads)))
    read = list(read_recording(file))
    assert [(one.seq, one.payload) for one in read] == list(enumerate(payloads, 7))
    assert [one.batch for one in read] == [decode_batch(payload) for payload in payloads]
    assert [b'"payload"' in line for line in file.read_bytes().splitlines()] == [False] * 3 + [True] * 2
    assert read[0].place == f"{file}:1"


def test_lines_of_other_recorders(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    event = {
        "type": "BlockStored",
        "block_hashes": [CHAIN[1].hex()],
        "parent_block_hash": CHAIN[0].hex(),
        "token_ids": [1],
        "block_size": 1,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    arrays = [["BlockStored", [5], 4, [1], 1, None], ["BlockRemoved", [5], "CPU"]]
    file.write_bytes(msgspec.json.encode([1.0, [event], None]) + b"\n\n" + msgspec.json.encode([1.0, arrays]) + b"\n")
    one, two = read_recording(file)
    assert isinstance(one.batch, KVEventBatch)
    assert isinstance(two.batch, KVEventBatch)
    assert (one.seq, two.seq) == (0, 2)
    first = one.batch.events[0]
    assert isinstance(first, BlockStored)
    assert (first.block_hashes, first.parent_block_hash) == ([CHAIN[1]], CHAIN[0])
    assert two.batch.events[1] == BlockRemoved(block_hashes=[5], medium="CPU")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "not JSON"),
        ("3", "an object or an array"),
        ('{"ts": 1}', "events"),
        ('{"ts": 1, "events": [], "seq": -1}', "seq"),
        (f'{{"ts": 1, "events": [], "seq": {2**64 - 1}}}', "seq"),
        (f'{{"ts": 1, "events": [], "seq": {2**70}}}', "seq"),
        (f'{{"ts": 1, "events": [["BlockRemoved", [{2**70}]]]}}', "ints"),
        (f'{{"ts": 1, "events": [["BlockStored", [1], null, [{10**30}], 1, null]]}}', "ints"),
        ("[" * 20_000, "too deeply"),
        ('{"ts": 1, "events": [["AllBlocksCleared", ' + "[" * 5000 + "]" * 5000 + "]]}", "too deeply"),
        ('{"ts": 1, "events": [3]}', "not a batch"),
        ('{"ts": 1, "events": [], "payload": "?"}', "payload"),
        ('{"ts": 1, "events": [{"type": "BlockRemoved", "block_hashes": ["?"], "medium": null}]}', ":1"),
    ],
)
def test_what_is_no_recording(tmp_path: Path, line: str, what: str) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text(line)
    with pytest.raises(RecordingError, match=what):
        list(read_recording(file))
    with pytest.raises(RecordingError, match="No such file"):
        list(read_recording(tmp_path / "nowhere"))


NOT_STRICT = msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_hashes": [1], "token_ids": "?"}]])
TOO_DEEP = b"\x92\xcb" + bytes(8) + b"\x91\x82\xa4type\xb0AllBlocksCleared\xa1x" + b"\x91" * 5000 + b"\xc0"


@pytest.mark.parametrize("payload", [b"", b"\xff", NOT_STRICT, TOO_DEEP])
def test_what_is_no_batch_is_recorded_and_is_a_fault(tmp_path: Path, payload: bytes) -> None:
    file = tmp_path / "events.jsonl"
    after = encode_batch(KVEventBatch(0.0, [removed(0, 1)]))
    file.write_bytes(record_line(0, payload) + record_line(1, after))
    one, two = read_recording(file)
    assert (one.payload, two.payload) == (payload, after)
    assert isinstance(one.batch, BatchError)
    check = StreamCheck()
    assert [fault.rule for fault in check.feed(one.seq, one.batch, one.payload)] == ["batch"]
    assert check.feed(two.seq, two.batch, two.payload) == []  # it may have been announced in what is lost


@pytest.mark.parametrize("ts", [float("nan"), float("inf")])
def test_a_time_that_json_cannot_say(tmp_path: Path, ts: float) -> None:
    payload = encode_batch(KVEventBatch(ts, [stored(0, 1)]))
    file = tmp_path / "events.jsonl"
    file.write_bytes(record_line(3, payload))
    (one,) = read_recording(file)
    assert (one.seq, one.payload) == (3, payload)


def test_a_removal_of_what_is_not_there_does_not_look_at_every_key() -> None:
    class Watched(Counter[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("looked at every key")

        items = keys = values = __pos__ = __iter__  # type: ignore[assignment]

    check = StreamCheck()
    check.keys = Watched()
    batch = KVEventBatch(0.0, [stored(0, 4), removed(5, 8), removed(0, 1, group_idx=3)])
    assert [fault.rule for fault in check.feed(0, batch)] == ["removed"] * 4
