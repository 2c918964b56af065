"""Models that mix attention with states: Qwen-Next, Jamba, Nemotron-H."""

from __future__ import annotations

from typing import Final

from blockpool.managers import FullAttentionSpec, MambaSpec

from .decoders import FULL, attention_bytes, listed_kinds
from .errors import ModelError
from .layers import LayerCache
from .rank import Rank
from .states import delta_net_state_bytes, mamba1_state_bytes, mamba2_state_bytes

LINEAR = "linear_attention"
# Nemotron-H writes its layers as letters, or in newer configurations as words of one kind or another.
LETTERS: Final = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
WORDS: Final = {LINEAR: "mamba", FULL: "attention"}


def qwen_next_layers(rank: Rank) -> list[LayerCache]:
    """Three gated delta nets, then one full attention, ...

    A `mamba_ssm_dtype` in the configuration is not followed, as vLLM does not for this architecture.
    """
    if rank.config.get("mamba_ssm_dtype") is not None:
        rank.notes.append("mamba_ssm_dtype is not followed, as vLLM does not: states have the model's dtype")
    config = rank.config
    interval = config.count("full_attention_interval")
    kinds = [FULL if (at + 1) % interval == 0 else LINEAR for at in range(config.num_layers())]
    kinds = listed_kinds(config, kinds)
    for kind in kinds:
        if kind not in (FULL, LINEAR):
            raise ModelError(f"{config.name}: layer_types: {kind!r} is neither {FULL} nor {LINEAR}")
    state = delta_net_state_bytes(
        rank,
        num_key_heads=config.count("linear_num_key_heads"),
        num_value_heads=config.count("linear_num_value_heads"),
        key_head_dim=config.count("linear_key_head_dim"),
        value_head_dim=config.count("linear_value_head_dim"),
        conv_kernel=config.count("linear_conv_kernel_dim"),
    )
    return _mixed(rank, ["attention" if kind == FULL else "mamba" for kind in kinds], state)


def jamba_layers(rank: Rank) -> list[LayerCache]:
    """One attention in each period of layers, Mamba in the others."""
    config = rank.config
    period, offset = config.count("attn_layer_period"), config.count("attn_layer_offset", least=0)
    count = config.num_layers()
    state = mamba1_state_bytes(
        rank,
        num_channels=config.count("mamba_expand") * config.count("hidden_size"),
        state_size=config.count("mamba_d_state"),
        conv_kernel=config.count("mamba_d_conv"),
    )
    return _mixed(rank, ["attention" if at % period == offset else "mamba" for at in range(count)], state)


def nemotron_h_layers(rank: Rank) -> list[LayerCache]:
    """Mamba 2, attention and plain layers, which keep nothing, in any order.

    The recurrent part of a state is float32 unless the configuration says otherwise.
    """
    config = rank.config
    state = mamba2_state_bytes(
        rank,
        num_heads=config.count("mamba_num_heads"),
        head_dim=config.count("mamba_head_dim"),
        state_size=config.count("ssm_state_size"),
        num_groups=config.count("n_groups"),
        conv_kernel=config.count("conv_kernel"),
        ssm_dtype=config.optional_text("mamba_ssm_cache_dtype"),
    )
    return _mixed(rank, _nemotron_h_kinds(rank), state)


def _nemotron_h_kinds(rank: Rank) -> list[str]:
    config = rank.config
    pattern = config.optional_text("hybrid_override_pattern")
    words = config.get("layers_block_type") or config.get("layer_types")
    if pattern is not None:
        kinds = [LETTERS.get(letter, letter) for letter in pattern]
    elif isinstance(words, list):
        kinds = [WORDS.get(word, word) if isinstance(word, str) else word for word in words]
    else:
        raise ModelError(f"{config.name}: hybrid_override_pattern: missing")
    config.checked_layers("hybrid_override_pattern", len(kinds))
    for kind in kinds:
        if kind not in LETTERS.values():
            raise ModelError(f"{config.name}: the pattern of layers has {kind!r}, which is none of {LETTERS}")
    count = config.optional_count("num_hidden_layers")
    if count is not None and count != len(kinds):
        raise ModelError(f"{config.name}: num_hidden_layers: {count}, but the pattern has {len(kinds)} layers")
    return kinds


def _mixed(rank: Rank, kinds: list[str], state_bytes: int) -> list[LayerCache]:
    """Layers of full attention and of states; what is neither keeps nothing."""
    bytes_per_token = attention_bytes(rank)
    layers = []
    for at, kind in enumerate(kinds):
        if kind == "attention":
            layers.append(LayerCache(f"layers.{at}", FullAttentionSpec(1), bytes_per_token))
        elif kind == "mamba":
            state = MambaSpec(1, mamba_cache_mode=rank.mamba_cache_mode)
            layers.append(LayerCache(f"layers.{at}", state, bytes_per_state=state_bytes))
    return layers
