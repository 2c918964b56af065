"""A progress bar on stderr, when a person is watching and there is something to wait for."""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

# A bar that would vanish at once is not worth importing one.
QUIET_S = 0.5


class ProgressBar:
    """Shows how many of `total` are done. Silent unless stderr is a terminal."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._what = ""
        self._watched = sys.stderr.isatty()
        self._show_at_s = time.monotonic() + QUIET_S
        self._bar: Progress | None = None

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def describe(self, what: str) -> None:
        """Say what the next updates are about."""
        self._what = what

    def update(self, num_done: int) -> None:
        """Show that `num_done` are done."""
        if not self._watched:
            return
        if self._bar is None:
            if time.monotonic() < self._show_at_s:
                return
            self._bar = _new_bar(self._total)
        self._bar.update(self._bar.task_ids[0], description=self._what, completed=num_done)


def _new_bar(total: int) -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    bar.add_task("", total=total)
    bar.start()
    return bar
