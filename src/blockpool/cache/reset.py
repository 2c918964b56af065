"""The outcome of a reset: done, or who stands in the way."""

from __future__ import annotations

from typing import final


@final
class CacheResetResult:
    """True when the prefix cache was emptied; else who holds blocks, and how many: requests, owners of pins, and of
    other holds (copies that were not taken, blocks that wait to be found).
    """

    def __init__(
        self,
        num_blocks_in_use: int,
        num_blocks_deferred: int,
        requests: dict[str, int],
        pins: dict[str, int],
        holds: dict[str, int],
    ) -> None:
        self.num_blocks_in_use = num_blocks_in_use
        self.num_blocks_deferred = num_blocks_deferred
        self.requests = requests
        self.pins = pins
        self.holds = holds

    def __bool__(self) -> bool:
        return self.num_blocks_in_use == 0

    def __repr__(self) -> str:
        if self:
            return "CacheResetResult(done)"
        return (
            f"CacheResetResult({self.num_blocks_in_use} blocks in use, {self.num_blocks_deferred} of them deferred,"
            f" requests={self.requests}, pins={self.pins}, holds={self.holds})"
        )
