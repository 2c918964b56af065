"""What events cost: publishing on the step's thread, following in a fleet, and asking it. Prints one JSON line.

Options: --blocks N, the fleet's blocks in all (default 10,000,000), --workers N (default 64), --only TEXT. Times are
of this process; the index that it is compared with is the obvious one, a dict of sets of workers.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import random
import statistics
import time
import tracemalloc
from typing import Any

from blockpool.pool import BlockStored
from blockpool.wire import Fleet, KVEventBatch, Mirror, Publisher, Subscriber, encode_batch
from blockpool.wire.changes import read_changes
from blockpool.wire.lean import read_lean

BLOCK = 16
PROMPT = 1_000
#: Blocks per event: a prompt of 1,024 tokens, and one decoded block.
LONG, SHORT = 64, 1


def stored(rng: random.Random, count: int) -> BlockStored:
    return BlockStored(
        block_hashes=[rng.randbytes(32) for _ in range(count)],
        parent_block_hash=rng.randbytes(32),
        token_ids=[rng.randrange(128_000) for _ in range(BLOCK * count)],
        block_size=BLOCK,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=0,
    )


# -- publishing ------------------------------------------------------------------------------------------


def publishing(num_blocks: int = 1_000_000) -> dict[str, float]:
    """Nanoseconds per block that `publish` takes on the step's thread, and the longest call, in microseconds."""
    rng = random.Random(1)
    batches = [[stored(rng, LONG) for _ in range(4)] for _ in range(64)]
    per_batch = 4 * LONG
    out: dict[str, float] = {}
    for name, stalled in (("a reader", False), ("a stalled reader", True)):
        with Publisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", snapshots=False) as publisher:
            reader = Subscriber(Mirror(), publisher.endpoint, hwm=10)
            # a stalled reader is there, and never reads
            reader.poll(0.2)
            spent, longest = 0.0, 0.0
            for number in range(num_blocks // per_batch):
                start = time.perf_counter()
                publisher.publish(batches[number % 64])
                took = time.perf_counter() - start
                spent += took
                longest = max(longest, took)
                while publisher.counts.waiting > 256:  # a step takes its time
                    time.sleep(0)
                if not stalled:
                    reader.poll()
            out[f"publish, {name}: ns per block"] = round(1e9 * spent / num_blocks, 1)
            out[f"publish, {name}: longest call, us"] = round(1e6 * longest, 1)
            reader.close()
    return out


def pauses(num_steps: int = 2_000) -> dict[str, float]:
    """The longest of many steps of pure Python beside a publisher at work, in milliseconds, least of three runs."""
    rng = random.Random(2)
    events = [stored(rng, 8)]

    def steps(publisher: Publisher | None) -> float:
        longest = 0.0
        for _ in range(num_steps):
            start = time.perf_counter()
            sum(range(20_000))
            if publisher is not None:
                publisher.publish(events)
            longest = max(longest, time.perf_counter() - start)
        return 1e3 * longest

    out = {"longest step, without a publisher: ms": min(steps(None) for _ in range(3))}
    for name, snapshots in (("", False), (" that keeps snapshots", True)):
        with Publisher("tcp://127.0.0.1:*", snapshots=snapshots) as publisher:
            reader = Subscriber(Mirror(), publisher.endpoint, hwm=10)
            reader.poll(0.2)
            out[f"longest step, stalled reader, a publisher{name}: ms"] = min(steps(publisher) for _ in range(3))
            reader.close()
    out |= snapshot_pause(rng, steps_of=lambda publisher: steps(publisher))
    return {name: round(value, 2) for name, value in out.items()}


#: Of `stalls`: batches of one run, and runs of each kind. What is sent is more than sockets and `hwm` hold.
STALL_STEPS = 4_000
STALL_ROUNDS = 7


def stalls() -> dict[str, float]:
    """What a step waits in `publish`, in microseconds: longest, and the longest of 999 in 1,000.

    Beside nobody, a process that reads, and one that has connected and never reads; in turns, medians of all rounds.
    """
    events = [[stored(random.Random(at), LONG)] for at in range(64)]
    names = ("nobody", "a reader", "one that never reads")
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(STALL_ROUNDS):
        for name in names:
            seen[name].append(_stall(events, name))
    out = {}
    for name, rounds in seen.items():
        for at, what in enumerate(("longest", "99.9 %")):
            values = sorted(one[at] for one in rounds)
            for which, value in (("least", values[0]), ("median", statistics.median(values)), ("most", values[-1])):
                out[f"publish beside {name}: {what}, {which} of {STALL_ROUNDS}: us"] = round(value, 1)
    return out


def _stall(events: list[list[BlockStored]], beside: str) -> tuple[float, float]:
    spawn = multiprocessing.get_context("spawn")
    there, done = spawn.Event(), spawn.Event()
    with Publisher("tcp://127.0.0.1:*", hwm=100, snapshots=False) as publisher:
        consumer = spawn.Process(target=_consume, args=(publisher.endpoint, beside == "a reader", there, done))
        if beside != "nobody":
            consumer.start()
            while not there.wait(0.01):
                publisher.publish(events[0])
        times = []
        for step in range(STALL_STEPS):
            sum(range(5_000))  # the step's own work
            start = time.perf_counter()
            publisher.publish(events[step % 64])
            times.append(time.perf_counter() - start)
        done.set()
        if beside != "nobody":
            consumer.join()
    times.sort()
    return 1e6 * times[-1], 1e6 * times[-1 - STALL_STEPS // 1000]


def _consume(endpoint: str, reads: bool, there: Any, done: Any) -> None:
    mirror = Mirror(can_replay=False)
    with Subscriber(mirror, endpoint, hwm=10) as reader:
        while mirror.counts.batches == 0:
            reader.poll(0.1)
        there.set()
        while reads and not done.is_set():
            reader.poll(0.01)
        done.wait()


def snapshot_pause(rng: random.Random, steps_of: Any, num_blocks: int = 100_000) -> dict[str, float]:
    """The longest step while the publisher gives a snapshot of so many blocks, and how long that takes."""
    import zmq

    with (
        Publisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", buffer_steps=1) as publisher,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
    ):
        for _ in range(num_blocks // LONG):
            publisher.publish([stored(rng, LONG)])
        while publisher.counts.waiting:
            time.sleep(0.01)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(publisher.replay_endpoint)
        took = []
        for beside in (False, True):
            start = time.perf_counter()
            dealer.send_multipart((b"", b"snapshot"))
            longest = steps_of(publisher) if beside else 0.0
            while dealer.recv_multipart()[3]:
                pass
            took.append(time.perf_counter() - start)
    return {
        "snapshot of 100,000 blocks: ms": 1e3 * took[0],
        "longest step while it is given: ms": longest,
    }


# -- following -------------------------------------------------------------------------------------------


def applying(per_event: int, num_blocks: int = 400_000) -> dict[str, float]:
    """Nanoseconds per block to read and apply batches, with one mirror and with a dict of sets."""
    rng = random.Random(3)
    payloads = [
        encode_batch(KVEventBatch(0.0, [stored(rng, per_event) for _ in range(16)]))
        for _ in range(num_blocks // (per_event * 16))
    ]
    mirror = Mirror()
    mirror.connected()
    mirror.replayed([], None)
    ours = _time(lambda: [mirror.receive(seq, payload) for seq, payload in enumerate(payloads)])
    index: dict[bytes, set[int]] = {}

    def obvious() -> None:
        for payload in payloads:
            for event in read_lean(payload).events:
                for one in event.block_hashes:  # type: ignore[union-attr]
                    index.setdefault(one, set()).add(0)

    theirs = _time(obvious)
    count = len(payloads) * 16 * per_event
    assert mirror.num_blocks == len(index) == count
    name = f"apply, {per_event} blocks per event"
    return {
        f"{name}: ns per block": round(1e9 * ours / count, 1),
        f"{name}: blocks/s": round(count / ours),
        f"{name}: times as fast as a dict of sets": round(theirs / ours, 2),
    }


def _time(work: Any) -> float:
    gc.collect()
    start = time.process_time()
    work()
    return time.process_time() - start


# -- asking ----------------------------------------------------------------------------------------------


def fleet(num_blocks: int, num_workers: int) -> dict[str, float]:
    """A fleet with so many blocks in all: memory per block, time to apply, and an overlap over all workers."""
    rng = random.Random(4)
    shared = [rng.randbytes(32) for _ in range(PROMPT)]
    whole = Fleet(hash_block_size=BLOCK)
    mirrors = [whole.join(f"worker-{i}") for i in range(num_workers)]
    for i, mirror in enumerate(mirrors):
        mirror.connected()
        mirror.replayed([], None)
        event = stored(rng, 1)
        event.block_hashes = list(shared[: PROMPT * (i + 1) // num_workers])
        event.token_ids = []
        mirror.receive(0, encode_batch(KVEventBatch(0.0, [event])))
    count = whole_count = sum(mirror.num_blocks for mirror in mirrors)
    seq, spent = 0, 0.0
    event = stored(rng, LONG)
    while count < num_blocks:
        seq += 1
        for mirror in mirrors:
            for _ in range(16):
                event.block_hashes = [os.urandom(32) for _ in range(LONG)]
                payload = encode_batch(KVEventBatch(0.0, [event]))
                start = time.process_time()
                mirror.holdings.apply(read_changes(payload), True)
                spent += time.process_time() - start
            count += 16 * LONG
    bytes_per_block = whole.catalogue.num_bytes / count
    decoded = [encode_batch(KVEventBatch(0.0, [stored(rng, SHORT) for _ in range(16)])) for _ in range(20_000)]
    start = time.process_time()
    for at, payload in enumerate(decoded):
        mirrors[at % num_workers].holdings.apply(read_changes(payload), True)
    per_second = 16 * len(decoded) / (time.process_time() - start)
    times = []
    for _ in range(50):
        start = time.perf_counter()
        answer = whole.overlap(shared)
        times.append(time.perf_counter() - start)
    for i, mirror in enumerate(mirrors):
        assert answer[mirror.name].tokens == {"GPU": PROMPT * (i + 1) // num_workers * BLOCK}
    applied = count - whole_count
    return {
        "fleet: blocks": count,
        "fleet: workers": num_workers,
        "fleet: bytes per block": round(bytes_per_block, 1),
        "fleet: apply, ns per block": round(1e9 * spent / max(1, applied), 1),
        "fleet: apply, blocks/s": round(applied / spent) if spent else 0,
        "fleet: apply, one block per event: blocks/s": round(per_second),
        "fleet: overlap of 1,000 blocks, ms": round(1e3 * statistics.median(times), 3),
        "fleet: overlap, times as fast as a dict of sets": round(
            _obvious_overlap(rng, num_workers, shared, times), 2
        ),
    }


def _obvious_overlap(rng: random.Random, num_workers: int, shared: list[bytes], ours: list[float]) -> float:
    index = {
        one: {f"worker-{i}" for i in range(num_workers) if at < PROMPT * (i + 1) // num_workers}
        for at, one in enumerate(shared)
    }
    times = []
    for _ in range(20):
        start = time.perf_counter()
        left = {f"worker-{i}" for i in range(num_workers)}
        tokens: dict[str, int] = {}
        for at, one in enumerate(shared):
            there = index.get(one, set())
            for worker in left - there:
                tokens[worker] = at * BLOCK
            left &= there
        times.append(time.perf_counter() - start)
    return statistics.median(times) / statistics.median(ours)


def memory_of_the_obvious(num_blocks: int = 200_000) -> dict[str, float]:
    tracemalloc.start()
    index: dict[bytes, set[int]] = {}
    for _ in range(num_blocks):
        index.setdefault(os.urandom(32), set()).add(0)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {"a dict of sets: bytes per block": round(size / num_blocks, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=10_000_000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    rows = {
        "publish": publishing,
        "pauses": pauses,
        "stalls": stalls,
        "apply": lambda: applying(LONG) | applying(16) | applying(SHORT),
        "fleet": lambda: fleet(options.blocks, options.workers),
        "memory": memory_of_the_obvious,
    }
    results: dict[str, float] = {}
    for name, work in rows.items():
        if options.only in name:
            results |= work()
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
