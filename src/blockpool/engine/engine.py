"""A scheduler and a worker in one process, with steps in flight between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from blockpool.engine.connector import Transfers
from blockpool.engine.errors import EngineError
from blockpool.engine.output import SchedulerOutput
from blockpool.engine.request import EngineRequest
from blockpool.engine.scheduler import Scheduler
from blockpool.engine.states import FinishedRequest
from blockpool.engine.worker import Worker


class Engine:
    """Plans a step, runs it, and tells the scheduler its result when `steps_in_flight` are waiting for that.

    The worker runs a step when it is planned; to the scheduler it is in flight until its result is told.
    `transfers`: the scheduler's connector, if it is one that an engine runs.

    What the worker raises, and what the scheduler says to a result that cannot be, comes out of the call that ran the
    step. Nobody can say then what the memory holds: the engine is broken, and refuses to go on with EngineError.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        worker: Worker,
        steps_in_flight: int = 1,
        transfers: Transfers | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.worker = worker
        self.steps_in_flight = steps_in_flight
        self.transfers = transfers
        self.in_flight: deque[tuple[int, dict[str, list[int]]]] = deque()
        self._failure: BaseException | None = None  # what broke it
        self._failed_step = -1

    def add_request(self, request: EngineRequest) -> None:
        self._must_not_be_broken()
        self.scheduler.add_request(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        self.scheduler.abort(request_ids)

    def step(self) -> SchedulerOutput | None:
        """One more step, or the result of the oldest when none can be planned; the step that was planned, if any."""
        self._must_not_be_broken()
        transfers = self.transfers
        if transfers is not None:
            transfers.poll(self.scheduler)
        output = self.scheduler.schedule()
        is_planned = output.step_id >= 0
        if is_planned:
            try:
                results = self.worker.execute(output)
            except BaseException as error:
                self._break(output.step_id, error)
                raise
            self.in_flight.append((output.step_id, results))
            if transfers is not None:
                transfers.step_has_run(output)
        if self.in_flight and (not is_planned or len(self.in_flight) >= self.steps_in_flight):
            self._tell(*self.in_flight.popleft())
        return output if is_planned else None

    def run(self) -> list[FinishedRequest]:
        """Steps until all requests have ended; who has ended since the last call. After an error they are still to be
        had from the scheduler's `take_finished`.
        """
        self._must_not_be_broken()
        while self.scheduler.has_work or self.in_flight:
            was_idle = not self.in_flight
            if self.step() is None and was_idle:
                self._wait()
        return self.scheduler.take_finished()

    def _wait(self) -> None:
        """Nothing can run and nothing is in flight: only a load can change that."""
        if self.transfers is not None:
            self.transfers.wait()

    def _tell(self, step_id: int, results: dict[str, list[int]]) -> None:
        try:
            self.scheduler.update(step_id, results)
        except BaseException as error:
            if self.scheduler.num_steps_in_flight > len(self.in_flight):  # not that of a hook behind a settled step
                self._break(step_id, error)
            raise

    def _break(self, step_id: int, error: BaseException) -> None:
        self._failure = error
        self._failed_step = step_id

    def _must_not_be_broken(self) -> None:
        if self._failure is not None:
            what = f"{type(self._failure).__name__}: {self._failure}"
            raise EngineError(
                f"the engine is broken, make a new one: step {self._failed_step} has failed with {what}"
            ) from self._failure
