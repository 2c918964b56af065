"""Which format a file has, by its content."""

import msgspec

from .azure import is_azure_header
from .errors import TraceError
from .formats import TraceFormat
from .source import Source

# How far to look for a line that can be read, when the first ones are damaged.
MAX_PROBED_LINES = 100


class _Keys(msgspec.Struct):
    """Which of the telling keys an object has."""

    requests: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    block_size: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    tokens: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    hash_ids: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input_length: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    timestamp: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    session_id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    chat_id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    events: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


# A batch of events as an engine publishes it: the time, the events, and the rank or nothing.
_Batch = list[msgspec.Raw]


def detect_format(source: Source) -> TraceFormat:
    """The format of `source`: that of the first line that tells, else of the document, else of the words in it.

    Raises `TraceError` when nothing in it looks like a known format.
    """
    decoder: msgspec.json.Decoder[_Keys | _Batch] = msgspec.json.Decoder(_Keys | _Batch)
    lines = [line for line in source.data.split(b"\n", MAX_PROBED_LINES)[:MAX_PROBED_LINES] if line.strip()]
    if lines and is_azure_header(lines[0]):
        return TraceFormat.AZURE
    # The document before the later lines: one line of a pretty-printed document can look like a request.
    for text in [*lines[:1], source.data, *lines[1:]]:
        found = _format_of(decoder, text)
        if found is not None:
            return found
    for found, word in (
        (TraceFormat.KV_EVENTS, b'"BlockStored"'),
        (TraceFormat.SESSIONS, b'"requests"'),
        (TraceFormat.AGENTIC, b'"session_id"'),
        (TraceFormat.BAILIAN, b'"chat_id"'),
        (TraceFormat.TOKENS, b'"tokens"'),
        (TraceFormat.MOONCAKE, b'"hash_ids"'),
        (TraceFormat.MOONCAKE, b'"input_length"'),
    ):
        if word in source.data:
            return found
    known = ", ".join(TraceFormat)
    raise TraceError(f"{source.name}: not a trace of a known format ({known}); --format forces one")


def _format_of(decoder: "msgspec.json.Decoder[_Keys | _Batch]", text: bytes) -> TraceFormat | None:
    try:
        keys = decoder.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return None
    if isinstance(keys, list):
        return TraceFormat.KV_EVENTS if len(keys) in (2, 3) and bytes(keys[1]).startswith(b"[") else None
    if keys.events is not msgspec.UNSET:
        return TraceFormat.KV_EVENTS
    if keys.hash_ids is not msgspec.UNSET or keys.input_length is not msgspec.UNSET:
        return _format_of_ids(keys)
    if keys.tokens is not msgspec.UNSET:
        return TraceFormat.TOKENS
    if keys.requests is not msgspec.UNSET or keys.block_size is not msgspec.UNSET:
        return TraceFormat.SESSIONS
    if keys.timestamp is not msgspec.UNSET:
        return TraceFormat.MOONCAKE
    return None


def _format_of_ids(keys: _Keys) -> TraceFormat:
    """Of the formats with a request a line and a list of ids in it."""
    if keys.chat_id is not msgspec.UNSET:
        return TraceFormat.BAILIAN
    if keys.session_id is not msgspec.UNSET:
        return TraceFormat.AGENTIC
    if keys.block_size is not msgspec.UNSET:
        return TraceFormat.KVCACHE_SIMULATOR
    return TraceFormat.MOONCAKE
