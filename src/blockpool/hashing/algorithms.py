"""The four hash algorithms by name, the hash that stands before the first block, and the hash of one block.

A block hash is H((parent, tokens, extra)): see HashAlgorithm for H and extra_keys.py for the extra value.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from blockpool.hashing import cbor, kernel, pickled, pure
from blockpool.hashing.errors import DigestError, MissingDependency, RandomSeedWarning, SeedError, UnknownAlgorithm
from blockpool.hashing.tokens import Ids, TokenIds, as_ids

ALGORITHMS: tuple[str, ...] = ("sha256_cbor", "sha256", "xxhash_cbor", "xxhash")
DEFAULT_SEED = "vllm-none-hash"
# Drawn at import rather than on demand, so that threads cannot draw two.
_RANDOM_SEED = os.urandom(32).hex()


@dataclass(frozen=True, slots=True)
class HashAlgorithm:
    """H = `hash_bytes` over the CBOR or the pickle of a value; its digests have `digest_size` bytes."""

    name: str
    digest_size: int
    form: Literal["cbor", "pickle"]
    hash_bytes: Callable[[bytes], bytes]

    def digest(self, value: object) -> bytes:
        """H(value). Raises CborError for values without a form in this room's CBOR."""
        return self.hash_bytes(cbor.encode(value) if self.form == "cbor" else pickled.serialize(value))

    def chain(
        self, ids: Ids, block_size: int, parent: bytes, extras: Sequence[object] | None, num_blocks: int
    ) -> bytes:
        """The digests of `num_blocks` consecutive blocks, concatenated; `extras` has one value per block.

        Ids behind the last block are checked but not hashed. Raises TokenIdError, CborError; for SHA-256, whose
        chains a kernel hashes, also DigestError for a parent that is no digest.
        """
        if self.name == "sha256":
            return kernel.chain_pickled(ids, block_size, parent, extras, num_blocks=num_blocks)
        if self.form == "pickle":
            return pickled.chain(kernel.plain_list(ids), block_size, parent, extras, num_blocks, self.hash_bytes)
        encoded = None if extras is None else cbor.encode_each(extras)
        if self.name == "sha256_cbor":
            return kernel.chain(ids, block_size, parent, encoded, num_blocks=num_blocks)
        return pure.chain(ids, block_size, parent, encoded, num_blocks, self.hash_bytes)


@cache
def hash_algorithm(name: str) -> HashAlgorithm:
    """The algorithm of that name. Raises UnknownAlgorithm, MissingDependency."""
    if name not in ALGORITHMS:
        raise UnknownAlgorithm(f"hash algorithm {name!r}: known are {', '.join(ALGORITHMS)}")
    form: Literal["cbor", "pickle"] = "cbor" if name.endswith("_cbor") else "pickle"
    if name.startswith("sha256"):
        return HashAlgorithm(name, 32, form, pure.sha256)
    try:
        import xxhash
    except ImportError as why:
        raise MissingDependency(f"hash algorithm {name!r} needs the package xxhash: blockpool[xxhash]") from why
    return HashAlgorithm(name, 16, form, xxhash.xxh3_128_digest)


def none_hash(algorithm: str = "sha256_cbor", seed: str | None = None) -> bytes:
    """H(seed), the parent of first blocks.

    The seed is the argument; else the environment's PYTHONHASHSEED, if set; else a fixed text for SHA-256. For
    xxhash, which is not collision resistant, it is then random, one per process, with a RandomSeedWarning.
    Raises UnknownAlgorithm, MissingDependency, SeedError.
    """
    if seed is None:
        seed = os.environ.get("PYTHONHASHSEED")
    elif not isinstance(seed, str):
        raise SeedError(f"seed must be text, not {type(seed).__name__}")
    chosen = hash_algorithm(algorithm)
    if seed is None and algorithm.startswith("sha256"):
        seed = DEFAULT_SEED
    if seed is None:
        warnings.warn(
            f"{algorithm} without a seed: block hashes will differ between processes; "
            "give a seed or set PYTHONHASHSEED",
            RandomSeedWarning,
            stacklevel=2,
        )
        seed = _RANDOM_SEED
    return chosen.digest(seed)


def hash_block_tokens(
    parent: bytes | None,
    tokens: TokenIds,
    extra: tuple[object, ...] | None = None,
    *,
    algorithm: str = "sha256_cbor",
    seed: str | None = None,
) -> bytes:
    """The digest of one block: H((parent, tokens, extra)); a parent that is None or empty is NONE_HASH.

    `extra` is hashed as it is given: an empty tuple is not None. `seed` matters only for NONE_HASH. For more than
    one block see BlockHasher. Raises TokenIdError, DigestError if `parent` is not a digest of this algorithm,
    CborError, and what none_hash raises.
    """
    chosen = hash_algorithm(algorithm)
    if not parent:
        parent = none_hash(algorithm, seed)
    elif not isinstance(parent, bytes) or len(parent) != chosen.digest_size:
        raise DigestError(f"parent {parent!r}: a {algorithm} digest has {chosen.digest_size} bytes")
    return chosen.digest((parent, tuple(kernel.plain_list(as_ids(tokens))), extra))


def digest_to_int(digest: bytes) -> int:
    """The 64-bit form of a digest: its last 8 bytes, big endian, unsigned. Raises DigestError if it has fewer."""
    if len(digest) < 8:
        raise DigestError(f"a digest of {len(digest)} bytes has no 64-bit form")
    return int.from_bytes(digest[-8:], "big")
