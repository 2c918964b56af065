"""What names a prefix: a number of 64 bits per token, that of the token before mixed with the token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from blockpool.engine.store import Prints

MASK = (1 << 64) - 1
NO_PREFIX = 0x9E3779B97F4A7C15


def mixed(value: int) -> int:
    """A permutation of the 64-bit numbers whose results look random (the finalizer of splitmix64)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def next_print(before: int, token: int) -> int:
    """The print of a prefix that is longer by one token; `before`: NO_PREFIX for none."""
    return mixed((before + (token + 1) * 0xD1B54A32D192ED03) & MASK)


class Fingerprints:
    """The prints of one request's prefixes, kept as it grows. `len()` counts tokens."""

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._prints: list[int] = [NO_PREFIX]
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self._prints) - 1

    def extend(self, token_ids: Iterable[int]) -> None:
        last = self._prints[-1]
        for token in token_ids:
            last = next_print(last, token)
            self._prints.append(last)

    def with_more(self, token_ids: Sequence[int]) -> Prints:
        """The prints of all tokens, and of some behind them that are not kept: print i is of tokens 0 .. i."""
        prints = self._prints[1:]
        last = self._prints[-1]
        for token in token_ids:
            last = next_print(last, token)
            prints.append(last)
        return np.array(prints, np.uint64)
