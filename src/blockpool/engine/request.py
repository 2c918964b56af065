"""A request of an engine: what the cache reads of it, when it ends, and how far the scheduler is with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from operator import index
from typing import Final, SupportsFloat, SupportsIndex, final

from blockpool.cache import Request
from blockpool.engine.errors import EngineRequestError
from blockpool.engine.states import RequestState
from blockpool.engine.told import ToldTable
from blockpool.hashing import BlockHasher, BlockHashes, ExtraKeys

NO_ORDER = (0, 0.0, -1)
NO_TOKENS: Final[list[int]] = []


@final
class Part:
    """A request's part in a step: `num_tokens` to compute, drafts included; `samples`: its next token comes of it.

    `drafts`: those to verify. `epoch`: the life of the request that it is of. `ahead`: some of the tokens were not
    known when it was planned. `tokens`: its result; `counts`: whether the request got them.
    """

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.epoch = 0
        self.num_tokens = 0
        self.num_drafts = 0
        self.drafts: list[int] = NO_TOKENS
        self.samples = False
        self.ahead = False
        self.tokens: list[int] = NO_TOKENS
        self.counts = False


class EngineRequest(Request):
    """A prompt to be continued by at most `max_tokens` tokens, or up to one of `stop_token_ids`, which is its last.

    `priority`: lower runs first, among equals by `arrival`, then in the order of adding; first come first served
    looks at neither. `num_encoder_tokens`: for cross attention. All else as in the cache's Request: a prompt may be
    known by its hashes alone, then what is generated is counted and leaves nothing to be found.

    The scheduler owns what follows. `num_promised`: tokens that steps in flight will give for certain, but nobody
    knows yet. `drafts`: to be verified with the next token.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | None = None,
        *,
        max_tokens: int = 16,
        stop_token_ids: Iterable[int] = (),
        priority: SupportsIndex = 0,
        arrival: SupportsFloat = 0.0,
        hasher: BlockHasher | None = None,
        extra_keys: ExtraKeys | None = None,
        block_hashes: BlockHashes | None = None,
        num_prompt_tokens: int | None = None,
        num_encoder_tokens: int = 0,
        skip_reading_prefix_cache: bool = False,
        no_store: bool = False,
        lora_id: int | None = None,
        session_id: str | None = None,
    ) -> None:
        super().__init__(
            request_id,
            prompt_token_ids,
            hasher=hasher,
            extra_keys=extra_keys,
            block_hashes=block_hashes,
            num_prompt_tokens=num_prompt_tokens,
            skip_reading_prefix_cache=skip_reading_prefix_cache,
            no_store=no_store,
            lora_id=lora_id,
            session_id=session_id,
        )
        if max_tokens < 1:
            raise EngineRequestError(f"request {request_id!r}: max_tokens must be at least 1 token, not {max_tokens}")
        if num_encoder_tokens < 0:
            raise EngineRequestError(
                f"request {request_id!r}: num_encoder_tokens must not be negative, not {num_encoder_tokens}"
            )
        self.tokens: list[int] = [] if self.all_token_ids is None else self.all_token_ids
        self.knows_tokens: bool = self.all_token_ids is not None
        self.max_tokens = max_tokens
        self.stop_token_ids = frozenset(stop_token_ids)
        self.priority = whole_number(request_id, priority)
        self.arrival = finite_number(request_id, arrival)
        self.num_encoder_tokens = num_encoder_tokens
        self.state: RequestState = RequestState.WAITING
        self.order: tuple[int, float, int] = NO_ORDER  # its place in every queue
        self.most_tokens = self.num_prompt_tokens + max_tokens  # it ends there
        self.num_promised = 0
        self.num_drafts_in_flight = 0
        self.drafts: list[int] = NO_TOKENS
        self.is_loading = False
        self.may_load = True
        self.num_failed_loads = 0
        self.load_id = -1  # of the load that was planned last
        self.connector_answer: object = None  # the connector's own, kept as long as the request
        self.restarted_at = 0  # its length when it did not fit any more, and was preempted to see if it does afresh
        self.epoch = 0  # grows when it loses its blocks: what steps in flight give is of another life then
        self.last_step = -1  # the newest step that reads or writes its blocks
        self.is_told = False  # whether the worker knows it
        self.num_told = 0  # tokens
        self.told: list[ToldTable] = []
        self.spare: Part | None = None
        # Tokens go into the chain of hashes when a block of them is there: each call of the chain has its price.
        self._unit = 1
        if self.block_hashes is not None and self.block_hashes.num_lookahead_tokens == 0:
            self._unit = self.block_hashes.hash_block_size
        self._num_chained = self.num_tokens
        self._chain_at = (self.num_tokens // self._unit + 1) * self._unit
        self._num_hashes = super().num_hashes()

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    def append_output_tokens(self, token_ids: SupportsIndex | Iterable[int]) -> None:
        """Verified tokens that the model produced: the request grows, and its chain with it."""
        self.append(list(token_ids) if isinstance(token_ids, Iterable) else [token_ids.__index__()])

    def append(self, tokens: list[int]) -> None:
        """The same, for a list. Where the prompt's tokens are unknown, so are they, and only counted."""
        if not self.knows_tokens:
            self.num_tokens += len(tokens)
            return
        if len(tokens) == 1:
            self.tokens.append(tokens[0])
            self.num_tokens += 1
        else:
            self.tokens.extend(tokens)
            self.num_tokens += len(tokens)
        if self.num_tokens >= self._chain_at:
            if self.block_hashes is not None:
                self.block_hashes.append_tokens(self.tokens[self._num_chained :])
                self._num_hashes = len(self.block_hashes)
            self._num_chained = self.num_tokens
            self._chain_at = (self.num_tokens // self._unit + 1) * self._unit

    def untold(self) -> list[int]:
        """The tokens that the worker was not told yet; it is now."""
        first = self.num_told
        self.num_told = self.num_tokens
        if not self.knows_tokens:
            return NO_TOKENS
        if first + 1 == self.num_tokens:
            return [self.tokens[first]]
        return self.tokens[first:]

    def num_hashes(self) -> int:
        """How many digests the request has, one per hash block of its known tokens."""
        return self._num_hashes

    def part(self) -> Part:
        """A part in a step, made once and used again when its step has run."""
        spare = self.spare
        if spare is None:
            return Part(self)
        self.spare = None
        return spare


def whole_number(request_id: str, priority: SupportsIndex) -> int:
    try:
        return index(priority)
    except TypeError:
        raise EngineRequestError(f"request {request_id!r}: priority must be an int, not {priority!r}") from None


def finite_number(request_id: str, arrival: SupportsFloat) -> float:
    try:
        number = arrival.__float__()
    except (AttributeError, OverflowError):
        number = float("nan")
    if not isfinite(number):
        raise EngineRequestError(f"request {request_id!r}: arrival must be a finite number, not {arrival!r}")
    return number
