"""Pages that follow from their keys: whoever has a key knows the bytes."""

from __future__ import annotations

import random

from blockpool.offload.namespace import Namespace

ONE = Namespace(model="one")
TWO = Namespace(model="two")


def key_of(number: int, namespace: Namespace = ONE) -> bytes:
    return namespace.key(number.to_bytes(32, "big"), 0)


def page_of(key: bytes, page_bytes: int, *, full: bool = False) -> bytes:
    """One in three is shorter than a page may be, unless it is to be full."""
    rng = random.Random(key)
    length = page_bytes if full or rng.randrange(3) else rng.randint(1, page_bytes)
    return rng.randbytes(length)


def room_for(key: bytes, page_bytes: int, *, full: bool = False) -> memoryview:
    return memoryview(bytearray(len(page_of(key, page_bytes, full=full))))
