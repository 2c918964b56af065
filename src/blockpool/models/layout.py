"""The cache of a model: its groups, what a block costs, and how many blocks fit."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from blockpool.managers import KVCacheGroupSpec

from .errors import ModelError
from .grouping import grouped
from .layers import ModelCache
from .pages import LayerPage, block_size_for_states, page_of, with_one_page_size

DEFAULT_BLOCK_SIZE = 16


class GroupLayout(msgspec.Struct, frozen=True):
    """A group and what its layers together write, on one rank.

    `bytes_per_token`: keys and values, latents, indexer keys; 0 for states. `bytes_per_state`: 0 for attention.
    `used_bytes_per_block`: of the pool's bytes per block; the rest is padding, or pages for which it has no layer.
    """

    group: KVCacheGroupSpec
    bytes_per_token: int
    bytes_per_state: int
    used_bytes_per_block: int


class CacheLayout(msgspec.Struct, frozen=True):
    """All groups of a model over one pool, on one rank. `bytes_per_block`: those of the largest group.

    The other fields are those of ModelCache.
    """

    architecture: str
    groups: tuple[GroupLayout, ...]
    bytes_per_block: int
    max_model_len: int | None = None
    num_encoder_tokens: int = 0
    notes: tuple[str, ...] = ()

    @property
    def kv_cache_groups(self) -> tuple[KVCacheGroupSpec, ...]:
        """The groups as `KVCacheConfig` wants them."""
        return tuple(layout.group for layout in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """What all layers of attention write for one token."""
        return sum(layout.bytes_per_token for layout in self.groups)

    def num_blocks(self, memory_bytes: int) -> int:
        """The blocks that fit, the null block included. Raises ModelError for fewer than the 2 that a pool needs."""
        num_blocks = memory_bytes // self.bytes_per_block
        if num_blocks < 2:
            raise ModelError(
                f"{memory_bytes} bytes hold {num_blocks} blocks of {self.bytes_per_block} bytes, and a pool needs 2 "
                "(one is the null block)"
            )
        return num_blocks


def lay_out(model: ModelCache, *, block_size: int = DEFAULT_BLOCK_SIZE) -> CacheLayout:
    """The groups of a model, as vLLM forms them.

    `block_size`: tokens per block of the attention with the largest pages; a multiple of it where a state would not
    fit into such a page. Raises ModelError for a model that keeps nothing, and for pages that cannot be made equal.
    """
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise ModelError(f"block_size must be an int of at least 1 token, not {block_size!r}")
    if not model.layers:
        raise ModelError(f"{model.architecture}: no layer keeps anything")
    for layer in model.layers:
        if layer.bytes_per_token < 1 and layer.bytes_per_state < 1:
            raise ModelError(f"{layer.name}: a layer without bytes per token and bytes per state keeps nothing")
    block_size = block_size_for_states(model.layers, block_size)
    pages = [page_of(layer, block_size) for layer in model.layers]
    if len({page.spec for page in pages}) == 1:
        groups = [pages]  # pages of several sizes do not matter where each block has one of each
    else:
        groups = grouped(with_one_page_size(pages))
    has_states = any(layer.attention.is_state for layer in model.layers)
    return CacheLayout(
        architecture=model.architecture,
        groups=tuple(_layout_of(group, has_states) for group in groups),
        bytes_per_block=max(sum(page.page_bytes for page in group) for group in groups),
        max_model_len=model.max_model_len,
        num_encoder_tokens=model.num_encoder_tokens,
        notes=model.notes,
    )


def _layout_of(group: Sequence[LayerPage], has_states: bool) -> GroupLayout:
    spec = group[0].spec
    return GroupLayout(
        group=KVCacheGroupSpec(
            tuple(page.layer.name for page in group),
            spec,
            # Kernels of attention read whole blocks, and what a state has left there need not be a number.
            clear_new_blocks=has_states and not spec.is_state,
        ),
        bytes_per_token=sum(page.layer.bytes_per_token for page in group),
        bytes_per_state=sum(page.layer.bytes_per_state for page in group),
        used_bytes_per_block=sum(page.used_bytes for page in group),
    )
