"""The worker's side of a step: it keeps the tables of running requests, does what a step says, and samples tokens."""

from __future__ import annotations

from collections.abc import Sequence

from blockpool.cache import KVCacheConfig
from blockpool.engine.block_table import BlockTable
from blockpool.engine.errors import EngineError
from blockpool.engine.fingerprint import Fingerprints
from blockpool.engine.model import Model, RequestStep, StateBlocks
from blockpool.engine.output import CachedRequestData, NewRequestData, SchedulerOutput
from blockpool.engine.store import Store
from blockpool.managers import MambaSpec


class WorkerError(EngineError, ValueError):
    """A step that does not follow from the ones before it. The worker that raised it is of no use any more."""


class RunningRequest:
    """What a worker knows of a request. `token_ids`: all verified tokens, its own samples included.

    `states`: per state group, the blocks of the states that the last step left: number of tokens -> block.
    """

    def __init__(self, new: NewRequestData, row: int, num_groups: int) -> None:
        self.request_id = new.request_id
        self.row = row
        self.token_ids = list(new.token_ids)
        self.num_prompt_tokens = new.num_prompt_tokens
        self.num_computed_tokens = new.num_computed_tokens
        self.first_of_own = new.num_computed_tokens
        self.prints = Fingerprints(new.token_ids)
        self.states: list[dict[int, int]] = [{} for _ in range(num_groups)]

    def append(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        self.prints.extend(token_ids)


class Worker:
    """Runs steps over a store, one after another. `sink_block_ids`: per group, for groups with attention sinks; the
    store holds what they hold already.

    `tables`: per group, a row per running request.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        store: Store,
        model: Model,
        sink_block_ids: Sequence[Sequence[int]] | None = None,
    ) -> None:
        groups = config.kv_cache_groups
        self.config = config
        self.store = store
        self.model = model
        self.tables = [BlockTable() for _ in groups]
        self.requests: dict[str, RunningRequest] = {}
        self.sinks = tuple(
            [list(ids) for ids in sink_block_ids] if sink_block_ids is not None else [[] for _ in groups]
        )
        self._by_row: list[RunningRequest] = []

    def execute(self, output: SchedulerOutput) -> dict[str, list[int]]:
        """Run a step; the tokens that were sampled, per request: accepted drafts and one more.

        Raises WorkerError for a step that contradicts what the worker knows, and for a request that is known by its
        hashes alone.
        """
        for request_id in (*output.finished_ids, *output.preempted_ids):
            self._forget(request_id)
        for new in output.new_requests:
            self._add(new)
        for data in output.running:
            self._update(data)
        self.store.begin_step(output.step_id)
        for group_id, blocks in enumerate(output.clears):
            if blocks:
                self.store.clear(group_id, blocks)
        for order in output.copies:
            self.store.copy(order)
        steps = [
            self._step(self._known(request_id), count, output.draft_token_ids.get(request_id, []))
            for request_id, count in output.num_scheduled_tokens.items()
            if count
        ]
        sampled = self.model.forward(steps, self.store)
        results: dict[str, list[int]] = {}
        for step, tokens in zip(steps, sampled, strict=True):
            accepted = self._accept(step, tokens)
            if accepted:
                results[step.request_id] = accepted
        return results

    # -- what the worker keeps -----------------------------------------------------------------------

    def _known(self, request_id: str) -> RunningRequest:
        request = self.requests.get(request_id)
        if request is None:
            raise WorkerError(f"request {request_id!r} is not running here")
        return request

    def _add(self, new: NewRequestData) -> None:
        if new.request_id in self.requests:
            raise WorkerError(f"request {new.request_id!r} runs already, it is not new")
        if len(new.token_ids) < new.num_prompt_tokens:
            raise WorkerError(
                f"request {new.request_id!r}: {len(new.token_ids)} of {new.num_prompt_tokens} tokens of its prompt"
                " are known, a worker computes from tokens: hashes alone are not enough"
            )
        request = RunningRequest(new, len(self._by_row), len(self.tables))
        for table, blocks in zip(self.tables, new.block_ids, strict=True):
            table.append(request.row, blocks)
        self._by_row.append(request)
        self.requests[new.request_id] = request

    def _update(self, data: CachedRequestData) -> None:
        request = self._known(data.request_id)
        for table, blocks, nulled in zip(self.tables, data.new_block_ids, data.nulled, strict=True):
            if blocks:
                table.append(request.row, blocks)
            if nulled:
                table.set_null(request.row, nulled)
        request.num_computed_tokens = data.num_computed_tokens

    def _forget(self, request_id: str) -> None:
        """The last row takes the place of the one that ends. A request that never came here is none of ours."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        last = self._by_row.pop()
        for table in self.tables:
            table.clear(request.row)
            table.move(last.row, request.row)
        if last is not request:
            self._by_row[request.row] = last
            last.row = request.row

    # -- one request's part of a step ----------------------------------------------------------------

    def _step(self, request: RunningRequest, num_tokens: int, drafts: list[int]) -> RequestStep:
        first = request.num_computed_tokens
        last = first + num_tokens
        num_known = len(request.token_ids)
        verified = last - len(drafts)
        if verified > num_known or (drafts and verified != num_known) or first >= verified:
            raise WorkerError(
                f"request {request.request_id!r}: tokens {first} to {last} with {len(drafts)} drafts are to be"
                f" computed, {num_known} are known"
            )
        token_ids = request.token_ids[:verified] + drafts
        return RequestStep(
            request.request_id,
            token_ids,
            request.num_prompt_tokens,
            request.first_of_own,
            first,
            last,
            len(drafts),
            verified == num_known,
            tuple([table.row(request.row) for table in self.tables]),
            tuple(
                [
                    self._state_blocks(request, group_id, first, last, len(drafts))
                    for group_id in range(len(self.tables))
                ]
            ),
            request.prints.with_more(drafts),
            self.sinks,
        )

    def _state_blocks(
        self, request: RunningRequest, group_id: int, first: int, last: int, num_drafts: int
    ) -> StateBlocks | None:
        """A state stands at the position of the last token that is no draft, those of drafts in the positions behind;
        where a group keeps no other states, at position 0.

        The state to start from is the one that the last step left; that of a new request is its hit.
        """
        spec = self.config.kv_cache_groups[group_id].kv_cache_spec
        if not isinstance(spec, MambaSpec):
            return None
        row = self.tables[group_id].row(request.row)
        is_aligned = spec.mamba_cache_mode == "align"
        at = (last - num_drafts - 1) // spec.block_size if is_aligned else 0
        if at + num_drafts >= len(row):
            raise WorkerError(
                f"request {request.request_id!r}, group {group_id}: {len(row)} positions, the states of {num_drafts}"
                f" drafts behind position {at} have no room"
            )
        after = list(range(last - num_drafts, last + 1))
        writes = row[at : at + num_drafts + 1].tolist()
        left = request.states[group_id]
        start = 0
        if first in left:
            start = left[first]
        elif first:
            start = int(row[(first - 1) // spec.block_size if is_aligned else 0])
        request.states[group_id] = dict(zip(after, writes, strict=True))
        return StateBlocks(start, after, writes)

    def _accept(self, step: RequestStep, sampled: list[int]) -> list[int]:
        """The drafts that the model would have said itself, and the token that it says behind them."""
        if not sampled:
            return []
        drafts = step.token_ids[step.last - step.num_drafts :] if step.num_drafts else []
        accepted: list[int] = []
        for token, draft in zip(sampled, [*drafts, None], strict=True):
            accepted.append(token)
            if token != draft:
                break
        self._known(step.request_id).append(accepted)
        return accepted
