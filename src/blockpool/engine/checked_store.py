"""A memory that is watched: what is read is checked first."""

from __future__ import annotations

from blockpool.cache import BlockCopy, KVCacheConfig
from blockpool.engine.paged_store import PagedStore
from blockpool.engine.shadow_store import ShadowStore
from blockpool.engine.store import Access, Array, Store, StoreError, must_be_group, must_be_layer, must_be_page


class CheckedStore:
    """A store and, for each layer number, a ShadowStore that sees every access to it."""

    def __init__(self, config: KVCacheConfig, store: Store) -> None:
        self.store = store
        self._num_layers = [len(group.layer_names) for group in config.kv_cache_groups]
        self.shadows = [ShadowStore(config) for _ in range(max(self._num_layers))]

    def begin_step(self, step_id: int) -> None:
        for shadow in self.shadows:
            shadow.begin_step(step_id)
        self.store.begin_step(step_id)

    def clear(self, group_id: int, block_ids: list[int]) -> None:
        for shadow in self.shadows:
            shadow.clear(group_id, block_ids)
        self.store.clear(group_id, block_ids)

    def copy(self, order: BlockCopy) -> None:
        for shadow in self.shadows:
            shadow.copy(order)
        self.store.copy(order)

    def write(self, access: Access, layer: int, *values: Array) -> None:
        self._shadow(access, layer).write(access, layer)
        self.store.write(access, layer, *values)

    def read(self, access: Access, layer: int) -> tuple[Array, ...]:
        self._shadow(access, layer).read(access, layer)
        return self.store.read(access, layer)

    def page_bytes(self, group_id: int) -> int:
        """The memory's page, and behind it one per shadow."""
        return self._memory().page_bytes(group_id) + sum(shadow.page_bytes(group_id) for shadow in self.shadows)

    def read_page(self, group_id: int, block_id: int, page: memoryview) -> None:
        for memory, part in self._parts(group_id, page):
            memory.read_page(group_id, block_id, part)

    def write_page(self, group_id: int, block_id: int, page: memoryview) -> None:
        for memory, part in self._parts(group_id, page):
            memory.write_page(group_id, block_id, part)

    def _memory(self) -> PagedStore:
        if not isinstance(self.store, PagedStore):
            raise StoreError(f"{type(self.store).__name__} has no pages")
        return self.store

    def _parts(self, group_id: int, page: memoryview) -> list[tuple[PagedStore | ShadowStore, memoryview]]:
        must_be_page(group_id, page.nbytes, self.page_bytes(group_id))
        parts: list[tuple[PagedStore | ShadowStore, memoryview]] = []
        first = 0
        memories: list[PagedStore | ShadowStore] = [self._memory(), *self.shadows]
        for memory in memories:
            size = memory.page_bytes(group_id)
            parts.append((memory, page[first : first + size]))
            first += size
        return parts

    def _shadow(self, access: Access, layer: int) -> ShadowStore:
        must_be_group(f"request {access.request_id!r}", access.group_id, len(self._num_layers))
        must_be_layer(access, layer, self._num_layers[access.group_id])
        return self.shadows[layer]
