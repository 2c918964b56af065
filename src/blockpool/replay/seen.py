"""What earlier prompts have had in common with a prompt: what an endless cache without blocks could have found."""

from collections.abc import Sequence

from blockpool.traces import TraceRequest

from .expand import DIGEST_BYTES, num_known_hash_blocks

Key = int | bytes


class SeenPrefixes:
    """The prefixes of all prompts so far, in pieces of an id's unit (of a hash block, where tokens are known).

    Whoever has a piece has all before it, so the longest prefix is found by halving.
    """

    def __init__(self, hash_block_size: int) -> None:
        self._hash_block_size = hash_block_size
        # scope -> piece -> to which token of it anybody had it
        self._ends: dict[str, dict[Key, int]] = {}

    def longest(self, request: TraceRequest, chain: bytes) -> int:
        """The longest prefix in tokens that an earlier prompt had too. `chain`: the request's digests."""
        unit, length = self._pieces(request, chain)
        ends = self._ends.get(request.scope, {})
        keys = _keys(request, chain, -(-length // unit))
        count = _num_seen(ends, keys)
        return 0 if count == 0 else min(ends[keys[count - 1]], count * unit, length)

    def add(self, request: TraceRequest, chain: bytes) -> None:
        """From now on this prompt is an earlier one."""
        unit, length = self._pieces(request, chain)
        ends = self._ends.setdefault(request.scope, {})
        keys = _keys(request, chain, -(-length // unit))
        count = _num_seen(ends, keys)
        if count:  # the last of the known ones may have been known in part
            ends[keys[count - 1]] = max(ends[keys[count - 1]], min(count * unit, length))
        ends.update(zip(keys[count:], range((count + 1) * unit, length + unit, unit), strict=True))
        if count < len(keys):
            ends[keys[-1]] = length

    def _pieces(self, request: TraceRequest, chain: bytes) -> tuple[int, int]:
        """The tokens per piece, and how many tokens of a prompt can be stored at all: full hash blocks."""
        if request.hash_ids is None:
            return self._hash_block_size, len(chain) // DIGEST_BYTES * self._hash_block_size
        return request.unit, num_known_hash_blocks(request, self._hash_block_size) * self._hash_block_size


def _keys(request: TraceRequest, chain: bytes, count: int) -> Sequence[Key]:
    if request.hash_ids is None:
        return [chain[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES] for at in range(count)]
    ids: list[int] = request.hash_ids[:count].tolist()
    return ids


def _num_seen(ends: dict[Key, int], keys: Sequence[Key]) -> int:
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) // 2
        if keys[middle] in ends:
            low = middle + 1
        else:
            high = middle
    return low
