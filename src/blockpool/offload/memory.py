"""The blocks of an engine as bytes: what a transfer reads and writes."""

from __future__ import annotations

from typing import Protocol


class BlockMemory(Protocol):
    """One page per block and group: the bytes of the block in all layers of the group, in an order of its own.

    Pages are read and written while steps run, by threads of their own; who calls takes care that nobody writes the
    block meanwhile, and that nobody reads it before it is all there.
    """

    def page_bytes(self, group_id: int) -> int:
        """How long a page of that group is."""

    def read_page(self, group_id: int, block_id: int, page: memoryview) -> None:
        """Copy a block into `page`, which is exactly as long."""

    def write_page(self, group_id: int, block_id: int, page: memoryview) -> None:
        """Copy a page into a block."""
