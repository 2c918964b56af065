"""A pool, its publisher and a network without sockets: messages in order on one connection, which may lose them,
be cut, and find another publisher at the other end.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, deque

from blockpool.pool import BlockPool, StorePayload
from blockpool.wire.desk import Desk
from blockpool.wire.mirror import Mirror, MirrorStatus, ReplayWanted
from blockpool.wire.protocol import (
    END,
    SNAPSHOT,
    STATUS,
    PublisherStatus,
    decode_status,
    sequence_bytes,
    sequence_number,
    snapshot_end,
)

UNIT = 4
SIZE = 8
CHAINS = [
    [hashlib.sha256(bytes([c if i >= fork else 0, i])).digest() for i in range(12)]
    for c, fork in ((0, 0), (1, 2), (2, 4), (3, 0))
]
Keys = Counter[tuple[bytes, int]]


class TracedPool:
    """Random operations on a real pool, as an engine might do them."""

    def __init__(self, num_blocks: int, events: str, rng: random.Random) -> None:
        self.pool = BlockPool(num_blocks, hash_block_size=UNIT, events=events)
        self.events = events
        self.rng = rng
        self.payload = StorePayload(token_ids=range(100))

    def change(self) -> None:
        pool, rng = self.pool, self.rng
        held = [b for b in range(1, pool.num_gpu_blocks) if pool.blocks[b].ref_cnt]
        match rng.randrange(9):
            case 0 | 1 | 2:
                count = rng.randint(0, min(4, pool.get_num_free_blocks()))
                blocks = pool.get_new_blocks(count)
                first = rng.randint(0, 2)
                table = [0] * first + blocks
                chain = b"".join(rng.choice(CHAINS))
                mask = [rng.random() < 0.8 for _ in blocks]
                if rng.random() < 0.8:
                    pool.cache_full_blocks(
                        table, chain, first, len(table), SIZE, rng.randint(0, 1), mask, payload=self.payload
                    )
            case 3 | 4:
                blocks = rng.sample(held, min(len(held), 4))
                pool.free_blocks(blocks)
            case 5:
                pool.evict_blocks([rng.randrange(pool.num_gpu_blocks)])
            case 6:
                plain = [b for b in held if not pool.get_block_hashes(b)]
                if plain:
                    at = rng.randint(1, 12)
                    chain = rng.choice(CHAINS)
                    payload = StorePayload(token_ids=range(100), parent=chain[at - 2] if at > 1 else None)
                    pool.cache_partial_block(rng.choice(plain), chain[at - 1], at * UNIT, 0, SIZE, payload=payload)
            case 7:
                if rng.random() < 0.3:
                    pool.free_blocks([b for b in held for _ in range(pool.blocks[b].ref_cnt)])
                    pool.reset_prefix_cache()
            case 8:
                cached = [b for b in range(1, pool.num_gpu_blocks) if pool.get_block_hashes(b)]
                pool.touch(rng.sample(cached, min(len(cached), 2)))

    def keys(self) -> Keys:
        """What can be hit, as often as it is announced."""
        out: Keys = Counter()
        for row in self.pool.cached_block_hash_to_block.listing():
            key = bytes.fromhex(row["key"])
            copies = len(row["blocks"]) if self.events == "per_copy" else 1
            out[key[:-4], int.from_bytes(key[-4:], "big")] = copies
        return out


class Engine:
    """One life of a publisher. `has_status`: ours; else it answers as vLLM's does, to numbers only."""

    def __init__(self, world: World) -> None:
        rng = world.rng
        self.traced = TracedPool(rng.randint(2, 12), world.events, rng)
        self.desk = Desk(
            f"life {world.num_lives}",
            convention=world.events if world.says_convention else None,
            buffer_steps=world.buffer_steps,
            max_queue_size=world.queue_size,
            clock=world.tick,
        )
        self.history: list[Keys] = []

    def step(self) -> None:
        for _ in range(self.traced.rng.randint(1, 3)):
            self.traced.change()
        events = self.traced.pool.take_events()
        if events:
            seq = self.desk.put(events)
            assert seq == len(self.history)
            self.history.append(self.traced.keys())

    def keys_at(self, seq: int) -> Keys:
        return self.history[seq] if seq >= 0 else Counter()


class World:
    def __init__(
        self,
        rng: random.Random,
        events: str,
        *,
        has_status: bool = True,
        can_replay: bool = True,
        says_convention: bool = True,
        buffer_steps: int = 4,
        queue_size: int = 3,
    ) -> None:
        self.rng = rng
        self.events = events
        self.has_status = has_status
        self.says_convention = says_convention
        self.buffer_steps = buffer_steps
        self.queue_size = queue_size
        self.time = 0.0
        self.num_lives = 1
        self.engine = Engine(self)
        self.mirror = Mirror(can_replay=can_replay)
        self.is_connected = False
        self.is_cut_unnoticed = False
        self.pipe: deque[tuple[int, bytes]] = deque()
        self.question: object = None
        self.answer: tuple[list[tuple[int, bytes]], PublisherStatus | None, PublisherStatus | None] | None = None

    def tick(self) -> float:
        self.time += 1.0
        return self.time

    # -- what may happen -----------------------------------------------------------------------------------

    def send(self, *, lose: bool = False) -> None:
        """The publisher's thread sends a batch; a slow connection may lose it."""

        def over_the_wire(frames: tuple[bytes, ...]) -> None:
            if self.is_connected and not self.is_cut_unnoticed and not lose:
                self.pipe.append((sequence_number(frames[1]), frames[2]))

        self.engine.desk.send_one(over_the_wire)

    def deliver(self) -> None:
        if self.is_connected and self.pipe:
            self.mirror.receive(*self.pipe.popleft())

    def cut(self) -> None:
        """The connection is gone; the reader may notice later, and what it has not read then is lost."""
        if self.is_connected:
            self.is_cut_unnoticed = True

    def notice(self) -> None:
        if self.is_connected and (self.is_cut_unnoticed or self.mirror.wants_reconnect):
            self.is_connected = self.is_cut_unnoticed = False
            self.pipe.clear()
            self.mirror.disconnected()

    def connect(self) -> None:
        if not self.is_connected:
            self.is_connected = True
            self.pipe.clear()
            self.question = self.answer = None
            self.mirror.connected()

    def restart(self) -> None:
        """A new publisher; who was connected is not any more."""
        self.num_lives += 1
        self.engine = Engine(self)
        self.cut()

    def ask(self) -> None:
        if self.question is None and self.mirror.wanted is not None:
            self.question = self.mirror.wanted

    def respond(self) -> None:
        """The publisher answers what was asked, and how it was before and after; it goes on meanwhile."""
        if self.question is None or self.answer is not None:
            return
        if isinstance(self.question, ReplayWanted):
            asked = sequence_bytes(self.question.first)
        elif self.has_status:
            asked = SNAPSHOT
        else:
            asked = b"\x7f" * 8
        before = self.status()
        if self.rng.random() < 0.2:
            self.send()
        frames = [one for one in self.engine.desk.answers(asked) if one is not None]
        assert frames[-1] in (END, snapshot_end(len(frames) - 1))
        if self.rng.random() < 0.2:
            self.send()
        self.answer = [(sequence_number(one[2]), one[3]) for one in frames[:-1]], before, self.status()

    def status(self) -> PublisherStatus | None:
        if not self.has_status:
            return None
        ((_, _, _, payload),) = [one for one in self.engine.desk.answers(STATUS) if one is not None]
        return decode_status(payload)

    def hear(self) -> None:
        """The answer arrives."""
        if self.answer is None:
            return
        if self.mirror.publisher is None and self.is_cut_unnoticed:
            # Of two ends that closed, the one that closed first is noticed first. Only a publisher whose id is known
            # could be told from its successor otherwise.
            self.notice()
            return
        (batches, before, after), question = self.answer, self.question
        self.question = self.answer = None
        if isinstance(question, ReplayWanted):
            self.mirror.replayed(batches, before)
        else:
            self.mirror.snapshot(batches[-1][0] if batches else -1, [one for _, one in batches], before)
        if after is not None:
            self.mirror.heard(after)

    def heartbeat(self) -> None:
        if self.has_status and self.is_connected:
            self.mirror.heard(self.engine.desk.status())
        elif not self.has_status:
            self.mirror.look_again()

    # -- what must be so -----------------------------------------------------------------------------------

    def settle(self) -> None:
        """The network is well again, and everybody has time."""
        for _ in range(40):
            self.notice()
            self.connect()
            while len(self.engine.desk.outbox):
                self.send()
            while self.pipe:
                self.deliver()
            for _ in range(3):
                self.ask()
                self.respond()
                self.hear()
            self.heartbeat()

    def mirrored(self) -> Keys:
        out: Keys = Counter()
        for chain in CHAINS:
            for digest in chain:
                for group in (0, 1):
                    copies = self.mirror.copies(digest, group)
                    if copies:
                        out[digest, group] = copies
        assert len(out) == self.mirror.num_blocks
        return out

    def check(self, engines: list[Engine]) -> None:
        """A live mirror is what some life of the publisher was, at the number that the mirror names."""
        mirror = self.mirror
        if mirror.status is not MirrorStatus.LIVE:
            assert mirror.reason
            return
        told = [e for e in engines if mirror.publisher in (None, e.desk.publisher_id)]
        now = self.mirrored()
        assert any(len(one.history) > mirror.sequence and one.keys_at(mirror.sequence) == now for one in told), (
            mirror.sequence,
            now,
        )
