"""Pages: what one layer keeps in one block, and how all layers come to pages of one size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from blockpool.managers import KVCacheSpec

from .errors import ModelError
from .layers import LayerCache

# What a pool can count in a block.
MOST_TOKENS: Final = 2**31 - 1


class LayerPage(msgspec.Struct, frozen=True):
    """A layer with its block size. `spec`: with the tokens per block; `page_bytes`: padding included."""

    layer: LayerCache
    spec: KVCacheSpec
    page_bytes: int

    @property
    def used_bytes(self) -> int:
        """What the layer itself writes into a page."""
        return self.layer.bytes_per_state or self.layer.bytes_per_token * self.spec.block_size


def page_of(layer: LayerCache, block_size: int) -> LayerPage:
    """The page of a layer in blocks of `block_size` tokens, unpadded. Raises ModelError for too many tokens."""
    if block_size > MOST_TOKENS:
        raise ModelError(
            f"{layer.name}: its pages would need blocks of {block_size:,} tokens, more than the {MOST_TOKENS:,} "
            "that a block can have"
        )
    spec = msgspec.structs.replace(layer.attention, block_size=block_size)
    return LayerPage(layer, spec, layer.bytes_per_state or layer.bytes_per_token * block_size)


def block_size_for_states(layers: Sequence[LayerCache], block_size: int) -> int:
    """The smallest multiple of `block_size` at which a page of attention holds a state.

    A state has the same size after one token as after a million, so it is the attention's blocks that grow.
    """
    largest_state = max((layer.bytes_per_state for layer in layers), default=0)
    bytes_per_token = max((layer.bytes_per_token for layer in layers), default=0)
    if largest_state == 0 or bytes_per_token == 0:
        return block_size
    return block_size * -(-largest_state // (bytes_per_token * block_size))


def with_one_page_size(pages: Sequence[LayerPage]) -> list[LayerPage]:
    """The same layers with pages as large as the largest: groups share one pool, whose blocks are interchangeable.

    A smaller page takes more tokens where that fits without rest, else it is padded; a state is always padded. Raises
    ModelError for a page that can be neither enlarged nor padded.
    """
    page_bytes = max(page.page_bytes for page in pages)
    return [_enlarged(page, page_bytes) for page in pages]


def _enlarged(page: LayerPage, page_bytes: int) -> LayerPage:
    layer = page.layer
    if layer.bytes_per_state == 0 and page_bytes % page.page_bytes == 0:
        return page_of(layer, page.spec.block_size * (page_bytes // page.page_bytes))
    if layer.whole_rows:
        raise ModelError(
            f"{layer.name}: pages of {page.page_bytes} bytes cannot be padded to {page_bytes}, the model's largest: "
            "its kernels read rows without gaps"
        )
    return msgspec.structs.replace(page, page_bytes=page_bytes)
