"""The pure-Python twin of the C kernel: any hash function over the CBOR bytes of block after block."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from blockpool.hashing.cbor import ARRAY, BYTES, UNSIGNED, head
from blockpool.hashing.tokens import Ids, id_array, plain_ids

_NO_EXTRA = b"\xf6"
# Below this many tokens a plain loop is faster than numpy's fixed cost per call.
_VECTOR_FROM = 200


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def chain(
    ids: Ids,
    block_size: int,
    parent: bytes,
    extras: Sequence[bytes | None] | None,
    num_blocks: int,
    hash_bytes: Callable[[bytes], bytes] = sha256,
) -> bytes:
    """The digests of the first `num_blocks` blocks, concatenated.

    `extras` has one entry per block: None, or the canonical CBOR of its extra value. All ids are checked, those
    behind the last block too: TokenIdError.
    """
    encoded, starts = _encode_blocks(ids, block_size, num_blocks)
    before = head(ARRAY, 3) + head(BYTES, len(parent))
    header = head(ARRAY, block_size)
    digests = []
    for i in range(num_blocks):
        extra = None if extras is None else extras[i]
        tokens = encoded[starts[i] : starts[i + 1]]
        parent = hash_bytes(b"".join((before, parent, header, tokens, _NO_EXTRA if extra is None else extra)))
        digests.append(parent)
    return b"".join(digests)


def _encode_blocks(ids: Ids, block_size: int, num_blocks: int) -> tuple[bytes, list[int]]:
    """The CBOR of the tokens of all blocks, and where in it each block starts, and the last one ends."""
    num_tokens = num_blocks * block_size
    if len(ids) < _VECTOR_FROM:
        tokens = [head(UNSIGNED, t) for t in plain_ids(ids)[:num_tokens]]
        encoded, ends = b"".join(tokens), list(accumulate(map(len, tokens)))
    else:
        encoded, ends = _encode_array(id_array(ids)[:num_tokens])
    return encoded, [0, *ends[block_size - 1 :: block_size]]


def _encode_array(ids: NDArray[np.uint32]) -> tuple[bytes, list[int]]:
    """The CBOR of all ids, concatenated, and where each one ends.

    Every id becomes a row of five bytes: head, then 32 bits big endian; the mask keeps the ones that are written.
    """
    width = (ids > 0x17).astype(np.uint8) + (ids > 0xFF) + (ids > 0xFFFF)
    rows = np.empty((len(ids), 5), np.uint8)
    rows[:, 0] = np.where(width == 0, ids, 0x17 + width)
    rows[:, 1:] = ids.astype(">u4").view(np.uint8).reshape(-1, 4)
    written = width[:, None] >= np.array([0, 3, 3, 2, 1], np.uint8)
    ends: list[int] = np.cumsum(np.array([1, 2, 3, 5])[width]).tolist()
    return rows[written].tobytes(), ends
