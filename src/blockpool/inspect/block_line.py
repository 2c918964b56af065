"""What a dump says about each block, gathered from its parts into one line."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from blockpool.pool import Fault


class BlockLine(msgspec.Struct, frozen=True):
    """One block of a dump."""

    pool: int
    """The pool's number in the file."""
    block_id: int
    ref_cnt: int
    hashes: tuple[str, ...]
    """Keys in hex: digest and group id."""
    queue_place: int | None
    """0 is the block to be handed out next; None: not in the free queue."""
    faulty: bool
    holders: tuple[str, ...] = ()
    """The owners of the holds that keep it, each once."""

    @property
    def in_use(self) -> bool:
        """Whether anybody depends on the block (or, in broken books, seems to)."""
        return self.ref_cnt != 0


def block_lines(pool: int, dump: Mapping[str, Any], faults: Iterable[Fault]) -> tuple[BlockLine, ...]:
    """The blocks of a dump that has passed for one, by id."""
    faulty = {fault.block_id for fault in faults}
    places: dict[int, int] = {}
    for place, block_id in enumerate(dump["queue"]):
        places.setdefault(block_id, place)
    holders: dict[int, dict[str, None]] = {}
    for hold in dump.get("holds", ()):
        for block_id in hold["blocks"]:
            holders.setdefault(block_id, {})[hold["owner"]] = None
    lines = [
        BlockLine(
            pool=pool,
            block_id=block["id"],
            ref_cnt=block["ref_cnt"],
            hashes=tuple(one["key"] for one in block.get("hashes", ())),
            queue_place=places.get(block["id"]),
            faulty=block["id"] in faulty,
            holders=tuple(holders.get(block["id"], ())),
        )
        for block in dump["blocks"]
    ]
    return tuple(sorted(lines, key=lambda line: line.block_id))
