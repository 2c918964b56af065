"""Where the scheduler asks for KV that is elsewhere: in a lower tier, or at another engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from blockpool.engine.output import SchedulerOutput
from blockpool.engine.request import EngineRequest

if TYPE_CHECKING:
    from blockpool.engine.scheduler import Scheduler


class Connector(Protocol):
    """Knows what KV it can bring. What it is to bring stands in a step's `loads`; that done, or failed, the scheduler
    is told: `finished_recving(request_id)` or `failed_recving(request_id)`, once per load.
    """

    def get_num_external_tokens(self, request: EngineRequest, num_computed_tokens: int) -> int | None:
        """How many tokens behind the first `num_computed_tokens` it can bring; None: ask again in the next step.

        It is asked while a step is planned, and must not call the scheduler.
        """

    def load_aborted(self, request_id: str) -> None:
        """A request was aborted while it was loaded: its blocks are kept until the load is reported, as done or as
        failed, or its lease ends.
        """


class Transfers(Connector, Protocol):
    """A connector that an Engine runs: it is shown each step that has run, and tells the scheduler itself."""

    def step_has_run(self, output: SchedulerOutput) -> None:
        """The worker has made the step's clears and copies: its loads may be written from now on."""

    def poll(self, scheduler: Scheduler) -> int:
        """Tell the scheduler of loads that have ended since the last call; how many. Never waits."""

    def wait(self) -> None:
        """Return when there may be something to poll, at once if there is nothing in flight."""
