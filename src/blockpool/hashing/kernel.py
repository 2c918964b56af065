"""Which code hashes the SHA-256 CBOR chain: chosen once at import, every path callable by name.

"sha-ni"       C with the SHA instructions of x86 processors
"portable-c"   C without them
"pure-python"  hashlib; what an installation without a compiled kernel has

The environment variable BLOCKPOOL_HASH_KERNEL forces one; otherwise the first that is available is taken.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import cast

import numpy as np

from blockpool.hashing import pure
from blockpool.hashing.errors import BlockSizeError, DigestError, KernelUnavailable, TokenIdError
from blockpool.hashing.tokens import Ids, TokenIds, as_ids, plain_ids

KERNELS = ("sha-ni", "portable-c", "pure-python")
DIGEST_SIZE = 32
_ANY_PARENT = bytes(DIGEST_SIZE)

try:
    from blockpool.hashing import _sha
except ImportError:
    _AVAILABLE: tuple[str, ...] = KERNELS[2:]
else:
    _AVAILABLE = KERNELS if _sha.HAS_SHA_NI else KERNELS[1:]


def available_kernels() -> tuple[str, ...]:
    """The names of the kernels that run here, fastest first. "pure-python" always does."""
    return _AVAILABLE


def _require(name: str) -> str:
    if name not in _AVAILABLE:
        known = "" if name in KERNELS else "there is no such kernel; "
        raise KernelUnavailable(f"hash kernel {name!r}: {known}available here: {', '.join(_AVAILABLE)}")
    return name


KERNEL: str = _require(os.environ.get("BLOCKPOOL_HASH_KERNEL") or _AVAILABLE[0])
"""The kernel that runs unless a call names another."""


def chain(
    tokens: TokenIds,
    block_size: int,
    parent: bytes,
    extras: Sequence[bytes | None] | None = None,
    kernel: str | None = None,
    num_blocks: int | None = None,
) -> bytes:
    """The digests of consecutive blocks of `block_size` tokens, concatenated (32 bytes each).

    `parent` is the 32-byte digest before the first. `extras` is None or has one entry per block: None, or the
    canonical CBOR of that block's extra value. `num_blocks` defaults to all full blocks; the ids behind the last
    block are checked but not hashed.

    Raises TokenIdError (nothing is returned of a chain with one bad id), BlockSizeError, DigestError,
    KernelUnavailable, and ValueError if `extras` has not one entry per block.
    """
    name = KERNEL if kernel is None else _require(kernel)
    ids = as_ids(tokens)
    if block_size < 1:
        raise BlockSizeError(f"block size {block_size}: must be at least 1")
    if num_blocks is None:
        num_blocks = len(ids) // block_size
    elif not 0 <= num_blocks * block_size <= len(ids):
        raise BlockSizeError(f"{num_blocks} blocks of {block_size} tokens: there are {len(ids)} tokens")
    if not isinstance(parent, bytes) or len(parent) != DIGEST_SIZE:
        raise DigestError(f"parent {parent!r}: a SHA-256 digest has {DIGEST_SIZE} bytes")
    if extras is not None and len(extras) != num_blocks:
        raise ValueError(f"{len(extras)} extras for {num_blocks} blocks")
    if name == "pure-python":
        return pure.chain(ids, block_size, parent, extras, num_blocks)
    portable = name == "portable-c"
    try:
        return _sha.chain(ids, block_size, parent, extras, num_blocks, portable)
    except TokenIdError as bad:
        if type(bad.value) is int:
            raise
    # The C loop takes plain ints only and runs no Python code: what has an __index__ is brought into shape here.
    return _sha.chain(plain_ids(ids), block_size, parent, extras, num_blocks, portable)


def plain_list(ids: Ids) -> list[int]:
    """tokens.plain_ids, with the check done by the kernel: a chain of no blocks only checks."""
    if KERNEL == "pure-python":
        return plain_ids(ids)
    try:
        _sha.chain(ids, 1, _ANY_PARENT, None, 0, True)
    except TokenIdError:
        return plain_ids(ids)
    return cast(list[int], ids.tolist()) if isinstance(ids, np.ndarray) else list(ids)
