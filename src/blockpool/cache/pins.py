"""Pins: cached prefixes that an owner keeps, whoever asks for blocks; capped per pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from librt.vecs import append, vec
from mypy_extensions import i32

from blockpool.cache.groups import Groups
from blockpool.cache.plan import RefusalReason
from blockpool.managers import CommonHit
from blockpool.pool import BlockPool, Hold


@final
class PinResult:
    """`num_tokens` tokens are pinned, in `num_blocks` blocks per pool; with a `reason`, why none are: PIN_CAP."""

    def __init__(self, num_tokens: int, num_blocks: tuple[int, ...], reason: RefusalReason | None = None) -> None:
        self.num_tokens = num_tokens
        self.num_blocks = num_blocks
        self.reason = reason

    def __bool__(self) -> bool:
        return self.num_tokens > 0

    def __repr__(self) -> str:
        why = "" if self.reason is None else f", reason={self.reason.value}"
        return f"PinResult({self.num_tokens} tokens, {self.num_blocks} blocks{why})"


@final
class PinBook:
    """The holds that are pins, by owner. `cap`: the part of each pool that pins may keep."""

    def __init__(self, pools: Sequence[BlockPool], cap: float) -> None:
        self.pools: list[BlockPool] = list(pools)
        self.most: list[int] = [int(cap * (pool.num_gpu_blocks - 1)) for pool in pools]
        self.counts: list[dict[int, int]] = [{} for _ in pools]  # block -> pins
        self.by_owner: dict[str, list[tuple[int, Hold]]] = {}

    def pin(self, groups: Groups, common: CommonHit, owner: str, until: float | None) -> PinResult:
        wanted: list[list[int]] = [[] for _ in self.pools]
        for at, hit in enumerate(common.groups):
            deepest_first = reversed(hit.block_ids())
            wanted[groups.pool_of[at]] += [block for block in deepest_first if block]
        counts = tuple([len(blocks) for blocks in wanted])
        if not self.fit(wanted):
            self.forget_ended()
            if not self.fit(wanted):
                return PinResult(0, tuple([0] * len(counts)), RefusalReason.PIN_CAP)
        made: list[tuple[int, Hold]] = []
        try:
            for pool, blocks in enumerate(wanted):
                if blocks:
                    made.append((pool, self.pools[pool].hold(blocks, owner, until=until)))
        except BaseException:
            for pool, hold in made:
                self.pools[pool].release(hold)
            raise
        for pool, hold in made:
            self.enter(pool, hold)
        if made:
            self.by_owner.setdefault(owner, []).extend(made)
        return PinResult(common.num_tokens, counts)

    def fit(self, wanted: list[list[int]]) -> bool:
        for pool, blocks in enumerate(wanted):
            pinned = self.counts[pool]
            if len(pinned) + len([block for block in blocks if block not in pinned]) > self.most[pool]:
                return False
        return True

    def enter(self, pool: int, hold: Hold) -> None:
        counts = self.counts[pool]
        for block in hold.blocks:
            counts[block] = counts.get(block, 0) + 1

    def leave(self, pool: int, hold: Hold) -> int:
        counts = self.counts[pool]
        for block in hold.blocks:
            counts[block] -= 1
            if counts[block] == 0:
                del counts[block]
        return len(hold.blocks)

    def unpin(self, owner: str) -> int:
        count = 0
        for pool, hold in self.by_owner.pop(owner, []):
            blocks = self.leave(pool, hold)
            if not hold.released:
                self.pools[pool].release(hold)
                count += blocks
        return count

    def moved(self, pool: BlockPool, source: int, target: int) -> None:
        """What a block was pinned for is in another one now: the pins go with it."""
        number = self.pools.index(pool)
        if source not in self.counts[number]:
            return
        for holds in self.by_owner.values():
            for at, (owned, hold) in enumerate(holds):
                if owned == number and not hold.released and source in hold.blocks:
                    ids = vec[i32]()
                    for block in hold.blocks:
                        ids = append(ids, i32(target if block == source else block))
                    again = pool.hold_vec(ids, hold.owner, hold.until, None)
                    holds[at] = (number, again)
                    self.enter(number, again)
                    self.leave(number, hold)
                    pool.release(hold)

    def expire(self) -> int:
        """Also ends other holds of these pools whose time has come."""
        for pool in self.pools:
            pool.expire_holds()
        return self.forget_ended()

    def forget_ended(self) -> int:
        """Pins end with their holds; how many blocks those had."""
        count = 0
        for owner, holds in list(self.by_owner.items()):
            left: list[tuple[int, Hold]] = []
            for pool, hold in holds:
                if hold.released:
                    count += self.leave(pool, hold)
                else:
                    left.append((pool, hold))
            if left:
                self.by_owner[owner] = left
            else:
                del self.by_owner[owner]
        return count

    def holders(self) -> tuple[dict[str, int], dict[str, int]]:
        """Blocks per owner of pins, and per owner of other holds."""
        self.forget_ended()
        pins = {owner: sum([len(hold.blocks) for _, hold in holds]) for owner, holds in self.by_owner.items()}
        others: dict[str, int] = {}
        for at, pool in enumerate(self.pools):
            known = {hold.number for holds in self.by_owner.values() for number, hold in holds if number == at}
            for hold in pool.open_holds:
                if hold.number not in known:
                    others[hold.owner] = others.get(hold.owner, 0) + len(hold.blocks)
        return pins, others
