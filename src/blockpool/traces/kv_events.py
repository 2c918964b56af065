"""Recorded event streams of vLLM and SGLang: JSONL, one batch of events a line.

A batch is `[ts, events, rank]`, as engines publish it, or an object with `ts`, `events` and `data_parallel_rank`; an
event an object with its `type`, or an array that begins with it. A block hash is a number or text (bytes in base64 or
hex). What is read are the `BlockStored` events of GPU memory, of one group that keeps every block; the other events
say nothing of requests.

Events say what was stored, not what was asked. The requests are rebuilt from chains of blocks:

- a chain that begins, or grows out of anything but a chain's newest end, is a request: its prompt is the whole chain;
- one that grows at its end by several blocks at once is a prompt that was computed in parts; by one block, it is the
  answer; several blocks behind an answer are the next request;
- so is whatever comes more than 10 s after the last growth.

A request that stored nothing is not seen, nor are the tokens of a last block that is not full. A parent that was
stored before the recording began counts as the beginning.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from .errors import BadLines, TraceError
from .ids import UnitLength
from .lines import decode_lines
from .source import Source
from .trace import MAX_TOKENS, TraceRequest

STORED = "BlockStored"
GPU = "GPU"
# Kinds of groups that lose blocks at the front, or keep few: their chains have gaps.
PARTIAL_KINDS = ("sliding_window", "sliding_window_mla", "chunked_local_attention", "mamba")
SAME_REQUEST_S = 10.0

BlockHash = int | str


class _Stored(msgspec.Struct, gc=False):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    block_size: UnitLength
    medium: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


# The fields of an event that is an array, behind its type. What stands between them is not needed.
ARRAY_FIELDS = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    *("extra_keys", "group_idx", "kv_cache_spec_kind"),
)


class _Request:
    """A chain that may still grow."""

    def __init__(self, arrival_s: float, source: str, tail: int) -> None:
        self.arrival_s = arrival_s
        self.last_s = arrival_s
        self.source = source
        self.prompt_tail = tail
        self.num_output_blocks = 0


class _Chains:
    """All blocks seen, each with the one before it."""

    def __init__(self) -> None:
        self.numbers: dict[BlockHash, int] = {}
        self.parents: list[int] = []
        self.depths: list[int] = []

    def add(self, block: BlockHash, parent: int) -> int:
        """The block's number; a block that was stored before keeps its place."""
        number = self.numbers.setdefault(block, len(self.parents))
        if number == len(self.parents):
            self.parents.append(parent)
            self.depths.append(1 if parent < 0 else self.depths[parent] + 1)
        return number

    def path(self, tail: int) -> npt.NDArray[np.int64]:
        """[blocks] from the first to `tail`."""
        path = np.empty(self.depths[tail], dtype=np.int64)
        for at in range(len(path) - 1, -1, -1):
            path[at] = tail
            tail = self.parents[tail]
        return path


class _Stream:
    """Requests out of the events of one file."""

    def __init__(self) -> None:
        self.chains = _Chains()
        self.requests: list[_Request] = []
        self.growing: dict[tuple[int, int], _Request] = {}
        self.block_size: int | None = None
        self.group: int | None = None

    def store(self, event: _Stored, ts: float, rank: int, place: str) -> None:
        if not event.block_hashes or not self.is_of_interest(event):
            return
        if self.block_size is None:
            self.block_size, self.group = event.block_size, event.group_idx
        chains = self.chains
        parent = -1 if event.parent_block_hash is None else chains.numbers.get(event.parent_block_hash, -1)
        request = self.growing.pop((rank, parent), None)
        tail = parent
        for block in event.block_hashes:
            tail = chains.add(block, tail)
        several = len(event.block_hashes) > 1
        if request is None or ts - request.last_s > SAME_REQUEST_S or (several and request.num_output_blocks):
            request = _Request(ts, place, tail)
            self.requests.append(request)
        elif several:
            request.prompt_tail = tail
        else:
            request.num_output_blocks += 1
        request.last_s = ts
        self.growing[rank, tail] = request

    def is_of_interest(self, event: _Stored) -> bool:
        if event.medium not in (None, GPU) or event.kv_cache_spec_kind in PARTIAL_KINDS:
            return False
        # Smaller blocks announce a prompt's end inside a block.
        return self.block_size is None or (event.block_size == self.block_size and event.group_idx == self.group)


def read_kv_events(source: Source, bad_lines: BadLines) -> list[TraceRequest]:
    """The requests in the order in which they began. Raises `TraceError` unless `bad_lines` skips what is wrong."""
    stream = _Stream()
    for place, batch in decode_lines(source, msgspec.json.Decoder(Any), bad_lines):
        try:
            ts, rank, events = _batch(batch, place)
            # All of them before the first is used: a bad line is skipped whole.
            stored = list(_stored(events, place))
        except TraceError as error:
            bad_lines.report(error)
            continue
        for event in stored:
            stream.store(event, ts, rank, place)
    return [_trace_request(request, stream, source) for request in stream.requests]


def _batch(batch: Any, place: str) -> tuple[float, int, list[Any]]:
    """(time, rank, events)."""
    if isinstance(batch, list):
        fields = dict(zip(("ts", "events", "data_parallel_rank"), batch, strict=False))
    elif isinstance(batch, dict):
        fields = batch
    else:
        raise TraceError(f"{place}: expected a batch of events, an array or an object")
    ts, events, rank = fields.get("ts"), fields.get("events"), fields.get("data_parallel_rank")
    if isinstance(ts, bool) or not isinstance(ts, int | float):
        raise TraceError(f"{place}: ts: expected a number")
    if not isinstance(events, list):
        raise TraceError(f"{place}: events: expected an array")
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int)):
        raise TraceError(f"{place}: data_parallel_rank: expected an int or null")
    return float(ts), rank or 0, events


def _stored(events: list[Any], place: str) -> Iterator[_Stored]:
    for at, event in enumerate(events):
        fields = event
        if isinstance(event, list) and event:
            fields = {"type": event[0], **dict(zip(ARRAY_FIELDS, event[1:], strict=False))}
        if not isinstance(fields, dict) or not isinstance(fields.get("type"), str):
            raise TraceError(f"{place}: events[{at}]: expected an event, an object with its type or an array")
        if fields["type"] != STORED:
            continue
        try:
            yield msgspec.convert(fields, _Stored)
        except msgspec.ValidationError as error:
            raise TraceError(f"{place}: events[{at}]: {_one_line(str(error))}") from error


def _one_line(message: str) -> str:
    return message.replace("`", "").replace(" - at $.", ": ")


def _trace_request(request: _Request, stream: _Stream, source: Source) -> TraceRequest:
    block_size = stream.block_size
    assert block_size is not None
    path = stream.chains.path(request.prompt_tail)
    num_prompt_tokens = len(path) * block_size
    num_output_tokens = request.num_output_blocks * block_size
    if max(num_prompt_tokens, num_output_tokens) > MAX_TOKENS:
        raise TraceError(f"{request.source}: a chain of {len(path)} blocks of {block_size} tokens is no request")
    return TraceRequest(
        arrival_s=request.arrival_s,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        source=request.source,
        unit=block_size,
        scope=f"{source.number}:{source.name}",
        hash_ids=path,
    )
