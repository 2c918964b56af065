"""Decoders of ordinary attention: over everything, over a window, within a chunk, or mixed layer by layer."""

from __future__ import annotations

from blockpool.managers import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

from .errors import ModelError
from .hf_config import HFConfig
from .layers import LayerCache
from .rank import Rank

FULL = "full_attention"
WINDOW = "sliding_attention"
CHUNK = "chunked_attention"


def window_layers(rank: Rank) -> list[LayerCache]:
    """Every layer has the window, if there is one, or those that are listed: Llama, Mistral, Mixtral, Gemma."""
    count = rank.config.num_layers()
    if rank.config.optional_count("sliding_window") is None:
        return attention_layers(rank, [FULL] * count)
    return attention_layers(rank, listed_kinds(rank.config, [WINDOW] * count))


def late_window_layers(rank: Rank) -> list[LayerCache]:
    """The first `max_window_layers` read everything, the others have the window if it is in use: Qwen."""
    config = rank.config
    kinds = [FULL] * config.num_layers()
    if config.flag("use_sliding_window") and config.optional_count("sliding_window") is not None:
        num_full = config.count("max_window_layers", least=0)
        kinds = listed_kinds(config, [FULL if at < num_full else WINDOW for at in range(len(kinds))])
        if len(set(kinds)) > 1:
            rank.notes.append("only some layers have a window: vLLM has full attention in all of them, or refuses it")
    return attention_layers(rank, kinds)


def alternating_layers(rank: Rank) -> list[LayerCache]:
    """Window, full, window, full, ...: Gemma 2 and GPT-OSS. GPT-OSS's sinks are weights and keep nothing."""
    count = rank.config.num_layers()
    return attention_layers(rank, listed_kinds(rank.config, _every_nth_full(count, 2, WINDOW)))


def every_nth_full_layers(rank: Rank) -> list[LayerCache]:
    """Five windows, then one full, ...: Gemma 3, whose pattern may have another length."""
    config = rank.config
    pattern = config.optional_count("_sliding_window_pattern") or config.count("sliding_window_pattern")
    kinds = _every_nth_full(config.num_layers(), pattern, WINDOW)
    return attention_layers(rank, listed_kinds(config, kinds))


def chunked_layers(rank: Rank) -> list[LayerCache]:
    """Chunks where positions are rotated, full attention where they are not (every fourth layer): Llama 4."""
    config = rank.config
    count = config.num_layers()
    kinds = [FULL] * count
    if config.optional_count("attention_chunk_size") is not None:
        kinds = _every_nth_full(count, config.count("no_rope_layer_interval"), CHUNK)
        rotated = config.optional_list("no_rope_layers", count)
        if rotated is not None:
            kinds = [CHUNK if rotates else FULL for rotates in rotated]
        kinds = listed_kinds(config, kinds)
    return attention_layers(rank, kinds)


def listed_kinds(config: HFConfig, otherwise: list[str]) -> list[str]:
    """`layer_types`, where the configuration lists them."""
    listed = config.optional_list("layer_types", len(otherwise))
    return otherwise if listed is None else listed


def attention_layers(rank: Rank, kinds: list[str]) -> list[LayerCache]:
    """One layer of ordinary attention for each of the kinds. Raises ModelError for a kind that is none."""
    bytes_per_token = attention_bytes(rank)
    return [
        LayerCache(f"layers.{at}", attention_of(kind, rank.config), bytes_per_token) for at, kind in enumerate(kinds)
    ]


def attention_of(kind: str, config: HFConfig) -> KVCacheSpec:
    if kind == FULL:
        return FullAttentionSpec(1)
    if kind == WINDOW:
        return SlidingWindowSpec(1, config.count("sliding_window"))
    if kind == CHUNK:
        return ChunkedLocalAttentionSpec(1, config.count("attention_chunk_size"))
    raise ModelError(f"{config.name}: layer_types: {kind!r} is none of {FULL}, {WINDOW} and {CHUNK}")


def attention_bytes(rank: Rank) -> int:
    """Bytes of one token's keys and values in one layer, on one rank."""
    config = rank.config
    num_heads = config.count("num_attention_heads")
    num_kv_heads = config.optional_count("num_key_value_heads") or num_heads
    head_size = config.optional_count("attention_head_dim") or config.optional_count("head_dim")
    head_size = head_size or config.head_size("hidden_size", "num_attention_heads")
    return rank.key_value_bytes(num_heads, num_kv_heads, head_size)


def _every_nth_full(count: int, n: int, otherwise: str) -> list[str]:
    return [FULL if (at + 1) % n == 0 else otherwise for at in range(count)]
