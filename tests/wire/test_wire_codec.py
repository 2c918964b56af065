"""Batches as bytes, both ways, and endpoints."""

from __future__ import annotations

import msgspec
import pytest

from blockpool.pool import AllBlocksCleared, BlockRemoved, BlockStored
from blockpool.wire import BatchError, EndpointError, KVEventBatch, Publisher, decode_batch, encode_batch
from blockpool.wire.codec import with_int_hashes
from blockpool.wire.endpoints import endpoint_of_rank, is_bound
from blockpool.wire.lean import read_lean
from blockpool.wire.protocol import decode_status, sequence_bytes, sequence_number

STORED = BlockStored(
    block_hashes=[b"a" * 32, b"b" * 32],
    parent_block_hash=None,
    token_ids=[1, 2, 3, 4],
    block_size=2,
    lora_id=None,
    medium="GPU",
    lora_name=None,
    group_idx=0,
)
EVENTS = [STORED, BlockRemoved(block_hashes=[7, 2**63], medium="CPU"), AllBlocksCleared()]


def test_the_bytes() -> None:
    """A batch is an array of three, an event a map: its type first, its fields in order, defaults left out."""
    raw = msgspec.msgpack.decode(encode_batch(KVEventBatch(1.5, EVENTS)))
    assert raw[0] == 1.5
    assert raw[2] is None
    assert [list(event.items()) for event in raw[1]] == [
        [
            ("type", "BlockStored"),
            ("block_hashes", [b"a" * 32, b"b" * 32]),
            ("parent_block_hash", None),
            ("token_ids", [1, 2, 3, 4]),
            ("block_size", 2),
            ("lora_id", None),
            ("medium", "GPU"),
            ("lora_name", None),
            ("group_idx", 0),
        ],
        [("type", "BlockRemoved"), ("block_hashes", [7, 2**63]), ("medium", "CPU")],
        [("type", "AllBlocksCleared")],
    ]


def test_there_and_back() -> None:
    batch = KVEventBatch(1.5, EVENTS, 2)
    assert decode_batch(encode_batch(batch)) == batch


def test_events_as_arrays() -> None:
    """SGLang's, and vLLM's before 0.13: fields by their place, the later ones missing."""
    payload = msgspec.msgpack.encode(
        [
            1.5,
            [["BlockStored", [-1, 5], 9, [1, 2, 3, 4], 2, None], ["BlockRemoved", [5], "CPU"], ["AllBlocksCleared"]],
        ]
    )
    stored, removed, cleared = decode_batch(payload).events
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.parent_block_hash, stored.medium) == ([-1, 5], 9, None)
    assert (removed, cleared) == (BlockRemoved(block_hashes=[5], medium="CPU"), AllBlocksCleared())
    lean = read_lean(payload)
    assert [type(event).__name__ for event in lean.events] == ["Stored", "Removed", "Cleared"]
    assert lean.events[0].block_size == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("payload", [b"", b"\xff", msgspec.msgpack.encode([1.0, [{"type": "New"}]]), b"\x80"])
def test_what_is_no_batch(payload: bytes) -> None:
    for read in (decode_batch, read_lean):
        with pytest.raises(BatchError, match="not a batch"):
            read(payload)


def test_integers() -> None:
    stored, removed, cleared = (with_int_hashes(event) for event in EVENTS)
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == [int.from_bytes(b"a" * 8, "big"), int.from_bytes(b"b" * 8, "big")]
    assert stored.parent_block_hash is None
    assert removed == EVENTS[1]
    assert cleared == EVENTS[2]
    child = with_int_hashes(msgspec.structs.replace(STORED, parent_block_hash=b"c" * 32))
    assert child.parent_block_hash == int.from_bytes(b"c" * 8, "big")  # type: ignore[union-attr]
    assert STORED.block_hashes == [b"a" * 32, b"b" * 32]


def test_sequence_numbers() -> None:
    for number in (-1, 0, 7, 2**40):
        assert sequence_number(sequence_bytes(number)) == number
    assert sequence_bytes(258) == bytes([0, 0, 0, 0, 0, 0, 1, 2])
    assert decode_status(b"") is None


@pytest.mark.parametrize(
    ("endpoint", "rank", "own"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://[::]:5557", 1, "tcp://[::]:5558"),
        ("tcp://*:0", 2, "tcp://*:0"),
        ("inproc://x", 2, "inproc://x_dp2"),
        ("ipc:///x", 0, "ipc:///x"),
    ],
)
def test_the_endpoint_of_a_rank(endpoint: str, rank: int, own: str) -> None:
    assert endpoint_of_rank(endpoint, rank) == own


@pytest.mark.parametrize(("endpoint", "rank"), [("ipc:///x", 1), ("tcp://host", 1), ("tcp://*:65535", 1), ("x", 0)])
def test_no_endpoint_for_a_rank(endpoint: str, rank: int) -> None:
    with pytest.raises(EndpointError):
        endpoint_of_rank(endpoint, rank)


def test_what_is_bound() -> None:
    assert [is_bound(one) for one in ("tcp://*:1", "tcp://[::]:1", "ipc://x", "inproc://x")] == [True] * 4
    assert not is_bound("tcp://10.0.0.1:5557")


@pytest.mark.parametrize("rank", [-1, True, 1.5, "1"])
def test_what_is_no_rank(rank: object) -> None:
    pytest.importorskip("zmq")
    with pytest.raises(EndpointError, match="data_parallel_rank must be an int of at least 0"):
        Publisher("tcp://127.0.0.1:*", data_parallel_rank=rank)  # type: ignore[arg-type]
