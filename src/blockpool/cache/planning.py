"""Is there room? What a request would take, drop and copy, counted per pool before anything is touched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from mypy_extensions import i64

from blockpool.cache.groups import Groups
from blockpool.cache.hit import Hit
from blockpool.cache.plan import PoolRoom, Refusal, RefusalReason
from blockpool.cache.request import Request
from blockpool.managers import GroupHit, SingleTypeKVCacheManager
from blockpool.pool.layout import REF


@final
class Ask:
    """One request at one moment: `num_tokens` tokens are to have slots, all but lookahead `num_main_tokens`.

    `num_computed_tokens` counts hit and external tokens. `moves`: per group, a state that must be copied away before
    it is written on, or 0.
    """

    def __init__(
        self,
        request: Request,
        hit: Hit | None,
        is_running: bool,
        num_computed_tokens: int,
        num_main_tokens: int,
        num_tokens: int,
        num_settled_tokens: int,
        num_encoder_tokens: int,
        moves: list[int],
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.hit = hit
        self.is_running = is_running
        self.num_computed_tokens = num_computed_tokens
        self.num_main_tokens = num_main_tokens
        self.num_tokens = num_tokens
        self.num_settled_tokens = num_settled_tokens
        self.num_prompt_tokens: int = request.num_prompt_tokens
        self.num_encoder_tokens = num_encoder_tokens
        self.moves = moves

    def group_hit(self, group_id: int) -> GroupHit | None:
        return None if self.hit is None else self.hit.groups[group_id]

    def slots(self, manager: SingleTypeKVCacheManager) -> int:
        """States are not kept for tokens that may come."""
        return self.num_main_tokens if manager.is_state else self.num_tokens


@final
class Demand:
    """What an Ask comes to: blocks per group and per pool."""

    def __init__(self, groups: Groups, ask: Ask) -> None:
        self.groups = groups
        self.ask = ask
        num_pools = len(groups.pools)
        self.new: list[int] = []
        self.dropped: list[int] = []
        self.num_copies = 0
        self.alone: list[int] = [0] * len(groups.managers)  # at most at a time, if the whole must fit
        self.needed: list[int] = [0] * num_pools
        self.freed: list[int] = [0] * num_pools
        self.num_freed: list[int] = [0] * len(groups.managers)  # the same per group
        for at, manager in enumerate(groups.managers):
            pool = groups.pool_of[at]
            hit = ask.group_hit(at)
            new = manager.num_new_blocks(
                ask.request_id,
                ask.slots(manager),
                hit,
                ask.num_computed_tokens,
                ask.num_prompt_tokens,
                ask.num_encoder_tokens,
            )
            if ask.moves[at]:
                new += 1
                self.num_copies += 1
            dropped = 0
            if ask.is_running:
                dropped = self.drops(manager)
                self.freed[pool] += self.num_freed[at]
            elif hit is not None:
                self.num_copies += int(hit.num_tokens % manager.block_size != 0)
                self.needed[pool] += manager.num_evictable(hit)
            self.new.append(new)
            self.dropped.append(dropped)
            self.needed[pool] += new

    def drops(self, manager: SingleTypeKVCacheManager) -> int:
        """Blocks that leave the table; those that nobody else holds are free then."""
        ask = self.ask
        blocks = manager.droppable(ask.request_id, ask.num_settled_tokens, ask.num_prompt_tokens)
        records = manager.pool.records
        for b in blocks:
            if records.get(i64(b), REF) == 1:
                self.num_freed[manager.group_id] += 1
        return len(blocks)

    def kept(self, at: int) -> int:
        """Blocks of a group that the request holds, or would as its hit, when what it drops is gone."""
        hit = self.ask.group_hit(at)
        if not self.ask.is_running:
            return 0 if hit is None else hit.num_kept()
        return self.groups.managers[at].num_kept(self.ask.request_id) - self.dropped[at]

    def kept_once_settled(self, at: int) -> int:
        """The same, when what is in flight has run."""
        ask = self.ask
        if not ask.is_running:
            return self.kept(at)
        manager = self.groups.managers[at]
        dropped = manager.droppable(ask.request_id, ask.num_computed_tokens, ask.num_prompt_tokens)
        return manager.num_kept(ask.request_id) - len(dropped)

    def owned(self, at: int) -> int:
        """Those of them that nobody else holds, so that they are free when the request drops them."""
        hit = self.ask.group_hit(at)
        manager = self.groups.managers[at]
        if not self.ask.is_running:
            return 0 if hit is None else manager.num_evictable(hit)
        return manager.num_owned(self.ask.request_id) - self.num_freed[at]

    def positions(self, at: int) -> int:
        """How long the table is, or would be with the hit."""
        hit = self.ask.group_hit(at)
        if not self.ask.is_running:
            return 0 if hit is None else len(hit)
        return self.groups.managers[at].num_held(self.ask.request_id)

    def whole(self, num_tokens: int, max_model_len: int, max_in_flight_tokens: int) -> list[int]:
        """Blocks to take per group until so many tokens have been computed, as far as they are held at a time.

        A group that drops blocks holds no more than its cap; but those that others hold too are not free by that.
        """
        ask = self.ask
        most: list[int] = []
        for at, manager in enumerate(self.groups.managers):
            prompt = ask.num_prompt_tokens
            hit = ask.group_hit(at)
            copied = 0 if hit is None else int(hit.num_tokens % manager.block_size != 0)
            length = manager.table_length(num_tokens, prompt, ask.num_encoder_tokens)
            more = max(0, length - self.positions(at)) + copied
            alone = self.kept(at) + more
            cap = manager.most_blocks(max_model_len, max_in_flight_tokens, prompt)
            if cap is not None:
                owned = self.owned(at)
                more = min(owned + more, cap + copied) - owned
                alone = min(alone, cap + copied)
            self.alone[at] = max(self.alone[at], alone)
            most.append(max(self.new[at], more))
        return most

    def with_more(self, new: list[int]) -> list[int]:
        """`needed`, if so many blocks were taken per group."""
        needed = list(self.needed)
        for at, pool in enumerate(self.groups.pool_of):
            needed[pool] += new[at] - self.new[at]
        return needed

    def fits_never(self) -> bool:
        """Whether some pool has too few blocks even when all others have gone."""
        total = [0] * len(self.needed)
        for at, pool in enumerate(self.groups.pool_of):
            total[pool] += max(self.alone[at], self.new[at] + self.kept_once_settled(at))
        return any(total[pool] > self.groups.capacity(pool) for pool in range(len(total)))


def refusal(
    groups: Groups,
    request_id: str,
    reason: RefusalReason | None,
    needed: Sequence[int],
    withheld: Sequence[int],
    freed: Sequence[int],
    hit: Hit | None = None,
) -> Refusal:
    """Without a reason: no room, or only until a fence."""
    rooms: list[PoolRoom] = []
    helped = True
    for at, pool in enumerate(groups.pools):
        free = pool.get_num_free_blocks() + freed[at]
        deferred = pool.fences.num_deferred()
        held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks() - deferred
        helps = pool.next_fence
        missing = needed[at] + withheld[at] - free
        if reason is None and missing > deferred:
            helped = False
        elif reason is None and missing > 0:
            until = pool.get_deferred_blocks()
            if hit is not None:  # what the request would adopt is not given back to it
                for group_id, group in enumerate(hit.groups):
                    if groups.pool_of[group_id] == at:
                        for block in group.block_ids():
                            until.pop(block, None)
            if missing <= len(until):
                helps = sorted(until.values())[missing - 1]
            else:
                helped = False
        rooms.append(PoolRoom(needed[at], withheld[at], free, deferred, held, helps))
    if reason is None:
        reason = RefusalReason.WAIT_FOR_FENCE if helped else RefusalReason.NO_ROOM
    return Refusal(request_id, reason, tuple(rooms))
