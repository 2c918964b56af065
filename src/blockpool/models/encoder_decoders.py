"""Models whose decoder also reads what an encoder has written: Whisper."""

from __future__ import annotations

from blockpool.managers import CrossAttentionSpec, FullAttentionSpec

from .layers import LayerCache
from .rank import Rank


def whisper_layers(rank: Rank) -> list[LayerCache]:
    """Each decoder layer keeps its own tokens and those of the encoder; the encoder itself keeps nothing."""
    config = rank.config
    heads = config.count("decoder_attention_heads")
    bytes_per_token = rank.key_value_bytes(heads, heads, config.head_size("d_model", "decoder_attention_heads"))
    layers = []
    for at in range(config.num_layers("decoder_layers")):
        layers.append(LayerCache(f"layers.{at}", FullAttentionSpec(1), bytes_per_token))
        layers.append(LayerCache(f"layers.{at}.cross", CrossAttentionSpec(1), bytes_per_token))
    return layers
