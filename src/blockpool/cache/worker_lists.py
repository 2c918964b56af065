"""What the worker has to do before the forward pass of a step: blocks to clear, then blocks to copy; each once."""

from __future__ import annotations

from typing import final

from librt.vecs import append, vec
from mypy_extensions import i32

from blockpool.cache.block_copy import BlockCopy
from blockpool.cache.groups import Groups
from blockpool.cache.steps import HeldCopy, Step
from blockpool.managers import SingleTypeKVCacheManager


@final
class WorkerLists:
    """The orders that were not taken yet. Both ends of a copy hold a reference until its step is acknowledged;
    without steps, until the copies are taken.
    """

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.copies: list[BlockCopy] = []
        self.held: list[HeldCopy] = []  # without a step: held until they are taken
        self.clears: list[dict[int, bool]] = [{} for _ in groups.managers]

    # -- ordering ------------------------------------------------------------------------------------

    def copy(self, manager: SingleTypeKVCacheManager, source: int, target: int, step: Step | None) -> None:
        order = BlockCopy(manager.group_id, source, target)
        self.copies.append(order)
        self.keep(order, step)

    def keep(self, order: BlockCopy, step: Step | None) -> None:
        group_id, source, target = order
        pool = self.groups.managers[group_id].pool
        ends = append(append(vec[i32](capacity=2), i32(source)), i32(target))
        if step is None:
            self.held.append(HeldCopy(order, pool.hold_vec(ends, "copy", None, None)))
        else:
            step.copies.append(HeldCopy(order, pool.hold_vec(ends, "copy", None, step.step_id)))

    def clear(self, group_id: int, blocks: vec[i32], step: Step | None) -> None:
        clears = self.clears[group_id]
        for b in blocks:
            block = int(b)
            if block:
                clears[block] = True
                if step is not None:
                    step.clears.append((group_id, block))

    def given_back(self, group_id: int, blocks: vec[i32]) -> None:
        """These blocks need no clearing any more, for this holder."""
        clears = self.clears[group_id]
        if clears:
            for b in blocks:
                clears.pop(int(b), None)

    # -- taking --------------------------------------------------------------------------------------

    def take_copies(self) -> list[BlockCopy]:
        copies = self.copies
        self.copies = []
        self.release(self.held)
        self.held = []
        return copies

    def take_clears(self) -> tuple[list[int], ...]:
        taken = tuple([list(clears) for clears in self.clears])
        for clears in self.clears:
            clears.clear()
        return taken

    def release(self, copies: list[HeldCopy]) -> None:
        for copy in copies:
            self.groups.managers[copy.order.group_id].pool.release(copy.hold)

    # -- steps ---------------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """What was ordered before, and not taken, is for this step."""
        held = self.held
        self.held = []
        for copy in held:
            self.keep(copy.order, step)
        self.release(held)

    def again(self, step: Step) -> None:
        """The step was cancelled: what it ordered is still to be done, for those that are still there.

        The references that were to end with it are the caller's to end.
        """
        gone = {copy.order for copy in step.copies}
        self.copies = [order for order in self.copies if order not in gone]
        moved = {(one.manager.group_id, one.target): one.source for one in step.moved}
        for copy in step.copies:
            group_id, source, target = copy.order
            if (group_id, target) in moved:
                continue  # its entry went back
            if self.groups.managers[group_id].pool.blocks[target].ref_cnt > 1:
                order = BlockCopy(group_id, moved.get((group_id, source), source), target)
                self.copies.append(order)
                self.keep(order, None)
        for group_id, block in step.clears:
            if self.groups.managers[group_id].pool.blocks[block].ref_cnt > 0:
                self.clears[group_id][block] = True
