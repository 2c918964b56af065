"""What a reader raises, and the counter of what it was told to skip."""


class TraceError(ValueError):
    """A trace cannot be read. The message names the file and, where there is one, the line and the field."""


class BadLines:
    """Decides what one bad line (in a session file: one bad request) does: end the reading, or be counted.

    A fault of the whole file (absent, truncated, not JSON at all) is never skipped and does not come here.
    """

    def __init__(self, *, skip: bool) -> None:
        self.skip = skip
        self.count = 0
        self.first: TraceError | None = None

    def report(self, error: TraceError) -> None:
        """Count `error` if bad lines are to be skipped, else raise it."""
        if not self.skip:
            raise error
        self.count += 1
        if self.first is None:
            self.first = error
