"""A process that stores, loads and discards on a disk tier until it is killed: `FILE SEED`. A dot per call."""

from __future__ import annotations

import os
import random
import sys
import threading

from blockpool.offload.disk import DiskTier
from blockpool.offload.tier import Loaded
from tests.offload.content import key_of, page_of

PAGE_BYTES = 32 * 1024
NUM_PAGES = 48
KEYS = [key_of(number) for number in range(4 * NUM_PAGES)]


def run(tier: DiskTier, seed: int) -> None:
    rng = random.Random(seed)
    while True:
        keys = rng.sample(KEYS, 4)
        pages = [page_of(key, PAGE_BYTES) for key in keys]
        tier.store(keys, pages)
        if rng.random() < 0.1:
            tier.discard(rng.sample(KEYS, 4))
        buffers = [memoryview(bytearray(len(page))) for page in pages]
        for page, buffer, result in zip(pages, buffers, tier.load(keys, buffers), strict=True):
            if result not in (Loaded.OK, Loaded.MISSING) or (result is Loaded.OK and page != buffer):
                os.write(1, b"!")
        os.write(1, b".")


def main() -> None:
    path, seed = sys.argv[1:]
    tier = DiskTier(path, NUM_PAGES * PAGE_BYTES, PAGE_BYTES)
    for number in range(2):
        threading.Thread(target=run, args=(tier, 2 * int(seed) + number)).start()


if __name__ == "__main__":
    main()
