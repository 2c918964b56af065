"""Token ids in, chained digests out: the same bytes as other engines, block after block.

It must not know of blocks, pools, requests or models, and it imports no other room.
"""

from blockpool.hashing.algorithms import (
    ALGORITHMS,
    HashAlgorithm,
    digest_to_int,
    hash_algorithm,
    hash_block_tokens,
    none_hash,
)
from blockpool.hashing.chain import BlockHasher, BlockHashes
from blockpool.hashing.errors import (
    BlockSizeError,
    CborError,
    DigestError,
    ExtraKeysError,
    HashingError,
    KernelUnavailable,
    MissingDependency,
    RandomSeedWarning,
    SeedError,
    TokenCountError,
    TokenIdError,
    TokensUnknown,
    UnknownAlgorithm,
)
from blockpool.hashing.extra_keys import ExtraKeys, MediaItem
from blockpool.hashing.kernel import KERNEL, available_kernels
from blockpool.hashing.tokens import TokenIds
from blockpool.hashing.view import BlockHashView

__all__ = [
    "ALGORITHMS",
    "KERNEL",
    "BlockHashView",
    "BlockHasher",
    "BlockHashes",
    "BlockSizeError",
    "CborError",
    "DigestError",
    "ExtraKeys",
    "ExtraKeysError",
    "HashAlgorithm",
    "HashingError",
    "KernelUnavailable",
    "MediaItem",
    "MissingDependency",
    "RandomSeedWarning",
    "SeedError",
    "TokenCountError",
    "TokenIdError",
    "TokenIds",
    "TokensUnknown",
    "UnknownAlgorithm",
    "available_kernels",
    "digest_to_int",
    "hash_algorithm",
    "hash_block_tokens",
    "none_hash",
]
