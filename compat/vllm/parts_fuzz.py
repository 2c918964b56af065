"""Compares the parts on their own, as vLLM's tests and connectors use them: blocks that belong to no pool, the free
queue built from a list of them, the map from keys to blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from lockstep import Parting, first_difference, same_outcome, shrink
from sides import Side

OPERATIONS_PER_SCENARIO = 120
Call = tuple[str, Callable[["Parts"], Any]]


class Parts:
    """One side's blocks, queue and map. `queued` is what both have in the queue, by block id."""

    def __init__(self, side: Side, number: int) -> None:
        self.blocks = [side.KVCacheBlock(block_id) for block_id in range(number)]
        self.queue = side.FreeKVCacheBlockQueue(list(self.blocks))
        self.index = side.BlockHashToBlockMap()

    def ids(self, blocks: Sequence[Any]) -> list[Any]:
        """Ids, or the block's text if it is not the very object that was put in."""
        return [b.block_id if self.blocks[b.block_id] is b else f"stranger {b!r}" for b in blocks]

    def see(self) -> dict[str, Any]:
        ends = [self.queue.fake_free_list_head, *self.blocks, self.queue.fake_free_list_tail]
        return {
            "order": self.ids(self.queue.get_all_free_blocks()),
            "count": self.queue.num_free_blocks,
            "links": [(id_of(block.prev_free_block), id_of(block.next_free_block)) for block in ends],
            "blocks": [
                (b.block_id, b.ref_cnt, b.block_hash, b.block_hash_num_tokens, b.is_null) for b in self.blocks
            ],
            "pools": [block.pool for block in self.blocks],
            "keys": len(self.index),
        }


def id_of(block: Any) -> Any:
    return None if block is None else block.block_id


def queue_call(rng: random.Random, parts: Parts) -> Call:
    """On the free queue. `parts` is vLLM's side: what is in its queue decides what may be done."""
    inside = [block.block_id for block in parts.queue.get_all_free_blocks()]
    outside = [block.block_id for block in parts.blocks if block.block_id not in inside]
    some = rng.sample(outside, rng.randint(0, len(outside)))
    match rng.randrange(9):
        case 0:
            return "popleft()", lambda p: p.ids([p.queue.popleft()])
        case 1:
            number = rng.randint(0, len(inside) + (rng.random() < 0.1))
            return f"popleft_n({number})", lambda p: p.ids(p.queue.popleft_n(number))
        case 2 if inside:
            block_id = rng.choice(inside)
            return f"remove({block_id})", lambda p: p.queue.remove(p.blocks[block_id])
        case 3 if outside and rng.random() < 0.2:
            block_id = rng.choice(outside)
            return f"remove({block_id}), which is not queued", lambda p: p.queue.remove(p.blocks[block_id])
        case 4 if outside:
            block_id = rng.choice(outside)
            return f"append({block_id})", lambda p: p.queue.append(p.blocks[block_id])
        case 5:
            return f"append_n({some})", lambda p: p.queue.append_n([p.blocks[i] for i in some])
        case 6:
            return f"prepend_n({some})", lambda p: p.queue.prepend_n([p.blocks[i] for i in some])
    cursor = rng.choice([None, *inside])
    after = f"iter_blocks_after({cursor})"
    return after, lambda p: p.ids(list(p.queue.iter_blocks_after(None if cursor is None else p.blocks[cursor])))


def map_call(rng: random.Random, parts: Parts) -> Call:
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    key = make_block_hash_with_group_id(bytes([rng.randrange(3)]) * 32, rng.randrange(2))
    block_id = rng.randrange(len(parts.blocks))
    name = f"{key[:1].hex()}:{key[-1]}"
    match rng.randrange(5):
        case 0 | 1:
            return f"insert({name}, {block_id})", lambda p: p.index.insert(key, p.blocks[block_id])
        case 2:
            return f"pop({name}, {block_id})", lambda p: some_ids(p, p.index.pop(key, block_id))
        case 3:
            return f"get_one_block({name})", lambda p: some_ids(p, p.index.get_one_block(key))
    return f"contain({name}, {block_id})", lambda p: p.index.contain(key, block_id)


def some_ids(parts: Parts, block: Any) -> Any:
    return None if block is None else parts.ids([block])


def block_call(rng: random.Random, parts: Parts) -> Call:
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    block_id, other = (rng.randrange(len(parts.blocks)) for _ in range(2))
    key = make_block_hash_with_group_id(bytes([rng.randrange(3)]) * 32, 0)
    number = rng.choice((None, 4, 8))
    match rng.randrange(5):
        case 0 | 1:
            more = () if number is None else (number,)
            return f"set_block_hash({block_id})", lambda p: p.blocks[block_id].set_block_hash(key, *more)
        case 2:
            return f"reset_hash({block_id})", lambda p: p.blocks[block_id].reset_hash()
        case 3:
            return f"ref_cnt of {block_id} = {number or 0}", lambda p: setattr(
                p.blocks[block_id], "ref_cnt", number or 0
            )
    return f"{block_id} == {other}", lambda p: p.blocks[block_id] == p.blocks[other]


def replay(theirs: Side, ours: Side, seed: int, planned: Sequence[int]) -> tuple[int, Parting | None]:
    rng = random.Random(f"parts {seed}")
    number = rng.randint(1, 9)
    sides = (Parts(theirs, number), Parts(ours, number))
    history: list[str] = []

    for step in planned:
        rng = random.Random(f"parts {seed} {step}")
        text, act = rng.choice((queue_call, queue_call, map_call, block_call))(rng, sides[0])
        history.append(text)
        outcomes = [outcome(act, parts) for parts in sides]
        found = same_outcome(*outcomes) or first_difference(*(parts.see() for parts in sides))
        if found:
            return len(history), Parting("the parts", seed, len(history), *found, tuple(history))
    return len(history), None


def outcome(act: Callable[[Parts], Any], parts: Parts) -> tuple[str, Any]:
    try:
        return "returned", act(parts)
    except Exception as error:
        return "raised", error


def fuzz_parts(theirs: Side, ours: Side, seed: int) -> tuple[int, Parting | None]:
    """One scenario. The number of calls compared, and the first difference, shrunk."""
    planned = range(OPERATIONS_PER_SCENARIO)
    done, parting = replay(theirs, ours, seed, planned)
    if parting is None:
        return done, None
    return done, shrink(planned, lambda fewer: replay(theirs, ours, seed, fewer)[1], parting)
