"""The index that a stream says against the one that a pool's dump has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from blockpool.hashing import digest_to_int
from blockpool.pool import DumpError
from blockpool.pool.audit import read_dump
from blockpool.wire.check import Key


class KeyDifference(msgspec.Struct, frozen=True):
    """A key that one side has more often: how many copies the events say, and the dump."""

    group: int
    tier: str
    block_hash: str
    in_events: int
    in_dump: int


def compare_with_dumps(
    keys: Mapping[Key, int], dumps: Iterable[Mapping[str, Any]], per_copy: bool
) -> list[KeyDifference]:
    """Where they differ, by group, tier and key. `per_copy`: whether copies are compared, or only keys.

    Integers are compared with the 64-bit form of a dump's digests. Raises DumpError for what is no dump.
    """
    told = Counter({(group, tier, _as_text(one)): count for (group, tier, one), count in keys.items() if count > 0})
    as_int = any(isinstance(one, int) for _, _, one in keys)
    there: Counter[tuple[int, str, str]] = Counter()
    for dump in dumps:
        read = read_dump(dump)
        if read.index is None:
            raise DumpError("the dump has no index to compare with")
        for row in read.index:
            try:
                key = bytes.fromhex(row.key)
                digest, group = key[:-4], int.from_bytes(key[-4:], "big")
                name = str(digest_to_int(digest)) if as_int else digest.hex()
            except ValueError:
                raise DumpError(f"index: {row.key!r} is no key") from None
            there[group, read.medium, name] += len(row.blocks)
    if not per_copy:
        told, there = Counter(dict.fromkeys(told, 1)), Counter(dict.fromkeys(there, 1))
    return [KeyDifference(*key, told[key], there[key]) for key in sorted(told | there) if told[key] != there[key]]


def _as_text(one: bytes | int) -> str:
    return one.hex() if isinstance(one, bytes) else str(one & (1 << 64) - 1)
