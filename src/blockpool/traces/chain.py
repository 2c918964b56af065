"""From ids of blocks to ids of prefixes."""

from collections.abc import Hashable, Iterable

import numpy as np
import numpy.typing as npt


class PrefixIds:
    """Numbers prefixes as they come up: equal number, equal parts from the first one on.

    A part is anything that tells one block's content from another's. Where parts are prefixes already, nothing
    changes but the numbers.
    """

    START = -1

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Hashable], int] = {}

    def after(self, prefix: int, part: Hashable) -> int:
        """The number of `prefix` (START for none) with `part` behind it."""
        return self._numbers.setdefault((prefix, part), len(self._numbers))

    def of(self, parts: Iterable[Hashable]) -> npt.NDArray[np.int64]:
        """[parts]: the numbers of all prefixes of `parts`."""
        prefix = self.START
        numbers = []
        for part in parts:
            prefix = self.after(prefix, part)
            numbers.append(prefix)
        return np.array(numbers, dtype=np.int64)
