"""Many workers' mirrors behind one question: how much of this prompt is where?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from blockpool.managers import KVCacheGroupSpec
from blockpool.wire.errors import GroupRuleError, HashFormError, WorkerError
from blockpool.wire.holdings import Catalogue
from blockpool.wire.mirror import Convention, Mirror, MirrorStatus, check_hash
from blockpool.wire.rules import Fact, GroupRules, Masks, Numbers, spec_of
from blockpool.wire.shelf import Shelf, key_words, low_words

BlockHash = bytes | int
#: The order of the tiers, fastest first; others follow by name.
TIERS = ("GPU", "CPU", "STORAGE")


class Overlap(msgspec.Struct, frozen=True):
    """What a worker has of a prompt, in tokens, tier by tier.

    A tier's figure is the longest prefix that can be resumed from with it and the faster ones before it. `tokens` is
    None unless the worker's mirror is live; `last_known` is what is left of the truth otherwise, None for a worker
    that was never heard.
    """

    status: MirrorStatus
    tokens: dict[str, int] | None
    last_known: dict[str, int] | None


class Fleet:
    """Workers that run one model.

    `hash_block_size`: tokens per hash of a question; unless stated, the smallest block that was announced. `groups`:
    the spec of each group; unless stated, what the events say, which is not enough for every kind. `partial_hits`:
    whether the engine's hits may end inside a block.
    """

    def __init__(
        self,
        *,
        hash_block_size: int | None = None,
        groups: Mapping[int, KVCacheGroupSpec] | None = None,
        partial_hits: bool = True,
    ) -> None:
        self.hash_block_size = hash_block_size
        self.groups = groups
        self.partial_hits = partial_hits
        self.catalogue = Catalogue()
        self._mirrors: dict[str, Mirror] = {}
        self._rules: GroupRules | None = None
        self._rules_from: object = None

    @property
    def mirrors(self) -> dict[str, Mirror]:
        """Each worker's mirror, by its name."""
        return dict(self._mirrors)

    def join(
        self,
        worker: str,
        *,
        convention: Convention = "detect",
        can_replay: bool = True,
        max_blocks: int | None = None,
        max_pending: int = 10_000,
    ) -> Mirror:
        """A new worker's mirror, for a `Subscriber`. Raises WorkerError when there is one of this name."""
        if worker in self._mirrors:
            raise WorkerError(f"worker {worker!r} has joined already")
        with self.catalogue.lock:
            mirror = Mirror(
                worker,
                convention=convention,
                can_replay=can_replay,
                max_blocks=max_blocks,
                max_pending=max_pending,
                catalogue=self.catalogue,
            )
            self._mirrors[worker] = mirror
        return mirror

    def leave(self, worker: str) -> None:
        """Forget a worker and all that it has. Raises WorkerError when there is none of this name."""
        with self.catalogue.lock:
            mirror = self._mirrors.pop(worker, None)
            if mirror is None:
                raise WorkerError(f"there is no worker {worker!r}")
            mirror.leave()

    def overlap(self, block_hashes: Sequence[BlockHash]) -> dict[str, Overlap]:
        """What each worker has of a prompt, given its chain of hashes, one per `hash_block_size` tokens.

        By each group's own rule: a window needs its last blocks only, a state its last one; what counts is what all
        groups can resume from. Raises GroupRuleError for a group whose rule is not known, HashFormError for integer
        hashes when a worker announces digests, and for integers that have more than 64 bits.
        """
        hashes = list(block_hashes)
        with self.catalogue.lock:
            mirrors = list(self._mirrors.items())
            lengths = self._lengths(hashes)
            return {
                worker: _overlap(mirror, {tier: int(length[mirror.holdings.slot]) for tier, length in lengths})
                for worker, mirror in mirrors
            }

    def _lengths(self, hashes: list[BlockHash]) -> list[tuple[str, Numbers]]:
        """[slots] usable tokens, for each tier with the faster ones before it."""
        num_slots = 64 * int(self.catalogue.num_words)
        tiers = self._tiers()
        rules = self._current_rules()
        if rules is None or not rules.managers or not hashes:
            return [(tier, np.zeros(num_slots, dtype=np.int64)) for tier in tiers]
        keys = self._keys_of(hashes)
        out: list[tuple[str, Numbers]] = []
        rows = {group: np.zeros((len(hashes), num_slots // 64), dtype=np.uint64) for group in rules.managers}
        for tier in tiers:
            usable: Masks | None = None
            for group in rules.managers:
                shelf = self.catalogue.shelves.get((group, tier))
                if shelf is not None:
                    for key in keys:
                        rows[group] |= _masks(shelf, key, num_slots // 64)
                here = rules.usable(group, rows[group])
                usable = here if usable is None else usable & here
            assert usable is not None
            out.append((tier, _last_boundaries(usable) * rules.step))
        return out

    def _tiers(self) -> list[str]:
        known = {medium for _, medium in self.catalogue.shelves} | {TIERS[0]}
        return [tier for tier in TIERS if tier in known] + sorted(known - set(TIERS))

    def _keys_of(self, hashes: list[BlockHash]) -> list[object]:
        """What to look for: the digests themselves, and their 64-bit form where workers announce that."""
        for one in hashes:
            check_hash(one)
        held = [mirror.holdings for mirror in self._mirrors.values()]
        some_int = any(one.has_int_hashes for one in held)
        if not isinstance(hashes[0], bytes):
            for worker, mirror in self._mirrors.items():
                if mirror.holdings.has_byte_hashes:
                    raise HashFormError(f"worker {worker!r} announces whole digests: ask with digests, not integers")
            return [low_words(hashes)]
        if some_int:
            return [key_words(hashes), low_words(hashes)]
        return [key_words(hashes)]

    def _current_rules(self) -> GroupRules | None:
        """None while no group is known."""
        if self.groups is not None and self.hash_block_size is not None:
            if self._rules is None:
                self._rules = GroupRules(self.hash_block_size, self.groups, self.partial_hits)
            return self._rules
        facts: dict[int, list[Fact]] = {}
        for mirror in self._mirrors.values():
            for group, told in mirror.holdings.facts.items():
                here = facts.setdefault(group, [])
                here.extend(fact for fact in told if fact not in here)
        facts = {group: told for group, told in facts.items() if told}
        if not facts:
            return None
        if facts != self._rules_from:
            unit = self.hash_block_size or min(fact[0] for told in facts.values() for fact in told)
            self._rules = GroupRules(unit, self.groups or _groups_of(facts, unit), self.partial_hits)
            self._rules_from = facts
        return self._rules


def _groups_of(facts: dict[int, list[Fact]], unit: int) -> dict[int, KVCacheGroupSpec]:
    groups = {}
    for group, told in sorted(facts.items()):
        spec = spec_of(group, told)
        if spec.block_size % unit:
            raise GroupRuleError(f"group {group} has blocks of {spec.block_size} tokens, no multiple of {unit}")
        groups[group] = KVCacheGroupSpec((str(group),), spec)
    return groups


def _overlap(mirror: Mirror, lengths: dict[str, int]) -> Overlap:
    status = mirror.status
    if status is MirrorStatus.LIVE:
        return Overlap(status, lengths, lengths)
    return Overlap(status, None, None if status is MirrorStatus.NEVER_FED else lengths)


def _masks(shelf: Shelf, keys: object, num_words: int) -> Masks:
    found = np.frombuffer(shelf.masks(keys, 0, 1), dtype="<u8")  # type: ignore[arg-type]
    return found.reshape(-1, num_words)


def _last_boundaries(usable: Masks) -> Numbers:
    """[slots]: for each bit, the last row that has it, counted from 1; 0 for none."""
    later = np.bitwise_or.accumulate(usable[::-1], axis=0)
    bits = np.unpackbits(np.ascontiguousarray(later).view(np.uint8), axis=1, bitorder="little")
    out: Numbers = bits.sum(axis=0, dtype=np.int64)
    return out
