"""What others look for inside vLLM's KVCacheManager: its coordinator and the manager of each group, as views of ours.

Nothing is kept here but what never changes. Not compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from blockpool.integrations.vllm.demand import blocks_of, demand_of, hit_of
from blockpool.integrations.vllm.kv_cache_manager import ManagerOverBooks, num_cacheable, register, retain
from blockpool.managers import Table


class Row(Sequence[Any]):
    """The blocks of a request's table, as it is when it is looked at; as it was, when the request has ended."""

    def __init__(self, table: Table, members: list[Any]) -> None:
        self._table = table
        self._members = members

    def _blocks(self) -> list[Any]:
        return blocks_of(self._members, self._table.blocks)

    def __getitem__(self, at: Any) -> Any:
        return self._blocks()[at]

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._blocks())

    def __eq__(self, other: object) -> bool:
        return self._blocks() == (other._blocks() if isinstance(other, Row) else other)

    def __hash__(self) -> int:
        return id(self._table)

    def __repr__(self) -> str:
        return repr(self._blocks())


class Rows(Mapping[str, Sequence[Any]]):
    """Request id to the blocks of its table; an unknown request has none."""

    def __init__(self, manager: Any, members: list[Any]) -> None:
        self._manager = manager
        self._members = members

    def __getitem__(self, request_id: str) -> Sequence[Any]:
        table = self._manager.tables.get(request_id)
        return [] if table is None else Row(table, self._members)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._manager.tables

    def get(self, request_id: str, default: Any = None) -> Any:
        return self[request_id] if request_id in self._manager.tables else default

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._manager.tables))

    def __len__(self) -> int:
        return len(self._manager.tables)


class NumCached(Mapping[str, int]):
    """Request id to the number of leading blocks that were registered or passed over."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __getitem__(self, request_id: str) -> int:
        return int(self._manager.tables[request_id].num_registered)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._manager.tables))

    def __len__(self) -> int:
        return len(self._manager.tables)


class GroupView:
    """One group, as vLLM's SingleTypeKVCacheManager shows it."""

    def __init__(self, own: ManagerOverBooks, group_id: int) -> None:
        group = own.kv_cache_config.kv_cache_groups[group_id]
        self._own = own
        self._manager = own.cache.managers[group_id]
        self._interface: Any = import_module("vllm.v1.kv_cache_interface")
        self.kv_cache_spec = group.kv_cache_spec
        self.kv_cache_group_id = group_id
        self.block_size: int = self._manager.block_size
        self.scheduler_block_size = own.scheduler_block_size
        self.block_pool: Any = own.block_pool
        self.enable_caching = own.enable_caching
        self.dcp_world_size: int = own.cache.config.kv_cache_groups[group_id].context_parallel_size
        self.pcp_world_size = 1
        self.max_admission_blocks_per_request: int | None = (
            None if self._manager.is_state else own.caps[group_id] or None
        )
        self.req_to_blocks = Rows(self._manager, own.block_pool.blocks)
        self.num_cached_block = NumCached(self._manager)
        self.retains_longer_hit = False
        for name in ("sliding_window", "attention_chunk_size", "mamba_cache_mode", "num_speculative_blocks"):
            if hasattr(group.kv_cache_spec, name):
                setattr(self, name, getattr(group.kv_cache_spec, name))

    @property
    def use_eagle(self) -> bool:
        return bool(self._manager.draft_margin)

    @property
    def cache_hit_alignment_tokens(self) -> int:
        return int(self._own.cache.groups.alignment)

    @property
    def has_positionally_stable_blocks(self) -> bool:
        return not self._manager.is_state

    @property
    def supports_fine_grained_hash_lookup(self) -> bool:
        return bool(self._manager.supports_partial_boundaries)

    @property
    def records_new_block_ids(self) -> bool:
        return self._own._zeroed[self.kv_cache_group_id]

    @property
    def new_block_ids(self) -> list[int]:
        return list(self._own._to_zero[self.kv_cache_group_id])

    @property
    def _null_block(self) -> Any:
        return self.block_pool.null_block

    @property
    def cached_blocks_this_step(self) -> set[bytes]:
        """Keys of states."""
        end = self.kv_cache_group_id.to_bytes(4, "big")
        return {key for key in self._own._offering.new_states if key.endswith(end)}

    @property
    def num_tokens_per_id(self) -> int:
        """Tokens per block id that a connector is told of; 0 where ids do not stand for tokens."""
        interface = self._interface
        if isinstance(self.kv_cache_spec, interface.CrossAttentionSpec):
            return 0
        return self.kv_cache_spec.block_size if isinstance(self.kv_cache_spec, interface.AttentionSpec) else 0

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return self._manager.num_skipped_tokens(num_computed_tokens)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Any,
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
        num_encoder_tokens: int = 0,
    ) -> int:
        own = self._own
        twin = own._twins.get(request_id)
        hit = hit_of(
            self._manager, own.block_pool._home, new_computed_blocks, num_local_computed_tokens, total_computed_tokens
        )
        return demand_of(
            self._manager,
            request_id,
            num_tokens,
            num_tokens_main_model,
            hit,
            total_computed_tokens,
            0 if twin is None else twin.num_prompt_tokens,
            num_encoder_tokens,
            own.caps[self.kv_cache_group_id] if apply_admission_cap else 0,
        )


class CoordinatorView:
    """All groups, as vLLM's KVCacheCoordinator shows them."""

    def __init__(self, own: ManagerOverBooks) -> None:
        self._own = own
        self.kv_cache_config = own.kv_cache_config
        self.block_pool: Any = own.block_pool
        self.enable_caching = own.enable_caching
        self.scheduler_block_size = own.scheduler_block_size
        self.hash_block_size = own.hash_block_size
        self.num_reprefillable_tokens = own.num_reprefillable_tokens
        self.single_type_managers = tuple(group_view(own, group_id) for group_id in range(own.num_kv_cache_groups))
        self.group_block_sizes = tuple(view.block_size for view in self.single_type_managers)
        self.num_single_type_manager = len(self.single_type_managers)
        whole = own.cache.groups.coordinator.whole
        self.full_attention_group_id = whole[0] if whole else None

    @property
    def retention_interval(self) -> int | None:
        return self._own.cache.groups.policy.interval

    @retention_interval.setter
    def retention_interval(self, interval: int | None) -> None:
        retain(self._own.cache, interval)

    @property
    def enable_partial_hash_hits(self) -> bool:
        return self._own.is_fine

    @property
    def _cache_hit_alignment_tokens(self) -> int:
        return int(self._own.cache.groups.alignment)

    @property
    def eagle_group_ids(self) -> set[int]:
        return {view.kv_cache_group_id for view in self.single_type_managers if view.use_eagle}

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Any,
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Blocks that the pool must have for the request to come so far."""
        return sum(
            view.get_num_blocks_to_allocate(
                request_id,
                num_tokens,
                some,
                total_computed_tokens,
                num_local_computed_tokens,
                num_tokens_main_model,
                apply_admission_cap,
                prefill_end,
                num_encoder_tokens,
            )
            for view, some in zip(self.single_type_managers, new_computed_blocks, strict=True)
        )

    def get_num_cacheable_tokens(self, num_computed_tokens: int, kv_cache_group_id: int) -> int:
        return num_cacheable(self._own, kv_cache_group_id, num_computed_tokens)

    def find_longest_cache_hit_per_group(
        self, block_hashes: list[bytes], max_cache_hit_length: int
    ) -> tuple[tuple[list[Any], ...], tuple[int, ...]]:
        """Each group by itself: its blocks and its length."""
        hits = self._own.longest_hits(block_hashes, max_cache_hit_length)
        blocks = tuple(blocks_of(self.block_pool.blocks, hit.blocks) for hit in hits)
        return blocks, tuple(hit.num_tokens for hit in hits)

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        twin = self._own._twins[request.request_id]
        twin.look(request)
        register(self._own, twin, num_computed_tokens)

    def get_blocks(self, request_id: str) -> tuple[Sequence[Any], ...]:
        return tuple(view.req_to_blocks[request_id] for view in self.single_type_managers)

    def new_step_starts(self) -> None:
        self._own.new_step_starts()


@cache
def view_class(base: type, theirs: Any) -> type:
    """A view that passes for vLLM's class, for those who ask what it is an instance of."""
    made = type(theirs.__name__, (base,), {"__module__": __name__})
    theirs.register(made)
    return made


def group_view(own: ManagerOverBooks, group_id: int) -> GroupView:
    group = own.kv_cache_config.kv_cache_groups[group_id]
    registry: Any = import_module("vllm.v1.kv_cache_spec_registry").KVCacheSpecRegistry
    theirs = registry.get_manager_class(group.kv_cache_spec, group.role)
    made: GroupView = view_class(GroupView, theirs)(own, group_id)
    return made


def coordinator_of(own: ManagerOverBooks) -> CoordinatorView:
    name = "UnitaryKVCacheCoordinator" if own.num_kv_cache_groups == 1 else "HybridKVCacheCoordinator"
    if not own.enable_caching:
        name = "KVCacheCoordinatorNoPrefixCache"
    theirs = getattr(import_module("vllm.v1.core.kv_cache_coordinator"), name)
    made: CoordinatorView = view_class(CoordinatorView, theirs)(own)
    return made


def zeroed_groups(kv_cache_config: Any) -> list[bool]:
    """Which groups' new blocks the worker zeroes: of attention that reads beyond what is written, but for rings."""
    interface: Any = import_module("vllm.v1.kv_cache_interface")
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return [
        bool(kv_cache_config.needs_kv_cache_zeroing)
        and isinstance(spec, interface.AttentionSpec)
        and not isinstance(spec, interface.CircularBufferSpec)
        for spec in specs
    ]


def event_metadata(kv_cache_config: Any) -> tuple[tuple[Any, Any], ...]:
    """Per group, the kind of its attention and its window, as events name them."""
    interface: Any = import_module("vllm.v1.kv_cache_interface")
    return tuple(
        (
            interface.get_kv_cache_spec_kind(group.kv_cache_spec).value,
            interface.get_kv_cache_spec_sliding_window(group.kv_cache_spec),
        )
        for group in kv_cache_config.kv_cache_groups
    )
