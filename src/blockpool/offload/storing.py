"""The way down: which blocks are copied into which tiers, when, and under what guard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from blockpool.cache import Hit, KVCacheManager, StoredBlocks
from blockpool.offload.announcing import Announcer
from blockpool.offload.errors import OffloadError
from blockpool.offload.namespace import GROUP_BYTES
from blockpool.offload.tier import Tier
from blockpool.offload.transfers import StoreJob, TransferEngine
from blockpool.pool import BlockPool

MOST_AGAIN = 4096


class StoreWhen(msgspec.Struct, frozen=True):
    """When a block goes down into a tier: `kind` is "completion", "eviction" or "hits", with `hits` of them."""

    kind: str
    hits: int = 0

    @staticmethod
    def parse(text: str) -> StoreWhen:
        """Raises OffloadError for what is none."""
        if text in ("completion", "eviction"):
            return StoreWhen(text)
        name, _, number = text.partition("=")
        if name == "hits" and number.isdecimal() and int(number) > 0:
            return StoreWhen("hits", int(number))
        raise OffloadError(
            f'a block is stored at "completion", "eviction" or "hits=N" with N of 1 or more, not {text!r}'
        )


class Storer:
    """Gathers blocks that are to go down, and lets go of them when they have."""

    def __init__(
        self,
        manager: KVCacheManager,
        tiers: Sequence[Tier],
        transfers: TransferEngine,
        starts: Sequence[bytes],
        whens: Sequence[StoreWhen],
        holds: bool,
        evict_ahead: int,
        losses: Counter[str],
        announcer: Announcer | None,
    ) -> None:
        self._manager = manager
        self._tiers = list(tiers)
        self._transfers = transfers
        self._starts = list(starts)
        self._pool_of = [group.pool for group in manager.config.kv_cache_groups]
        self._groups = [one.group_id.to_bytes(GROUP_BYTES, "big") for one in manager.managers]
        self._at_completion = [at for at, when in enumerate(whens) if when.kind == "completion"]
        self._at_eviction = [at for at, when in enumerate(whens) if when.kind == "eviction"]
        self._at_hits = [(at, when.hits) for at, when in enumerate(whens) if when.kind == "hits"]
        self._holds = holds
        self._evict_ahead = evict_ahead
        self._losses = losses
        self._announcer = announcer
        self._storing: set[bytes] = set()  # keys that are on their way
        # Wanted by a tier while they were on their way to another: key -> group, block, tiers.
        self._again: dict[bytes, tuple[int, int, tuple[int, ...]]] = {}
        self._hits: list[dict[int, tuple[int, int]]] = [{} for _ in manager.pools]  # block -> incarnation, hits
        self._seen: list[int] = [-1] * len(manager.pools)  # versions
        self._clean: list[dict[int, int]] = [{} for _ in manager.pools]  # block -> incarnation, sent or there
        self._late: list[dict[int, int]] = [{} for _ in manager.pools]  # neither yet, for want of room

    @property
    def is_idle(self) -> bool:
        return not self._storing and not self._again

    # -- gathering -------------------------------------------------------------------------------------

    def gather(self, all_cached: bool = False) -> bool:
        """Send on their way what the last steps have made ready. Never waits: what there is no room for is lost, but
        at eviction, where it is tried until it is handed out. `all_cached`: all is about to be evicted. Whether
        there was anything.
        """
        job = StoreJob()
        if self._again:
            self._try_again(job)
        stored = self._manager.take_stored()
        for blocks in stored:
            self._note_origins(blocks)
            if self._at_completion:
                self._completed(job, blocks)
        hits = self._manager.take_hits()
        if self._at_hits:
            for hit in hits:
                self._hit(job, hit)
        is_any = self._send(job, self._holds)
        if self._at_eviction:
            job = StoreJob()
            self._about_to_go(job, all_cached)
            is_any = self._send(job, False) or is_any  # held, those blocks could be given to nobody
        if self._announcer is not None:
            self._announcer.collect()
        return is_any

    def _note_origins(self, blocks: StoredBlocks) -> None:
        if self._announcer is not None:
            self._announcer.note(blocks, self._keys(blocks))

    def _completed(self, job: StoreJob, blocks: StoredBlocks) -> None:
        self._add(job, blocks.group_id, blocks.block_ids, self._keys(blocks), self._at_completion)

    def _keys(self, blocks: StoredBlocks) -> list[bytes]:
        start, tail = self._starts[blocks.group_id], self._groups[blocks.group_id]
        return [start + digest + tail for digest in blocks.digests]

    def _hit(self, job: StoreJob, hit: Hit) -> None:
        for group_id, (manager, ids) in enumerate(zip(self._manager.managers, hit.blocks, strict=True)):
            blocks = [block for block in ids if block]
            if not blocks:
                continue
            counts = self._hits[self._pool_of[group_id]]
            for block, turn in zip(blocks, manager.pool.get_incarnations(blocks), strict=True):
                known, count = counts.get(block, (turn, 0))
                count = count + 1 if known == turn else 1
                counts[block] = (turn, count)
                targets = [at for at, least in self._at_hits if count >= least]
                if targets:
                    for group, key in self._whole_keys(manager.pool, block):
                        self._add(job, group, [block], [key], targets)

    def _try_again(self, job: StoreJob) -> None:
        waiting, self._again = self._again, {}
        for key, (group_id, block, targets) in waiting.items():
            pool = self._manager.managers[group_id].pool
            if (group_id, key) in self._whole_keys(pool, block):
                self._add(job, group_id, [block], [key], targets)
            else:
                self._losses["store: too late"] += 1

    def _about_to_go(self, job: StoreJob, all_cached: bool) -> None:
        for number, pool in enumerate(self._manager.pools):
            late = self._late[number]
            if pool.version == self._seen[number] and not late and not all_cached:
                continue
            self._seen[number] = pool.version
            ahead = pool.next_evicted(pool.num_gpu_blocks if all_cached else self._evict_ahead)
            turns = dict(zip(ahead, pool.get_incarnations(ahead), strict=True))
            if late:
                known = list(late)
                now = pool.get_incarnations(known)
                self._losses["store: too late"] += sum(
                    turn != late[block] for block, turn in zip(known, now, strict=True)
                )
            clean, self._clean[number], self._late[number] = self._clean[number], {}, {}
            for block, turn in turns.items():
                is_clean = clean.get(block) == turn or self._goes(job, pool, block)
                (self._clean if is_clean else self._late)[number][block] = turn

    def _goes(self, job: StoreJob, pool: BlockPool, block: int) -> bool:
        """Whether a block that is about to be evicted is on its way into all tiers that want it, or there."""
        room = self._transfers.room_to_store() - len(job.keys)
        goes = True
        for group_id, key in self._whole_keys(pool, block):
            lacking = self._lacking([key], self._at_eviction)
            if lacking and (key in self._storing or room <= 0):
                goes = False
            elif lacking:
                room -= 1
                self._storing.add(key)
                job.add(group_id, [block], [key], [lacking[0]])
        return goes

    def _whole_keys(self, pool: BlockPool, block: int) -> list[tuple[int, bytes]]:
        """The groups and keys that name all of a block."""
        found: list[tuple[int, bytes]] = []
        for key, covered in pool.get_block_hashes(block):
            group_id = int.from_bytes(key[-GROUP_BYTES:], "big")
            if covered % self._manager.managers[group_id].block_size == 0:
                found.append((group_id, self._starts[group_id] + key))
        return found

    def _lacking(self, keys: list[bytes], targets: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """By place, the tiers that lack a page. Those that cannot be asked at once may have it."""
        lacking: dict[int, tuple[int, ...]] = {}
        for number in targets:
            tier = self._tiers[number]
            here = [False] * len(keys) if tier.is_remote else self._look_up(tier, keys)
            if not lacking:
                only = (number,)
                lacking = {at: only for at, is_here in enumerate(here) if not is_here}
            else:
                for at, is_here in enumerate(here):
                    if not is_here:
                        lacking[at] = (*lacking.get(at, ()), number)
        return lacking

    def _look_up(self, tier: Tier, keys: list[bytes]) -> list[bool]:
        try:
            return tier.lookup(keys)
        except Exception as error:  # a tier that breaks its promise
            self._losses[f"lookup: {type(error).__name__}"] += 1
            return [False] * len(keys)

    def _add(
        self, job: StoreJob, group_id: int, block_ids: list[int], keys: list[bytes], targets: Sequence[int]
    ) -> None:
        """Those pages that some tier lacks, as far as there is room."""
        storing = self._storing
        lacking = self._lacking(keys, targets)
        fresh = {keys[at]: at for at in lacking if keys[at] not in storing}  # a key may come twice
        if len(fresh) < len(lacking):
            for at, numbers in lacking.items():
                if keys[at] not in storing:
                    continue
                if len(self._again) < MOST_AGAIN:
                    self._again[keys[at]] = (group_id, block_ids[at], numbers)
                else:
                    self._losses["store: busy"] += 1
        room = self._transfers.room_to_store() - len(job.keys)
        if len(fresh) > room:
            self._losses["store: busy"] += len(fresh) - room
            fresh = dict(list(fresh.items())[:room])
        storing.update(fresh)
        places = fresh.values()
        job.add(group_id, [block_ids[at] for at in places], list(fresh), [lacking[at] for at in places])

    # -- guarding --------------------------------------------------------------------------------------

    def _send(self, job: StoreJob, holds: bool) -> bool:
        if not job.keys:
            return False
        self._guard(job, holds)
        self._transfers.store(job)
        return True

    def _guard(self, job: StoreJob, holds: bool) -> None:
        """Until the job has ended: keep its blocks, or hear when one is handed out."""
        pool_of = self._pool_of
        lost: dict[int, set[int]] = {number: set() for number in pool_of}
        job.lost = [lost[number] for number in pool_of]
        for number, pool in enumerate(self._manager.pools):
            blocks = (
                job.block_ids
                if len(lost) == 1
                else [
                    block
                    for group_id, block in zip(job.group_ids, job.block_ids, strict=True)
                    if pool_of[group_id] == number
                ]
            )
            if not blocks:
                continue
            if holds:
                job.holds.append((pool, pool.hold(blocks, "offload")))
            else:
                job.guards.append(pool.watch_blocks(blocks, lost[number].add))

    def has_ended(self, job: StoreJob) -> None:
        """A job was carried out: its blocks are let go of, and what came of it is counted."""
        for guard in job.guards:
            guard.done()
        for pool, hold in job.holds:
            pool.release(hold)
        if job.losses:
            self._losses.update(job.losses)
        self._storing.difference_update(job.keys)
