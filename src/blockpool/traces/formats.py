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

    AGENTIC = "agentic"
    """JSONL, one turn a line, with what is new in it: `session_id`, `input_length`, `output_length`, `hash_ids`."""

    BAILIAN = "bailian"
    """JSONL, one request a line: `chat_id`, `timestamp` (s), lengths, `hash_ids` (16 tokens each)."""

    KVCACHE_SIMULATOR = "kvcache-simulator"
    """JSONL, one request a line: `hash_ids`, `input_length`, and `block_size`, the tokens per id."""

    AZURE = "azure"
    """CSV, one request a line: `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`. Lengths only."""

    KV_EVENTS = "kv-events"
    """JSONL, one batch of an engine's events a line: `[ts, events, rank]`."""
