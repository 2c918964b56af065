"""A step as the scheduler remembers it: while it plans it, and until its results are there."""

from __future__ import annotations

from typing import final

from blockpool.engine.output import CachedRequestData, LoadData, NewRequestData
from blockpool.engine.request import EngineRequest, Part


@final
class Step:
    """`budget`: tokens that may still be given to somebody. `is_short`: some running request lacks blocks, so that
    nobody else may take any. `loading`: whose loads start in it. `changing`: who is getting blocks just now.
    """

    def __init__(self, step_id: int, budget: int) -> None:
        self.step_id = step_id
        self.budget = budget
        self.is_short = False
        self.parts: list[Part] = []
        self.loading: list[EngineRequest] = []
        self.changing: EngineRequest | None = None
        # what the worker will be told
        self.new_requests: list[NewRequestData] = []
        self.running: list[CachedRequestData] = []
        self.loads: list[LoadData] = []
        self.num_scheduled_tokens: dict[str, int] = {}
        self.draft_token_ids: dict[str, list[int]] = {}

    def told(self) -> None:
        """The lists are the worker's now."""
        self.new_requests = []
        self.running = []
        self.loads = []
        self.num_scheduled_tokens = {}
        self.draft_token_ids = {}
