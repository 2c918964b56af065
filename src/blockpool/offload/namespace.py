"""Whose pages they are: what two engines must have in common to read each other's."""

from __future__ import annotations

import hashlib
import struct
import zlib

import msgspec

PREFIX_BYTES = 8
LAYOUT_BYTES = 4
GROUP_BYTES = 4


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of one namespace can be read by whoever has an equal one.

    `model`: its name. `weights`: which weights, in a form that lasts: a revision or a hash of the checkpoint, not a
    count since the start. `layout`: how a page's bytes are to be read: dtype, layers, parallel rank (block sizes and
    the length of pages are in the keys anyway). `hash_algorithm` and `seed`: of the digests.
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

    def start(self, block_size: int, page_bytes: int) -> bytes:
        """The prefix and 4 bytes of a group's own layout: what keys of its pages begin with. A page that covers other
        tokens, or has other bytes, is another page, though the digest at its end may be the same.
        """
        return self.prefix + zlib.crc32(struct.pack(">qq", block_size, page_bytes)).to_bytes(LAYOUT_BYTES, "big")

    def key(self, digest: bytes, group_id: int, block_size: int = 0, page_bytes: int = 0) -> bytes:
        """`start`, digest, group id (4 bytes, big endian)."""
        return self.start(block_size, page_bytes) + digest + group_id.to_bytes(GROUP_BYTES, "big")


def namespace_of(key: bytes) -> bytes:
    """The prefix of a key."""
    return key[:PREFIX_BYTES]


def digest_of(key: bytes) -> bytes:
    return key[PREFIX_BYTES + LAYOUT_BYTES : -GROUP_BYTES]


def group_of(key: bytes) -> int:
    return int.from_bytes(key[-GROUP_BYTES:], "big")
