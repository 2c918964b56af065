"""What a worker asks of a model: compute the tokens of some requests over a store, and say what follows."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from blockpool.engine.block_table import Row
from blockpool.engine.slots import Ints
from blockpool.engine.store import Access, Prints, Store


class StateBlocks(NamedTuple):
    """Where a request's states stand in a state group: the one that the step starts from, 0 for none (the request
    starts at token 0); and those that it leaves: behind its last token, and before it behind each token whose
    successor is a draft. `writes` is in the order of `after`, the numbers of tokens that the states cover.
    """

    start: int
    after: list[int]
    writes: list[int]


class RequestStep(NamedTuple):
    """One request's part of a step: it computes tokens first .. last-1.

    `token_ids`: all of them up to `last`, of which the last `num_drafts` are drafts; `wants_token`: whether the token
    behind the last is to be sampled (and those that the drafts stand for). `first_of_own`: where its computation
    began, when it was admitted. `rows`: its table per group. `states`: per group, None where there are none.
    `prints`: see Fingerprints.with_more. `sinks`: per group the blocks that all requests read.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    first_of_own: int
    first: int
    last: int
    num_drafts: int
    wants_token: bool
    rows: tuple[Row, ...]
    states: tuple[StateBlocks | None, ...]
    prints: Prints
    sinks: tuple[list[int], ...]

    def access(self, group_id: int, tokens: Ints, slots: Ints) -> Access:
        return Access(self.request_id, group_id, tokens, slots, self.prints[tokens])


class Model(Protocol):
    def forward(self, steps: list[RequestStep], store: Store) -> list[list[int]]:
        """Compute all requests of a step. Per request that wants a token the greedy one behind each draft and, first
        of all, behind the token before them; for the others an empty list.

        Requests of one step may share blocks of keys and values: in each layer all requests write theirs before any
        is read. They never share states: all are read before any is written, as if all requests ran at once.
        """
