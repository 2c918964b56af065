"""What each registered block really holds: kept only when hashes are verified, compared at every lookup."""

from __future__ import annotations

from typing import Any, final

from blockpool.cache.request import Request
from blockpool.managers import CommonHit, SingleTypeKVCacheManager

Content = tuple[bytes | None, tuple[int, ...], tuple[Any, ...]]


@final
class ContentBook:
    """(group, block) -> incarnation, and content per covered length. A record of another turn counts as absent."""

    def __init__(self) -> None:
        self._records: dict[tuple[int, int], tuple[int, dict[int, Content]]] = {}
        self.num_collisions = 0

    def record(self, manager: SingleTypeKVCacheManager, request: Request, block: int, end: int) -> None:
        """A block was registered for the tokens of a request up to `end`."""
        content = content_of(manager, request, end)
        if content is None:
            return
        turn = manager.pool.blocks[block].incarnation
        known = self._records.get((manager.group_id, block))
        if known is None or known[0] != turn:
            known = (turn, {})
            self._records[manager.group_id, block] = known
        known[1][end] = content

    def moved(self, manager: SingleTypeKVCacheManager, source: int, target: int) -> None:
        """The entries of one block name another, which is a copy of it."""
        known = self._records.get((manager.group_id, source))
        if known is not None and known[0] == manager.pool.blocks[source].incarnation:
            turn = manager.pool.blocks[target].incarnation
            self._records[manager.group_id, target] = (turn, dict(known[1]))

    def true_length(self, managers: list[SingleTypeKVCacheManager], request: Request, common: CommonHit) -> int:
        """How many tokens of a hit can be true: all of them, or less, where a block holds something else.

        A block whose content nobody recorded, or a request of unknown tokens, cannot be verified: no hit. Counts a
        collision.
        """
        for manager, hit in zip(managers, common.groups, strict=True):
            blocks = hit.block_ids()
            for position in range(hit.first, len(blocks)):
                if blocks[position]:
                    end = min((position + 1) * manager.block_size, hit.num_tokens)
                    if not self.is_true(manager, request, blocks[position], end):
                        return position * manager.block_size
        return common.num_tokens

    def is_true(self, manager: SingleTypeKVCacheManager, request: Request, block: int, end: int) -> bool:
        known = self._records.get((manager.group_id, block))
        content = content_of(manager, request, end)
        if known is None or content is None or known[0] != manager.pool.blocks[block].incarnation:
            return False
        for covered, held in known[1].items():
            if covered == end and held == content:
                return True
            if covered > end and not manager.is_state and begins_with(held, content):
                return True
        self.num_collisions += 1
        return False


def begins_with(held: Content, content: Content) -> bool:
    parent, tokens, extras = content
    return held[0] == parent and held[1][: len(tokens)] == tokens and held[2][: len(extras)] == extras


def content_of(manager: SingleTypeKVCacheManager, request: Request, end: int) -> Content | None:
    """Parent digest, tokens and extra keys per hash block, of the block that ends with token `end`, or the part of it
    up to there; None for unknown tokens.
    """
    chain = request.block_hashes
    if request.all_token_ids is None or chain is None:
        return None
    unit = manager.pool.hash_block_size
    start = (end - 1) // manager.block_size * manager.block_size
    first = start // unit
    parent = chain[first - 1] if first else None
    extras = (
        ()
        if request.extra_keys is None
        else tuple(request.extra_keys.key(at, at + unit) for at in range(start, end, unit))
    )
    return parent, tuple(request.all_token_ids[start:end]), extras
