"""How many blocks a request needs as vLLM counts them, for its admission; and hits made of vLLM's lists of blocks."""

from __future__ import annotations

from typing import Any

from librt.vecs import append, vec
from mypy_extensions import i32, i64

from blockpool.integrations.vllm.block import KVCacheBlock
from blockpool.integrations.vllm.errors import StrangerError
from blockpool.integrations.vllm.home import Home
from blockpool.managers import NOTHING_FOUND, GroupHit, SingleTypeKVCacheManager
from blockpool.pool.layout import TURN, zeros32


def hit_of(
    manager: SingleTypeKVCacheManager, home: Home, blocks: Any, num_tokens: int, num_computed_tokens: int
) -> GroupHit:
    """The hit that vLLM hands over as a list of blocks, without what is not read any more at num_computed_tokens."""
    count: i64 = len(blocks)
    if count == 0:
        return NOTHING_FOUND
    size = manager.block_size
    unread: i64 = manager.num_skipped_tokens(num_computed_tokens) // size
    records = manager.pool.records
    ids = zeros32(count)
    turns = zeros32(count)
    first: i64 = 0
    at: i64 = 0
    for block in blocks:
        if not isinstance(block, KVCacheBlock) or block._home is not home:
            raise StrangerError(f"{block!r} is not a block of this pool")
        b = block._place
        if at >= unread and b != 0:
            ids[at] = i32(b)
            turns[at] = i32(records.get(b, TURN))
        elif first == at:
            first = at + 1
        at += 1
    return GroupHit(ids, turns, min(num_tokens, int(count) * size), int(first))


def blocks_of(members: list[KVCacheBlock], ids: vec[i32]) -> list[KVCacheBlock]:
    return [members[i64(b)] for b in ids]


def without_null(ids: vec[i32]) -> vec[i32]:
    out = vec[i32]()
    for b in ids:
        if b != 0:
            out = append(out, b)
    return out


def demand_of(
    manager: SingleTypeKVCacheManager,
    request_id: str,
    num_tokens: int,
    num_main_tokens: int,
    hit: GroupHit,
    num_computed_tokens: int,
    num_prompt_tokens: int,
    num_encoder_tokens: int,
    cap: int,
) -> int:
    """Blocks that the pool must have for the request to reach `num_tokens`; `cap`: the most at a time, 0 for none."""
    copied = int(hit.num_tokens % manager.block_size != 0)
    from_queue = manager.num_evictable(hit)
    if manager.is_state:
        new = manager.num_new_blocks(
            request_id, num_main_tokens, hit, num_computed_tokens, num_prompt_tokens, num_encoder_tokens
        )
        if cap > 0:  # what a connector brings is not read any more when the rest is computed
            new = min(new, cap + copied)
        return from_queue + new
    required = manager.num_blocks(num_tokens, num_prompt_tokens, num_encoder_tokens)
    if cap > 0:
        required = min(required, cap)
    if request_id in manager.tables:
        return max(0, required - manager.num_held(request_id))
    unread = manager.num_skipped_tokens(num_computed_tokens) // manager.block_size
    return max(0, required - max(unread, len(hit))) + from_queue + copied
