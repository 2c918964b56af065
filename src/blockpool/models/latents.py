"""Latent attention (MLA): one compressed row per token instead of keys and values per head. DeepSeek and Kimi K2."""

from __future__ import annotations

import msgspec

from blockpool.managers import FullAttentionSpec

from .dtypes import FP8, FP8_MLA, NVFP4, PER_TOKEN_HEAD
from .errors import ModelError
from .layers import LayerCache
from .rank import Rank

# The indexer's keys are always 8 bits wide, with a float32 scale for each 128 of them.
INDEXER_SCALE_EVERY = 128
# fp8_ds_mla: 512 numbers of 8 bits with four float32 scales, and 64 rotated numbers of 16 bits.
FP8_MLA_ROW_BYTES = 512 + 4 * 4 + 64 * 2


def latent_layers(rank: Rank) -> list[LayerCache]:
    """Each rank keeps every row whole: tensor parallelism shares the heads that read it, not the latent."""
    config = rank.config
    row = config.count("kv_lora_rank") + config.count("qk_rope_head_dim")
    rank.share("num_attention_heads", config.count("num_attention_heads"))
    bytes_per_token = row_bytes(rank, row)
    return [
        LayerCache(f"layers.{at}", FullAttentionSpec(1), bytes_per_token, whole_rows=True)
        for at in range(config.num_layers())
    ]


def indexed_latent_layers(rank: Rank) -> list[LayerCache]:
    """DeepSeek V3.2: beside each latent the keys of the indexer, which picks the rows that are read.

    The indexer scores every row, so both need the whole prefix. An 8-bit cache has its own row format here.
    """
    if rank.kv_cache_dtype in FP8:
        rank = msgspec.structs.replace(rank, kv_cache_dtype=FP8_MLA)
    size = rank.config.count("index_head_dim")
    indexer_bytes = size + -(-size // INDEXER_SCALE_EVERY) * 4
    layers = []
    for layer in latent_layers(rank):
        layers.append(layer)
        layers.append(LayerCache(f"{layer.name}.indexer", FullAttentionSpec(1), indexer_bytes, whole_rows=True))
    return layers


def row_bytes(rank: Rank, row: int) -> int:
    """Bytes of one token's latent. Raises ModelError for a dtype that latents do not have."""
    dtype = rank.kv_cache_dtype
    if dtype in PER_TOKEN_HEAD or dtype == NVFP4:
        raise ModelError(
            f"kv_cache_dtype {dtype} is for keys and values per head, and this model keeps latents (MLA)"
        )
    if dtype == FP8_MLA:
        if row != 512 + 64:
            raise ModelError(f"kv_cache_dtype {FP8_MLA} is for latents of 512 + 64 numbers, not {row}")
        return FP8_MLA_ROW_BYTES
    if dtype in FP8:
        return row
    return row * (rank.model_bytes if dtype == "auto" else 2)
