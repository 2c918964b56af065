"""How fast pages go into lower tiers and come back, beside what this machine does without a tier, in the same run.

    python benchmarks/offload_ops.py [--rounds N] [--folder DIR] [--json FILE] [--valkey URL]

Host memory stands beside `np.copyto` of the same pages into a touched buffer of the tier's size. The disk stands
beside `dd` with the same block size into and out of a preallocated file in the same folder: both go through few
buffers that are used again (dd has one, a tier those of a call); before each turn what was written before is on the
device, and what is read is in the page cache. Stores evict: each round has new keys. Rounds are interleaved; figures
are medians. A tier promises at least 60 % of what it stands beside.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from blockpool.offload.disk import DiskTier
from blockpool.offload.host import HostTier
from blockpool.offload.namespace import Namespace
from blockpool.offload.tier import Loaded, Stored, Tier
from blockpool.offload.valkey import ValkeyTier

PAGE_SIZES = (64 * 1024, 512 * 1024, 2 * 1024 * 1024)
TOTAL_BYTES = 256 * 1024 * 1024
BATCH = 8  # pages of a call, unless they are large
BATCH_BYTES = 2 * 1024 * 1024
PROMISED = 0.6
NAMESPACE = Namespace(model="benchmark")


class Traffic:
    """All pages of a tier, again and again under new keys."""

    def __init__(self, tier: Tier, source: list[memoryview], target: list[memoryview]) -> None:
        self.tier = tier
        self.source = source
        self.target = target
        self.batch = max(1, min(BATCH, BATCH_BYTES // tier.page_bytes))
        self.round = 0
        self.keys: list[bytes] = []

    def store(self) -> float:
        self.round += 1
        digest = self.round.to_bytes(24, "big")
        self.keys = [NAMESPACE.key(digest + place.to_bytes(8, "big"), 0) for place in range(len(self.source))]
        start = time.perf_counter()
        for first in range(0, len(self.keys), self.batch):
            results = self.tier.store(self.keys[first : first + self.batch], self.source[first : first + self.batch])
            assert results == [Stored.OK] * self.batch
        return time.perf_counter() - start

    def load(self) -> float:
        start = time.perf_counter()
        for first in range(0, len(self.keys), self.batch):
            results = self.tier.load(self.keys[first : first + self.batch], self.target[first : first + self.batch])
            assert results == [Loaded.OK] * self.batch
        return time.perf_counter() - start


def touched() -> Any:
    return np.random.default_rng(0).integers(0, 256, TOTAL_BYTES, dtype=np.uint8)


def pages_of(buffer: Any, page_bytes: int) -> list[memoryview]:
    view = memoryview(buffer)
    return [view[first : first + page_bytes] for first in range(0, TOTAL_BYTES, page_bytes)]


def copy(source: list[memoryview], target: list[memoryview]) -> float:
    pairs = zip(source, target, strict=True)
    arrays = [(np.frombuffer(to, np.uint8), np.frombuffer(page, np.uint8)) for page, to in pairs]
    start = time.perf_counter()
    for to, page in arrays:
        np.copyto(to, page)
    return time.perf_counter() - start


def dd(source: Path, target: Path, page_bytes: int) -> float:
    """Seconds, as dd counts them."""
    count = TOTAL_BYTES // page_bytes
    command = ["dd", f"if={source}", f"of={target}", f"bs={page_bytes}", f"count={count}", "conv=notrunc"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    found = re.search(r"copied, ([\d.e-]+) s", done.stderr)
    assert found is not None, done.stderr
    return float(found[1])


def settled(call: Callable[[], float], *files: Path) -> float:
    """The call, once all that was written before is on the device."""
    for path in files:
        file = os.open(path, os.O_RDWR)
        os.fdatasync(file)
        os.close(file)
    return call()


def rows_of(page_bytes: int, folder: Path, rounds: int, url: str | None) -> list[dict[str, Any]]:
    source_buffer, target_buffer, plain_buffer = touched(), touched(), touched()
    source, target, plain = (pages_of(buffer, page_bytes) for buffer in (source_buffer, target_buffer, plain_buffer))
    host = Traffic(HostTier(TOTAL_BYTES, page_bytes), source, target)
    tier_path, plain_path = folder / "tier", folder / "plain"
    disk = Traffic(DiskTier(tier_path, TOTAL_BYTES, page_bytes, overwrite=True), source, target)
    disk.source = source[: disk.batch] * (len(source) // disk.batch)
    disk.target = target[: disk.batch] * (len(target) // disk.batch)
    with plain_path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, TOTAL_BYTES)
    files = (tier_path, plain_path)
    null, zero = Path("/dev/null"), Path("/dev/zero")
    turns: dict[str, Callable[[], float]] = {
        "memory": lambda: copy(source, plain),
        "host store": host.store,
        "memory back": lambda: copy(plain, target),
        "host load": host.load,
        "dd write": lambda: settled(lambda: dd(zero, plain_path, page_bytes), *files),
        "disk store": lambda: settled(disk.store, *files),
        "dd read": lambda: settled(lambda: dd(plain_path, null, page_bytes), *files),
        "disk load": lambda: settled(disk.load, *files),
    }
    beside: dict[str, str | None] = {
        "host store": "memory",
        "host load": "memory back",
        "disk store": "dd write",
        "disk load": "dd read",
    }
    if url is not None:
        server = ValkeyTier(url, page_bytes, namespace=NAMESPACE, ttl_s=600, prefix=f"benchmark{os.getpid()}")
        shared = Traffic(server, source, target)
        turns |= {"valkey store": shared.store, "valkey load": shared.load}
        beside |= {"valkey store": None, "valkey load": None}
    times: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds + 1):
        for name, turn in turns.items():
            seconds = turn()
            if number:  # the first warms up
                times[name].append(seconds)
        if url is not None:
            server.clear()
    host.tier.close()
    disk.tier.close()
    for path in files:
        path.unlink()
    rows = []
    for name, rival in beside.items():
        seconds = statistics.median(times[name])
        row = {"row": name, "page_bytes": page_bytes, "gb_per_s": TOTAL_BYTES / seconds / 1e9}
        if rival is not None:
            row["beside"] = rival.removesuffix(" back")
            row["beside_gb_per_s"] = TOTAL_BYTES / statistics.median(times[rival]) / 1e9
            row["ratio"] = row["gb_per_s"] / row["beside_gb_per_s"]
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where the files are made; by default that of temporary files")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--valkey", metavar="URL", help="a server to store 256 MiB in, as well")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        print(f"{'':14} {'page':>9} {'GB/s':>7}   beside")
        for page_bytes in PAGE_SIZES:
            for row in rows_of(page_bytes, Path(folder), arguments.rounds, arguments.valkey):
                rows.append(row)
                line = f"{row['row']:14} {page_bytes // 1024:>5} KiB {row['gb_per_s']:7.2f}"
                if "ratio" in row:
                    mark = "" if row["ratio"] >= PROMISED else f"   less than the promised {PROMISED:.0%}"
                    line += f"   {row['beside']} {row['beside_gb_per_s']:.2f}: {row['ratio']:.0%}{mark}"
                print(line)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
