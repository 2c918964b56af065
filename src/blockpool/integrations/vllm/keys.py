"""Keys of any width, for books whose digests have 32 bytes.

vLLM's key is a hash and four bytes of group id, and the pool is not told how long its hashes are: 32 bytes with
SHA-256, 16 with xxHash, anything in a test. Up to 20 bytes stand in the digest as they are, before a tag that no
SHA-256 digest ends in but by a chance of 2**-96. Other widths are hashed, and the original is kept beside.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final, final

from blockpool.pool.errors import GroupError
from blockpool.pool.index import BlockHashToBlockMap as Index
from blockpool.pool.layout import MAX_GROUP

WIDTH: Final = 32
SHORT: Final = 20
TAG: Final = b"\xf1blockpool\x1f"  # 11 bytes; the twelfth is the length
PADDING: Final = [bytes(SHORT - n) + TAG + bytes([n]) for n in range(SHORT + 1)]


@final
class Keys:
    """Between vLLM's hashes and the digests of one index."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.originals: dict[bytes, bytes] = {}

    def digest(self, block_hash: bytes) -> bytes:
        """The digest under which a hash is looked up."""
        length = len(block_hash)
        if length == WIDTH:
            return block_hash
        if length <= SHORT:
            return block_hash + PADDING[length]
        return sha256(block_hash).digest()

    def keep(self, block_hash: bytes) -> bytes:
        """The digest under which a hash is registered: it can be turned back."""
        digest = self.digest(block_hash)
        if len(block_hash) > SHORT and len(block_hash) != WIDTH:
            self.originals[digest] = block_hash
        return digest

    def original(self, digest: bytes) -> bytes:
        """The hash that a digest stands for."""
        if digest[SHORT : WIDTH - 1] == TAG and digest[WIDTH - 1] <= SHORT:
            return digest[: digest[WIDTH - 1]]
        if self.originals:
            return self.originals.get(digest, digest)
        return digest

    def tidy(self) -> None:
        """Forget the originals of keys that have left the index, when they are many. Called before a registration."""
        if len(self.originals) <= 2 * len(self.index) + 64:
            return
        listed = {key[:WIDTH] for key in self.index.keys()}  # noqa: SIM118 -- a map of blocks, no dict
        self.originals = {digest: value for digest, value in self.originals.items() if digest in listed}

    def clear(self) -> None:
        self.originals.clear()

    def split(self, key: bytes) -> tuple[bytes, int]:
        """A key's hash and group id. Raises GroupError for a key without either."""
        if len(key) < 4:
            raise GroupError(f"a key is a hash and 4 bytes of group id, this one has {len(key)} bytes")
        group = int.from_bytes(key[-4:], "big")
        if group > MAX_GROUP:
            raise GroupError(f"group id {group} is not below {MAX_GROUP + 1}")
        return key[:-4], group

    def key_of(self, entry: int) -> bytes:
        """The key of an entry of the index, as vLLM writes it."""
        group = int(self.index.group_at(entry))
        return self.original(self.index.digest_of(entry)) + group.to_bytes(4, "big")

    def keys_of(self, block: int) -> list[bytes]:
        """All keys of a block, the primary one first."""
        return [self.key_of(entry) for entry in self.index.entries_of(block)]
