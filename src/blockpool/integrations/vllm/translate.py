"""A KV cache as vLLM describes it, in our words; or why our manager is not for it. Not compiled: run once."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import msgspec

from blockpool.cache import ConfigError, KVCacheConfig
from blockpool.managers import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    ReferenceWindowSpec,
    SlidingWindowSpec,
    SpecError,
)

MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"


class NotForUs(Exception):
    """What vLLM asks for that our manager does not do: vLLM's own is used instead."""


class Translated(msgspec.Struct, frozen=True):
    """`config` in our words. `alignment`: every hit ends at its multiples, in tokens. `is_fine`: inside blocks too.

    `margins`: the groups whose hits keep a distance from the end of what is cached. `caps`: the most blocks that a
    request needs at a time per group, as vLLM counts them at admission; 0 for no cap.
    """

    config: KVCacheConfig
    alignment: int
    is_fine: bool
    margins: tuple[bool, ...]
    caps: tuple[int, ...]


def translate(
    theirs: Any,
    *,
    max_model_len: int,
    max_in_flight_tokens: int,
    scheduler_block_size: int,
    hash_block_size: int,
    enable_caching: bool,
    use_eagle: bool,
    num_prefill_lookahead: int,
    dcp_world_size: int,
    pcp_world_size: int,
    shared_prefix_checkpoint: bool,
) -> Translated:
    """vLLM's KVCacheConfig for our manager. Raises NotForUs."""
    groups = theirs.kv_cache_groups
    if not groups:
        raise NotForUs("a model without any KV cache")
    if pcp_world_size != 1:
        raise NotForUs("prefill context parallelism")
    if any(margins_asked(groups, enable_caching and use_eagle)) and scheduler_block_size < num_prefill_lookahead:
        raise NotForUs("drafts that reach further than a scheduler block")
    if shared_prefix_checkpoint:
        raise NotForUs("checkpoints of Mamba states at shared prefixes")
    kinds = [kind_of(group) for group in groups]
    check_retention(theirs.prefix_cache_retention_interval, kinds, scheduler_block_size)
    specs = [
        spec_of(kind, group.kv_cache_spec, max_model_len, enable_caching)
        for kind, group in zip(kinds, groups, strict=True)
    ]
    margins = margins_of(groups, kinds, enable_caching and use_eagle)
    shared = [dcp_world_size if group.kv_cache_spec.dcp_sharded else 1 for group in groups]
    try:
        config = KVCacheConfig(
            theirs.num_blocks,
            tuple(
                KVCacheGroupSpec(tuple(group.layer_names), spec, draft_margin=margin, context_parallel_size=ranks)
                for group, spec, margin, ranks in zip(groups, specs, margins, shared, strict=True)
            ),
            hash_block_size=hash_block_size if enable_caching else None,
            retention_interval=theirs.prefix_cache_retention_interval if enable_caching else None,
        )
    except (ConfigError, SpecError) as wrong:
        raise NotForUs(str(wrong)) from None
    sizes = [group.block_size for group in config.kv_cache_groups]
    cached = [size for size, spec in zip(sizes, specs, strict=True) if spec.prefix_cacheable]
    if enable_caching and not cached:
        raise NotForUs("prefix caching without a group that can be hit")
    if any(scheduler_block_size % size for size in sizes) or scheduler_block_size % hash_block_size:
        raise NotForUs("a scheduler block size that is no multiple of every block size")
    if enable_caching and len(groups) == 1 and sizes[0] != hash_block_size:
        raise NotForUs("one group whose block size is not the hash block size")
    is_fine = (
        enable_caching and len(groups) > 1 and hits_end_inside(kinds, specs, sizes, hash_block_size, dcp_world_size)
    )
    alignment = hash_block_size if is_fine else scheduler_block_size
    if len(groups) == 1:
        alignment = sizes[0]
    caps = [
        cap_of(kind, group.kv_cache_spec, size, max_model_len, max_in_flight_tokens)
        for kind, group, size in zip(kinds, groups, sizes, strict=True)
    ]
    return Translated(config, alignment, is_fine, tuple(margins), tuple(caps))


def check_retention(interval: int | None, kinds: Sequence[str], scheduler_block_size: int) -> None:
    """What vLLM refuses, it is to refuse in its own words."""
    if interval and (interval % scheduler_block_size or not {"SlidingWindowManager", "MambaManager"} & set(kinds)):
        raise NotForUs(f"a retention interval of {interval} tokens here")


def kind_of(group: Any) -> str:
    """The name of the vLLM manager that would keep the group. Raises NotForUs when it is none of vLLM's own."""
    role = getattr(group.role, "value", group.role)
    if group.host_resident or role != "default":
        raise NotForUs("KV caches in host memory (HiSparse)")
    registry: Any = import_module("vllm.v1.kv_cache_spec_registry").KVCacheSpecRegistry
    found = registry.get_manager_class(group.kv_cache_spec, role)
    name = getattr(found, "__name__", "none")
    if name not in KINDS or found is not getattr(import_module(MANAGERS), name, None):
        raise NotForUs(f"{type(group.kv_cache_spec).__name__}, which is kept by {name}")
    return str(name)


def spec_of(kind: str, theirs: Any, max_model_len: int, enable_caching: bool) -> KVCacheSpec:
    size = theirs.block_size
    if getattr(theirs, "extra_retained_tokens", 0):
        raise NotForUs("a sliding window that keeps more tokens than it reads")
    if kind in CACHEABLE and not getattr(theirs, "prefix_cacheable", True):
        raise NotForUs(f"{type(theirs).__name__} that cannot be hit")
    match kind:
        case "FullAttentionManager":
            return FullAttentionSpec(size)
        case "RSWAManager":
            return ReferenceWindowSpec(size, theirs.rswa_window)
        case "SlidingWindowManager":
            return SlidingWindowSpec(size, theirs.sliding_window)
        case "ChunkedLocalAttentionManager":
            if theirs.attention_chunk_size % size:
                raise NotForUs("chunks of local attention that are no whole blocks")
            return ChunkedLocalAttentionSpec(size, theirs.attention_chunk_size)
        case "MambaManager":
            return mamba_spec_of(theirs, max_model_len, enable_caching)
        case "CrossAttentionManager":
            return CrossAttentionSpec(size)
    return CircularBufferSpec(size)


def mamba_spec_of(theirs: Any, max_model_len: int, enable_caching: bool) -> KVCacheSpec:
    mode = theirs.mamba_cache_mode
    if theirs.num_prefill_checkpoint_blocks:
        raise NotForUs("Mamba states that a prefill leaves inside a chunk (prefill checkpoint blocks)")
    if mode not in ("none", "align") or (mode == "none" and (enable_caching or theirs.block_size < max_model_len)):
        raise NotForUs(f"Mamba in mode {mode!r} with prefix caching or with blocks shorter than a request")
    return MambaSpec(theirs.block_size, theirs.num_speculative_blocks, mode)


def margins_of(groups: Sequence[Any], kinds: Sequence[str], use_eagle: bool) -> list[bool]:
    """The groups that draft layers share, and those of equal kind, which vLLM looks up together."""
    drafts = margins_asked(groups, use_eagle)
    margins = [
        any(
            draft and other == kind and (one is group or one.kv_cache_spec == group.kv_cache_spec)
            for draft, other, one in zip(drafts, kinds, groups, strict=True)
        )
        for kind, group in zip(kinds, groups, strict=True)
    ]
    for kind, margin in zip(kinds, margins, strict=True):
        if margin and kind not in ("FullAttentionManager", "RSWAManager", "SlidingWindowManager"):
            raise NotForUs(f"drafts whose layers are kept by {kind}")
    return margins


def margins_asked(groups: Sequence[Any], use_eagle: bool) -> list[bool]:
    """The groups that hold layers of a draft model; all of them, when none says so."""
    drafts = [use_eagle and bool(group.is_eagle_group) for group in groups]
    return drafts if any(drafts) else [use_eagle] * len(groups)


def hits_end_inside(
    kinds: Sequence[str], specs: Sequence[KVCacheSpec], sizes: Sequence[int], unit: int, num_ranks: int
) -> bool:
    """Whether vLLM has hits that end inside blocks: a state group asks for it, and no other stands in the way."""
    states = [
        size > unit or (num_ranks > 1 and size == unit)
        for kind, size in zip(kinds, sizes, strict=True)
        if kind == "MambaManager"
    ]
    return any(states) and all(
        kind in ("FullAttentionManager", "RSWAManager", "MambaManager") or size == unit or not spec.prefix_cacheable
        for kind, spec, size in zip(kinds, specs, sizes, strict=True)
    )


def cap_of(kind: str, theirs: Any, size: int, max_model_len: int, max_in_flight_tokens: int) -> int:
    if kind == "SlidingWindowManager":
        return -(-min(int(theirs.sliding_window) - 1 + max_in_flight_tokens, max_model_len) // size) + 1
    if kind == "ChunkedLocalAttentionManager":
        return -(-min(int(theirs.attention_chunk_size) + max_in_flight_tokens, max_model_len) // size)
    if kind == "MambaManager":
        return 1 + int(theirs.num_speculative_blocks)
    return 0


CACHEABLE = frozenset(
    {"FullAttentionManager", "RSWAManager", "SlidingWindowManager", "ChunkedLocalAttentionManager", "MambaManager"}
)
KINDS = CACHEABLE | {"CrossAttentionManager", "CircularBufferManager"}
