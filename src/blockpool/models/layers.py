"""What each layer of a model keeps of a request, on one rank."""

from __future__ import annotations

import msgspec

from blockpool.managers import KVCacheSpec


class LayerCache(msgspec.Struct, frozen=True):
    """One layer with a cache of its own.

    `attention`: its kind, as a spec with blocks of one token. `bytes_per_token`: its keys and values, its latent or
    its indexer keys; 0 for a state. `bytes_per_state`: 0 for attention. `whole_rows`: its kernels read the pages as
    rows of tokens without gaps, so no page can be padded.
    """

    name: str
    attention: KVCacheSpec
    bytes_per_token: int = 0
    bytes_per_state: int = 0
    whole_rows: bool = False


class ModelCache(msgspec.Struct, frozen=True):
    """All layers of a model that keep something, in the order of the model.

    `max_model_len`: the longest sequence that the configuration allows, None when it does not say.
    `num_encoder_tokens`: what cross attention reads at most, 0 without it. `notes`: what was assumed or decided where
    the configuration leaves it open.
    """

    architecture: str
    layers: tuple[LayerCache, ...]
    max_model_len: int | None = None
    num_encoder_tokens: int = 0
    notes: tuple[str, ...] = ()
