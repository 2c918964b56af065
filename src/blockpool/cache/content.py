"""What each registered block really holds: kept only when hashes are verified, compared at every lookup."""

from __future__ import annotations

from typing import Any

from blockpool.cache.request import Request
from blockpool.managers import SingleTypeKVCacheManager

Content = tuple[bytes | None, tuple[int, ...], tuple[Any, ...]]


class ContentBook:
    """(group, block) -> incarnation and content. A record of another incarnation counts as absent."""

    def __init__(self) -> None:
        self._records: dict[tuple[int, int], tuple[int, Content]] = {}
        self.num_collisions = 0

    def record(self, manager: SingleTypeKVCacheManager, request: Request, position: int, block: int) -> None:
        content = content_of(manager, request, position)
        if content is not None:
            turn = manager.pool.blocks[block].incarnation
            self._records[manager.group_id, block] = (turn, content)

    def num_true(self, manager: SingleTypeKVCacheManager, request: Request, blocks: list[int]) -> int:
        """How many leading blocks of a hit hold what the request has there; counts a collision.

        A block whose content nobody recorded, or a request of unknown tokens, cannot be verified: no hit.
        """
        for position, block in enumerate(blocks):
            known = self._records.get((manager.group_id, block))
            content = content_of(manager, request, position)
            if known is None or content is None or known[0] != manager.pool.blocks[block].incarnation:
                return position
            if known[1] != content:
                self.num_collisions += 1
                return position
        return len(blocks)


def content_of(manager: SingleTypeKVCacheManager, request: Request, position: int) -> Content | None:
    """Parent digest, tokens and extra keys per hash block of one block position; None for unknown tokens."""
    chain = request.block_hashes
    if request.all_token_ids is None or chain is None:
        return None
    size = manager.block_size
    unit = manager.pool.hash_block_size
    start = position * size
    first = start // unit
    parent = chain[first - 1] if first else None
    extras = (
        ()
        if request.extra_keys is None
        else tuple(request.extra_keys.key(at, at + unit) for at in range(start, start + size, unit))
    )
    return parent, tuple(request.all_token_ids[start : start + size]), extras
