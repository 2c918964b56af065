"""The KV memory itself: pages of numbers, one per block and layer, for keys and values or for a state."""

from __future__ import annotations

import math

import numpy as np

from blockpool.cache import BlockCopy, KVCacheConfig
from blockpool.engine.store import (
    Access,
    Array,
    Bytes,
    StoreError,
    must_be_blocks,
    must_be_copy,
    must_be_group,
    must_be_layer,
    must_be_page,
    must_be_slots,
    must_not_be_null,
)


class PagedStore:
    """Float64 memory for all layers of a model: the keys and values of a token have `shape` (heads, head_dim), a
    state of a layer `state_shape`.

    `layers[group][layer]`: views [num_blocks, block_size, *shape] of keys and of values, or one [num_blocks,
    *state_shape] of states. The first layers of all groups that share a pool share its pages, so do the second ones,
    and so on: a block has one content there, whichever group it belongs to.
    """

    def __init__(
        self, config: KVCacheConfig, shape: tuple[int, ...], state_shape: tuple[int, ...] | None = None
    ) -> None:
        self.layers: list[list[tuple[Array, ...]]] = [[] for _ in config.kv_cache_groups]
        self._pages: list[list[Array]] = [[] for _ in config.kv_cache_groups]
        self._num_blocks = [config.pool_sizes[group.pool] for group in config.kv_cache_groups]
        shapes: list[tuple[tuple[int, ...], ...]] = []
        for group in config.kv_cache_groups:
            if not group.kv_cache_spec.is_state:
                shapes.append(((group.block_size, *shape), (group.block_size, *shape)))
            elif state_shape is None:
                raise StoreError(f"layers {group.layer_names} keep states: give a state_shape")
            else:
                shapes.append((state_shape,))
        for pool, num_blocks in enumerate(config.pool_sizes):
            members = [number for number, group in enumerate(config.kv_cache_groups) if group.pool == pool]
            counts = [len(config.kv_cache_groups[number].layer_names) for number in members]
            page_size = max(sum(map(math.prod, shapes[number])) for number in members)
            for layer in range(max(counts)):
                pages = np.zeros((num_blocks, page_size), np.float64)
                for number, count in zip(members, counts, strict=True):
                    if layer < count:
                        self.layers[number].append(_views(pages, shapes[number]))
                        self._pages[number].append(pages)

    def begin_step(self, step_id: int) -> None:
        """Nothing: memory has no steps."""

    def clear(self, group_id: int, block_ids: list[int]) -> None:
        must_be_group("clear", group_id, len(self.layers))
        must_be_blocks(group_id, block_ids, self._num_blocks[group_id])
        for pages in self._pages[group_id]:
            pages[block_ids] = 0.0

    def copy(self, order: BlockCopy) -> None:
        must_be_group("copy", order.group_id, len(self.layers))
        must_be_copy(order, self._num_blocks[order.group_id])
        for pages in self._pages[order.group_id]:
            pages[order.dst_block_id] = pages[order.src_block_id]

    def write(self, access: Access, layer: int, *values: Array) -> None:
        arrays = self._arrays(access, layer)
        must_not_be_null(access, 1 if len(arrays) == 1 else arrays[0].shape[1])
        for memory, new in zip(arrays, values, strict=True):
            memory[self._places(access, memory, len(arrays) == 1)] = new

    def read(self, access: Access, layer: int) -> tuple[Array, ...]:
        arrays = self._arrays(access, layer)
        return tuple([memory[self._places(access, memory, len(arrays) == 1)] for memory in arrays])

    def page_bytes(self, group_id: int) -> int:
        """The bytes of a block in all layers of a group."""
        must_be_group("page", group_id, len(self.layers))
        return sum(int(pages.shape[1]) for pages in self._group_pages(group_id)) * 8

    def read_page(self, group_id: int, block_id: int, page: memoryview) -> None:
        """Copy a block out of all layers of a group, one after another. Raises StoreError for an unknown block."""
        for part, bytes_of in self._parts(group_id, block_id, page):
            part[:] = bytes_of

    def write_page(self, group_id: int, block_id: int, page: memoryview) -> None:
        """Copy a page into a block. Raises StoreError for the null block and for one that is not there."""
        if block_id == 0:
            raise StoreError(f"group {group_id}: a page written to the null block")
        for part, bytes_of in self._parts(group_id, block_id, page):
            bytes_of[:] = part

    def _group_pages(self, group_id: int) -> list[Array]:
        """Of each layer, what the group uses of a block's page."""
        used = sum(math.prod(memory.shape[1:]) for memory in self.layers[group_id][0])
        return [pages[:, :used] for pages in self._pages[group_id]]

    def _parts(self, group_id: int, block_id: int, page: memoryview) -> list[tuple[Bytes, Bytes]]:
        """Per layer: its part of the page, and of the memory."""
        must_be_group("page", group_id, len(self.layers))
        must_be_blocks(group_id, [block_id], self._num_blocks[group_id])
        whole = np.frombuffer(page, np.uint8)
        must_be_page(group_id, len(whole), self.page_bytes(group_id))
        memory = [pages[block_id].view(np.uint8) for pages in self._group_pages(group_id)]
        size = len(memory[0])
        return [(whole[at * size : (at + 1) * size], bytes_of) for at, bytes_of in enumerate(memory)]

    def _arrays(self, access: Access, layer: int) -> tuple[Array, ...]:
        """The memory of an access, which is within it."""
        group_id = access.group_id
        must_be_group(f"request {access.request_id!r}", group_id, len(self.layers))
        must_be_layer(access, layer, len(self.layers[group_id]))
        arrays = self.layers[group_id][layer]
        must_be_slots(access, self._num_blocks[group_id], 1 if len(arrays) == 1 else arrays[0].shape[1])
        return arrays

    def _places(self, access: Access, memory: Array, is_state: bool) -> tuple[np.ndarray, ...]:
        if is_state:
            return (access.slots,)
        block_size = memory.shape[1]
        return access.slots // block_size, access.slots % block_size


def _views(pages: Array, shapes: tuple[tuple[int, ...], ...]) -> tuple[Array, ...]:
    """Arrays of these shapes, one after another within each page."""
    views: list[Array] = []
    first = 0
    for shape in shapes:
        inner = [math.prod(shape[axis + 1 :]) * pages.itemsize for axis in range(len(shape))]
        view: Array = np.ndarray(
            (len(pages), *shape), np.float64, pages, first * pages.itemsize, (pages.strides[0], *inner)
        )
        views.append(view)
        first += math.prod(shape)
    return tuple(views)
