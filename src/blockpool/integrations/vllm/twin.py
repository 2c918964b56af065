"""A request of vLLM's as our books read it."""

from __future__ import annotations

from typing import Any, final

from blockpool.cache import Request
from blockpool.integrations.vllm.keys import WIDTH, Keys


@final
class Twin(Request):
    """`source` is vLLM's request. Its lengths are copied when it is looked at; its hashes are never copied."""

    def __init__(self, source: Any, keys: Keys) -> None:
        super().__init__(source.request_id, num_prompt_tokens=max(1, int(source.num_prompt_tokens)))
        self.source: Any = source
        self.keys = keys

    def look(self, source: Any) -> None:
        """Take over how far vLLM's request has come."""
        self.source = source
        self.num_tokens = max(1, int(source.num_tokens))
        self.num_computed_tokens = source.num_computed_tokens
        self.num_in_flight_tokens = source.num_in_flight_tokens

    def num_hashes(self) -> int:
        return len(self.source.block_hashes)

    def digests(self, first: int, last: int) -> bytes:
        """As the index is asked for them: hashes of another width than 32 bytes have digests of their own."""
        hashes: list[bytes] = self.source.block_hashes[first:last]
        if not hashes:
            return b""
        joined = b"".join(hashes)
        if len(hashes[0]) == WIDTH and len(joined) == WIDTH * len(hashes):
            return joined
        return b"".join([self.keys.digest(one) for one in hashes])
