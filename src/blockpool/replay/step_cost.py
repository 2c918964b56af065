"""How long a step takes: a model of an engine with three numbers."""

import msgspec

from .errors import ReplayError


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """A step lasts `step_overhead_us` microseconds, its prompt tokens at `prefill_tokens_per_s`, and `decode_ms`
    milliseconds if it decodes at all: weights are read once for all requests of a step.

    Raises `ReplayError` for a cost below zero, or a speed that is not above it.
    """

    step_overhead_us: float = 500.0
    prefill_tokens_per_s: float = 20_000.0
    decode_ms: float = 15.0

    def __post_init__(self) -> None:
        for name in ("step_overhead_us", "decode_ms"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ReplayError(f"{name} must be a time of at least 0, not {getattr(self, name)}")
        if not 0.0 < self.prefill_tokens_per_s < float("inf"):
            raise ReplayError(f"prefill_tokens_per_s must be above 0, not {self.prefill_tokens_per_s}")

    def seconds(self, num_prefill_tokens: int, num_decodes: int) -> float:
        """What a step with so many prompt tokens and so many requests that decode takes."""
        seconds = self.step_overhead_us / 1e6 + num_prefill_tokens / self.prefill_tokens_per_s
        return seconds + self.decode_ms / 1e3 if num_decodes else seconds
