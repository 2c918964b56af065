"""What a pool refuses, by name. Every one of these leaves the pool as it was."""

from __future__ import annotations


class BlockPoolError(Exception):
    """Base of every error that a pool raises on purpose."""


class NoFreeBlocksError(BlockPoolError, ValueError):
    """More blocks were asked for than are free, or a negative number of them."""


class UnknownBlockError(BlockPoolError, ValueError):
    """The id is not a block of this pool: it is negative, too large, or not an integer."""


class ForeignBlockError(BlockPoolError, ValueError):
    """A handle of another pool was given where only this pool's blocks make sense."""


class NullBlockError(BlockPoolError, ValueError):
    """The null block was given where a real block is needed."""


class ReleaseError(BlockPoolError, ValueError):
    """A block was given back more often than it is held (a double free)."""


class AlreadyHashedError(BlockPoolError, ValueError):
    """The block has a hash that the call may not replace."""


class DigestError(BlockPoolError, ValueError):
    """Digests of the wrong width, or too few of them for the blocks named."""


class BoundaryError(BlockPoolError, ValueError):
    """A length in tokens that is not on a boundary of the unit it must be a multiple of."""


class GroupError(BlockPoolError, ValueError):
    """A group id outside 0 <= id < 2**23."""


class MaskError(BlockPoolError, ValueError):
    """A block mask whose length is not the number of blocks it describes."""


class CachingDisabledError(BlockPoolError, ValueError):
    """A hash was to be registered in a pool made with enable_caching=False."""


class QueueError(BlockPoolError, ValueError):
    """A block that is not in the free queue was to be removed, or one that is in it added again."""


class PoolBusyError(BlockPoolError, RuntimeError):
    """A reuse callback called into its pool; it may only call done()."""


class DumpError(ValueError):
    """A dump that cannot be read: the message names the field and the rule."""


class HoldError(BlockPoolError, ValueError):
    """A hold that cannot be: of a block that holds nothing, with two ends, until no time, or of another pool."""


class NoClockError(BlockPoolError, ValueError):
    """A hold until a time was asked of a pool that was made without a clock."""


class FenceError(BlockPoolError, ValueError):
    """A fence is an int of 0 or more."""
