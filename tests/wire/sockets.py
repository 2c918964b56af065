"""Publishers and subscribers on loopback. Nothing sleeps: everybody polls until a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

from blockpool.pool import BlockPool, StorePayload
from blockpool.wire import Fleet, Mirror, Publisher, Subscriber

DEADLINE_S = 20.0
LOOPBACK = "tcp://127.0.0.1:*"


def until(condition: Callable[[], bool], *subscribers: Subscriber) -> None:
    """Poll until it is so. Fails after a time that no machine needs."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        for one in subscribers:
            one.poll(0.01 / len(subscribers))
        states = [(one.mirror.status, one.mirror.sequence, one.mirror.reason) for one in subscribers]
        assert time.monotonic() < end, states


def publisher(**options: object) -> Publisher:
    return Publisher(LOOPBACK, LOOPBACK, **options)  # type: ignore[arg-type]


def subscriber(to: Publisher, mirror: Mirror | None = None, **options: object) -> Subscriber:
    mirror = Mirror() if mirror is None else mirror
    return Subscriber(mirror, to.endpoint, to.replay_endpoint, **options)  # type: ignore[arg-type]


def up_to(mirror: Mirror, sequence: int) -> Callable[[], bool]:
    return lambda: mirror.status == "live" and mirror.sequence == sequence


class Blocks:
    """A pool that announces one block per batch, of one long chain."""

    def __init__(self, num_blocks: int = 64) -> None:
        self.pool = BlockPool(num_blocks, hash_block_size=4, events="first_last")
        self.digests = [bytes([i]) * 32 for i in range(num_blocks)]
        self.table: list[int] = []
        self.payload = StorePayload(token_ids=range(4 * num_blocks))

    def one_more(self) -> list[object]:
        self.table += self.pool.get_new_blocks(1)
        at = len(self.table)
        self.pool.cache_full_blocks(self.table, b"".join(self.digests), at - 1, at, 4, 0, payload=self.payload)
        return list(self.pool.take_events())

    def holds(self, mirror: Mirror) -> bool:
        """Whether the mirror has what the pool has."""
        return mirror.num_blocks == len(self.pool.cached_block_hash_to_block) and all(
            (self.pool.get_cached_block(one, [0]) is not None) == (one in mirror) for one in self.digests
        )


__all__ = ["DEADLINE_S", "LOOPBACK", "Blocks", "Fleet", "publisher", "subscriber", "until", "up_to"]
