"""Events on the wire beside vLLM's own: the same bytes, and each follows the other's publisher.

- every struct, in random values and both forms of hashes: our bytes and vLLM's are equal, and read alike;
- vLLM's decoder reads our publisher's stream, the way its example of a subscriber does (SUB, a gap, replay);
- our mirror follows vLLM's ZmqEventPublisher: a late reader, a gap, batches that no replay has, a restart; it is
  what the pool is whenever it says that it is live.

Needs no model and no GPU. Exit code 1 when anything is different.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from vllm.distributed import kv_events as theirs

from blockpool.pool import AllBlocksCleared, BlockPool, BlockRemoved, BlockStored, StorePayload
from blockpool.wire import KVEventBatch, Mirror, Publisher, Subscriber, decode_batch, encode_batch
from blockpool.wire.codec import with_int_hashes
from blockpool.wire.endpoints import endpoint_of_rank

DEADLINE_S = 30.0
STRUCTS = ((BlockStored, theirs.BlockStored), (BlockRemoved, theirs.BlockRemoved))


def as_theirs(event: Any) -> Any:
    """The same event as vLLM's struct; theirs of a reset has no medium."""
    for ours, other in STRUCTS:
        if isinstance(event, ours):
            return other(**msgspec.structs.asdict(event))
    return theirs.AllBlocksCleared()


# -- bytes -----------------------------------------------------------------------------------------------


def random_event(rng: random.Random) -> Any:
    def maybe(value: Any) -> Any:
        return value if rng.random() < 0.5 else None

    width = rng.choice([8, 16, 32])
    as_int = rng.random() < 0.5

    def one_hash() -> bytes | int:
        return rng.getrandbits(64) if as_int else rng.randbytes(width)

    count = rng.choice([0, 1, 2, 15, 16, 70])
    places = {
        "medium": rng.choice([None, "GPU", "CPU", "STORAGE"]),
        "group_idx": maybe(rng.randrange(300)),
        "locality": maybe("local"),
        "ownership": maybe("owner"),
    }
    hashes = [one_hash() for _ in range(count)]
    kind = rng.randrange(5)
    if kind == 0:
        return AllBlocksCleared()
    if kind == 1:
        return BlockRemoved(block_hashes=hashes, **places)
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=maybe(one_hash()),
        token_ids=[rng.randrange(200_000) for _ in range(2 * count)],
        block_size=rng.choice([1, 16, 128, 70_000]),
        lora_id=maybe(rng.randrange(1000)),
        lora_name=maybe("adapter"),
        extra_keys=maybe([rng.choice([None, ("salt",), ("image", 3), (rng.randbytes(32),)]) for _ in hashes]),
        kv_cache_spec_kind=maybe("sliding_window"),
        kv_cache_spec_sliding_window=maybe(4096),
        session_id=maybe("session"),
        lookahead_token_ids=maybe([[1, 2] for _ in hashes]),
        **places,
    )


def same_bytes(rng: random.Random, rounds: int) -> str:
    encoder = msgspec.msgpack.Encoder()
    decoder = msgspec.msgpack.Decoder(theirs.KVEventBatch)
    for _ in range(rounds):
        events = [random_event(rng) for _ in range(rng.randint(0, 4))]
        rank = rng.choice([None, 0, 7])
        batch = KVEventBatch(rng.random() * 1e9, events, rank)
        other = theirs.KVEventBatch(
            ts=batch.ts, events=[as_theirs(event) for event in events], data_parallel_rank=rank
        )
        mine, their = encode_batch(batch), encoder.encode(other)
        expect(mine == their, f"bytes differ for {batch}")
        expect(decoder.decode(mine) == other, f"vLLM reads something else: {batch}")
        expect(decode_batch(their) == batch, f"we read something else: {batch}")
    return f"{rounds:,} batches: the same bytes, read alike"


# -- vLLM's reader, our publisher ------------------------------------------------------------------------


def their_reader(rng: random.Random, rounds: int) -> str:
    world = Pool(rng)
    decoder = msgspec.msgpack.Decoder(theirs.KVEventBatch)
    with (
        Publisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", topic="kv", data_parallel_rank=0, hash_form="int") as one,
        zmq.Context() as context,
        context.socket(zmq.SUB) as sub,
        context.socket(zmq.DEALER) as replay,
    ):
        for opened in (sub, replay):
            opened.setsockopt(zmq.RCVTIMEO, int(1000 * DEADLINE_S))
            opened.setsockopt(zmq.LINGER, 0)
        sub.setsockopt_string(zmq.SUBSCRIBE, "kv")
        sub.connect(one.endpoint)
        replay.connect(one.replay_endpoint)
        sent: list[Any] = []

        def publish() -> None:
            events = world.step()
            if one.publish(events) is not None:
                sent.append([as_theirs(with_int_hashes(event)) for event in events])

        received: dict[int, Any] = {}
        while not sub.poll(20):
            publish()
        for _ in range(rounds):
            publish()
        last = -1
        while last < len(sent) - 1:
            topic, seq_bytes, payload = sub.recv_multipart()
            seq = int.from_bytes(seq_bytes, "big")
            expect(topic == b"kv", f"topic {topic!r}")
            if seq % 7 == 3 and seq != len(sent) - 1:
                continue  # lost
            if seq > last + 1:
                replay.send_multipart((b"", (last + 1).to_bytes(8, "big")))
                while True:
                    _, _, replayed, old = replay.recv_multipart()
                    if not old:
                        expect(replayed == theirs.ZmqEventPublisher.END_SEQ, f"ended by {replayed!r}")
                        break
                    received.setdefault(int.from_bytes(replayed, "big"), decoder.decode(old))
            received.setdefault(seq, decoder.decode(payload))
            last = seq
        for seq, events in enumerate(sent):
            expect(received[seq].events == events, f"batch {seq} differs")
            expect(received[seq].data_parallel_rank == 0, f"rank of batch {seq}")
    return f"{len(sent):,} batches of our publisher, some by replay: decoded by vLLM's structs"


# -- our reader, vLLM's publisher ------------------------------------------------------------------------


class Pool:
    """A pool of ours in random use; each step's events as ours."""

    def __init__(self, rng: random.Random, convention: str = "per_copy") -> None:
        self.rng = rng
        self.pool = BlockPool(40, hash_block_size=4, events=convention)
        self.chains = [[rng.randbytes(32) for _ in range(12)] for _ in range(6)]
        self.payload = StorePayload(token_ids=range(48), kv_cache_spec_kind="full_attention")
        self.reset_rate = 0.05

    def step(self) -> list[Any]:
        pool, rng = self.pool, self.rng
        chain = rng.choice(self.chains)
        table = pool.get_new_blocks(rng.randint(1, 12))
        pool.cache_full_blocks(table, b"".join(chain), 0, len(table), 4, 0, payload=self.payload)
        pool.free_blocks(table[::-1])
        if rng.random() < self.reset_rate:
            pool.reset_prefix_cache()
        return pool.take_events()

    def is_in(self, mirror: Mirror) -> bool:
        index = self.pool.cached_block_hash_to_block
        return mirror.num_blocks == len(index) and all(
            mirror.copies(one) == len(index.get_blocks(one + bytes(4))) for chain in self.chains for one in chain
        )


def until(condition: Callable[[], bool], reader: Subscriber, what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        reader.poll(0.02)
        mirror = reader.mirror
        expect(time.monotonic() < end, f"never {what}: {mirror.status} at {mirror.sequence}, {mirror.reason}")


def our_mirror(rng: random.Random, rounds: int) -> str:
    world = Pool(rng)
    folder = tempfile.mkdtemp()
    endpoint, replay_endpoint = f"ipc://{folder}/events", f"ipc://{folder}/replay"
    count = 0

    def start() -> Any:
        nonlocal count
        count = 0
        return theirs.ZmqEventPublisher(
            data_parallel_rank=0, endpoint=endpoint, replay_endpoint=replay_endpoint, buffer_steps=20, topic="kv"
        )

    def publish(to: Any) -> None:
        nonlocal count
        events = world.step()
        if events:
            to.publish(theirs.KVEventBatch(ts=time.time(), events=[as_theirs(event) for event in events]))
            count += 1

    publisher = start()
    for _ in range(5):
        publish(publisher)
    told = []
    with Subscriber(Mirror(), endpoint, replay_endpoint, topic="kv", heartbeat_s=0.2) as reader:
        mirror = reader.mirror

        def caught_up() -> bool:
            return mirror.status == "live" and mirror.sequence == count - 1

        until(caught_up, reader, "caught up from the beginning")
        expect(world.is_in(mirror), "a late reader has something else")
        told.append("late")
        receive = mirror.receive
        for number in range(rounds):
            lost = {count + 1, count + 2} if number % 3 == 0 else set()
            mirror.receive = lambda seq, payload, lost=lost: seq in lost or receive(seq, payload)  # type: ignore[method-assign]
            for _ in range(5):
                publish(publisher)
            until(caught_up, reader, "caught up after a gap")
            expect(world.is_in(mirror), "after a replay the mirror has something else")
        expect(mirror.counts.gaps > 0, "no gap")
        expect(reader.has_status is False, "vLLM's socket knows our status?")
        told.append(f"{mirror.counts.gaps} gaps closed by {mirror.counts.replays} replays")

        world.reset_rate = 0.0  # a reset would heal it
        first = count
        mirror.receive = lambda seq, payload: first <= seq < first + 40 or receive(seq, payload)  # type: ignore[method-assign]
        for _ in range(60):
            publish(publisher)
        until(lambda: mirror.status == "stale", reader, "stale after batches that no replay has")
        expect("no snapshots" in mirror.reason, mirror.reason)
        mirror.receive = receive  # type: ignore[method-assign]
        told.append("stale when no replay had them")
        expect(bool(world.pool.reset_prefix_cache()), "blocks are in use")
        reset = [as_theirs(event) for event in world.pool.take_events()]
        publisher.publish(theirs.KVEventBatch(ts=time.time(), events=reset))
        count += 1
        until(caught_up, reader, "live again after a reset")
        for _ in range(10):
            publish(publisher)
        until(caught_up, reader, "following after a reset")
        expect(world.is_in(mirror), "after a reset the mirror has something else")
        told.append("live again by a reset")

        publisher.shutdown()
        world.pool.reset_prefix_cache()
        world.pool.take_events()
        publisher = start()
        for _ in range(7):
            publish(publisher)
        until(caught_up, reader, "following the successor")
        expect(world.is_in(mirror), "after a restart the mirror has something else")
        told.append("a restart followed")
    publisher.shutdown()
    shutil.rmtree(folder)
    return f"our mirror on vLLM's publisher: {', '.join(told)}"


def ranks() -> str:
    cases = [("tcp://*:5557", 3), ("inproc://cache", 2), ("tcp://*:0", 1), ("tcp://*:5557", 0)]
    for endpoint, rank in cases:
        other = theirs.ZmqEventPublisher.offset_endpoint_port(endpoint, rank)
        expect(endpoint_of_rank(endpoint, rank) == other, f"{endpoint} of rank {rank}: {other}")
    return f"{len(cases)} endpoints of ranks: the same"


class DifferentError(Exception):
    pass


def expect(true: bool, what: str) -> None:
    if not true:
        raise DifferentError(what)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    failed = False
    checks: list[tuple[str, Callable[[], str]]] = [
        ("bytes", lambda: same_bytes(rng, options.rounds)),
        ("their reader", lambda: their_reader(rng, min(200, options.rounds))),
        ("our mirror", lambda: our_mirror(rng, min(30, options.rounds))),
        ("ranks", ranks),
    ]
    for name, check in checks:
        try:
            print(f"the same: {check()}", flush=True)
        except DifferentError as error:
            failed = True
            print(f"DIFFERENT ({name}): {error}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
