"""What the replay socket is asked and answers. Frames behind the identity, as both sides write them.

Asked: `(empty, question)`, where the question is a first sequence number (8 bytes, big endian) or one of the texts
below. Answered: `(empty, topic, number, payload)` as often as there is something to say, then END; to `status` one
message and no end. The end of a snapshot says in its topic how many messages there were, so that a part of one is
never taken for the whole. vLLM's socket takes the texts for numbers beyond all numbers, and answers END at once.
"""

from __future__ import annotations

from typing import Final

import msgspec

SNAPSHOT: Final = b"snapshot"
STATUS: Final = b"status"
NO_MORE: Final = b"\xff" * 8
END: Final = (b"", b"", NO_MORE, b"")


def snapshot_end(num_messages: int) -> tuple[bytes, bytes, bytes, bytes]:
    """END behind a snapshot of so many messages."""
    return b"", sequence_bytes(num_messages), NO_MORE, b""


def sequence_bytes(number: int) -> bytes:
    """-1, "nothing yet", is eight ff."""
    return number.to_bytes(8, "big", signed=number < 0)


def sequence_number(frame: bytes) -> int:
    """A sequence number as it stands in a message; -1 for the end and for "nothing yet"."""
    return -1 if frame == NO_MORE else int.from_bytes(frame, "big")


class PublisherStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A publisher about itself. `publisher` changes when it restarts.

    `next_seq`: the sequence number of its next batch. `oldest_seq`: the first one that can be replayed, None without
    any. `dropped`: batches whose number was spent and that were never sent. `convention`: whether copies of a key are
    announced each ("per_copy") or by the first and the last ("first_last"). `snapshots`: whether it can give one.
    """

    publisher: str
    next_seq: int
    oldest_seq: int | None = None
    dropped: int = 0
    convention: str | None = None
    snapshots: bool = False


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PublisherStatus)


def encode_status(status: PublisherStatus) -> bytes:
    return _encoder.encode(status)


def decode_status(payload: bytes) -> PublisherStatus | None:
    """None for bytes that are no status."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
