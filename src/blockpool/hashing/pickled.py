"""The pickle forms: for engines that hash `pickle.dumps((parent, tokens, extra))`, on the same Python.

Pickle refers back to an object that it has met before, so its bytes depend on which equal objects are the same
object. Here equal strings within one block always are, so that equal keys give equal digests; tags are the
constants, as in vLLM, whose bytes are the same therefore.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence


def serialize(value: object) -> bytes:
    """The pickle of `value` in the highest protocol, equal strings and bytes within it made one object."""
    return pickle.dumps(_shared(value, {}), protocol=pickle.HIGHEST_PROTOCOL)


def _shared(value: object, met: dict[object, object]) -> object:
    if isinstance(value, tuple):
        return tuple([_shared(item, met) for item in value])
    if isinstance(value, list):
        return [_shared(item, met) for item in value]
    if isinstance(value, (str, bytes)):
        return met.setdefault((type(value), value), value)
    return value


def chain(
    ids: list[int],
    block_size: int,
    parent: bytes,
    extras: Sequence[object] | None,
    num_blocks: int,
    hash_bytes: Callable[[bytes], bytes],
) -> bytes:
    """The digests of the first `num_blocks` blocks, concatenated; `extras` has one value per block.

    `ids` must be checked, plain ints: the pickle of a numpy integer is another one.
    """
    dumps, protocol = pickle.dumps, pickle.HIGHEST_PROTOCOL
    digests = []
    for i in range(num_blocks):
        tokens = tuple(ids[i * block_size : (i + 1) * block_size])
        extra = None if extras is None else extras[i]
        if extra is None:
            parent = hash_bytes(dumps((parent, tokens, None), protocol))
        else:
            parent = hash_bytes(serialize((parent, tokens, extra)))
        digests.append(parent)
    return b"".join(digests)
