"""Checksums of pages, 16 bytes each: whether these are the bytes that were stored."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib import import_module
from typing import Any

from blockpool.offload.errors import MissingExtraError
from blockpool.offload.tier import Buffer

CHECKSUM_BYTES = 16
Checksum = Callable[[Buffer], bytes]
#: By the number that stands in files and values; the better one first.
ALGORITHMS = {1: "xxh3_128", 2: "sha1"}


def sha1_128(data: Buffer) -> bytes:
    """The first 16 bytes of SHA-1: against chance, not against people."""
    return hashlib.sha1(data, usedforsecurity=False).digest()[:CHECKSUM_BYTES]


def checksum_named(name: str, what: str, extra: str) -> Checksum:
    """Raises MissingExtraError, which names `what` has such checksums and the extra, and ValueError."""
    if name == "sha1":
        return sha1_128
    if name != "xxh3_128":
        raise ValueError(f"checksum {name!r} is not known; there are {', '.join(ALGORITHMS.values())}")
    try:
        xxhash: Any = import_module("xxhash")
    except ImportError:
        raise MissingExtraError(
            f"{what} has checksums of xxh3_128, which need xxhash: pip install 'blockpool[{extra}]'"
        ) from None
    of_page: Checksum = xxhash.xxh3_128_digest
    return of_page


def best_checksum() -> str:
    """xxh3_128 where xxhash is installed, SHA-1 elsewhere."""
    try:
        import_module("xxhash")
    except ImportError:
        return "sha1"
    return "xxh3_128"
