"""Which architecture keeps what: the table, and the way from a configuration to its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from .decoders import (
    alternating_layers,
    chunked_layers,
    every_nth_full_layers,
    late_window_layers,
    window_layers,
)
from .dtypes import model_dtype_bytes, resolved_kv_cache_dtype
from .encoder_decoders import whisper_layers
from .errors import ModelError, UnknownArchitecture
from .hf_config import HFConfig, read_hf_config
from .hybrids import jamba_layers, nemotron_h_layers, qwen_next_layers
from .latents import indexed_latent_layers, latent_layers
from .layers import LayerCache, ModelCache
from .rank import Rank


class Architecture(msgspec.Struct, frozen=True):
    """How to read one family of configurations.

    `defaults`: what its class in `transformers` assumes where a published configuration leaves a field out.
    `length_field`: which field has the longest sequence; `encoder_field`: the longest input of the encoder.
    """

    layers: Callable[[Rank], list[LayerCache]]
    defaults: Mapping[str, Any] = {}
    length_field: str = "max_position_embeddings"
    encoder_field: str | None = None


LLAMA: Final = Architecture(window_layers)
MISTRAL: Final = Architecture(window_layers, {"num_key_value_heads": 8, "sliding_window": 4096})
MIXTRAL: Final = Architecture(window_layers, {"num_key_value_heads": 8})
QWEN: Final = Architecture(late_window_layers, {"sliding_window": 4096, "max_window_layers": 28})
QWEN_3: Final = Architecture(late_window_layers, {"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28})
QWEN_3_MOE: Final = Architecture(
    late_window_layers, {"num_key_value_heads": 4, "sliding_window": 4096, "max_window_layers": 28}
)
GEMMA: Final = Architecture(window_layers, {"head_dim": 256})
GEMMA_2: Final = Architecture(
    alternating_layers,
    {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
)
GEMMA_3: Final = Architecture(
    every_nth_full_layers,
    {
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131072,
    },
)
LLAMA_4: Final = Architecture(
    chunked_layers,
    {
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
    },
)
GPT_OSS: Final = Architecture(
    alternating_layers, {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128}
)
DEEPSEEK: Final = Architecture(latent_layers, {"kv_lora_rank": 512, "qk_rope_head_dim": 64})
DEEPSEEK_V32: Final = Architecture(
    indexed_latent_layers, {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
)
QWEN_NEXT: Final = Architecture(
    qwen_next_layers,
    {
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
)
JAMBA: Final = Architecture(
    jamba_layers,
    {
        "num_key_value_heads": 8,
        "attn_layer_offset": 4,
        "attn_layer_period": 8,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
    },
)
NEMOTRON_H: Final = Architecture(
    nemotron_h_layers,
    {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "mamba_ssm_cache_dtype": "float32",
    },
)
WHISPER: Final = Architecture(
    whisper_layers, length_field="max_target_positions", encoder_field="max_source_positions"
)

ARCHITECTURES: Final[dict[str, Architecture]] = {
    "LlamaForCausalLM": LLAMA,
    "MixtralForCausalLM": MIXTRAL,
    "MistralForCausalLM": MISTRAL,
    "Mistral3ForConditionalGeneration": MISTRAL,
    "Qwen2ForCausalLM": QWEN,
    "Qwen2MoeForCausalLM": QWEN,
    "Qwen2VLForConditionalGeneration": QWEN,
    "Qwen2_5_VLForConditionalGeneration": QWEN,
    "Qwen3ForCausalLM": QWEN_3,
    "Qwen3MoeForCausalLM": QWEN_3_MOE,
    "Qwen3VLForConditionalGeneration": QWEN_3,
    "Qwen3VLMoeForConditionalGeneration": QWEN_3,
    "GemmaForCausalLM": GEMMA,
    "Gemma2ForCausalLM": GEMMA_2,
    "Gemma3ForCausalLM": GEMMA_3,
    "Gemma3ForConditionalGeneration": GEMMA_3,
    "Llama4ForCausalLM": LLAMA_4,
    "Llama4ForConditionalGeneration": LLAMA_4,
    "GptOssForCausalLM": GPT_OSS,
    "DeepseekV2ForCausalLM": DEEPSEEK,
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "DeepseekV32ForCausalLM": DEEPSEEK_V32,
    "Qwen3NextForCausalLM": QWEN_NEXT,
    "JambaForCausalLM": JAMBA,
    "NemotronHForCausalLM": NEMOTRON_H,
    "WhisperForConditionalGeneration": WHISPER,
}


def known_architectures() -> tuple[str, ...]:
    """The names that `read_model` knows, as they stand under "architectures"."""
    return tuple(sorted(ARCHITECTURES))


def read_model(
    source: str | Path | Mapping[str, Any],
    *,
    kv_cache_dtype: str = "auto",
    tensor_parallel_size: int = 1,
    mamba_cache_dtype: str = "auto",
    mamba_ssm_cache_dtype: str = "auto",
    prefix_caching: bool = True,
) -> ModelCache:
    """What the layers of a model keep on one rank, by its `config.json`: the file, its folder, its content, or the
    model's name (see `find_model`).

    `kv_cache_dtype` is one of KV_CACHE_DTYPES; the dtypes of states "auto", "float16", "bfloat16" or "float32".
    Without `prefix_caching` a state is kept for the running request only. Raises UnknownModel,
    UnknownArchitecture, and ModelError for what cannot be read or does not fit the model.
    """
    config = read_hf_config(source)
    architecture = _architecture_of(config)
    config.defaults = architecture.defaults
    if (
        isinstance(tensor_parallel_size, bool)
        or not isinstance(tensor_parallel_size, int)
        or tensor_parallel_size < 1
    ):
        raise ModelError(f"tensor_parallel_size must be an int of at least 1 rank, not {tensor_parallel_size!r}")
    notes: list[str] = []
    rank = Rank(
        config,
        model_bytes=model_dtype_bytes(config, notes),
        kv_cache_dtype=resolved_kv_cache_dtype(kv_cache_dtype, config, notes),
        tensor_parallel_size=tensor_parallel_size,
        mamba_cache_dtype=mamba_cache_dtype,
        mamba_ssm_cache_dtype=mamba_ssm_cache_dtype,
        mamba_cache_mode="align" if prefix_caching else "none",
        notes=notes,
    )
    layers = tuple(architecture.layers(rank))
    encoder_field = architecture.encoder_field
    return ModelCache(
        architecture=config.architecture,
        layers=layers,
        max_model_len=config.optional_count(architecture.length_field),
        num_encoder_tokens=0 if encoder_field is None else config.count(encoder_field),
        notes=tuple(notes),
    )


def _architecture_of(config: HFConfig) -> Architecture:
    found = ARCHITECTURES.get(config.architecture)
    if found is None:
        raise UnknownArchitecture(
            f"{config.name}: {config.architecture!r} is not among the known architectures "
            f"({', '.join(known_architectures())}); describe its groups instead, as in "
            "'full:16,window=1024:16,mamba:256'"
        )
    return found
