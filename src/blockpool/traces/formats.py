"""The trace formats by name."""

from enum import StrEnum


class TraceFormat(StrEnum):
    """What a trace file holds; the values are what `--format` takes."""

    MOONCAKE = "mooncake"
    """JSONL, one request a line: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (512 tokens each)."""

    SESSIONS = "sessions"
    """One JSON document: `block_size`, `hash_id_scope`, `requests[].{t,in,out,hash_ids}`, sub-agents nested."""

    TOKENS = "tokens"
    """JSONL, one request a line: `tokens`, and optionally `output_length` and `timestamp` (ms)."""
