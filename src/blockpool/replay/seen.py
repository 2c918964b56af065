"""What earlier prompts have had in common with a prompt: what an endless cache without blocks could have found."""

from __future__ import annotations

from collections.abc import Sequence

from blockpool.traces import TraceRequest

from .expand import DIGEST_BYTES

Key = int | bytes
Ends = dict[Key, int]


class SeenPrefixes:
    """The prefixes of all prompts so far, in pieces of an id's unit (of a hash block, where tokens are known).

    Whoever has a piece has all before it, so the longest prefix is found by halving.
    """

    def __init__(self, hash_block_size: int) -> None:
        self._hash_block_size = hash_block_size
        # scope -> piece -> to which token of it anybody had it
        self._ends: dict[str, Ends] = {}

    def look_up(self, request: TraceRequest, chain: bytes) -> Prompt:
        """A prompt beside the earlier ones. `chain`: its digests, which say how far it can be stored at all."""
        length = len(chain) // DIGEST_BYTES * self._hash_block_size
        unit = self._hash_block_size if request.hash_ids is None else request.unit
        count = -(-length // unit)
        keys: Sequence[Key]
        if request.hash_ids is None:
            keys = [chain[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES] for at in range(count)]
        else:
            keys = request.hash_ids[:count].tolist()
        ends = self._ends.get(request.scope)
        if ends is None:
            ends = self._ends[request.scope] = {}
        return Prompt(ends, keys, unit, length)


class Prompt:
    """A prompt in pieces, the last of which may be cut short. `num_tokens`: what an earlier one had in front too."""

    __slots__ = ("_ends", "_keys", "_length", "_num_seen", "_unit", "num_tokens")

    def __init__(self, ends: Ends, keys: Sequence[Key], unit: int, length: int) -> None:
        self._ends = ends
        self._keys = keys
        self._unit = unit
        self._length = length
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in ends:
                low = middle + 1
            else:
                high = middle
        self._num_seen = low
        self.num_tokens = 0 if low == 0 else min(ends[keys[low - 1]], low * unit, length)

    def add(self) -> None:
        """From now on this prompt is an earlier one."""
        ends, keys, unit, length, count = self._ends, self._keys, self._unit, self._length, self._num_seen
        if count:  # the last of the known ones may have been known in part
            last = keys[count - 1]
            ends[last] = max(ends[last], min(count * unit, length))
        if count < len(keys):
            ends.update(zip(keys[count:], range((count + 1) * unit, length + unit, unit), strict=True))
            ends[keys[-1]] = length
