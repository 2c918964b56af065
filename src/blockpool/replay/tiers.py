"""What lies below the pool in a replay: tiers with a size, a rule for what they store, and an order."""

from enum import StrEnum

import msgspec

from .errors import ReplayError


class StoreWhen(StrEnum):
    """When a tier is given a page of the pool."""

    COMPLETION = "completion"
    """When the block was computed, and can be found on the GPU."""
    EVICTION = "eviction"
    """When the last block of that content on the GPU is handed out."""
    HITS = "hits"
    """When it has been hit so many times since it came to the GPU."""


class TierOrder(StrEnum):
    """Which page of a tier goes first."""

    LRU = "lru"
    ARC = "arc"


class TierSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tier. `read_bytes_per_s`: how fast it is read, None when nothing is said about time. `num_hits`: for HITS."""

    name: str
    capacity_bytes: int
    read_bytes_per_s: float | None = None
    store: StoreWhen = StoreWhen.COMPLETION
    num_hits: int = 0
    order: TierOrder = TierOrder.LRU

    def __post_init__(self) -> None:
        if self.read_bytes_per_s is not None and not 0 < self.read_bytes_per_s < float("inf"):
            raise ReplayError(f"tier {self.name}: it is read at more than 0 bytes/s, not {self.read_bytes_per_s}")
        if (self.store is StoreWhen.HITS) != (self.num_hits > 0):
            raise ReplayError(f"tier {self.name}: a number of hits, at least 1, goes with storing by hits only")

    @property
    def store_text(self) -> str:
        """As `--tier-store` has it."""
        return f"hits={self.num_hits}" if self.store is StoreWhen.HITS else str(self.store)


class TierStack(msgspec.Struct, frozen=True, kw_only=True):
    """All tiers, the fastest first. `page_bytes`: of a block, per group. `prefill_tokens_per_s`: how fast a prompt is
    computed, None when nothing is said about time.

    Raises ReplayError for names that are not different, a tier that holds no page, and a speed that is none.
    """

    tiers: tuple[TierSpec, ...]
    page_bytes: tuple[int, ...]
    prefill_tokens_per_s: float | None = None

    def __post_init__(self) -> None:
        names = [tier.name for tier in self.tiers]
        if not names or len(set(names)) < len(names):
            raise ReplayError(f"tiers need names, each another: {', '.join(names) or 'there is none'}")
        if not self.page_bytes or min(self.page_bytes) < 1:
            raise ReplayError(f"a page has at least 1 byte, not {min(self.page_bytes, default=0)}")
        for tier in self.tiers:
            if tier.capacity_bytes < max(self.page_bytes):
                raise ReplayError(
                    f"tier {tier.name}: {tier.capacity_bytes:,} bytes do not hold one page of "
                    f"{max(self.page_bytes):,} bytes"
                )
        rate = self.prefill_tokens_per_s
        if rate is not None and not 0 < rate < float("inf"):
            raise ReplayError(f"a prompt is computed at more than 0 tokens/s, not {rate}")
