"""Many workers' mirrors behind one question: how much of this prompt is where?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import gcd

import msgspec
import numpy as np

from blockpool.managers import KVCacheGroupSpec, KVCacheSpec, SpecError
from blockpool.wire.errors import GroupRuleError, HashFormError, WorkerError
from blockpool.wire.holdings import Catalogue
from blockpool.wire.mirror import Convention, Mirror, MirrorStatus, check_hash
from blockpool.wire.rules import Fact, GroupRules, Masks, Numbers, spec_of
from blockpool.wire.shelf import Shelf, key_words, low_words

BlockHash = bytes | int
Said = dict[int, tuple[Fact, ...]]  # what one worker's events said of each group
#: The order of the tiers, fastest first; others follow by name.
TIERS = ("GPU", "CPU", "STORAGE")
UNCLEAR = "what it has of these hashes fits hashes of fewer tokens than its blocks have, too: state hash_block_size"


class Overlap(msgspec.Struct, frozen=True):
    """What a worker has of a prompt, in tokens, tier by tier.

    A tier's figure is the longest prefix that can be resumed from with it and the faster ones before it. `tokens` is
    None unless the worker's mirror is live; `last_known` is what is left of the truth otherwise, None for a worker
    that was never heard. A worker whose events cannot be those of the fleet's model is stale here, `reason` says why,
    and both are None.
    """

    status: MirrorStatus
    tokens: dict[str, int] | None
    last_known: dict[str, int] | None
    reason: str = ""


class Fleet:
    """Workers that run one model.

    `hash_block_size`: tokens per hash of a question. Unless stated it is the smallest block that was announced; that
    is one too large when the engine hashes in smaller units and has not announced a boundary inside a block yet, so
    where only every 2nd, 3rd, ... of the hashes is to be found anywhere, who has any is stale here. `groups`: the
    spec of each group; with both the answers are the engine's own. Unless stated, groups are what the events say:
    that is not enough for every kind, and a group of which no worker has announced anything yet is not known, so that
    answers are upper bounds until each has. `partial_hits`: whether the engine's hits may end inside a block.
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
        self._odd: dict[str, str] = {}

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
        groups can resume from. It is of the hashes given: an engine computes the last token of a prompt in any case,
        so for one that ends where its last hash does, its own hit is what is told without that hash, in chunks one
        chunk less. A worker that says of a group what most others do not, or what no rule is for, is
        stale here and changes nobody else's answer.

        Raises GroupRuleError when no worker's groups have rules that are known, HashFormError for what is no hash,
        for integer hashes when a worker announces digests, and for integers that have more than 64 bits.
        """
        hashes = list(block_hashes)
        with self.catalogue.lock:
            rules, odd = self._current_rules()
            lengths, unclear = self._lengths(hashes, rules, odd)
            slots = np.unpackbits(unclear.view(np.uint8), bitorder="little")
            if slots.any():
                odd = {
                    worker: UNCLEAR for worker, mirror in self._mirrors.items() if slots[mirror.holdings.slot]
                } | odd
            return {
                worker: Overlap(MirrorStatus.STALE, None, None, odd[worker])
                if worker in odd
                else _overlap(mirror, {tier: int(length[mirror.holdings.slot]) for tier, length in lengths})
                for worker, mirror in self._mirrors.items()
            }

    def _lengths(
        self, hashes: list[BlockHash], rules: GroupRules | None, odd: Mapping[str, str]
    ) -> tuple[list[tuple[str, Numbers]], Masks]:
        """[slots] usable tokens, for each tier with the faster ones before it; [words] for whom nobody knows."""
        num_slots = 64 * int(self.catalogue.num_words)
        tiers = self._tiers()
        if rules is None or not rules.managers or not hashes:
            nobody = np.zeros(num_slots // 64, dtype=np.uint64)
            return [(tier, np.zeros(num_slots, dtype=np.int64)) for tier in tiers], nobody
        keys = self._keys_of(hashes, odd)
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
        bits = np.zeros(num_slots, dtype=np.uint8)
        bits[[mirror.holdings.slot for worker, mirror in self._mirrors.items() if worker not in odd]] = 1
        fitting = np.packbits(bits, bitorder="little").view("<u8")
        return out, self._unclear(rules, {group: held & fitting for group, held in rows.items()}, odd)

    def _unclear(self, rules: GroupRules, rows: Mapping[int, Masks], odd: Mapping[str, str]) -> Masks:
        """[words]: who has some of the hashes, when nobody can tell how many tokens each stands for; else nobody.

        Blocks of n hashes are announced by every n-th: where no other is known, n is any divisor of that distance.
        """
        stride = 1 if self.hash_block_size is not None else rules.unit
        for group, held in rows.items():
            if stride > 1:
                places = np.flatnonzero(held.any(axis=1)) + 1
                stride = gcd(stride, int(np.gcd.reduce(places)) // (rules.managers[group].block_size // rules.unit))
        some = [np.bitwise_or.reduce(held, axis=0) for held in rows.values()]
        who: Masks = np.bitwise_or.reduce(some, axis=0)
        return np.zeros_like(who) if stride == 1 or self._has_boundaries(rules, odd) else who

    def _has_boundaries(self, rules: GroupRules, odd: Mapping[str, str]) -> bool:
        """Whether anybody has announced a boundary inside a block, which is in units of hashes."""
        return any(
            fact[0] < rules.managers[group].block_size
            for worker, mirror in self._mirrors.items()
            if worker not in odd
            for group, facts in mirror.holdings.facts.items()
            if group in rules.managers
            for fact in facts
        )

    def _tiers(self) -> list[str]:
        known = {medium for _, medium in self.catalogue.shelves} | {TIERS[0]}
        return [tier for tier in TIERS if tier in known] + sorted(known - set(TIERS))

    def _keys_of(self, hashes: list[BlockHash], odd: Mapping[str, str]) -> list[object]:
        """What to look for: the digests themselves, and their 64-bit form where workers announce that."""
        for one in hashes:
            check_hash(one)
        held = [mirror.holdings for mirror in self._mirrors.values()]
        some_int = any(one.has_int_hashes for one in held)
        if not isinstance(hashes[0], bytes):
            for worker, mirror in self._mirrors.items():
                if mirror.holdings.has_byte_hashes and worker not in odd:
                    raise HashFormError(f"worker {worker!r} announces whole digests: ask with digests, not integers")
            return [low_words(hashes)]
        if some_int:
            return [key_words(hashes), low_words(hashes)]
        return [key_words(hashes)]

    def _current_rules(self) -> tuple[GroupRules | None, dict[str, str]]:
        """None while no group is known; and the workers that do not fit them, with the reason."""
        if self.groups is not None and self.hash_block_size is not None:
            if self._rules is None:
                self._rules = GroupRules(self.hash_block_size, self.groups, self.partial_hits)
            return self._rules, {}
        told = {
            worker: {group: tuple(facts) for group, facts in mirror.holdings.facts.items() if facts}
            for worker, mirror in self._mirrors.items()
        }
        told = {worker: groups for worker, groups in told.items() if groups}
        if told != self._rules_from:
            self._rules_from = None
            self._rules, self._odd = self._learn(told)
            self._rules_from = told
        return self._rules, self._odd

    def _learn(self, told: dict[str, Said]) -> tuple[GroupRules | None, dict[str, str]]:
        """The rules that fit most workers. Raises GroupRuleError when those of nobody are known."""
        odd: dict[str, str] = {}
        specs: dict[str, dict[int, KVCacheSpec]] = {}
        first: GroupRuleError | None = None
        for worker, groups in told.items():
            try:
                specs[worker] = {group: spec_of(group, list(facts)) for group, facts in groups.items()}
            except GroupRuleError as error:
                if self.groups is None:
                    first = first or error
                    odd[worker] = f"{error}"
        # In each group what most workers say; of as many, what was said first.
        votes: dict[int, Counter[KVCacheSpec]] = {}
        for said in specs.values():
            for group, spec in said.items():
                votes.setdefault(group, Counter())[spec] += 1
        chosen = {group: max(votes[group], key=votes[group].__getitem__) for group in sorted(votes)}
        for worker, said in specs.items():
            for group, spec in said.items():
                if type(spec) is not type(chosen[group]) or not _fit(spec, chosen[group]):
                    odd[worker] = f"its group {group} is {_words(spec)}, where others have {_words(chosen[group])}"
        # A worker that has a boundary alone so far speaks of smaller units.
        for worker, said in specs.items():
            if worker not in odd:
                for group, spec in said.items():
                    if spec.block_size > chosen[group].block_size:
                        chosen[group] = spec
        while chosen:
            facts = [fact for worker in told if worker not in odd for said in told[worker].values() for fact in said]
            unit = self.hash_block_size or min(fact[0] for fact in facts)
            groups_of = {group: KVCacheGroupSpec((str(group),), spec) for group, spec in chosen.items()}
            try:
                return GroupRules(unit, self.groups or groups_of, self.partial_hits), odd
            except (SpecError, GroupRuleError) as error:
                first = first or GroupRuleError(f"the groups that events tell of are no model's: {error}")
            # Without the group that the fewest have told of, and those who have.
            rare = min(chosen, key=lambda group: (votes[group].total(), -group))
            del chosen[rare]
            odd |= {worker: f"{first}" for worker, said in specs.items() if rare in said and worker not in odd}
            if len(odd) == len(told):
                break
        if first is not None:
            raise first
        return None, odd


def _fit(one: KVCacheSpec, other: KVCacheSpec) -> bool:
    """Whether the same group can be both, when one of them is known by a boundary inside a block alone."""
    sizes = sorted((one.block_size, other.block_size))
    return sizes[1] % sizes[0] == 0 and all(
        getattr(one, field) == getattr(other, field) for field in one.__struct_fields__ if field != "block_size"
    )


def _words(spec: KVCacheSpec) -> str:
    window = getattr(spec, "sliding_window", None)
    return f"{type(spec).__name__} of {spec.block_size}" + ("" if window is None else f", window {window}")


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
