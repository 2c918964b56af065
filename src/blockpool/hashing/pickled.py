"""The pickle forms: for engines that hash `pickle.dumps((parent, tokens, extra))`, on the same Python.

Pickle refers back to an object that it has met before, so its bytes depend on which equal objects are the same
object. Here equal strings within one block always are, so that equal keys give equal digests; tags are the
constants, as in vLLM, whose bytes are the same therefore.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence

PROTOCOL_IN_C = 5
"""The protocol that the C kernel writes: the highest one of CPython 3.8 to 3.14."""

# What `extra_body` cuts off: PROTO, FRAME with its size, and two empty lists, memoized; then TUPLE3, MEMOIZE, STOP.
_BEFORE = 2 + 9 + 2 * 2
_BEHIND = 3


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


def extra_bodies(extras: Sequence[object]) -> list[bytes | None] | None:
    """What the C kernel takes for each extra value: None, or its extra_body. None if one of them has none."""
    bodies: list[bytes | None] = []
    last: object = None
    body: bytes | None = None
    for extra in extras:
        if extra is not last:  # an adapter's key is one object in all blocks
            last, body = extra, None if extra is None else extra_body(extra)
            if body is None and extra is not None:
                return None
        bodies.append(body)
    return bodies


def extra_body(extra: object) -> bytes | None:
    """The bytes that `extra` becomes within `serialize((parent, tokens, extra))`, if `tokens` is not empty.

    They are the same for all parents and tokens, as long as the extra value holds no bytes equal to the parent and
    the whole has one frame: numbers 0 and 1 are the parent's and the tokens', here those of two lists. None for
    values of other types than None, bool, int, str, bytes, tuple and list, whose pickles need not be the same every
    time.
    """
    try:
        shared = _shared_plain(extra, {})
    except _NotPlain:
        return None
    return pickle.dumps(([], [], shared), protocol=PROTOCOL_IN_C)[_BEFORE:-_BEHIND]


class _NotPlain(Exception):
    pass


def _shared_plain(value: object, met: dict[object, object]) -> object:
    """_shared, for values of known types only."""
    if type(value) is str or type(value) is bytes:
        return met.setdefault((type(value), value), value)
    if type(value) is tuple:
        return tuple([_shared_plain(item, met) for item in value])
    if type(value) is list:
        return [_shared_plain(item, met) for item in value]
    if value is None or type(value) is int or type(value) is bool:
        return value
    raise _NotPlain
