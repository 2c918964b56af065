"""Caches of several groups for tests, and how requests run through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blockpool.cache import KVCacheConfig, KVCacheManager, Request
from blockpool.hashing import BlockHasher
from blockpool.managers import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

UNIT = 4
HASHERS = {unit: BlockHasher(hash_block_size=unit, seed="groups") for unit in (2, 4)}
FULL = FullAttentionSpec(4)
STATE = MambaSpec(4, 0, "align")


def window(width: int, size: int = 4) -> SlidingWindowSpec:
    return SlidingWindowSpec(size, width)


def group(spec: KVCacheSpec, **options: Any) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(("layer",), spec, **options)


def cache(
    usable_blocks: int | tuple[int, ...],
    *groups: KVCacheSpec | KVCacheGroupSpec,
    unit: int = UNIT,
    retention_interval: int | None = None,
    **options: Any,
) -> KVCacheManager:
    """A manager of these groups; `usable_blocks` without the null block, a tuple: one number per pool."""
    num_blocks = usable_blocks + 1 if isinstance(usable_blocks, int) else tuple(n + 1 for n in usable_blocks)
    config = KVCacheConfig(
        num_blocks,
        tuple(g if isinstance(g, KVCacheGroupSpec) else group(g) for g in groups),
        hash_block_size=unit,
        retention_interval=retention_interval,
    )
    return KVCacheManager(config, events="first_last", **options)


def request(name: str, tokens: int | Sequence[int], unit: int = UNIT, **options: Any) -> Request:
    """A prompt; a number n stands for the tokens 0 .. n-1."""
    ids = list(range(tokens)) if isinstance(tokens, int) else list(tokens)
    return Request(name, ids, hasher=HASHERS[unit], **options)


def compute(manager: KVCacheManager, r: Request, num_tokens: int | None = None, **options: Any) -> int:
    """Admit a request, or go on with it, up to so many tokens (its whole prompt); the tokens that a hit spared."""
    end = r.num_tokens if num_tokens is None else num_tokens
    hit = None if r.num_computed_tokens else manager.get_computed_blocks(r)
    spared = 0 if hit is None else hit.num_tokens
    blocks = manager.allocate_slots(r, end - r.num_computed_tokens - spared, spared, hit, **options)
    assert blocks is not None, manager.last_refusal
    r.num_computed_tokens = end
    return spared


def hit_length(manager: KVCacheManager, tokens: int | Sequence[int], unit: int = UNIT) -> int:
    return manager.get_computed_blocks(request("probe", tokens, unit)).num_tokens


def refs(manager: KVCacheManager, *blocks: int, pool: int = 0) -> list[int]:
    return [manager.pools[pool].blocks[block].ref_cnt for block in blocks]


def drain(manager: KVCacheManager, pool: int = 0) -> list[int]:
    """Take all that is free."""
    return manager.pools[pool].get_new_blocks(manager.pools[pool].get_num_free_blocks())


def audit(manager: KVCacheManager) -> None:
    assert [pool.audit() for pool in manager.pools] == [[] for _ in manager.pools]


def state_of(manager: KVCacheManager, *requests: Request) -> Any:
    """All that a refusal must leave as it was."""
    return (
        [pool.dump() for pool in manager.pools],
        [pool.counters for pool in manager.pools],
        manager.version,
        manager.stats.total,
        [manager.get_block_ids(r) for r in requests],
    )


SINK = SinkFullAttentionSpec(4, 8)
