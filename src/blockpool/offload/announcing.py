"""Events of lower tiers: what their indices gained and lost, in the words of the pool's events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from blockpool.cache import KVCacheManager, StoredBlocks
from blockpool.managers import SlidingWindowSpec
from blockpool.offload.errors import OffloadError
from blockpool.offload.finding import look_up_in
from blockpool.offload.namespace import digest_of, group_of
from blockpool.offload.tier import ChangeKind, Tier
from blockpool.pool import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent


class Origin(NamedTuple):
    """What an event says of a block besides its digest."""

    parent: bytes | None
    token_ids: tuple[int, ...]


FEW = 10_000


@runtime_checkable
class HasKeys(Protocol):
    """A tier that can say all that it holds."""

    def keys(self) -> list[bytes]: ...


UNKNOWN = Origin(None, ())


class Announcer:
    """Of blocks whose origin is unknown, as those that a disk kept over a restart, events have neither parent nor
    tokens.
    """

    def __init__(self, manager: KVCacheManager, tiers: Sequence[Tier], starts: Sequence[bytes]) -> None:
        self._specs = [group.kv_cache_spec for group in manager.config.kv_cache_groups]
        self._block_sizes = [one.block_size for one in manager.managers]
        self._tiers = [tier for tier in tiers if not tier.is_remote]
        self._managers = manager.managers
        self._origins: dict[bytes, Origin] = {}
        self._most_origins = FEW
        self._events: list[KVCacheEvent] = []
        self._starts = list(starts)
        media = [tier.medium for tier in self._tiers]
        if len(set(media)) < len(media):
            raise OffloadError(f"events name a tier by its medium: tiers of {media} cannot be told apart")
        taken = [tier.name for tier in self._tiers if tier.reports_changes]
        if taken:
            raise OffloadError(
                f"the events of tiers {taken} are taken by another Offloader: only one can announce them"
            )
        for tier in self._tiers:
            tier.reports_changes = True
            tier.take_changes()
            for key in tier.keys() if isinstance(tier, HasKeys) else ():  # what it kept over a restart
                if self._is_own(key):
                    self._events.append(self._stored(tier, key))

    def close(self) -> None:
        """Nobody takes the changes any more."""
        for tier in self._tiers:
            tier.reports_changes = False
            tier.take_changes()

    def note(self, blocks: StoredBlocks, keys: Sequence[bytes]) -> None:
        """Where these pages come from, should a tier take them."""
        size = self._block_sizes[blocks.group_id]
        for key, parent, end in zip(keys, blocks.parents, blocks.ends, strict=True):
            if key not in self._origins:
                self._origins[key] = Origin(parent, tuple(blocks.token_ids[end - size : end]))
        if len(self._origins) > self._most_origins:
            self._origins = {key: origin for key, origin in self._origins.items() if self._is_anywhere(key)}
            self._most_origins = 2 * len(self._origins) + FEW

    def collect(self) -> None:
        """Turn what tiers report into events."""
        for tier in self._tiers:
            for kind, key in tier.take_changes():
                if kind is not ChangeKind.CLEARED and not self._is_own(key):
                    continue  # another engine's, which cannot be read here
                if kind is ChangeKind.STORED:
                    self._events.append(self._stored(tier, key))
                elif kind is ChangeKind.REMOVED:
                    self._events.append(
                        BlockRemoved(block_hashes=[digest_of(key)], medium=tier.medium, group_idx=group_of(key))
                    )
                    if not self._is_anywhere(key):
                        self._origins.pop(key, None)
                else:
                    self._events.append(AllBlocksCleared(medium=tier.medium))

    def take(self) -> list[KVCacheEvent]:
        self.collect()
        events = self._events
        self._events = []
        return events

    def _is_own(self, key: bytes) -> bool:
        """Whether it can be read here."""
        group_id = group_of(key)
        return group_id < len(self._starts) and key.startswith(self._starts[group_id])

    def _is_anywhere(self, key: bytes) -> bool:
        """Whether a tier has the page, or the cache the block, which may go down yet."""
        group_id = group_of(key)
        if self._managers[group_id].pool.get_cached_block(digest_of(key), [group_id]) is not None:
            return True
        return look_up_in(self._tiers, [], [key])[0]

    def _stored(self, tier: Tier, key: bytes) -> BlockStored:
        origin = self._origins.get(key, UNKNOWN)
        group_id = group_of(key)
        spec = self._specs[group_id]
        return BlockStored(
            block_hashes=[digest_of(key)],
            parent_block_hash=origin.parent,
            token_ids=list(origin.token_ids),
            block_size=self._block_sizes[group_id],
            lora_id=None,
            medium=tier.medium,
            lora_name=None,
            group_idx=group_id,
            kv_cache_spec_kind=spec.event_kind,
            kv_cache_spec_sliding_window=spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None,
        )
