"""What this room refuses, by name. Every one of these leaves the chain as it was."""

from __future__ import annotations

import reprlib


class HashingError(Exception):
    """Base of every error that this room raises on purpose."""


class TokenIdError(HashingError, ValueError):
    """A token id is not an integer with 0 <= id < 2**32.

    `index` is its position in the sequence that was given, `value` what stood there. A bool is not a token id.
    """

    def __init__(self, index: int, value: object) -> None:
        super().__init__(index, value)
        self.index = index
        self.value = value

    @property
    def is_integer(self) -> bool:
        """Whether the value is an integer, only not one in range."""
        return isinstance(self.value, int) and not isinstance(self.value, bool)

    def __str__(self) -> str:
        shown = reprlib.repr(self.value)
        if self.is_integer:
            return f"token id at index {self.index} is {shown}: must be 0 <= id < 2**32"
        return f"token id at index {self.index} is {shown} ({type(self.value).__name__}): not an integer"


class UnknownAlgorithm(HashingError, ValueError):
    """No hash algorithm has this name."""


class MissingDependency(HashingError, ImportError):
    """The algorithm needs an optional package that is not installed; the message names the extra."""


class KernelUnavailable(HashingError, RuntimeError):
    """The hash kernel that was asked for does not exist, was not built or is not supported by this CPU."""


class SeedError(HashingError, TypeError):
    """A seed is a text string."""


class DigestError(HashingError, ValueError):
    """Bytes that are not a digest (or a whole number of them) of the expected size."""


class BlockSizeError(HashingError, ValueError):
    """A size in tokens that is not positive, or not a multiple of the unit it must be a multiple of."""


class TokenCountError(HashingError, ValueError):
    """A number of tokens that the chain cannot cover."""


class TokensUnknown(HashingError, RuntimeError):
    """The chain was made from digests: the tokens behind them are not known, so nothing can follow."""


class ExtraKeysError(HashingError, ValueError):
    """An extra key of the wrong type, shape or order."""


class CborError(HashingError, ValueError):
    """A value that extra keys have no CBOR form for."""


class RandomSeedWarning(UserWarning):
    """The seed is random: digests will differ between processes."""
