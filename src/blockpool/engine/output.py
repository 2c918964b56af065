"""What a step is: all that a worker needs to run it, and only what it was not told before."""

from __future__ import annotations

import msgspec

from blockpool.cache import BlockCopy


class NewRequestData(msgspec.Struct, gc=False):
    """A request that was admitted, or resumed after a preemption: told in full.

    `token_ids`: all known tokens, prompt and outputs. `num_computed_tokens`: where the step's computation starts;
    what is before that was hit or loaded. `block_ids`: the whole table per group, 0 where nothing is needed.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[list[int], ...]


class CachedRequestData(msgspec.Struct, gc=False):
    """A request that the worker knows: only what changed.

    `new_token_ids`: verified tokens that were not told yet. `new_block_ids`: appended, per group. `nulled`: positions
    per group that hold nothing any more, ascending.
    """

    request_id: str
    num_computed_tokens: int
    new_token_ids: list[int]
    new_block_ids: tuple[list[int], ...]
    nulled: tuple[list[int], ...]


class LoadData(msgspec.Struct):
    """Blocks that a connector is to fill with tokens first .. last-1 of a request, once clears and copies are made.

    `token_ids`: the first `last` tokens. `block_ids`: the whole table per group, 0 where nothing is needed.
    `load_id`: no other load of the scheduler has it, though request ids come again.
    """

    request_id: str
    first: int
    last: int
    token_ids: list[int]
    block_ids: tuple[list[int], ...]
    load_id: int = -1


class SchedulerOutput(msgspec.Struct):
    """One step. A worker forgets what ended or was preempted, brings its tables up to date, clears, copies, computes.

    `step_id`: -1 when there is nothing to run now: no step, nothing to acknowledge, and all lists are empty.
    `running`: requests that take part, or whose table changed. `num_scheduled_tokens`: tokens to compute per request,
    drafts included; the last of them are its `draft_token_ids`. `clears`: blocks per group to zero before the copies.
    `finished_ids`: ended or aborted since the last step.
    """

    step_id: int
    new_requests: list[NewRequestData]
    running: list[CachedRequestData]
    num_scheduled_tokens: dict[str, int]
    draft_token_ids: dict[str, list[int]]
    copies: list[BlockCopy]
    clears: tuple[list[int], ...]
    loads: list[LoadData]
    finished_ids: list[str]
    preempted_ids: list[str]
