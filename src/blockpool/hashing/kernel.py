"""Which code hashes the SHA-256 chains, of CBOR and of pickles: chosen once at import, every path callable by name.

"sha-ni"       C with the SHA instructions of x86 processors
"portable-c"   C without them
"pure-python"  hashlib; what an installation without a compiled kernel has

The environment variable BLOCKPOOL_HASH_KERNEL forces one; otherwise the first that is available is taken.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from typing import Literal, cast

import numpy as np

from blockpool.hashing import cbor, pickled, pure
from blockpool.hashing.errors import BlockSizeError, DigestError, KernelUnavailable, TokenIdError
from blockpool.hashing.tokens import Ids, TokenIds, as_ids, plain_ids

KERNELS = ("sha-ni", "portable-c", "pure-python")
DIGEST_SIZE = 32
_ANY_PARENT = bytes(DIGEST_SIZE)
_PICKLES = pickle.HIGHEST_PROTOCOL == pickled.PROTOCOL_IN_C

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
    num_blocks = _checked(len(ids), 0, block_size, parent, extras, num_blocks)
    if name == "pure-python":
        return pure.chain(ids, block_size, parent, extras, num_blocks)
    portable = name == "portable-c"
    try:
        return _sha.chain("cbor", ids, block_size, parent, extras, num_blocks, portable)
    except TokenIdError as bad:
        if type(bad.value) is int:
            raise
    # The C loop takes plain ints only and runs no Python code: what has an __index__ is brought into shape here.
    return _sha.chain("cbor", plain_ids(ids), block_size, parent, extras, num_blocks, portable)


def chain_pickled(
    tokens: TokenIds,
    block_size: int,
    parent: bytes,
    extras: Sequence[object] | None = None,
    kernel: str | None = None,
    num_blocks: int | None = None,
) -> bytes:
    """The same for the pickle form: SHA-256 over pickled.serialize((parent, tokens, extra)), block after block.

    `extras` is None or has one extra value per block, as it is: what C cannot pickle as Python does, Python pickles.
    Raises what `chain` raises, and what pickle raises for values that have no pickle.
    """
    name = KERNEL if kernel is None else _require(kernel)
    ids = as_ids(tokens)
    num_blocks = _checked(len(ids), 0, block_size, parent, extras, num_blocks)
    if name != "pure-python" and _PICKLES:
        bodies = None if extras is None else pickled.extra_bodies(extras)
        if bodies is not None or extras is None:
            portable = name == "portable-c"
            try:
                digests = _sha.chain("pickle", ids, block_size, parent, bodies, num_blocks, portable)
            except TokenIdError as bad:
                if type(bad.value) is int:
                    raise
                ids = plain_ids(ids)
                digests = _sha.chain("pickle", ids, block_size, parent, bodies, num_blocks, portable)
            if digests is not None:
                return digests
    return pickled.chain(plain_list(ids), block_size, parent, extras, num_blocks, pure.sha256)


def chain_as_list(
    form: Literal["cbor", "pickle"],
    tokens: TokenIds,
    block_size: int,
    parent: bytes,
    extras: Sequence[object] | None = None,
    num_blocks: int | None = None,
    first: int = 0,
    kernel: str | None = None,
) -> list[bytes]:
    """The digests of the blocks from tokens[first] on, as a list of bytes: for callers that keep them apart.

    Only the tokens [first, first + num_blocks * block_size) are read, and of a list or an array nothing is copied;
    `num_blocks` defaults to all full blocks from `first` on. `extras` is None or has one extra value per block, in
    both forms as it is. A TokenIdError's index is a position in `tokens`.

    Raises what `chain` and `chain_pickled` raise, and CborError.
    """
    name = KERNEL if kernel is None else _require(kernel)
    ids = tokens if type(tokens) is list else as_ids(tokens)
    if num_blocks is None:
        num_blocks = _checked(len(ids), first, block_size, parent, extras, None)
    encoded = None
    by_c = name != "pure-python"
    if form == "cbor":
        if extras is not None:
            encoded = cbor.encode_each(extras)
    elif form == "pickle":
        by_c = by_c and _PICKLES
        if by_c and extras is not None:
            encoded = pickled.extra_bodies(extras)
            by_c = encoded is not None
    else:
        raise ValueError(f"form {form!r}: known are cbor, pickle")
    if by_c:
        try:
            digests = _sha.chain_list(form, ids, first, block_size, parent, encoded, num_blocks, name == "portable-c")
            if digests is not None:
                return digests
        except TokenIdError as bad:
            if type(bad.value) is int:
                raise
        except (ValueError, OverflowError):
            pass  # what is wrong with the arguments has a name below
    _checked(len(ids), first, block_size, parent, extras, num_blocks)
    part = ids[first : first + num_blocks * block_size]
    try:
        if form == "cbor":
            joined = chain(part, block_size, parent, encoded, name, num_blocks)
        else:
            joined = chain_pickled(part, block_size, parent, extras, name, num_blocks)
    except TokenIdError as bad:
        raise TokenIdError(first + bad.index, bad.value) from None
    return [joined[at : at + DIGEST_SIZE] for at in range(0, len(joined), DIGEST_SIZE)]


def _checked(
    num_tokens: int,
    first: int,
    block_size: int,
    parent: bytes,
    extras: Sequence[object] | None,
    num_blocks: int | None,
) -> int:
    """The number of blocks. Raises what `chain` raises about its arguments."""
    if block_size < 1:
        raise BlockSizeError(f"block size {block_size}: must be at least 1")
    if not 0 <= first <= num_tokens:
        raise BlockSizeError(f"first token {first}: there are {num_tokens} tokens")
    if num_blocks is None:
        num_blocks = (num_tokens - first) // block_size
    elif not 0 <= num_blocks * block_size <= num_tokens - first:
        there = f"there are {num_tokens} tokens" if first == 0 else f"from {first} on, of {num_tokens} tokens"
        raise BlockSizeError(f"{num_blocks} blocks of {block_size} tokens: {there}")
    if not isinstance(parent, bytes) or len(parent) != DIGEST_SIZE:
        raise DigestError(f"parent {parent!r}: a SHA-256 digest has {DIGEST_SIZE} bytes")
    if extras is not None and len(extras) != num_blocks:
        raise ValueError(f"{len(extras)} extras for {num_blocks} blocks")
    return num_blocks


def plain_list(ids: Ids) -> list[int]:
    """tokens.plain_ids, with the check done by the kernel: a chain of no blocks only checks."""
    if KERNEL == "pure-python":
        return plain_ids(ids)
    try:
        _sha.chain("cbor", ids, 1, _ANY_PARENT, None, 0, True)
    except TokenIdError:
        return plain_ids(ids)
    return cast(list[int], ids.tolist()) if isinstance(ids, np.ndarray) else list(ids)
