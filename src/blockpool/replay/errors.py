"""What replay raises about its input, and what it raises when it is interrupted."""

from .result import RunResult


class ReplayError(ValueError):
    """The trace cannot be replayed with these sizes. The message says which do not fit together."""


class ReplayInterrupted(KeyboardInterrupt):
    """Ctrl-C during a run; `result` says how far it came (`result.interrupted` is true)."""

    def __init__(self, result: RunResult) -> None:
        super().__init__(f"interrupted after {result.requests} of {result.trace_requests} requests")
        self.result = result
