"""From a trace's prefix ids to chained digests, one per full hash block.

A trace knows a prompt by ids, where equal id means equal prefix; the pool wants the same in digests. An id that
covers k hash blocks becomes k digests. When a hash block covers several ids, its digest is that of the id that
closes it. The digests are built, not hashed, and differ by construction where prefixes differ:

    word 0   64 bits mixed from the other three: the pool's index wants bits that look random
    word 1   the id
    word 2   which of the id's hash blocks
    word 3   the number of the id's scope
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from blockpool.traces import TraceRequest

DIGEST_WORDS = 4
DIGEST_BYTES = 8 * DIGEST_WORDS

Words = npt.NDArray[np.uint64]


def num_known_hash_blocks(request: TraceRequest, hash_block_size: int) -> int:
    """Full hash blocks of the prompt whose content the trace knows; no other can be cached or hit."""
    num_known_tokens = request.num_prompt_tokens
    if request.hash_ids is not None:
        num_known_tokens = min(num_known_tokens, len(request.hash_ids) * request.unit)
    return num_known_tokens // hash_block_size


def expand_ids(requests: Sequence[TraceRequest], scopes: Sequence[int], hash_block_size: int) -> Iterator[bytes]:
    """The chain of each request, as one buffer of `DIGEST_BYTES` per known full hash block.

    The requests are known by ids of one unit, of which `hash_block_size` is a divisor or a multiple. `scopes` has the
    number of each one's scope.
    """
    unit = requests[0].unit
    digests_per_id = max(1, unit // hash_block_size)
    ids_per_digest = max(1, hash_block_size // unit)
    num_digests = [num_known_hash_blocks(request, hash_block_size) for request in requests]
    ids = []
    for request, wanted in zip(requests, num_digests, strict=True):
        assert request.hash_ids is not None
        closing = request.hash_ids[ids_per_digest - 1 :: ids_per_digest]
        ids.append(closing[: -(-wanted // digests_per_id)])
    num_ids = [len(part) for part in ids]
    buffer = _digests(
        np.concatenate(ids).astype(np.uint64),
        np.repeat(np.array(scopes, dtype=np.uint64), num_ids),
        digests_per_id,
    )
    start = 0
    for wanted, count in zip(num_digests, num_ids, strict=True):
        yield buffer[start : start + wanted * DIGEST_BYTES]
        start += count * digests_per_id * DIGEST_BYTES


def _digests(ids: Words, scopes: Words, digests_per_id: int) -> bytes:
    """[ids] and [ids] into the bytes of [ids, digests_per_id, DIGEST_WORDS]."""
    words = np.empty((len(ids), digests_per_id, DIGEST_WORDS), dtype="<u8")
    words[:, :, 1] = ids[:, np.newaxis]
    words[:, :, 2] = np.arange(digests_per_id, dtype=np.uint64)
    words[:, :, 3] = scopes[:, np.newaxis]
    words[:, :, 0] = _mixed(words[:, :, 1], words[:, :, 2], words[:, :, 3])
    return words.tobytes()


def _mixed(ids: Words, parts: Words, scopes: Words) -> Words:
    """64 well-mixed bits of each (id, part, scope): odd multipliers, then the finaliser of SplitMix64."""
    mixed = ids * np.uint64(0x9E3779B97F4A7C15)
    mixed += parts * np.uint64(0xD6E8FEB86659FD93)
    mixed += scopes * np.uint64(0xA0761D6478BD642F)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed
