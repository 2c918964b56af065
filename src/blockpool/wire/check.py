"""The auditor of a stream: every rule that events follow, checked on the events alone.

It shares no code with the mirror, and keeps whole keys in plain dicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

import msgspec

from blockpool.pool import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from blockpool.wire.codec import KVEventBatch
from blockpool.wire.errors import BatchError

BlockHash = bytes | int
Key = tuple[int, str, BlockHash]  # group, tier, hash

#: Every rule by its name, and why it is one.
RULES = {
    "batch": "every payload is a batch of events; what one that is not has said is lost to every reader",
    "frames": "a message has three frames: topic, number (eight bytes, big endian) and payload; readers skip others",
    "sequence": "batches are numbered without gaps; a missing one leaves every reader wrong about its blocks",
    "duplicate": "a batch is sent once; who counts copies counts a second one as more of them",
    "restart": "numbers begin anew only with a new publisher, whose index begins empty",
    "tokens": "token_ids covers exactly block_hashes: one block_size of tokens per hash",
    "empty": "an event names at least one block",
    "extra_keys": "extra_keys and lookahead_token_ids have one entry per hash",
    "form": "all hashes of a stream are integers, or digests of one width",
    "group": "a group keeps its kind and window; blocks in smaller units are boundaries inside one of its blocks",
    "tier": "the tier is one of GPU, CPU and STORAGE",
    "parent": "a block of a group that reads everything follows one that is announced (a boundary inside a block need"
    " not); evict_blocks and no_store, and a recording that begins in the middle, cut chains",
    "repeated": "where the first and the last copy are announced, a key is announced once until it is removed",
    "removed": "what is removed was announced in that group and tier, and not removed since",
    "capacity": "there are no more keys than blocks: a block that is used anew loses its old key first",
}
TIERS = ("GPU", "CPU", "STORAGE")
#: Batches that are remembered to tell one that comes again from a restart.
REMEMBERED = 1024
#: Groups that are looked into for a key that is not where it is removed.
SEARCHED_GROUPS = 64
WHOLE_KINDS = (None, "full_attention", "mla_attention", "sink_full_attention")


class StreamFault(msgspec.Struct, frozen=True):
    """A broken rule: where (batch number, event in the batch, None for the batch itself), and what was seen."""

    rule: str
    seq: int
    event: int | None
    detail: str
    place: str = ""

    @property
    def why(self) -> str:
        return RULES[self.rule]


class StreamCheck:
    """Fed batch by batch. `convention`: "detect" takes a key that is announced twice as a sign of "per_copy".

    `num_blocks`: of the pool, in each tier, the null block not among them; None leaves `capacity` out.
    """

    def __init__(self, convention: str = "detect", num_blocks: int | None = None) -> None:
        if convention not in ("detect", "first_last", "per_copy"):
            raise ValueError(f'convention must be "detect", "first_last" or "per_copy", not {convention!r}')
        self.convention = convention
        self.num_blocks = num_blocks
        self.num_batches = 0
        self.num_events = 0
        self.keys: Counter[Key] = Counter()
        self.ranks: set[int | None] = set()
        self._counts: Counter[str] = Counter()  # per tier
        self._next = -1
        self._begins_late = False
        self._form: str | None = None
        self._groups: dict[int, tuple[str | None, int | None]] = {}
        self._sizes: dict[int, int] = {}
        self._sized: set[int] = set()  # groups of which it is certain that the size is that of whole blocks
        self._recent: dict[int, int] = {}  # hashes of payloads, by their numbers
        self._faults: list[StreamFault] = []

    @property
    def next_seq(self) -> int:
        """The number that is expected next."""
        return max(0, self._next)

    def feed(
        self, seq: int, batch: KVEventBatch | BatchError, payload: bytes | None = None, place: str = ""
    ) -> list[StreamFault]:
        """The faults of the next batch, in the order of its events. An error is a payload that is no batch."""
        self._faults = []
        if self._is_next(seq, payload, place):
            self.num_batches += 1
            if isinstance(batch, BatchError):
                self._begins_late = True
                self._faults.append(StreamFault("batch", seq, None, f"{batch}", place))
                return self._faults
            self.ranks.add(batch.data_parallel_rank)
            for at, event in enumerate(batch.events):
                self.num_events += 1
                for rule, detail in self._event(event):
                    self._faults.append(StreamFault(rule, seq, at, detail, place))
        return self._faults

    def _is_next(self, seq: int, payload: bytes | None, place: str) -> bool:
        """Whether the batch's events count."""

        def fault(rule: str, detail: str) -> None:
            self._faults.append(StreamFault(rule, seq, None, detail, place))

        counts = True
        if self._next < 0:
            self._begins_late = seq > 0
            self._next = seq
        if seq > self._next:
            missing = str(self._next) if seq == self._next + 1 else f"{self._next} to {seq - 1}"
            fault("sequence", f"batch {seq} follows {self._next - 1}: {missing} missing")
            self._begins_late = True
        elif seq < self._next and payload is not None and self._recent.get(seq) == hash(payload):
            fault("duplicate", f"batch {seq} came twice")
            counts = False
        elif seq < self._next:
            fault("restart", f"batch {seq} follows {self._next - 1}")
            self.keys.clear()
            self._counts.clear()
            self._recent.clear()
            self._begins_late = seq > 0
        if counts:
            self._next = seq + 1
            if payload is not None:
                self._recent.pop(seq, None)
                self._recent[seq] = hash(payload)
                if len(self._recent) > REMEMBERED:
                    del self._recent[next(iter(self._recent))]
        return counts

    def _event(self, event: KVCacheEvent) -> Iterator[tuple[str, str]]:
        if isinstance(event, AllBlocksCleared):
            yield from self._cleared(event)
            return
        tier = "GPU" if event.medium is None else event.medium
        group = event.group_idx or 0
        if tier not in TIERS:
            yield "tier", f"{event.medium!r}"
        if not event.block_hashes:
            yield "empty", f"a {type(event).__name__} without blocks"
            return
        for one in event.block_hashes:
            form = "integers" if isinstance(one, int) else f"digests of {len(one)} bytes"
            if self._form is None:
                self._form = form
            elif form != self._form:
                yield "form", f"{form} among {self._form}"
                break
        if isinstance(event, BlockStored):
            yield from self._shape(event, group)
            yield from self._parent(event, group, tier)
            yield from self._stored(event, group, tier)
        else:
            yield from self._removed(event, group, tier)

    def _cleared(self, event: AllBlocksCleared) -> Iterator[tuple[str, str]]:
        if event.medium is not None and event.medium not in TIERS:
            yield "tier", f"{event.medium!r}"
        for key in [key for key in self.keys if event.medium in (None, key[1])]:
            self._counts[key[1]] -= self.keys.pop(key)
        if event.medium is None:
            self._begins_late = False

    def _shape(self, event: BlockStored, group: int) -> Iterator[tuple[str, str]]:
        hashes = len(event.block_hashes)
        if event.block_size < 1:
            yield "tokens", f"blocks of {event.block_size} tokens"
        elif len(event.token_ids) != hashes * event.block_size:
            yield "tokens", f"{len(event.token_ids)} tokens for {hashes} blocks of {event.block_size}"
        for field, entries in (
            ("extra_keys", event.extra_keys),
            ("lookahead_token_ids", event.lookahead_token_ids),
        ):
            if entries is not None and len(entries) != hashes:
                yield "extra_keys", f"{len(entries)} {field} for {hashes} hashes"
        said = (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
        known = self._groups.setdefault(group, said)
        if said != known:
            yield "group", f"group {group} is {_kind(said)}, and was {_kind(known)}"
        if event.block_size < 1:
            return
        size = self._sizes.setdefault(group, event.block_size)
        if max(size, event.block_size) % min(size, event.block_size):
            yield "group", f"group {group} has blocks of {event.block_size} tokens, and had {size}"
        self._sizes[group] = max(size, event.block_size)
        if hashes > 1 or size != event.block_size:
            self._sized.add(group)

    def _parent(self, event: BlockStored, group: int, tier: str) -> Iterator[tuple[str, str]]:
        parent = event.parent_block_hash
        if parent is None or event.kv_cache_spec_kind not in WHOLE_KINDS or self._begins_late:
            return
        # One hash alone may be a boundary inside a block, whose parent may be one, too, that nobody has announced.
        if len(event.block_hashes) == 1 and (group not in self._sized or event.block_size < self._sizes[group]):
            return
        if not any(self.keys[group, other, parent] for other in {tier, *TIERS}):
            yield "parent", f"{_short(event.block_hashes[0])} follows {_short(parent)}, which is not announced"

    def _stored(self, event: BlockStored, group: int, tier: str) -> Iterator[tuple[str, str]]:
        for one in event.block_hashes:
            key = (group, tier, one)
            if self.keys[key]:
                if self.convention == "first_last":
                    yield "repeated", f"{_short(one)} in group {group} is announced already"
                    continue
                self.convention = "per_copy"
            self.keys[key] += 1
            self._counts[tier] += 1
        if self.num_blocks is not None and self._counts[tier] > self.num_blocks:
            yield "capacity", f"{self._counts[tier]} keys in {self.num_blocks} blocks of {tier}"

    def _removed(self, event: BlockRemoved, group: int, tier: str) -> Iterator[tuple[str, str]]:
        for one in event.block_hashes:
            key = (group, tier, one)
            if self.keys[key]:
                self.keys[key] -= 1
                self._counts[tier] -= 1
            elif not self._begins_late:
                groups = islice(self._groups, SEARCHED_GROUPS)
                where = [f"group {g}, {t}" for g in sorted(groups) for t in TIERS if self.keys[g, t, one]]
                there = f"; it is in {' and '.join(where)}" if where else ""
                yield "removed", f"{_short(one)} is not in group {group}, {tier}{there}"
            if not self.keys[key]:
                del self.keys[key]


def first_of_each(faults: list[StreamFault]) -> list[tuple[StreamFault, int]]:
    """The first fault of each rule, and how often it was broken."""
    counts = Counter(fault.rule for fault in faults)
    first: dict[str, StreamFault] = {}
    for fault in faults:
        first.setdefault(fault.rule, fault)
    return [(fault, counts[rule]) for rule, fault in first.items()]


def _kind(said: tuple[str | None, int | None]) -> str:
    kind, window = said
    return (kind or "of no kind") + ("" if window is None else f" of {window}")


def _short(one: BlockHash) -> str:
    return f"{one.hex()[:16]}…" if isinstance(one, bytes) else str(one)
