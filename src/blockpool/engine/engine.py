"""A scheduler and a worker in one process, with steps in flight between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from blockpool.engine.output import SchedulerOutput
from blockpool.engine.request import EngineRequest
from blockpool.engine.scheduler import Scheduler
from blockpool.engine.states import FinishedRequest
from blockpool.engine.worker import Worker


class Engine:
    """Plans a step, runs it, and tells the scheduler its result when `steps_in_flight` are waiting for that.

    The worker runs a step when it is planned; to the scheduler it is in flight until its result is told.
    """

    def __init__(self, scheduler: Scheduler, worker: Worker, steps_in_flight: int = 1) -> None:
        self.scheduler = scheduler
        self.worker = worker
        self.steps_in_flight = steps_in_flight
        self.in_flight: deque[tuple[int, dict[str, list[int]]]] = deque()

    def add_request(self, request: EngineRequest) -> None:
        self.scheduler.add_request(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        self.scheduler.abort(request_ids)

    def step(self) -> SchedulerOutput | None:
        """One more step, or the result of the oldest when none can be planned; the step that was planned, if any."""
        output = self.scheduler.schedule()
        is_planned = output.step_id >= 0
        if is_planned:
            self.in_flight.append((output.step_id, self.worker.execute(output)))
        if self.in_flight and (not is_planned or len(self.in_flight) >= self.steps_in_flight):
            self.scheduler.update(*self.in_flight.popleft())
        return output if is_planned else None

    def run(self) -> list[FinishedRequest]:
        """Steps until all requests have ended."""
        finished: list[FinishedRequest] = []
        while self.scheduler.has_work or self.in_flight:
            self.step()
            finished += self.scheduler.take_finished()
        return finished
