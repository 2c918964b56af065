"""The obviously right versions that the tests compare with, and the settings that all of them share."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from blockpool.hashing import ExtraKeys

FIXED = settings(derandomize=True, deadline=None, max_examples=200)

# Every width of the CBOR and of the pickle form, and the values at which it changes.
token_ids = st.one_of(
    st.integers(0, 30),
    st.sampled_from([0, 23, 24, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1]),
    st.integers(0, 2**32 - 1),
)


def cbor_digest(value: object) -> bytes:
    cbor2 = pytest.importorskip("cbor2")
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


def pickle_digest(value: object) -> bytes:
    met: dict[object, object] = {}

    def one_of_equals(part: object) -> object:
        if isinstance(part, (tuple, list)):
            again = [one_of_equals(item) for item in part]
            return tuple(again) if isinstance(part, tuple) else again
        return met.setdefault((type(part), part), part) if isinstance(part, (str, bytes)) else part

    return hashlib.sha256(pickle.dumps(one_of_equals(value), protocol=pickle.HIGHEST_PROTOCOL)).digest()


def oracle_chain(
    tokens: Sequence[int],
    block_size: int,
    parent: bytes,
    extras: Sequence[object] | None = None,
    digest: Callable[[object], bytes] = cbor_digest,
) -> list[bytes]:
    digests = []
    for i in range(len(tokens) // block_size if extras is None else len(extras)):
        block = tuple(tokens[i * block_size : (i + 1) * block_size])
        parent = digest((parent, block, None if extras is None else extras[i]))
        digests.append(parent)
    return digests


def oracle_key(extra: ExtraKeys, start: int, end: int) -> tuple[tuple[object, ...], ...] | None:
    """Everything is looked at for every block."""
    keys: list[tuple[object, ...]] = []
    if extra.lora:
        keys.append(("lora", extra.lora[0], extra.lora[1]))
    for item in extra.media:
        touched = set(range(item.offset, item.offset + item.length))
        keys += [("mm", item.identifier, item.offset - start)] if touched & set(range(start, end)) else []
    if extra.cache_salt and start == 0:
        keys.append(("cache_salt", extra.cache_salt))
    if extra.prompt_embeds is not None:
        rows = b"".join(row.tobytes() for row in cast(Any, extra.prompt_embeds)[start:end])
        keys.append(("prompt_embeds", hashlib.sha256(rows).digest()))
    if extra.embeds_mask is not None and len(extra.embeds_mask) > start:
        keys.append(("embeds_mask", bytes(int(flag) for flag in extra.embeds_mask[start:end])))
    if extra.generation is not None and start == 0:
        keys.append(("generation", extra.generation))
    for at, salt in extra.salt_from:
        if at in range(start, end):
            keys.append(("salt_from", at, salt))
    return tuple(keys) or None
