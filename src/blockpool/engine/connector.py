"""Where the scheduler asks for KV that is elsewhere: in a lower tier, or at another engine."""

from __future__ import annotations

from typing import Protocol

from blockpool.engine.request import EngineRequest


class Connector(Protocol):
    """Knows what KV it can bring. What it is to bring stands in a step's `loads`; that done, or failed, the scheduler
    is told: `finished_recving(request_id)` or `failed_recving(request_id)`, once per load.
    """

    def get_num_external_tokens(self, request: EngineRequest, num_computed_tokens: int) -> int | None:
        """How many tokens behind the first `num_computed_tokens` it can bring; None: ask again in the next step.

        It is asked while a step is planned, and must not call the scheduler.
        """
        ...
