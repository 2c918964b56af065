"""Token ids: what counts as one, and the forms in which the rest of the room handles them."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from blockpool.hashing.errors import TokenIdError

TokenIds: TypeAlias = Iterable[SupportsIndex]
"""What callers may give: a list, a tuple, any other iterable of integers, or a one-dimensional integer array."""

IdArray: TypeAlias = NDArray[np.int32] | NDArray[np.int64] | NDArray[np.uint32]
Ids: TypeAlias = Sequence[int] | IdArray
"""What the kernels take: a list or a tuple, not yet checked, or a contiguous native array of these types."""

ID_LIMIT = 1 << 32
_NATIVE = frozenset(map(np.dtype, (np.int32, np.int64, np.uint32)))


def as_ids(tokens: TokenIds) -> Ids:
    """Bring `tokens` into a form that the kernels take, without a copy where possible.

    Lists, tuples and arrays of the native types pass as they are and are checked where they are hashed.
    Raises TokenIdError for arrays that cannot hold token ids (not 1-D, or of floats, bools, ...).
    """
    if isinstance(tokens, (list, tuple)):
        return tokens
    if isinstance(tokens, np.ndarray):
        return _as_native(tokens)
    if hasattr(tokens, "__array__"):
        return _as_native(np.asarray(tokens))
    try:
        view = memoryview(cast(Any, tokens))
    except TypeError:
        return cast(list[int], list(tokens))
    return _as_native(np.asarray(view))


def _as_native(given: NDArray[Any]) -> Ids:
    if given.ndim != 1:
        raise TokenIdError(0, given)
    if given.size == 0:
        return np.empty(0, np.int64)
    if given.dtype.kind == "O":
        return cast(list[int], given.tolist())
    if given.dtype.kind not in "iu":
        raise TokenIdError(0, given[0].item())
    if given.dtype in _NATIVE:
        return np.ascontiguousarray(given)
    if given.dtype.kind == "u":
        _check_range(given)  # before int64 would wrap the upper half of uint64
    return np.ascontiguousarray(given, np.int64)


def _check_range(given: NDArray[Any]) -> None:
    if given.size and (int(given.min()) < 0 or int(given.max()) >= ID_LIMIT):
        index = int(np.flatnonzero((given < 0) | (given >= ID_LIMIT))[0])
        raise TokenIdError(index, int(given[index]))


def plain_ids(ids: Ids) -> list[int]:
    """The same ids, every one checked, as a new list of plain Python ints. Raises TokenIdError at the first bad one.

    Objects with `__index__` (numpy scalars, members of an IntEnum) count as integers, bools do not.
    """
    if isinstance(ids, np.ndarray):
        _check_range(ids)
        return cast(list[int], ids.tolist())
    for value in ids:
        if type(value) is not int or not 0 <= value < ID_LIMIT:
            return [_plain_id(index, value) for index, value in enumerate(ids)]
    return list(ids)


def id_array(ids: Ids) -> NDArray[np.uint32]:
    """The same ids, every one checked, as an array. Raises TokenIdError at the first bad one."""
    if isinstance(ids, np.ndarray):
        _check_range(ids)
        return ids.astype(np.uint32, copy=False)
    if set(map(type, ids)) <= {int}:
        try:
            return np.frombuffer(array("I", ids), np.uint32)  # three times as fast as np.array
        except OverflowError:
            pass  # found, and named, below
    return np.array(plain_ids(ids), np.uint32)


def _plain_id(index: int, value: object) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise TokenIdError(index, value)
    try:
        plain = operator.index(cast(SupportsIndex, value))
    except TypeError:
        raise TokenIdError(index, value) from None
    if not 0 <= plain < ID_LIMIT:
        raise TokenIdError(index, plain)
    return plain


def join(head: list[int], ids: Ids) -> Ids:
    """`head`, which is short, followed by `ids`, in a form that the kernels take."""
    if not head:
        return ids
    if isinstance(ids, np.ndarray):
        return np.concatenate((np.array(head, np.int64), ids), dtype=np.int64)
    return [*head, *ids]
