"""Specs say what is wrong with them; the registry finds the manager of each."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from blockpool.managers import (
    ChunkedLocalAttentionManager,
    ChunkedLocalAttentionSpec,
    CircularBufferManager,
    CircularBufferSpec,
    CrossAttentionManager,
    CrossAttentionSpec,
    FullAttentionManager,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaManager,
    MambaSpec,
    ReferenceWindowManager,
    ReferenceWindowSpec,
    RetentionPolicy,
    SingleTypeKVCacheManager,
    SinkFullAttentionManager,
    SinkFullAttentionSpec,
    SlidingWindowManager,
    SlidingWindowSpec,
    SpecError,
    make_manager,
    manager_class_of,
    register_manager,
)
from blockpool.managers.registry import MANAGERS
from blockpool.pool import BlockPool, NoFreeBlocksError

FULL = FullAttentionSpec(4)

KINDS: list[tuple[KVCacheSpec, type[SingleTypeKVCacheManager], bool, bool, bool]] = [
    # spec, manager, prefix cacheable, partial boundaries, findable at acknowledgement only
    (FullAttentionSpec(4), FullAttentionManager, True, True, False),
    (SlidingWindowSpec(4, 9), SlidingWindowManager, True, False, False),
    (ChunkedLocalAttentionSpec(4, 8), ChunkedLocalAttentionManager, True, False, False),
    (ReferenceWindowSpec(4, 9), ReferenceWindowManager, True, False, False),
    (MambaSpec(4, 1, "align"), MambaManager, True, True, True),
    (MambaSpec(4), MambaManager, False, False, True),
    (CircularBufferSpec(4), CircularBufferManager, False, False, False),
    (CrossAttentionSpec(4), CrossAttentionManager, False, False, False),
    (SinkFullAttentionSpec(4, 8), SinkFullAttentionManager, True, True, False),
]


@pytest.mark.parametrize(("spec", "manager", "cacheable", "partial", "late"), KINDS)
def test_every_kind_has_its_manager_and_its_facts(
    spec: KVCacheSpec, manager: type[SingleTypeKVCacheManager], cacheable: bool, partial: bool, late: bool
) -> None:
    made = make_manager(BlockPool(9, hash_block_size=4), 2, KVCacheGroupSpec(("a",), spec))
    assert type(made) is manager
    assert (made.group_id, made.block_size) == (2, 4)
    assert made.prefix_cacheable == spec.prefix_cacheable == cacheable
    assert made.supports_partial_boundaries == partial
    assert made.findable_at_acknowledgement == late


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: FullAttentionSpec(0), "block_size"),
        (lambda: FullAttentionSpec(True), "block_size"),
        (lambda: FullAttentionSpec(4.0), "block_size"),  # type: ignore[arg-type]
        (lambda: SlidingWindowSpec(-1, 4), "block_size"),
        (lambda: SlidingWindowSpec(4, 0), "sliding_window"),
        (lambda: ChunkedLocalAttentionSpec(4, 0), "attention_chunk_size"),
        (lambda: ReferenceWindowSpec(4, 0), "sliding_window"),
        (lambda: MambaSpec(4, -1), "num_speculative_blocks"),
        (lambda: MambaSpec(4, 0, "all"), "mamba_cache_mode"),
        (lambda: CircularBufferSpec(0), "block_size"),
        (lambda: CrossAttentionSpec(0), "block_size"),
        (lambda: SinkFullAttentionSpec(4, 0), "sink_len"),
        (lambda: SinkFullAttentionSpec(4, 6), "sink_len"),
        (lambda: KVCacheGroupSpec(["a"], FULL), "layer_names"),  # type: ignore[arg-type]
        (lambda: KVCacheGroupSpec(("a",), 4), "kv_cache_spec"),  # type: ignore[arg-type]
        (lambda: KVCacheGroupSpec(("a",), FULL, 1), "draft_margin"),  # type: ignore[arg-type]
        (lambda: KVCacheGroupSpec(("a",), MambaSpec(4), True), "draft_margin"),
        (lambda: KVCacheGroupSpec(("a",), FULL, context_parallel_size=0), "context_parallel_size"),
        (lambda: KVCacheGroupSpec(("a",), FULL, pool=-1), "pool"),
    ],
)
def test_a_bad_field_is_named(make: Callable[[], object], field: str) -> None:
    with pytest.raises(SpecError, match=rf"^{field} must be"):
        make()


def test_specs_are_values() -> None:
    assert SlidingWindowSpec(4, 9) == SlidingWindowSpec(4, 9) != SlidingWindowSpec(4, 8)
    with pytest.raises(AttributeError):
        FULL.block_size = 8  # type: ignore[misc]
    assert msgspec.json.decode(msgspec.json.encode(MambaSpec(4, 2, "align")), type=MambaSpec) == MambaSpec(
        4, 2, "align"
    )


def test_ranks_share_the_tokens_of_a_block_but_not_a_state() -> None:
    assert KVCacheGroupSpec(("a",), SlidingWindowSpec(4, 9), context_parallel_size=2).block_size == 8
    assert KVCacheGroupSpec(("a",), MambaSpec(4), context_parallel_size=2).block_size == 4
    manager = make_manager(
        BlockPool(9, hash_block_size=8), 0, KVCacheGroupSpec(("a",), FULL, context_parallel_size=2)
    )
    assert manager.num_blocks(17) == 3


def test_a_block_is_whole_hash_blocks_where_it_is_cached() -> None:
    pool = BlockPool(9, hash_block_size=8)
    with pytest.raises(SpecError, match=r"group 5: block_size 4 is not a multiple .* 8"):
        make_manager(pool, 5, KVCacheGroupSpec(("a",), FULL))
    make_manager(pool, 5, KVCacheGroupSpec(("a",), CircularBufferSpec(4)))  # is not


def test_sinks_are_reserved_at_start_up_and_shared() -> None:
    pool = BlockPool(6, hash_block_size=4)
    group = KVCacheGroupSpec(("a",), SinkFullAttentionSpec(4, 12))
    manager = make_manager(pool, 0, group)
    assert isinstance(manager, SinkFullAttentionManager)
    sinks = manager.sink_block_ids
    assert len(sinks) == manager.num_reserved_blocks == 3
    assert pool.get_num_free_blocks() == 2
    assert manager.num_blocks(8) == 2  # none of them is the request's
    manager.reserve()
    assert manager.sink_block_ids == sinks
    manager.unreserve()
    assert pool.reset_prefix_cache()
    manager.reserve()
    assert manager.sink_block_ids == sinks
    with pytest.raises(NoFreeBlocksError):
        make_manager(pool, 1, group)


class OddSpec(SlidingWindowSpec, frozen=True):
    pass


class NewSpec(KVCacheSpec, frozen=True):
    pass


class NewManager(SingleTypeKVCacheManager):
    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return 0

    def num_blocks(self, num_tokens: int, num_prompt_tokens: int = 0, num_encoder_tokens: int = 0) -> int:
        return 1


def test_the_nearest_class_of_a_spec_decides() -> None:
    assert manager_class_of(OddSpec(4, 9)) is SlidingWindowManager
    with pytest.raises(SpecError, match="no manager is registered for NewSpec"):
        manager_class_of(NewSpec(4))
    try:
        register_manager(NewSpec, NewManager)
        register_manager(OddSpec, NewManager)
        assert manager_class_of(NewSpec(4)) is NewManager
        assert manager_class_of(OddSpec(4, 9)) is NewManager
        assert manager_class_of(SlidingWindowSpec(4, 9)) is SlidingWindowManager
    finally:
        MANAGERS.pop(NewSpec, None)
        MANAGERS.pop(OddSpec, None)


@pytest.mark.parametrize(
    ("spec", "manager", "name"),
    [(int, NewManager, "spec_class"), (NewSpec, int, "manager_class"), (4, NewManager, "spec_class")],
)
def test_only_specs_and_managers_are_registered(spec: type, manager: type, name: str) -> None:
    with pytest.raises(SpecError, match=rf"^{name} must be"):
        register_manager(spec, manager)


def test_policies_say_what_is_wrong() -> None:
    for alignment, interval in ((0, None), (4, 6), (4, -4)):
        with pytest.raises(ValueError, match="alignment"):
            RetentionPolicy(alignment, interval)
