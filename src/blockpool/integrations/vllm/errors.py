"""What the drop-in refuses. Where vLLM asserts, the error is an AssertionError as well: its callers see theirs."""

from __future__ import annotations

from blockpool.pool.errors import (
    AlreadyHashedError,
    BoundaryError,
    CachingDisabledError,
    ForeignBlockError,
    MaskError,
    NullBlockError,
    QueueError,
    ReleaseError,
    UnknownBlockError,
)


class HashSetError(AlreadyHashedError, AssertionError):
    """A block that has a hash was to be given another one."""


class RangeError(BoundaryError, AssertionError):
    """A range of blocks, a length or a block size that does not fit the request's hashes."""


class MaskLengthError(MaskError, AssertionError):
    """A block mask whose length is not the number of blocks it describes."""


class NotCachingError(CachingDisabledError, AssertionError):
    """A hash was to be registered in a pool that keeps none."""


class NotHeldError(ReleaseError, AssertionError):
    """A block was given back more often than it is held."""


class NullGivenError(NullBlockError, AssertionError):
    """The null block was given where a real block is needed."""


class UnknownIdError(UnknownBlockError, AssertionError):
    """The id is not a block of this pool."""


class NotLinkedError(QueueError, RuntimeError):
    """A block that is not in the free queue was to be removed from it."""


class StrangerError(ForeignBlockError, TypeError):
    """A block that is not of this pool, or no block at all."""
