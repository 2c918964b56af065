"""What the books read of a request: its lengths, its chain of block hashes, and how it may use the cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import SupportsIndex

from mypy_extensions import mypyc_attr

from blockpool.cache.errors import RequestError
from blockpool.hashing import BlockHasher, BlockHashes, ExtraKeys
from blockpool.pool import BlockPool


@mypyc_attr(allow_interpreted_subclasses=True)
class Request:
    """One sequence. The engine owns `num_computed_tokens` and `num_in_flight_tokens` and keeps them true.

    Either `prompt_token_ids` with a `hasher` (and `extra_keys`), or a ready chain of `block_hashes`, whose tokens
    may be unknown: then `num_prompt_tokens` says how many there are. Without hasher and chain nothing of the
    request is cached or found.

    `skip_reading_prefix_cache`: nothing is looked up. `no_store`: nothing of it stays findable.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | None = None,
        *,
        hasher: BlockHasher | None = None,
        extra_keys: ExtraKeys | None = None,
        block_hashes: BlockHashes | None = None,
        num_prompt_tokens: int | None = None,
        skip_reading_prefix_cache: bool = False,
        no_store: bool = False,
        lora_id: int | None = None,
        session_id: str | None = None,
    ) -> None:
        if prompt_token_ids is None:
            if num_prompt_tokens is None:
                raise RequestError(f"request {request_id!r}: give prompt_token_ids or num_prompt_tokens")
            count = num_prompt_tokens
        else:
            count = len(prompt_token_ids)
            if num_prompt_tokens is not None and num_prompt_tokens != count:
                raise RequestError(f"request {request_id!r}: {count} prompt tokens, not {num_prompt_tokens}")
        if count < 1:
            raise RequestError(f"request {request_id!r}: a prompt has at least one token, not {count}")
        if hasher is not None:
            if block_hashes is not None:
                raise RequestError(f"request {request_id!r}: give a hasher or block_hashes, not both")
            if prompt_token_ids is None:
                raise RequestError(f"request {request_id!r}: a hasher needs prompt_token_ids")
            block_hashes = hasher.start(prompt_token_ids, extra_keys)
        self.request_id = request_id
        self.all_token_ids: list[int] | None = None if prompt_token_ids is None else list(prompt_token_ids)
        self.num_prompt_tokens = count
        self.num_tokens = count
        self.block_hashes = block_hashes
        self.extra_keys = extra_keys
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_preemptions = 0
        self.skip_reading_prefix_cache = skip_reading_prefix_cache
        self.no_store = no_store
        self.lora_id = lora_id
        self.session_id = session_id

    def append_output_tokens(self, token_ids: SupportsIndex | Iterable[int]) -> None:
        """Verified tokens that the model produced: the request grows, and its chain with it."""
        if self.all_token_ids is None:
            raise RequestError(f"request {self.request_id!r}: its tokens are unknown, none can be appended")
        tokens = list(token_ids) if isinstance(token_ids, Iterable) else [index(token_ids)]
        if self.block_hashes is not None:
            self.block_hashes.append_tokens(tokens)
        self.all_token_ids.extend(tokens)
        self.num_tokens += len(tokens)

    def num_hashes(self) -> int:
        """How many digests the request has, one per hash block of its known tokens."""
        chain = self.block_hashes
        return 0 if chain is None else len(chain)

    def digests(self, first: int, last: int) -> bytes:
        """The digests first .. last-1, one after another."""
        chain = self.block_hashes
        return b"" if chain is None else chain.raw(first, last)

    def must_fit(self, pool: BlockPool) -> None:
        """Raises RequestError when the chain was not made for this pool."""
        chain = self.block_hashes
        if chain is None:
            return
        if chain.hash_block_size != pool.hash_block_size or chain.digest_size != pool.digest_size:
            raise RequestError(
                f"request {self.request_id!r}: its chain has digests of {chain.digest_size} bytes per"
                f" {chain.hash_block_size} tokens, this cache {pool.digest_size} bytes per"
                f" {pool.hash_block_size}"
            )

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.num_tokens} tokens, {self.num_computed_tokens} computed)"
