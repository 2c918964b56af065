"""One side's pools in one scenario, and everything that can be seen of them through vLLM's public surface."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sides import Side
from traffic import Shape

Ref = tuple[int, int]  # which pool, which block id
DEVICE, HOST = 0, 1


@dataclass(frozen=True)
class Scenario:
    """How the pools are made; all of it follows from the seed."""

    seed: int
    num_blocks: tuple[int, ...]  # of the device pool and, if there is one, of a host pool that shares its events
    enable_caching: bool
    enable_events: bool
    metrics: bool
    shape: Shape
    hash_name: str
    block_sizes: tuple[int, ...]  # by group
    drain_each: bool  # take the events after each operation, or let them pile up
    raw_hashes: bool  # in events: the digest's bytes instead of an int

    @classmethod
    def of(cls, seed: int) -> Scenario:
        rng = random.Random(f"scenario {seed}")
        hash_block_size = rng.choice((1, 2, 4))
        sizes = tuple(hash_block_size * rng.choice((1, 1, 2, 3)) for _ in range(rng.randint(1, 3)))
        num_blocks = [rng.choice((1, 2, 4, 6, 6, 9, 9, 14, 14, 24, 100))]
        if rng.random() < 0.2:
            num_blocks.append(rng.choice((2, 5, 8)))
        return cls(
            seed=seed,
            num_blocks=tuple(num_blocks),
            enable_caching=rng.random() < 0.88,
            enable_events=rng.random() < 0.8,
            metrics=rng.random() < 0.5,
            shape=Shape(hash_block_size, lookahead=rng.choice((0, 0, 0, 2))),
            hash_name=rng.choice(("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")),
            block_sizes=sizes,
            drain_each=rng.random() < 0.5,
            raw_hashes=rng.random() < 0.15,
        )


class MetricsLog:
    """Stands in for KVCacheMetricsCollector: writes down which hook was called with which block."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def on_block_allocated(self, block: Any) -> None:
        self.log.append(("allocated", block.block_id))

    def on_block_accessed(self, block: Any) -> None:
        self.log.append(("accessed", block.block_id))

    def on_block_evicted(self, block: Any) -> None:
        self.log.append(("evicted", block.block_id))

    def reset(self) -> None:
        self.log.append(("reset",))


class World:
    def __init__(self, side: Side, scenario: Scenario) -> None:
        self.side = side
        self.calls: list[Any] = []  # of metrics hooks and reuse callbacks, in order
        collector = MetricsLog(self.calls) if scenario.metrics else None
        settings: dict[str, Any] = {
            "enable_caching": scenario.enable_caching,
            "hash_block_size": scenario.shape.hash_block_size,
            "enable_kv_cache_events": scenario.enable_events,
            "metrics_collector": collector,
            "num_hash_lookahead_tokens": scenario.shape.lookahead,
        }
        self.pools = [side.BlockPool(num_gpu_blocks=scenario.num_blocks[DEVICE], **settings)]
        for number in scenario.num_blocks[1:]:
            host = side.SharedEventQueueBlockPool(
                num_gpu_blocks=number, event_owner=self.pools[DEVICE], medium="CPU", **settings
            )
            self.pools.append(host)
        self.drain_each = scenario.drain_each
        self.events_seen = 0

    def block(self, ref: Ref) -> Any:
        return self.pools[ref[0]].blocks[ref[1]]

    def refs(self, blocks: Iterable[Any], pool: int = DEVICE) -> list[Any]:
        """Ids of what a pool returned. A block that is not the very object in `pool.blocks` is shown as a stranger:
        vLLM compares blocks with `is`."""
        mine = self.pools[pool]
        return [
            block.block_id if mine.blocks[block.block_id] is block and block.pool is mine else f"stranger {block!r}"
            for block in blocks
        ]

    def reuse_callback(self, tag: int) -> Callable[[Any], None]:
        def reused(block: Any) -> None:
            self.calls.append(("reused", tag, block.block_id, block.ref_cnt, block.block_hash))

        return reused

    def run(self, action: Callable[[World], Any]) -> tuple[str, Any]:
        try:
            return "returned", action(self)
        except Exception as error:
            return "raised", error

    def see(self, keys: Iterable[tuple[bytes, int]]) -> dict[str, Any]:
        """All that is visible now. `keys` are (block hash, group) pairs to look up."""
        seen: dict[str, Any] = {"calls": list(self.calls)}
        for number, pool in enumerate(self.pools):
            seen |= {f"{name} of pool {number}": value for name, value in self.see_pool(number, pool, keys).items()}
        return seen

    def new_events(self) -> list[Any]:
        """What was announced since the last time, whether it is taken from the pool or left there."""
        device = self.pools[DEVICE]
        if self.drain_each:
            return [fields(event) for event in device.take_events()]
        pending = device.kv_event_queue
        new = [fields(event) for event in pending[self.events_seen :]]
        self.events_seen = len(pending)
        return new

    def take_all(self) -> list[Any]:
        self.events_seen = 0
        return [fields(event) for event in self.pools[DEVICE].take_events()]

    def see_pool(self, number: int, pool: Any, keys: Iterable[tuple[bytes, int]]) -> dict[str, Any]:
        queue = pool.free_block_queue
        return {
            "blocks": {
                block.block_id: (block.ref_cnt, block.block_hash, block.block_hash_num_tokens, block.is_null)
                for block in pool.blocks
            },
            "additional keys": {
                block_id: sorted(more) for block_id, more in sorted(pool.cached_block_hashes_by_block.items()) if more
            },
            "free queue": self.refs(queue.get_all_free_blocks(), number),
            "free count": (queue.num_free_blocks, pool.get_num_free_blocks()),
            "usage": float(pool.get_usage()),
            "number of keys": len(pool.cached_block_hash_to_block),
            "writable": [block.block_id for block in pool.blocks if pool.is_block_writable(block)],
            "hits": [self.hit(number, pool, block_hash, group) for block_hash, group in keys],
        }

    def hit(self, number: int, pool: Any, block_hash: bytes, group: int) -> Any:
        found = pool.get_cached_block(block_hash, [group])
        return None if found is None else self.refs(found, number)


def fields(event: Any) -> Any:
    """An event as comparable values, with the types that msgpack would see."""
    kind = type(event)
    values = {name: getattr(event, name) for name in event.__struct_fields__}
    return (f"{kind.__module__}.{kind.__qualname__}", {name: (type(v).__name__, v) for name, v in values.items()})
