"""A recorded stream: JSONL, one batch a line, as `blockpool replay` reads it too.

A line is an object with `seq`, `ts`, `events` and `data_parallel_rank`; digests in base64. Where JSON cannot say
exactly what was sent (bytes among the extra keys, fields of another version), `payload` has it, in base64; what is no
batch has a `payload` alone. Lines of other recorders, `[ts, events, rank]` or objects without `seq`, are read as
well, digests also in hex.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from blockpool.wire.codec import KVEventBatch, decode_batch, encode_batch
from blockpool.wire.errors import BatchError, RecordingError

#: Numbers are eight bytes on the wire, and eight ff say "none".
LAST_SEQ = 2**64 - 2
_HEX = re.compile(r"(?:[0-9a-f]{16}){1,4}")


class Recorded(msgspec.Struct, frozen=True):
    """A batch of a recording, or why its payload is none. `place`: its file and line."""

    seq: int
    payload: bytes
    batch: KVEventBatch | BatchError
    place: str


def record_line(seq: int, payload: bytes) -> bytes:
    """The line of one batch, with its end."""
    raw = {"payload": b64encode(payload).decode()}
    fields: dict[str, Any] = {"seq": seq}
    try:
        batch = decode_batch(payload)
        said = {"ts": batch.ts, "events": batch.events, "data_parallel_rank": batch.data_parallel_rank}
        fields |= said
        line = msgspec.json.encode(fields)
        if encode_batch(_batch(msgspec.json.decode(line), "")) == payload:
            return line + b"\n"
    except RecordingError:
        pass  # such as a time that is no number
    except (ValueError, TypeError, RecursionError, NotImplementedError):
        fields = {"seq": seq}  # no batch, or one that JSON cannot say at all
    return msgspec.json.encode(fields | raw) + b"\n"


def read_batch(payload: bytes) -> KVEventBatch | BatchError:
    """A payload's batch, or why it is none."""
    try:
        return decode_batch(payload)
    except BatchError as error:
        return error
    except RecursionError:
        return BatchError("not a batch of events: nested too deeply")


def read_recording(path: str | Path) -> Iterator[Recorded]:
    """The batches of a file in its order; one without a number has that of the line. Raises RecordingError."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file):
                if line.strip():
                    place = f"{path}:{number + 1}"
                    try:
                        one = _recorded(line, number, place)
                    except RecursionError:
                        raise RecordingError(f"{place}: nested too deeply") from None
                    yield one
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror or error}") from None


def _recorded(line: bytes, number: int, place: str) -> Recorded:
    try:
        fields = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise RecordingError(f"{place}: not JSON: {error}") from None
    if isinstance(fields, list):
        fields = dict(zip(("ts", "events", "data_parallel_rank"), fields, strict=False))
    if not isinstance(fields, dict):
        raise RecordingError(f"{place}: expected a batch of events, an object or an array")
    seq = fields.get("seq", number)
    if isinstance(seq, bool) or not isinstance(seq, int) or not 0 <= seq <= LAST_SEQ:
        raise RecordingError(f"{place}: seq: expected an int of 0 to {LAST_SEQ}, not {seq!r:.80}")
    if "payload" in fields:
        try:
            payload = b64decode(fields["payload"], validate=True)
        except (Base64Error, TypeError, ValueError) as error:
            raise RecordingError(f"{place}: payload: {error}") from None
        return Recorded(seq, payload, read_batch(payload), place)
    batch = _batch(fields, place)
    return Recorded(seq, encode_batch(batch), batch, place)


def _batch(fields: dict[str, Any], place: str) -> KVEventBatch:
    events = fields.get("events")
    if not isinstance(events, list):
        raise RecordingError(f"{place}: events: expected an array")
    try:
        written = [fields.get("ts"), [_event(event) for event in events], fields.get("data_parallel_rank")]
        return decode_batch(msgspec.msgpack.encode(written))
    except (BatchError, Base64Error, ValueError, OverflowError) as error:
        raise RecordingError(f"{place}: {error}") from None


def _event(event: Any) -> Any:
    """The event with its digests as bytes again."""
    if isinstance(event, list):
        hashes = 3 if event[:1] == ["BlockStored"] else 2
        return [*event[:1], *map(_hashes, event[1:hashes]), *event[hashes:]]
    if not isinstance(event, dict):
        return event
    out = dict(event)
    for field in ("block_hashes", "parent_block_hash"):
        if field in out:
            out[field] = _hashes(out[field])
    return out


def _hashes(value: Any) -> Any:
    if isinstance(value, list):
        return [_hashes(one) for one in value]
    if isinstance(value, str):
        return bytes.fromhex(value) if _HEX.fullmatch(value) else b64decode(value, validate=True)
    return value
