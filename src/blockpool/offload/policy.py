"""In which order the pages of a tier go when room is needed."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Protocol, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Policy(Protocol[Key]):
    """An order of the keys that are there. It keeps no pages and takes no locks; a simulator can use it alone.

    A miss is `added`, preceded by an `evicted` where there is no room: the first of `victims()` that may go.
    """

    def added(self, key: Key) -> None:
        """It came, and was not there."""

    def used(self, key: Key) -> None:
        """It was there and was asked for."""

    def removed(self, key: Key) -> None:
        """It went because somebody said so."""

    def evicted(self, key: Key) -> None:
        """It went to make room: a policy may remember it."""

    def victims(self) -> Iterator[Key]:
        """All keys in the order in which they would be evicted now. Any change ends the walk."""

    def clear(self) -> None:
        """All went, and nothing is remembered."""

    def __len__(self) -> int:
        """How many are there."""

    def __contains__(self, key: object) -> bool:
        """Whether it is there."""
