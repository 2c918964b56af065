"""What a pool says to the outside, in vLLM's own types where vLLM is installed, in ours where it is not.

Asked only where something is to be said, so that importing this package never imports vLLM.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from typing import Any

from blockpool.hashing import none_hash
from blockpool.pool import events

logger = logging.getLogger("vllm.blockpool")


class Words:
    """Events as structs of `blockpool.pool.events`, with the hashes as they are."""

    BlockStored: Any = events.BlockStored
    BlockRemoved: Any = events.BlockRemoved
    AllBlocksCleared: Any = events.AllBlocksCleared

    def external(self, block_hash: bytes) -> Any:
        """A hash as events publish it."""
        return block_hash

    def extra_keys(self, request: Any, spans: list[tuple[int, int]], lookahead: int) -> list[Any] | None:
        """The untagged extra keys of each block, None when there are none at all."""
        return None

    def tagged_keys(self, request: Any, start: int, end: int, lookahead: int, at: int) -> tuple[Any, int]:
        """What is hashed besides tokens [start, end) and those behind them, and the media item to go on with."""
        return None, at

    def none_hash(self, hash_fn: Any) -> bytes:
        """The parent of a first block."""
        return none_hash(hash_fn.__name__)

    def warn(self, message: str) -> None:
        logger.warning(message)

    def removed(self, block_hash: bytes, group_id: int | None, medium: str) -> Any:
        return self.BlockRemoved(block_hashes=[self.external(block_hash)], medium=medium, group_idx=group_id)

    def cleared(self) -> Any:
        return self.AllBlocksCleared()

    def stored(
        self,
        request: Any,
        hashes: list[bytes],
        parent: bytes | None,
        spans: list[tuple[int, int]],
        tokens: tuple[int, int],
        block_size: int,
        group_id: int,
        lookahead: int,
        medium: str,
    ) -> Any:
        """One BlockStored: `spans` are the tokens [start, end) of each hash, `tokens` those that are told."""
        lora = getattr(request, "lora_request", None)
        ids = request.all_token_ids
        return self.BlockStored(
            block_hashes=[self.external(one) for one in hashes],
            parent_block_hash=None if parent is None else self.external(parent),
            token_ids=ids[tokens[0] : tokens[1]],
            block_size=block_size,
            lora_id=None if lora is None else lora.adapter_id,
            medium=medium,
            lora_name=None if lora is None else lora.name,
            extra_keys=self.extra_keys(request, spans, lookahead),
            group_idx=group_id,
            session_id=getattr(request, "session_id", None),
            lookahead_token_ids=[ids[end : end + lookahead] for _, end in spans] if lookahead else None,
        )


class VLLMWords(Words):
    """The same in vLLM's event structs, with its helpers for what the pool itself does not look at."""

    def __init__(self) -> None:
        said = import_module("vllm.distributed.kv_events")
        self.utils: Any = import_module("vllm.v1.core.kv_cache_utils")
        self.BlockStored = said.BlockStored
        self.BlockRemoved = said.BlockRemoved
        self.AllBlocksCleared = said.AllBlocksCleared

    def external(self, block_hash: bytes) -> Any:
        return self.utils.maybe_convert_block_hash(block_hash)

    def extra_keys(self, request: Any, spans: list[tuple[int, int]], lookahead: int) -> list[Any] | None:
        at, found = 0, []
        for start, end in spans:
            keys, at = self.tagged_keys(request, start, end, lookahead, at)
            found.append(keys)
        told: list[Any] | None = self.utils.to_event_extra_keys(found)
        return told

    def tagged_keys(self, request: Any, start: int, end: int, lookahead: int, at: int) -> tuple[Any, int]:
        utils = self.utils
        if lookahead:
            keys, at = utils.generate_lookahead_block_hash_extra_keys(request, start, end, end + lookahead, at)
        else:
            keys, at = utils.generate_block_hash_extra_keys(request, start, end, at)
        return keys, at

    def none_hash(self, hash_fn: Any) -> bytes:
        parent: bytes = self.utils.NONE_HASH
        return parent


@cache
def words() -> Words:
    """How this process speaks."""
    try:
        return VLLMWords()
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] != "vllm":
            raise
        return Words()
