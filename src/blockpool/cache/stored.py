"""What others may keep copies of: blocks whose content is computed for certain, and how often they were hit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from librt.vecs import vec
from mypy_extensions import i32, i64

from blockpool.cache.hit import Hit
from blockpool.cache.request import Request
from blockpool.managers import SingleTypeKVCacheManager

NO_TOKENS: list[int] = []


@final
class StoredBlocks:
    """Full blocks of one group that hold what their digests say, and will until they are handed out.

    `digests`: one per block. `parents`: the digest before each, None at the start of a sequence. `ends`: where each
    ends, in tokens. `token_ids`: those of the whole sequence, empty where they are unknown.
    """

    def __init__(
        self,
        group_id: int,
        block_ids: list[int],
        digests: list[bytes],
        parents: list[bytes | None],
        ends: list[int],
        token_ids: Sequence[int],
    ) -> None:
        self.group_id = group_id
        self.block_ids = block_ids
        self.digests = digests
        self.parents = parents
        self.ends = ends
        self.token_ids = token_ids

    def __repr__(self) -> str:
        return f"StoredBlocks(group {self.group_id}, blocks {self.block_ids}, ends {self.ends})"


@final
class Span:
    """Blocks that were registered at `first`, first+1, … of a table, 0 for those that were not."""

    def __init__(
        self,
        manager: SingleTypeKVCacheManager,
        request: Request,
        blocks: vec[i32],
        first: int,
        digests: bytes,
        first_digest: int,
    ) -> None:
        self.manager = manager
        self.request = request
        self.blocks = blocks
        self.first = first
        self.digests = digests
        self.first_digest = first_digest

    def still_there(self) -> StoredBlocks:
        """Those of its blocks that have the hash still."""
        manager = self.manager
        index = manager.pool.index
        width: i64 = manager.pool.digest_size
        factor: i64 = manager.factor
        group: i64 = manager.group_id
        block_ids: list[int] = []
        digests: list[bytes] = []
        parents: list[bytes | None] = []
        ends: list[int] = []
        place: i64 = self.first
        for b in self.blocks:
            offset = ((place + 1) * factor - 1 - self.first_digest) * width
            if b != 0 and index.entry_of(i64(b), self.digests, offset, group) != 0:
                block_ids.append(int(b))
                digests.append(self.digests[offset : offset + width])
                before = offset - factor * width
                parents.append(self.digests[before : before + width] if place else None)
                ends.append(int((place + 1) * manager.block_size))
            place += 1
        tokens = self.request.all_token_ids
        return StoredBlocks(
            manager.group_id, block_ids, digests, parents, ends, NO_TOKENS if tokens is None else tokens
        )


@final
class StoredLog:
    """Spans of acknowledged steps, and the hits of requests that were admitted, until they are taken."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.hits: list[Hit] = []

    def take(self) -> list[StoredBlocks]:
        spans = self.spans
        self.spans = []
        found: list[StoredBlocks] = []
        for span in spans:
            blocks = span.still_there()
            if blocks.block_ids:
                found.append(blocks)
        return found

    def take_hits(self) -> list[Hit]:
        hits = self.hits
        self.hits = []
        return hits
