"""Below the pool of a replay: how much further a hit reaches with its tiers, and what moves between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

from blockpool.cache import Hit, KVCacheManager
from blockpool.managers import SingleTypeKVCacheManager
from blockpool.managers.resume import margin_behind, parts_of, parts_to_resume
from blockpool.pool import BlockRemoved, BlockStored

from .errors import ReplayError
from .expand import DIGEST_BYTES
from .tier_pages import TierPages
from .tier_run import StackRun
from .tiers import StoreWhen, TierStack


class Below:
    """All tiers, as one request after the other uses them. A page's key is its digest and its group.

    Raises ReplayError when there are not as many sizes of pages as groups.
    """

    def __init__(self, manager: KVCacheManager, stack: TierStack) -> None:
        if len(stack.page_bytes) != len(manager.managers):
            raise ReplayError(f"{len(manager.managers)} groups need as many page_bytes, not {len(stack.page_bytes)}")
        self._manager = manager
        self._stack = stack
        self._cached = [one for one in manager.managers if one.prefix_cacheable]
        # What is usable of these is a prefix, so that one look is enough.
        self._cached.sort(key=lambda one: not one.reads_whole_prefix())
        self._suffixes = [one.group_id.to_bytes(2, "big") for one in manager.managers]
        self._tiers = [TierPages(spec, min(stack.page_bytes)) for spec in stack.tiers]
        self._on_completion = self._that_store(StoreWhen.COMPLETION)
        self._on_eviction = self._that_store(StoreWhen.EVICTION)
        self._on_hits = self._that_store(StoreWhen.HITS)
        self._num_hits: dict[bytes, int] = {}  # of pages on the GPU

    def _that_store(self, when: StoreWhen) -> list[TierPages]:
        return [tier for tier in self._tiers if tier.spec.store is when]

    # -- looking up ----------------------------------------------------------------------------------

    def look_up(self, hit: Hit, chain: bytes, most: int) -> int:
        """To which token, at most `most`, the request can resume when all behind its hit comes from tiers."""
        return self._reach(hit.num_tokens, chain, most, self._tiers)

    def tokens_by_tier(self, hit: Hit, chain: bytes, reach: int) -> list[int]:
        """By how much each tier makes the hit longer."""
        count = len(self._tiers)
        ends = [hit.num_tokens] * count + [reach]
        if reach > hit.num_tokens:
            for number in range(1, count):
                ends[number] = self._reach(hit.num_tokens, chain, reach, self._tiers[:number])
        return [after - before for before, after in pairwise(ends)]

    @contextmanager
    def as_if_on_gpu(self, chain: bytes) -> Iterator[None]:
        """While this lasts, the managers find what is in any tier too."""
        num_digests = len(chain) // DIGEST_BYTES
        try:
            for one in self._cached:
                known: dict[bytes, int] = {}
                for position in range(num_digests // one.factor):
                    if self._has(self._tiers, self._key(one, chain, position)):
                        end = (position + 1) * one.factor * DIGEST_BYTES
                        known[chain[end - DIGEST_BYTES : end]] = 1
                one.awaited = known
            yield
        finally:
            for one in self._cached:
                one.awaited = None

    def _reach(self, start: int, chain: bytes, most: int, tiers: Sequence[TierPages]) -> int:
        """The greatest boundary that all groups can resume at; `start` when none lies behind it."""
        length = most - most % self._manager.alignment if self._cached else start
        settled = False
        num_settled = sum(one.reads_whole_prefix() for one in self._cached)
        first = 0
        while not settled and length > start:
            settled = True
            for one in self._cached[first:]:
                own = self._own_reach(one, start, chain, length, tiers)
                if own < length:
                    length = own
                    settled = False
            first = num_settled
        return max(length, start)

    def _own_reach(
        self, one: SingleTypeKVCacheManager, start: int, chain: bytes, most: int, tiers: Sequence[TierPages]
    ) -> int:
        """The same for one group. No position is looked at twice."""
        unit, step = one.block_size, self._manager.alignment
        margin = margin_behind(one, step)
        hashed = len(chain) // DIGEST_BYTES * one.pool.hash_block_size
        boundary = min(most, hashed - margin)
        boundary -= boundary % step
        known_from = hashed
        while boundary > start:
            first, last, _, _ = parts_to_resume(one, boundary, margin)
            first = max(first, start // unit)
            for position in range(first, min(last, known_from)):
                if not self._has(tiers, self._key(one, chain, position)):
                    break
            else:
                return boundary
            known_from = first
            boundary = (position + 1) * unit - 1 - margin
            boundary -= boundary % step
        return start

    def _key(self, one: SingleTypeKVCacheManager, chain: bytes, position: int) -> bytes:
        end = (position + 1) * one.factor * DIGEST_BYTES
        return chain[end - DIGEST_BYTES : end] + self._suffixes[one.group_id]

    def _has(self, tiers: Sequence[TierPages], key: bytes) -> bool:
        return any(key in tier.pages for tier in tiers)

    # -- moving --------------------------------------------------------------------------------------

    def ended(self, hit: Hit, chain: bytes, reach: int) -> None:
        """A request that began with `hit`, and loaded what lies between that and `reach`, is over.

        In the order in which it happens: loads, and promotions with them; hits; what left the pool; what came. Of one
        group the deepest page first, so that the pages that others share are the last to go.
        """
        loaded = self._load(hit.num_tokens, chain, reach)
        if self._on_hits and hit.num_tokens:
            self._count_hits(hit, chain)
        self._take_events(loaded)

    def _load(self, start: int, chain: bytes, reach: int) -> set[bytes]:
        loaded: set[bytes] = set()
        if reach == start:
            return loaded
        found = []
        for one in self._cached:
            num_bytes = self._stack.page_bytes[one.group_id]
            first, last, _ = parts_of(one, reach)
            for position in range(last - 1, max(first, start // one.block_size) - 1, -1):
                key = self._key(one, chain, position)
                number = next(number for number, tier in enumerate(self._tiers) if key in tier.pages)
                found.append((number, key, num_bytes))
                loaded.add(key)
        # All are read before a promotion can evict one of them.
        for number, key, _ in found:
            self._tiers[number].load(key)
        for number, key, num_bytes in found:
            for tier in self._tiers[:number]:
                tier.promote(key, num_bytes)
        return loaded

    def _count_hits(self, hit: Hit, chain: bytes) -> None:
        for one in self._cached:
            group = hit.groups[one.group_id]
            for position in range(len(group) - 1, group.first - 1, -1):
                key = self._key(one, chain, position)
                count = self._num_hits[key] = self._num_hits.get(key, 0) + 1
                for tier in self._on_hits:
                    if count == tier.spec.num_hits:
                        tier.store(key, self._stack.page_bytes[one.group_id])

    def _take_events(self, loaded: set[bytes]) -> None:
        page_bytes = self._stack.page_bytes
        filled: list[tuple[bytes, int]] = []
        for event in self._manager.pool.take_events():
            assert isinstance(event, BlockStored | BlockRemoved)
            assert event.group_idx is not None
            suffix, num_bytes = self._suffixes[event.group_idx], page_bytes[event.group_idx]
            for digest in event.block_hashes:
                assert isinstance(digest, bytes)
                key = digest + suffix
                if isinstance(event, BlockRemoved):
                    self._num_hits.pop(key, None)
                    for tier in self._on_eviction:
                        tier.store(key, num_bytes)
                elif key not in loaded:
                    filled.append((key, num_bytes))
        for tier in self._on_completion:
            for key, num_bytes in reversed(filled):
                tier.store(key, num_bytes)

    def result(self, hit_tokens: Sequence[Sequence[int]]) -> StackRun:
        """The figures so far. `hit_tokens`: by tier, of each request that counts."""
        return StackRun(
            tiers=tuple(
                tier.result(sum(tokens[number] for tokens in hit_tokens)) for number, tier in enumerate(self._tiers)
            ),
            prefill_tokens_per_s=self._stack.prefill_tokens_per_s,
        )
