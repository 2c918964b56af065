"""A whole trace at one hash block size: each request with its chain of digests."""

from collections.abc import Iterator

from blockpool.hashing import BlockHasher
from blockpool.traces import Trace, TraceRequest

from .errors import ReplayError
from .expand import expand_ids, num_known_hash_blocks

# Digests built at once: enough to make numpy's calls cheap, and never the whole trace (the 9 million of a long one
# would be 300 MB).
BATCH_DIGESTS = 1 << 15
# Any fixed text does: with it a token prompt has the same digests in every process.
HASH_SEED = "blockpool replay"


class DigestedTrace:
    """A trace and its digests. It can be iterated again and again, once per pool size.

    Prompts known by ids are expanded batch by batch on each pass; prompts known by tokens are hashed once, here, as
    an engine would hash them. Raises `ReplayError` for a hash block size that neither divides a unit of the trace nor
    is a multiple of it.
    """

    def __init__(self, trace: Trace, hash_block_size: int) -> None:
        for unit in trace.units():
            if unit % hash_block_size and hash_block_size % unit:
                raise ReplayError(
                    f"hash blocks of {hash_block_size} tokens do not fit a trace with ids of {unit} tokens: "
                    "one must be a multiple of the other"
                )
        self.trace = trace
        self.hash_block_size = hash_block_size
        self._scopes: dict[str, int] = {}
        for request in trace.requests:
            self._scopes.setdefault(request.scope, len(self._scopes))
        hasher = BlockHasher("sha256_cbor", hash_block_size=hash_block_size, seed=HASH_SEED)
        self._token_chains = [
            None if request.token_ids is None else bytes(hasher.start(request.token_ids).raw())
            for request in trace.requests
        ]

    def __len__(self) -> int:
        return len(self.trace.requests)

    def __iter__(self) -> Iterator[tuple[TraceRequest, bytes]]:
        """(request, its digests in one buffer), in the order of the trace."""
        batch: list[TraceRequest] = []
        room = BATCH_DIGESTS
        for request, token_chain in zip(self.trace.requests, self._token_chains, strict=True):
            if batch and (token_chain is not None or room <= 0 or request.unit != batch[0].unit):
                yield from self._expanded(batch)
                batch, room = [], BATCH_DIGESTS
            if token_chain is not None:
                yield request, token_chain
            else:
                batch.append(request)
                room -= num_known_hash_blocks(request, self.hash_block_size)
        if batch:
            yield from self._expanded(batch)

    def _expanded(self, batch: list[TraceRequest]) -> Iterator[tuple[TraceRequest, bytes]]:
        scopes = [self._scopes[request.scope] for request in batch]
        return zip(batch, expand_ids(batch, scopes, self.hash_block_size), strict=True)
