"""Session files (github.com/callanjfox/kv-cache-tester): one JSON document per coding-agent session.

`block_size` (tokens per id), `hash_id_scope`, `requests[].{t,in,out,hash_ids}` with `t` in seconds. An entry with
`requests` of its own is a sub-agent: their `t` counts from its `t`, and its ids are the parent's. Scope "local" means
that ids are this file's alone; ids of files with the same other scope are shared.
"""

import re

import msgspec
import numpy as np

from .decode import check_utf8, decode_record
from .errors import BadLines, TraceError
from .ids import OutputLength, PrefixId, PromptLength, UnitLength, check_num_ids
from .source import Source
from .trace import TraceRequest

LOCAL_SCOPE = "local"


class _Document(msgspec.Struct):
    block_size: UnitLength
    requests: list[msgspec.Raw]
    hash_id_scope: str = LOCAL_SCOPE


class _Entry(msgspec.Struct, rename={"num_in": "in", "num_out": "out"}):
    t: float
    num_in: PromptLength | msgspec.UnsetType = msgspec.UNSET
    num_out: OutputLength | msgspec.UnsetType = msgspec.UNSET
    hash_ids: list[PrefixId] | msgspec.UnsetType = msgspec.UNSET
    requests: list[msgspec.Raw] | msgspec.UnsetType = msgspec.UNSET


def read_sessions(source: Source, bad_lines: BadLines) -> list[TraceRequest]:
    """The requests in the order of the document, a sub-agent's in its place.

    Raises `TraceError`; a bad request only unless `bad_lines` skips it, a bad document always.
    """
    document = _decode_document(source)
    # Two files may have the same name (stdin and "-", or one file given twice), so the number is part of the scope.
    own = document.hash_id_scope == LOCAL_SCOPE
    scope = f"{source.number}:{source.name}" if own else f"sessions:{document.hash_id_scope}:{document.block_size}"
    decoder = msgspec.json.Decoder(_Entry)
    requests = []
    # An explicit stack: the file decides how deep sub-agents nest.
    todo = _children("requests", document.requests, base_s=0.0)
    while todo:
        path, raw, base_s = todo.pop()
        try:
            entry = decode_record(decoder, raw, source.name, path)
            if entry.num_in is not msgspec.UNSET or entry.requests is msgspec.UNSET:
                requests.append(_request(entry, base_s, document.block_size, scope, source.name, path))
        except TraceError as error:
            bad_lines.report(_with_line(error, source, raw))
            continue
        if entry.requests is not msgspec.UNSET:
            todo += _children(f"{path}.requests", entry.requests, base_s + entry.t)
    return requests


def _decode_document(source: Source) -> _Document:
    check_utf8(source.data, source.name)
    try:
        return decode_record(msgspec.json.Decoder(_Document), source.data, source.name)
    except TraceError as error:
        at_byte = re.search(r"\(byte (\d+)\)$", str(error))
        if at_byte is None:
            raise
        raise _at_line(error, source, int(at_byte[1])) from error


def _children(path: str, entries: list[msgspec.Raw], base_s: float) -> list[tuple[str, msgspec.Raw, float]]:
    """Entries with their paths, last first: the stack gives them back in the order of the file."""
    return [(f"{path}[{i}]", entry, base_s) for i, entry in enumerate(entries)][::-1]


def _request(entry: _Entry, base_s: float, unit: int, scope: str, name: str, path: str) -> TraceRequest:
    num_in, num_out, hash_ids = entry.num_in, entry.num_out, entry.hash_ids
    if num_in is msgspec.UNSET:
        raise TraceError(f"{name}: {path}.in: missing")
    if num_out is msgspec.UNSET:
        raise TraceError(f"{name}: {path}.out: missing")
    if hash_ids is msgspec.UNSET:
        raise TraceError(f"{name}: {path}.hash_ids: missing")
    check_num_ids(len(hash_ids), num_in, unit, name, f"{path}.hash_ids")
    return TraceRequest(
        arrival_s=base_s + entry.t,
        num_prompt_tokens=num_in,
        num_output_tokens=num_out,
        source=f"{name}:{path}",
        unit=unit,
        scope=scope,
        hash_ids=np.array(hash_ids, dtype=np.int64),
    )


def _with_line(error: TraceError, source: Source, entry: msgspec.Raw) -> TraceError:
    """The same error with the line on which the entry begins. The first with this text is as bad as this one."""
    return _at_line(error, source, source.data.find(bytes(entry)))


def _at_line(error: TraceError, source: Source, offset: int) -> TraceError:
    line = source.data.count(b"\n", 0, offset) + 1
    return TraceError(f"{source.name}:{line}{str(error).removeprefix(source.name)}")
