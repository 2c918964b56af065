"""The random operations on a pool. Each is chosen from what the driver holds at that moment and a seed of its own.

So any part of a run is a run too: leaving operations out changes which blocks the later ones meet, but never makes
one of them illegal. That is what makes shrinking a failure easy.

What vLLM accepts and ours refuses on purpose is not done here:

- freeing what is not held (vLLM: the count goes to -1), and negative ids in `evict_blocks`;
- keys and announcements on a pool that was made without caching (vLLM: done as if it had been);
- `unpin_blocks` on a block whose last callback has not fired (vLLM: the new one replaces the old one).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pool_world import DEVICE, Ref, Scenario, World
from traffic import Traffic

MAX_REQUESTS = 8


@dataclass
class Row:
    """A request's blocks in one group, as a manager would hold them. Block 0 is the null block."""

    request: Any
    group: int
    block_size: int
    block_ids: list[int] = field(default_factory=list)
    num_cached: int = 0


@dataclass(frozen=True)
class Step:
    text: str
    action: Callable[[World], Any]
    after: Callable[[Any], None] = lambda result: None


class Driver:
    """What the caller of the pools knows. `reference` is vLLM's side: read to choose operations that it allows."""

    def __init__(self, scenario: Scenario, reference: World, traffic: Traffic) -> None:
        self.scenario = scenario
        self.reference = reference
        self.traffic = traffic
        self.requests: list[Any] = []
        self.rows: list[Row] = []
        self.loose: list[Ref] = []  # references that belong to no row, one entry each
        self.watched: set[Ref] = set()  # with a callback that has not fired
        self.keys: dict[tuple[bytes, int], None] = {}
        self.tags = 0
        self.fired = 0

    # what is there to choose from

    def request(self, rng: random.Random) -> Any:
        if len(self.requests) < MAX_REQUESTS or rng.random() < 0.05:
            self.traffic.rng = rng
            request = self.traffic.request(plain=rng.random() < 0.3)
            self.requests = [*self.requests[-MAX_REQUESTS + 1 :], request]
            return request
        return rng.choice(self.requests)

    def row(self, rng: random.Random) -> Row | None:
        return rng.choice(self.rows) if self.rows else None

    def blocks(self, pool: int = DEVICE) -> list[Ref]:
        """All blocks but the null one."""
        return [(pool, block_id) for block_id in range(1, self.scenario.num_blocks[pool])]

    def any_block(self, rng: random.Random, pool: int | None = None) -> Ref | None:
        chosen = rng.randrange(len(self.scenario.num_blocks)) if pool is None else pool
        blocks = self.blocks(chosen)
        return rng.choice(blocks) if blocks else None

    def hashes(self, request: Any, block_size: int) -> Any:
        """The request's hashes for blocks of that size: every k-th, as the managers take them."""
        from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize

        unit = self.scenario.shape.hash_block_size
        if block_size == unit:
            return request.block_hashes
        return BlockHashListWithBlockSize(request.block_hashes, unit, block_size)

    def remember(self, block_hash: bytes, group: int) -> None:
        self.keys.pop((block_hash, group), None)
        self.keys[(block_hash, group)] = None
        if len(self.keys) > 60:
            del self.keys[next(iter(self.keys))]

    def some_keys(self, rng: random.Random) -> list[tuple[bytes, int]]:
        keys = list(self.keys)
        return keys if len(keys) <= 6 else rng.sample(keys, 6)

    def note_callbacks(self) -> None:
        """Forgets the watchers that have fired."""
        for call in self.reference.calls[self.fired :]:
            if call[0] == "reused":
                self.watched.discard((DEVICE, call[2]))
        self.fired = len(self.reference.calls)

    def can_take_key(self, ref: Ref, num_tokens: int) -> bool:
        """vLLM wants a block's key to cover more tokens than the one before, of known length."""
        block = self.reference.block(ref)
        if block.block_hash is None:
            return True
        return block.block_hash_num_tokens is not None and block.block_hash_num_tokens < num_tokens


def in_some_shape(rng: random.Random, blocks: list[Any]) -> Iterable[Any]:
    """`free_blocks` takes any iterable: a list, a tuple, an iterator, a generator."""
    match rng.randrange(4):
        case 0:
            return blocks
        case 1:
            return tuple(blocks)
        case 2:
            return iter(blocks)
        case _:
            return (block for block in blocks)


def order(rng: random.Random, refs: list[Ref]) -> list[Ref]:
    match rng.randrange(5):
        case 0:
            return refs
        case 1:
            return rng.sample(refs, len(refs))
        case _:
            return refs[::-1]  # as the managers do


# taking


def start_row(driver: Driver, rng: random.Random) -> Step | None:
    """A request arrives in a group: hits are looked up and touched, as long as they last."""
    request = driver.request(rng)
    group = rng.randrange(len(driver.scenario.block_sizes))
    size = driver.scenario.block_sizes[group]
    hashes = list(driver.hashes(request, size))[: rng.randint(0, 8)]
    for block_hash in hashes[:3]:
        driver.remember(block_hash, group)

    def look_up_and_touch(world: World) -> list[Any]:
        pool = world.pools[DEVICE]
        hits: list[Any] = []
        for block_hash in hashes:
            found = pool.get_cached_block(block_hash, [group])
            if found is None:
                break
            hits.append(found[0])
        pool.touch(hits)
        return world.refs(hits)

    def keep(block_ids: list[int]) -> None:
        driver.rows.append(Row(request, group, size, list(block_ids), len(block_ids)))

    return Step(f"touch the hits of {request.request_id} in group {group}", look_up_and_touch, keep)


def take_blocks(driver: Driver, rng: random.Random) -> Step | None:
    row = driver.row(rng)
    free = driver.reference.pools[DEVICE].get_num_free_blocks()
    usual = min(free, 4 if driver.scenario.num_blocks[DEVICE] < 50 else 30)
    number = rng.randint(0, free + 2) if rng.random() < 0.15 else rng.randint(0, usual)

    def keep(block_ids: list[int]) -> None:
        if row is not None:
            if rng.random() < 0.1:
                row.block_ids.append(0)
            row.block_ids.extend(block_ids)
        else:
            driver.loose.extend((DEVICE, block_id) for block_id in block_ids)

    return Step(f"get_new_blocks({number})", lambda w: w.refs(w.pools[DEVICE].get_new_blocks(number)), keep)


def take_host_blocks(driver: Driver, rng: random.Random) -> Step | None:
    if len(driver.scenario.num_blocks) == 1:
        return None
    number = rng.randint(0, 3)

    def keep(block_ids: list[int]) -> None:
        driver.loose.extend((1, block_id) for block_id in block_ids)

    return Step(f"host get_new_blocks({number})", lambda w: w.refs(w.pools[1].get_new_blocks(number), 1), keep)


def touch(driver: Driver, rng: random.Random) -> Step | None:
    """Any blocks: free or held, with a key or without, one twice, the null block."""
    pool = rng.randrange(len(driver.scenario.num_blocks))
    everything = [(pool, 0), *driver.blocks(pool)]
    refs = rng.choices(everything, k=rng.randint(0, 3))
    kind = rng.choice((list, tuple))

    def keep(_: Any) -> None:
        driver.loose.extend(ref for ref in refs if ref[1] != 0)

    return Step(f"touch({refs})", lambda w: w.pools[pool].touch(kind(map(w.block, refs))), keep)


def add_reference(driver: Driver, rng: random.Random) -> Step | None:
    """vLLM's copy-on-write counts up a held block's field itself."""
    held = [ref for ref in driver.blocks() if driver.reference.block(ref).ref_cnt > 0]
    if not held:
        return None
    ref = rng.choice(held)

    def count_up(world: World) -> int:
        block = world.block(ref)
        block.ref_cnt += 1
        return int(block.ref_cnt)

    return Step(f"block {ref}.ref_cnt += 1", count_up, lambda _: driver.loose.append(ref))


# giving back


def free_row(driver: Driver, rng: random.Random) -> Step | None:
    row = driver.row(rng)
    if row is None:
        return None
    refs = order(rng, [(DEVICE, block_id) for block_id in row.block_ids])
    shape = rng.random()

    def forget(_: Any) -> None:
        driver.rows.remove(row)

    return Step(f"free_blocks({refs})", lambda w: free(w, refs, shape), forget)


def free_tail(driver: Driver, rng: random.Random) -> Step | None:
    """Blocks behind the window: some positions of a row become null."""
    row = driver.row(rng)
    if row is None or not row.block_ids:
        return None
    end = rng.randint(1, len(row.block_ids))
    refs = [(DEVICE, block_id) for block_id in reversed(row.block_ids[:end]) if block_id != 0]
    shape = rng.random()

    def null(_: Any) -> None:
        row.block_ids[:end] = [0] * end

    return Step(f"free_blocks({refs}) behind the window", lambda w: free(w, refs, shape), null)


def free_loose(driver: Driver, rng: random.Random) -> Step | None:
    """References of several owners in one batch, of two pools where there are two; a block may be in it twice."""
    if not driver.loose:
        return None
    places = rng.sample(range(len(driver.loose)), rng.randint(1, min(5, len(driver.loose))))
    refs = order(rng, [driver.loose[i] for i in places])
    if rng.random() < 0.2:
        refs = [*refs, (DEVICE, 0)]
    shape = rng.random()

    def forget(_: Any) -> None:
        driver.loose = [ref for i, ref in enumerate(driver.loose) if i not in places]

    return Step(f"free_blocks({refs})", lambda w: free(w, refs, shape), forget)


def free(world: World, refs: list[Ref], shape: float) -> None:
    world.pools[DEVICE].free_blocks(in_some_shape(random.Random(shape), [world.block(ref) for ref in refs]))


def unpin(driver: Driver, rng: random.Random) -> Step | None:
    loose = [ref for ref in dict.fromkeys(driver.loose) if ref[0] == DEVICE and ref not in driver.watched]
    if not loose:
        return None
    refs = rng.sample(loose, rng.randint(1, min(3, len(loose))))
    driver.tags += 1
    tag = driver.tags

    def forget(_: Any) -> None:
        for ref in refs:
            driver.loose.remove(ref)
            driver.watched.add(ref)

    def act(world: World) -> None:
        world.pools[DEVICE].unpin_blocks([world.block(ref) for ref in refs], world.reuse_callback(tag))

    return Step(f"unpin_blocks({refs}, callback {tag})", act, forget)


# keys


def cache_full(driver: Driver, rng: random.Random) -> Step | None:
    row = driver.row(rng)
    if row is None:
        return None
    row_start = row.num_cached if rng.random() < 0.9 else rng.randint(0, row.num_cached)
    most = min(len(row.block_ids), len(driver.hashes(row.request, row.block_size)))
    end = rng.randint(row_start, most) if most > row_start else row_start
    if rng.random() < 0.5:
        end = max(row_start, most)
    mask = [rng.random() < 0.6 for _ in range(end - row_start)] if rng.random() < 0.35 else None
    hashes = list(driver.hashes(row.request, row.block_size))
    for i in range(row_start, end):
        if mask is not None and not mask[i - row_start]:
            continue
        block_id = row.block_ids[i]
        if block_id != 0 and not driver.can_take_key((DEVICE, block_id), (i + 1) * row.block_size):
            return None
        driver.remember(hashes[i], row.group)

    def act(world: World) -> None:
        pool = world.pools[DEVICE]
        blocks = [pool.null_block if block_id == 0 else pool.blocks[block_id] for block_id in row.block_ids]
        if mask is None:
            pool.cache_full_blocks(row.request, blocks, row_start, end, row.block_size, row.group)
        else:
            pool.cache_full_blocks(
                request=row.request,
                blocks=blocks,
                num_cached_blocks=row_start,
                num_full_blocks=end,
                block_size=row.block_size,
                kv_cache_group_id=row.group,
                block_mask=mask,
            )

    def move_on(_: Any) -> None:
        row.num_cached = max(row.num_cached, end)

    text = f"cache_full_blocks({row.request.request_id}, {row.block_ids}, {row_start}, {end}, {row.block_size}, "
    return Step(f"{text}group {row.group}, mask {mask})", act, move_on)


def cache_partial(driver: Driver, rng: random.Random) -> Step | None:
    """Mostly the block that a request is filling, else any block at all."""
    row = driver.row(rng)
    if row is None or not row.block_ids:
        return None
    unit = driver.scenario.shape.hash_block_size
    position = rng.randrange(len(row.block_ids))
    num_tokens = position * row.block_size + unit * rng.randint(1, row.block_size // unit)
    if num_tokens > len(row.request.block_hashes) * unit:
        return None
    ref = (DEVICE, row.block_ids[position])
    if rng.random() < 0.15:
        ref = driver.any_block(rng, DEVICE) or ref
    replace = rng.random() < 0.25
    driver.remember(row.request.block_hashes[num_tokens // unit - 1], row.group)

    def act(world: World) -> Any:
        more = {"replace_existing_hashes": True} if replace else {}
        return world.pools[DEVICE].cache_partial_block(
            request=row.request,
            block=world.block(ref),
            num_tokens=num_tokens,
            kv_cache_group_id=row.group,
            block_size=row.block_size,
            **more,
        )

    return Step(f"cache_partial_block({row.request.request_id}, {ref}, {num_tokens}, replace {replace})", act)


def insert_key(driver: Driver, rng: random.Random) -> Step | None:
    """As the offload connector does when a block has arrived in the other tier."""
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    ref = driver.any_block(rng)
    request = driver.request(rng)
    if ref is None or not request.block_hashes:
        return None
    position = rng.randrange(len(request.block_hashes))
    group = rng.randrange(len(driver.scenario.block_sizes))
    key = make_block_hash_with_group_id(request.block_hashes[position], group)
    num_tokens = None if rng.random() < 0.3 else (position + 1) * driver.scenario.shape.hash_block_size
    driver.remember(request.block_hashes[position], group)
    return Step(
        f"_insert_block_hash({key.hex()[:8]}, {ref}, {num_tokens})",
        lambda w: w.pools[ref[0]]._insert_block_hash(key, w.block(ref), num_tokens),
    )


def move_keys(driver: Driver, rng: random.Random) -> Step | None:
    source, target = driver.any_block(rng, DEVICE), driver.any_block(rng, DEVICE)
    if source is None or target is None or source == target or driver.reference.block(target).block_hash is not None:
        return None
    return Step(
        f"move_block_hashes({source}, {target})",
        lambda w: w.pools[DEVICE].move_block_hashes(w.block(source), w.block(target)),
    )


def evict_one(driver: Driver, rng: random.Random) -> Step | None:
    ref = driver.any_block(rng)
    if ref is None:
        return None
    return Step(
        f"_maybe_evict_cached_block({ref})", lambda w: w.pools[ref[0]]._maybe_evict_cached_block(w.block(ref))
    )


def evict(driver: Driver, rng: random.Random) -> Step | None:
    pool = rng.randrange(len(driver.scenario.num_blocks))
    ids = set(rng.choices(range(driver.scenario.num_blocks[pool]), k=rng.randint(0, 3)))
    if len(ids) > 1 and driver.scenario.enable_events:
        ids = {min(ids)}  # a set's order is nobody's promise, and the events follow it
    return Step(f"evict_blocks({ids}) of pool {pool}", lambda w: w.pools[pool].evict_blocks(ids))


def look_up(driver: Driver, rng: random.Random) -> Step | None:
    request = driver.request(rng)
    groups = rng.sample(range(len(driver.scenario.block_sizes)), rng.randint(0, len(driver.scenario.block_sizes)))
    size = driver.scenario.block_sizes[groups[0]] if groups else driver.scenario.shape.hash_block_size
    hashes = driver.hashes(request, size)
    if len(hashes) == 0:
        return None
    block_hash = hashes[rng.randrange(min(3, len(hashes)))]

    def act(world: World) -> Any:
        found = world.pools[DEVICE].get_cached_block(block_hash, groups)
        return None if found is None else world.refs(found)

    return Step(f"get_cached_block({block_hash.hex()[:8]}, {groups})", act)


def read_index(driver: Driver, rng: random.Random) -> Step | None:
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    ref = driver.any_block(rng)
    if ref is None or not driver.keys:
        return None
    key = make_block_hash_with_group_id(*rng.choice(list(driver.keys)))

    def act(world: World) -> Any:
        pool = world.pools[ref[0]]
        index = pool.cached_block_hash_to_block
        found = index.get_one_block(key)
        return None if found is None else world.refs([found], ref[0]), index.contain(key, ref[1]), len(index)

    return Step(f"index reads of {key.hex()[:8]} and block {ref}", act)


# the rest


def grow_request(driver: Driver, rng: random.Random) -> Step | None:
    request = driver.request(rng)
    if request.num_tokens > 120:
        return None
    driver.traffic.rng = rng
    driver.traffic.grow(request)
    return Step(f"{request.request_id} grows to {request.num_tokens} tokens", lambda w: None)


def announce(driver: Driver, rng: random.Random) -> Step | None:
    request = driver.request(rng)
    group = rng.randrange(len(driver.scenario.block_sizes))
    size = driver.scenario.block_sizes[group]
    number = rng.randint(0, len(driver.hashes(request, size)))
    return Step(
        f"emit_cached_block_events({request.request_id}, {number}, {size}, {group})",
        lambda w: w.pools[DEVICE].emit_cached_block_events(request, number, size, group),
    )


def reset(driver: Driver, rng: random.Random) -> Step | None:
    pool = rng.randrange(len(driver.scenario.num_blocks))
    return Step(f"reset_prefix_cache() of pool {pool}", lambda w: w.pools[pool].reset_prefix_cache())


def free_all_and_reset(driver: Driver, rng: random.Random) -> Step | None:
    refs = [*driver.loose, *((DEVICE, block_id) for row in driver.rows for block_id in row.block_ids)]

    def act(world: World) -> Any:
        world.pools[DEVICE].free_blocks(world.block(ref) for ref in refs)
        return world.pools[DEVICE].reset_prefix_cache()

    def forget(_: Any) -> None:
        driver.loose, driver.rows = [], []

    return Step(f"free_blocks({refs}) and reset_prefix_cache()", act, forget)


def take_events(driver: Driver, rng: random.Random) -> Step | None:
    """Their number only: each was compared when it was announced."""
    return Step("take_events()", lambda w: w.drain_each or len(w.take_all()) >= 0)


def walk_queue(driver: Driver, rng: random.Random) -> Step | None:
    """From a cursor that is in the queue, or from the head; read only so far, as the offload manager does."""
    queued = driver.reference.pools[DEVICE].free_block_queue.get_all_free_blocks()
    cursor = rng.choice([None, *(block.block_id for block in queued)])
    most = rng.randint(0, len(queued) + 1)

    def act(world: World) -> Any:
        pool = world.pools[DEVICE]
        start = None if cursor is None else pool.blocks[cursor]
        return world.refs(first(most, pool.free_block_queue.iter_blocks_after(start)))

    return Step(f"iter_blocks_after({cursor}), {most} steps", act)


def first(number: int, items: Iterator[Any]) -> Iterator[Any]:
    return (item for _, item in zip(range(number), items, strict=False))


def read_links(driver: Driver, rng: random.Random) -> Step | None:
    """Each block's neighbours in the queue, and its text."""

    def act(world: World) -> Any:
        blocks = world.pools[DEVICE].blocks
        links = [(b.prev_free_block, b.next_free_block) for b in blocks]
        return [(getattr(before, "block_id", None), getattr(after, "block_id", None)) for before, after in links]

    return Step("prev_free_block and next_free_block of all blocks", act)


def bad_call(driver: Driver, rng: random.Random) -> Step | None:
    """What both refuse, and nothing has changed."""
    pool_size = driver.scenario.num_blocks[DEVICE]
    row = driver.row(rng)
    match rng.randrange(5):
        case 4:
            wrong = rng.choice((0, -1))
            return Step(f"a pool of {wrong} blocks", lambda w: w.side.BlockPool(wrong, True, 1))
        case 0:
            return Step(f"get_new_blocks({pool_size})", lambda w: w.pools[DEVICE].get_new_blocks(pool_size))
        case 1:
            return Step(f"evict_blocks({{{pool_size}}})", lambda w: w.pools[DEVICE].evict_blocks({pool_size}))
        case 2 if row is not None and row.block_ids and len(driver.hashes(row.request, row.block_size)) > 0:
            block_ids = row.block_ids

            def wrong_mask(world: World) -> None:
                blocks = [world.block((DEVICE, block_id)) for block_id in block_ids]
                world.pools[DEVICE].cache_full_blocks(
                    row.request, blocks, 0, 1, row.block_size, row.group, block_mask=[True, True]
                )

            return Step(f"cache_full_blocks({row.block_ids}, 0, 1) with a mask of two", wrong_mask)
        case 3 if row is not None and row.block_ids and driver.scenario.shape.hash_block_size > 1:
            ref = (DEVICE, row.block_ids[0])
            if ref[1] == 0:
                return None
            return Step(
                f"cache_partial_block({ref}, 1 token)",
                lambda w: w.pools[DEVICE].cache_partial_block(
                    row.request, w.block(ref), 1, row.group, row.block_size
                ),
            )
    return None


Operation = Callable[[Driver, random.Random], Step | None]

WITHOUT_KEYS: dict[Operation, int] = {
    start_row: 8, take_blocks: 14, take_host_blocks: 2, touch: 5, add_reference: 2, free_row: 6, free_tail: 2,
    free_loose: 6, unpin: 3, look_up: 2, grow_request: 4, reset: 1, take_events: 2, walk_queue: 2, read_links: 1,
    bad_call: 1,
}  # fmt: skip
WITH_KEYS: dict[Operation, int] = {
    cache_full: 14, cache_partial: 7, insert_key: 3, move_keys: 3, evict_one: 1, evict: 3, read_index: 2, announce: 2,
    free_all_and_reset: 1,
}  # fmt: skip
