"""The list of a pool's blocks, or of those in a stand-alone queue. Not compiled: it has to be weakly referable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def nobody() -> None:
    return None


class Members(list[Any]):
    """Blocks by place. `head` and `tail` are the sentinels of the queue; `owner()` is the pool, or None."""

    head: Any = None
    tail: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.owner: Callable[[], Any] = nobody
