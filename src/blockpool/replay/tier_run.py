"""What the tiers of a run have done."""

import msgspec


class TierRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a tier has done. Pages are those of all groups; bytes are theirs."""

    name: str
    capacity_bytes: int
    store: str
    """As `--tier-store` has it."""
    order: str
    read_bytes_per_s: float | None
    hit_tokens: int
    """Prompt tokens by which the hit was longer with this tier than with the GPU and the tiers before it alone."""
    loaded_pages: int
    loaded_bytes: int
    """Read from this tier into blocks of the pool."""
    stored_pages: int
    stored_bytes: int
    """Written with pages of the pool."""
    promoted_pages: int
    promoted_bytes: int
    """Written with pages that were found in a slower tier."""
    distinct_pages: int
    distinct_bytes: int
    """Of all that was written, each page once, however often it was written."""
    evicted_pages: int
    evicted_unread_pages: int
    """Of these: not loaded since they were written."""
    held_pages: int
    held_bytes: int
    """When the run ended."""

    @property
    def written_bytes(self) -> int:
        """Stored and promoted."""
        return self.stored_bytes + self.promoted_bytes

    @property
    def write_amplification(self) -> float | None:
        """Bytes written / bytes of distinct pages: 1.0 when nothing was written twice; None without a write."""
        return self.written_bytes / self.distinct_bytes if self.distinct_bytes else None

    @property
    def written_per_loaded(self) -> float | None:
        """Bytes written / bytes loaded; None without a load."""
        return self.written_bytes / self.loaded_bytes if self.loaded_bytes else None

    @property
    def load_s(self) -> float | None:
        """What its loads take, one after the other at the stated bandwidth; None where none was stated."""
        if not self.loaded_bytes:
            return 0.0
        return None if self.read_bytes_per_s is None else self.loaded_bytes / self.read_bytes_per_s


class StackRun(msgspec.Struct, frozen=True, kw_only=True):
    """All tiers of a run, the fastest first."""

    tiers: tuple[TierRun, ...]
    prefill_tokens_per_s: float | None

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that were found below the GPU."""
        return sum(tier.hit_tokens for tier in self.tiers)

    @property
    def loaded_bytes(self) -> int:
        """Of all tiers."""
        return sum(tier.loaded_bytes for tier in self.tiers)

    @property
    def load_s(self) -> float | None:
        """What all loads take, None where the bandwidth of a tier that was read is not stated."""
        seconds = [tier.load_s for tier in self.tiers]
        return None if None in seconds else sum(one for one in seconds if one is not None)

    @property
    def recompute_s(self) -> float | None:
        """What computing those tokens would take, None where no speed is stated."""
        return None if self.prefill_tokens_per_s is None else self.hit_tokens / self.prefill_tokens_per_s

    @property
    def saved_s(self) -> float | None:
        """By loading instead of computing; below 0 where that was slower."""
        load, recompute = self.load_s, self.recompute_s
        return None if load is None or recompute is None else recompute - load
