"""Whose pages they are: what two engines must have in common to read each other's."""

from __future__ import annotations

import hashlib

import msgspec

PREFIX_BYTES = 8
GROUP_BYTES = 4


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of one namespace can be read by whoever has an equal one.

    `model`: its name. `weights`: which weights, in a form that lasts: a revision or a hash of the checkpoint, not a
    count since the start. `layout`: how a page's bytes are to be read: dtype, block sizes, layers, parallel rank.
    `hash_algorithm` and `seed`: of the digests.
    """

    model: str
    weights: str = ""
    layout: str = ""
    hash_algorithm: str = "sha256_cbor"
    seed: str = ""

    @property
    def prefix(self) -> bytes:
        """8 bytes: the start of every key."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()[:PREFIX_BYTES]

    def key(self, digest: bytes, group_id: int) -> bytes:
        """Prefix, digest, group id (4 bytes, big endian)."""
        return self.prefix + digest + group_id.to_bytes(GROUP_BYTES, "big")


def namespace_of(key: bytes) -> bytes:
    """The prefix of a key."""
    return key[:PREFIX_BYTES]


def digest_of(key: bytes) -> bytes:
    return key[PREFIX_BYTES:-GROUP_BYTES]


def group_of(key: bytes) -> int:
    return int.from_bytes(key[-GROUP_BYTES:], "big")
