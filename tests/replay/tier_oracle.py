"""Tiers so simple that they are obviously right: an ordered dict each, and one loop per rule.

Below `LruOracle` for one group that reads everything; and a search of boundaries for any groups, by trying all.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from .lru_oracle import LruOracle


@dataclass
class TierOutcome:
    hit_tokens: int = 0
    loaded_pages: int = 0
    stored_pages: int = 0
    promoted_pages: int = 0
    distinct_pages: int = 0
    evicted_pages: int = 0
    evicted_unread_pages: int = 0
    held_pages: int = 0


@dataclass
class OracleTier:
    """Least recently used first; `store` as `--tier-store` has it."""

    capacity: int  # in pages
    store: str
    order: OrderedDict[Hashable, None] = field(default_factory=OrderedDict)
    unread: set[Hashable] = field(default_factory=set)
    ever: set[Hashable] = field(default_factory=set)
    outcome: TierOutcome = field(default_factory=TierOutcome)

    def use(self, key: Hashable) -> None:
        self.order.move_to_end(key)

    def write(self, key: Hashable) -> None:
        if len(self.order) == self.capacity:
            gone, _ = self.order.popitem(last=False)
            self.outcome.evicted_pages += 1
            self.outcome.evicted_unread_pages += gone in self.unread
            self.unread.discard(gone)
        self.order[key] = None
        self.unread.add(key)
        self.ever.add(key)

    def give(self, key: Hashable) -> None:
        """A page of the pool."""
        if key in self.order:
            self.use(key)
        else:
            self.write(key)
            self.outcome.stored_pages += 1


class TieredOracle(LruOracle):
    """One group that reads everything, over tiers."""

    def __init__(self, num_blocks: int, block_size: int, tiers: Sequence[OracleTier]) -> None:
        super().__init__(num_blocks, block_size)
        self.tiers = tiers
        self.handed_out: list[Hashable] = []
        self.num_hits: dict[Hashable, int] = {}

    def take_next(self) -> int:
        key = self.key_of.get(next(iter(self.free_queue)))
        block = super().take_next()
        if key is not None and key not in self.blocks_with:
            self.handed_out.append(key)
            self.num_hits.pop(key, None)
        return block

    def run(self, keys: Sequence[Hashable], num_prompt_tokens: int, num_output_tokens: int) -> None:
        most = (num_prompt_tokens - 1) // self.block_size
        hit = keys[: len(self.look_up(keys, most))]
        loads: list[tuple[Hashable, int]] = []
        for key in keys[len(hit) : most]:
            there = [number for number, tier in enumerate(self.tiers) if key in tier.order]
            if not there:
                break
            loads.append((key, there[0]))
        known = set(self.blocks_with)
        refused = self.outcome.refused_requests
        self.handed_out = []
        super().run(keys, num_prompt_tokens, num_output_tokens)
        if self.outcome.refused_requests > refused:
            return
        # Without tier n and those behind it, the hit ends at the first page that no tier before n has.
        reach = [
            next((at for at, load in enumerate(loads) if load[1] > n), len(loads)) for n in range(len(self.tiers))
        ]
        for number, tier in enumerate(self.tiers):
            before = reach[number - 1] if number else 0
            tier.outcome.hit_tokens += (reach[number] - before) * self.block_size
        for key, number in reversed(loads):
            self.tiers[number].use(key)
            self.tiers[number].unread.discard(key)
            self.tiers[number].outcome.loaded_pages += 1
        for key, number in reversed(loads):
            for tier in self.tiers[:number]:
                if key not in tier.order:
                    tier.write(key)
                    tier.outcome.promoted_pages += 1
        kept = known - set(self.handed_out)
        brought = {key for key, _ in loads}
        computed = [key for key in keys if key not in kept and key not in brought]
        for key in reversed(hit):
            self.num_hits[key] = self.num_hits.get(key, 0) + 1
            for tier in self.tiers:
                if tier.store == f"hits={self.num_hits[key]}":
                    tier.give(key)
        for tier in self.tiers:
            if tier.store == "eviction":
                for key in self.handed_out:
                    tier.give(key)
            elif tier.store == "completion":
                for key in reversed(computed):
                    tier.give(key)

    def outcomes(self) -> list[TierOutcome]:
        for tier in self.tiers:
            tier.outcome.distinct_pages = len(tier.ever)
            tier.outcome.held_pages = len(tier.order)
        return [tier.outcome for tier in self.tiers]
