"""One worker's index, rebuilt from its events, and whether it is true: without sockets, threads or clocks.

A `Subscriber` tells it what comes in and asks it what it wants to have sent. A test can do the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from typing import Literal

import msgspec

from blockpool.wire.changes import Changes, read_changes
from blockpool.wire.errors import BatchError, HashFormError
from blockpool.wire.holdings import GPU, MOST_SAID, Catalogue, Holdings
from blockpool.wire.protocol import PublisherStatus

Convention = Literal["detect", "first_last", "per_copy"]
#: Of so many batches it is remembered what they were, to tell one that comes again from one of another life.
REMEMBERED = 1024


class MirrorStatus(StrEnum):
    """LIVE: the index is the publisher's as of the mirror's `sequence`. CATCHING_UP: batches are missing, or it is
    not sure whose they are; they have been asked for. STALE: they cannot be had, and the index is what is left of
    the truth. NEVER_FED: nothing has been heard yet.
    """

    NEVER_FED = "never_fed"
    CATCHING_UP = "catching_up"
    LIVE = "live"
    STALE = "stale"


class ReplayWanted(msgspec.Struct, frozen=True):
    """Ask the replay socket for batches from `first` on."""

    first: int


class SnapshotWanted(msgspec.Struct, frozen=True):
    """Ask the replay socket for a snapshot."""


Wanted = ReplayWanted | SnapshotWanted


def check_hash(block_hash: bytes | int) -> None:
    """Raises HashFormError for what is no hash, and for an integer that is announced by nobody."""
    if not isinstance(block_hash, bytes | int):
        raise HashFormError(f"a hash is bytes or an integer, not {block_hash!r}")
    if not isinstance(block_hash, bytes) and not -(1 << 63) <= block_hash < 1 << 64:
        raise HashFormError(f"an integer hash has 64 bits, {block_hash} has more")


class MirrorCounts(msgspec.Struct, frozen=True):
    """Since the mirror was made. `repeated`: keys announced while they were; `unknown`: keys removed while not."""

    batches: int = 0
    blocks: int = 0
    duplicates: int = 0
    gaps: int = 0
    replays: int = 0
    snapshots: int = 0
    restarts: int = 0
    unreadable: int = 0
    repeated: int = 0
    unknown: int = 0


class Mirror:
    """Follows one publisher. `status` says whether to believe it, `reason` why not.

    `convention`: how the publisher announces copies of a key: "per_copy", each; "first_last", the first and the
    last, so that announcing a key again means nothing; "detect": as its `status` says, else a key that is announced
    again is one copy more. `max_blocks`: copies that are kept at most, `max_pending`: batches that wait for missing
    ones, and messages of one answer; beyond a limit the mirror gives up what it has, and so it does when there is no
    end of groups and tiers.
    `can_replay`: whether anybody can be asked for what is missing. `on_batch(seq, payload)` is called for each batch
    in its turn, also for one that cannot be read; not for what a snapshot contains. It must not raise.
    """

    def __init__(
        self,
        name: str = "",
        *,
        convention: Convention = "detect",
        can_replay: bool = True,
        max_blocks: int | None = None,
        max_pending: int = 10_000,
        catalogue: Catalogue | None = None,
        on_batch: Callable[[int, bytes], object] | None = None,
    ) -> None:
        if convention not in ("detect", "first_last", "per_copy"):
            raise ValueError(f'convention must be "detect", "first_last" or "per_copy", not {convention!r}')
        self.name = name
        self.convention: str = convention
        self._stated_convention: str = convention  # `convention` is what has been found out since
        self.can_replay = can_replay
        self.max_blocks = max_blocks
        self.max_pending = max_pending
        self.on_batch = on_batch
        self.catalogue = Catalogue() if catalogue is None else catalogue
        self.holdings = Holdings(self.catalogue)
        self.lock = self.catalogue.lock
        self.status = MirrorStatus.NEVER_FED
        self.reason = "nothing has been heard yet"
        self._cause = self.reason  # without what became of it
        self.publisher: str | None = None
        self.sequence = -1
        self.last_ts: float | None = None
        self.dropped_there = 0
        self.wants_reconnect = False  # what the subscription still holds is a dead publisher's
        self._connected: bool | None = None  # nobody has said yet
        self._exact = True  # the index is the publisher's as of `sequence`
        self._in_doubt = False  # a connection began, and who is at its other end has not been found out
        self._is_muddled = False  # this connection brings two streams, or one that began anew: nobody can say
        self._wanted: Wanted | None = None
        self._pending: dict[int, bytes] = {}
        self._marks = array("q", bytes(8 * REMEMBERED))
        self._first_mark = 0  # the oldest number whose mark is kept
        self._known = -1  # `sequence` at the last heartbeat: the next one is asked later
        self._behind = -1  # the newest number that a heartbeat has told of
        self._newest = -1  # the newest that was received
        self._no_snapshots = False
        self._has_overflowed = False
        self._snapshot_ts: float | None = None  # when a snapshot was taken whose batches may still arrive
        self._counts = dict.fromkeys(MirrorCounts.__struct_fields__, 0)

    # -- what there is to know ---------------------------------------------------------------------------

    @property
    def wanted(self) -> Wanted | None:
        """What should be asked of the replay socket now, or nothing."""
        return self._wanted

    @property
    def counts(self) -> MirrorCounts:
        held = self.holdings
        return MirrorCounts(**self._counts | {"repeated": held.num_repeated, "unknown": held.num_unknown})

    @property
    def lag(self) -> int:
        """How many batches are known to exist that the index does not have yet."""
        return max(0, max(self._newest, self._behind) - self.sequence)

    @property
    def num_blocks(self) -> int:
        """Keys, over all groups and tiers."""
        return self.holdings.num_keys

    @property
    def tiers(self) -> dict[str, int]:
        """Keys in each tier."""
        return self.holdings.tiers()

    def copies(self, block_hash: bytes | int, group: int = 0, medium: str = GPU) -> int:
        """How many copies of a key the worker has as far as is known; believe it only of a live mirror.

        Raises HashFormError for an integer of more than 64 bits.
        """
        check_hash(block_hash)
        with self.lock:
            return self.holdings.num_copies(block_hash, group, medium)

    def __contains__(self, block_hash: bytes | int) -> bool:
        """Whether the key is in group 0 of the GPU, as far as is known."""
        return self.copies(block_hash) > 0

    # -- what comes in -----------------------------------------------------------------------------------

    def connected(self) -> None:
        """The subscription stands, with a publisher that may be another one than before."""
        with self.lock:
            self._connect()

    def disconnected(self, reason: str = "the connection is cut") -> None:
        """The connection was cut: what comes next may be another publisher's."""
        with self.lock:
            self._connected = False
            self._pending.clear()
            self._wanted = None
            if self.status is MirrorStatus.LIVE:
                self._set(MirrorStatus.CATCHING_UP, reason)
            elif self.status is not MirrorStatus.STALE:
                self._set(self.status, reason)

    def gave_up(self, reason: str) -> None:
        """It has been trying for too long, says whoever has a clock."""
        with self.lock:
            if self.status is MirrorStatus.CATCHING_UP or self._pending:
                self._wanted = None
                self._go_on_stale(reason, self._cause)

    def look_again(self) -> None:
        """Ask for what may have come since: the heartbeat of publishers that have no status."""
        with self.lock:
            if self.status is MirrorStatus.LIVE and self._wanted is None and self.can_replay:
                self._want_replay()

    def unanswered(self, reason: str) -> None:
        """A heartbeat was not answered: whether the publisher is still there has to be asked."""
        with self.lock:
            if self.status is MirrorStatus.LIVE:
                self._miss(reason)

    def receive(self, seq: int, payload: bytes) -> None:
        """A batch from the subscription."""
        with self.lock:
            if self._connected is None:
                self._connect()
            if self._connected:  # else it is a left-over of a connection that was cut
                self._receive(seq, payload)

    def heard(self, status: PublisherStatus, known: int = -1, *, is_reading: bool = False) -> None:
        """A heartbeat: what the publisher says of itself. `known`: the mirror's `sequence` when it was asked.

        `is_reading`: there are batches that came and were not handed over yet, so that none has to be missing.
        """
        with self.lock:
            self._heard(status, known, is_reading)

    def too_long(self, reason: str) -> None:
        """The answer to what is wanted has more messages than `max_pending`."""
        with self.lock:
            if self._wanted is not None:
                self._has_overflowed = self._has_overflowed or isinstance(self._wanted, SnapshotWanted)
                self._wanted = None
                self._lose(reason)

    def replayed(self, batches: list[tuple[int, bytes]], status: PublisherStatus | None) -> None:
        """The whole answer to a `ReplayWanted`, and the publisher's status behind it (None: it has no such thing)."""
        with self.lock:
            if isinstance(self._wanted, ReplayWanted):
                self._counts["replays"] += 1
                self._wanted = None
                self._replayed(batches, status)

    def snapshot(self, seq: int, payloads: list[bytes], status: PublisherStatus | None) -> None:
        """The whole answer to a `SnapshotWanted`: no payloads when the publisher gives none."""
        with self.lock:
            if isinstance(self._wanted, SnapshotWanted):
                self._wanted = None
                self._snapshot(seq, payloads, status)

    def leave(self) -> None:
        """Give up what it holds; the mirror is of no use afterwards."""
        with self.lock:
            self._pending.clear()
            self._wanted = None
            self._exact = False
            self.holdings.leave()
            self._set(MirrorStatus.STALE, "the worker has left")

    # -- live batches ------------------------------------------------------------------------------------

    def _connect(self) -> None:
        self._connected = True
        self._in_doubt = True
        self._is_muddled = False
        self.wants_reconnect = False
        self._pending.clear()
        if self.can_replay:
            if self.status is not MirrorStatus.NEVER_FED:
                self._set(MirrorStatus.CATCHING_UP, "connected: what was missed has been asked for")
            self._want_replay()
        elif self.status is not MirrorStatus.NEVER_FED:
            self._go_on_stale("the connection was cut, and nobody can be asked what was missed")

    def _receive(self, seq: int, payload: bytes) -> None:
        if seq <= self.sequence:
            is_old = self._is_old(seq, payload)
            if is_old is None and self.can_replay:
                # One that was waiting while a replay brought it and many more. Numbers that fall are to be explained.
                self._counts["duplicates"] += 1
                if seq <= self._newest and self.status is MirrorStatus.LIVE:
                    self._miss(f"batch {seq} comes again: whether the publisher is the one of before has been asked")
                self._newest = max(self._newest, seq)
                return
            if is_old:
                self._counts["duplicates"] += 1
                self._newest = max(self._newest, seq)
                return
            # In one stream everything after it is the new publisher's too.
            self._restarted("a batch has an old number and a new content")
        if not self.can_replay:
            self._in_doubt = False
        self._newest = max(self._newest, seq)
        if self._wanted is not None or self.status is MirrorStatus.CATCHING_UP:
            self._keep(seq, payload)
        elif (self._exact and seq == self.sequence + 1) or self._starts_anew(seq, payload):
            self._take(seq, payload)
        elif not self._exact:
            self._take_what_is_left(seq, payload)
        else:
            self._counts["gaps"] += 1
            self._keep(seq, payload)
            self._miss(f"batches {self.sequence + 1} to {seq - 1} are missing")

    def _starts_anew(self, seq: int, payload: bytes) -> bool:
        """Where nothing is known for sure, a first batch, or one that empties every tier, is where truth begins."""
        if self._exact or self._is_muddled or (seq != 0 and not _empties_all(payload)):
            return False
        if seq == 0:
            self.holdings.forget()
        self._begin(seq - 1)
        return True

    def _begin(self, sequence: int) -> None:
        """The index is exact as of this number, and no batch up to it is remembered."""
        self.sequence = sequence
        self._first_mark = sequence + 1
        self._exact = True
        self._snapshot_ts = None
        self._has_overflowed = False

    def _take_what_is_left(self, seq: int, payload: bytes) -> None:
        """A stale mirror goes on as well as it can: most of what it says is still right."""
        if seq != self.sequence + 1:
            self._first_mark = seq
        with suppress(BatchError):
            self._apply(seq, payload)

    def _keep(self, seq: int, payload: bytes) -> None:
        """Until what comes before it is there."""
        there = self._pending.get(seq)
        if there is not None and there != payload:
            self._restarted("two batches have one number")
            self._reconnect()
            return
        elif there is not None:
            self._counts["duplicates"] += 1
        if len(self._pending) >= self.max_pending:
            self._pending.clear()
        self._pending[seq] = payload

    def _take(self, seq: int, payload: bytes) -> bool:
        """The next batch, and the status that follows from it. False when the index is not exact any more."""
        try:
            self._apply(seq, payload)
        except BatchError as error:
            self._lose(f"batch {seq} cannot be read ({error})")
            return False
        if not self._exact:
            self._go_on_stale(self._cause)
            return False
        if self.status is not MirrorStatus.CATCHING_UP:
            self._set(MirrorStatus.LIVE, "")
        return True

    def _apply(self, seq: int, payload: bytes) -> None:
        """Raises BatchError."""
        self.sequence = seq
        self._remember(seq, payload)
        try:
            self._change(read_changes(payload))
        except BatchError:
            self._counts["unreadable"] += 1
            raise
        finally:
            if self.on_batch is not None:
                self.on_batch(seq, payload)

    def _change(self, changes: Changes) -> None:
        """What was too much is all gone, and the index is not exact any more."""
        held = self.holdings
        num_repeated = held.num_repeated
        self.last_ts = changes.ts
        self._counts["batches"] += 1
        self._counts["blocks"] += held.apply(changes, self.convention != "first_last")
        if held.num_repeated > num_repeated and self.convention == "detect":
            self.convention = "per_copy"
        if held.is_full or (self.max_blocks is not None and held.num_all_copies > self.max_blocks):
            self._cause = f"there are more than {self.max_blocks} blocks"
            if held.is_full:
                self._cause = f"its events name more than {MOST_SAID} groups, tiers and kinds of groups"
            held.forget()
            self._exact = False
            self._has_overflowed = True

    # -- what is missing ---------------------------------------------------------------------------------

    def _miss(self, reason: str) -> None:
        if self.can_replay:
            self._set(MirrorStatus.CATCHING_UP, reason)
            self._want_replay()
        else:
            self._go_on_stale(f"{reason}, and nobody can be asked for them")

    def _lose(self, reason: str) -> None:
        """What is missing is in no replay."""
        self._exact = False
        if self.can_replay and not self._no_snapshots and not self._has_overflowed:
            self._set(MirrorStatus.CATCHING_UP, reason)
            self._wanted = SnapshotWanted()
        else:
            gives = "the publisher gives no snapshots" if self.can_replay else "nobody can be asked for a snapshot"
            self._go_on_stale(f"{reason}, and {gives}", reason)

    def _go_on_stale(self, reason: str, cause: str | None = None) -> None:
        """What waits is taken in as well as it can be."""
        self._exact = False
        self._wanted = None
        self._set(MirrorStatus.STALE, reason, cause)
        waiting, self._pending = sorted(self._pending.items()), {}
        for seq, payload in waiting:
            self._receive(seq, payload)

    def _want_replay(self) -> None:
        # One batch that is known already comes first: it says whether this is the publisher of before.
        self._wanted = ReplayWanted(max(0, self.sequence) if self._exact else 0)

    def _replayed(self, batches: list[tuple[int, bytes]], status: PublisherStatus | None) -> None:
        if self._has_begun_anew(status, self.sequence):
            self._restarted("it has fewer batches than before")
            self._reconnect()
            return
        if not self._exact and self._is_whole(batches, status):
            self._forget()
        if self._is_another(batches, status):
            self._restarted("it is another one")
            self._reconnect()
            return
        self._adopt(status)
        if self._exact and not self._is_certain(batches, status):
            if not batches and self.sequence > 0:  # nothing behind that number: one that has begun anew?
                self._exact = False
                self._want_replay()
                return
            self._lose("the replay does not show whether the publisher is the one of before")
            return
        for seq, payload in batches:
            if seq > self.sequence and self._pending.setdefault(seq, payload) != payload:
                self._restarted("two batches have one number")
                self._reconnect()
                return
        if not self._exact:
            self._lose("the replay does not go back to the beginning")
            return
        self._catch_up(max(self._behind, batches[-1][0] if batches else -1))

    def _catch_up(self, replayed: int = -1) -> None:
        """Take what waits, and be live if nothing is missing before it; up to `replayed` no more is to be had."""
        for seq in sorted(self._pending):
            if seq <= self.sequence:
                del self._pending[seq]
            elif seq > self.sequence + 1:
                missing = f"batches {self.sequence + 1} to {seq - 1}"
                if self.sequence < replayed:
                    self._lose(f"{missing} are in no replay")
                else:
                    self._miss(f"{missing} are missing")
                return
            elif not self._take(seq, self._pending.pop(seq)):
                return
        if self.sequence < replayed:
            self._lose(f"batches {self.sequence + 1} to {replayed} are in no replay")
            return
        self._in_doubt = False
        self._set(MirrorStatus.LIVE, "")

    def _snapshot(self, seq: int, payloads: list[bytes], status: PublisherStatus | None) -> None:
        if status is not None and self.publisher is not None and status.publisher != self.publisher:
            self._restarted("it is another one")
            self._reconnect()
            return
        try:
            batches = [read_changes(payload) for payload in payloads]
        except BatchError as error:
            self._no_snapshots = True
            self._lose(f"the snapshot cannot be read ({error})")
            return
        if not batches or status is None:
            self._no_snapshots = True
            self._lose(self._cause)
            return
        if seq < self.sequence:
            self._restarted("its snapshot is older than what is known")
            self._reconnect()
            return
        self._counts["snapshots"] += 1
        self.holdings.clear(None)
        self._begin(seq)
        self._adopt(status)
        self._snapshot_ts = batches[-1].ts
        for batch in batches:
            self._change(batch)
            if not self._exact:
                self._go_on_stale(self._cause)
                return
        self._catch_up()

    # -- whose batches these are ---------------------------------------------------------------------------

    def _heard(self, status: PublisherStatus, known: int, is_reading: bool) -> None:
        if self.publisher is not None and status.publisher != self.publisher:
            self._restarted("it is another one")
            self._reconnect()
            return
        if not self._connected or self._wanted is not None:
            return
        if self.publisher is None:
            if self.status is MirrorStatus.LIVE:
                self._miss("whether the publisher is the one of before has been asked")
            return
        if self._has_begun_anew(status, max(self._known, known)):
            self._restarted("it has fewer batches than before")
            self._reconnect()
            return
        self._known = self.sequence
        self._adopt(status)
        told, self._behind = self._behind, status.next_seq - 1
        if self.status is MirrorStatus.LIVE and self.sequence < told and not is_reading:
            # what the heartbeat before told of should have come by now
            self._counts["gaps"] += 1
            self._miss(f"batches {self.sequence + 1} to {told} have not come")
        elif self.status is MirrorStatus.STALE and status.snapshots and not self._has_overflowed:
            self._lose(self._cause)

    def _adopt(self, status: PublisherStatus | None) -> None:
        if status is None:
            return
        self.publisher = status.publisher
        self.dropped_there = status.dropped
        self._no_snapshots = not status.snapshots
        if self.convention == "detect" and status.convention in ("first_last", "per_copy"):
            self.convention = status.convention

    def _has_begun_anew(self, status: PublisherStatus | None, known: int) -> bool:
        """Whether a publisher of the same id has not sent what was `known` before its status was asked."""
        return status is not None and known >= 0 and status.publisher == self.publisher and status.next_seq <= known

    def _is_whole(self, batches: list[tuple[int, bytes]], status: PublisherStatus | None) -> bool:
        """Whether the answer to "from 0 on" is everything that was ever published."""
        if batches:
            return batches[0][0] == 0
        return status is None or status.next_seq == 0

    def _is_another(self, batches: list[tuple[int, bytes]], status: PublisherStatus | None) -> bool:
        """Whether an answer is surely of another publisher than the index."""
        if status is not None and self.publisher is not None and status.publisher != self.publisher:
            return True
        first, payload = batches[0] if batches else (-1, b"")
        return self._has_mark(first) and self._mark_of(first) != hash(payload)

    def _is_certain(self, batches: list[tuple[int, bytes]], status: PublisherStatus | None) -> bool:
        """Whether an answer is surely of the publisher that the index is of."""
        if self.sequence < 0:
            return True  # there is nothing to continue
        if batches and batches[0][0] == self.sequence and self._has_mark(self.sequence):
            return True  # it begins with the batch that is known
        # Else it is by its id; of one that has just connected that is not enough: it may have been given the same.
        return status is not None and self.publisher is not None and not self._in_doubt

    def _is_old(self, seq: int, payload: bytes) -> bool | None:
        """Whether a batch with a number that was there before is that very batch; None: that is not remembered."""
        if self._has_mark(seq):
            return self._mark_of(seq) == hash(payload)
        if self._snapshot_ts is None:
            return None
        try:  # a snapshot contains it if it is older
            return read_changes(payload).ts <= self._snapshot_ts
        except BatchError:
            return None

    def _restarted(self, reason: str) -> None:
        """Everything so far is of a publisher that is no more."""
        self._counts["restarts"] += 1
        self._forget()
        self._pending.clear()
        self.publisher = None
        self.convention = self._stated_convention
        self._known = -1
        self._no_snapshots = False
        self._behind = -1
        self._newest = -1
        reason = f"the publisher has restarted: {reason}"
        if self.can_replay:
            self._set(MirrorStatus.CATCHING_UP, reason)
            self._want_replay()
        else:
            # Or there are two publishers, whose batches would fit each other by chance: the next connection tells.
            self._is_muddled = not self._in_doubt  # with a connection's first batch it is a restart
            self._exact = False
            self._wanted = None
            self._set(MirrorStatus.STALE, reason)

    def _reconnect(self) -> None:
        """What was noticed, the subscription has not told: what is still in it may be of either publisher."""
        self._connected = False
        self._wanted = None
        self.wants_reconnect = True

    def _forget(self) -> None:
        self.holdings.forget()
        self._begin(-1)

    def _remember(self, seq: int, payload: bytes) -> None:
        self._marks[seq % REMEMBERED] = hash(payload)
        self._first_mark = max(self._first_mark, seq - REMEMBERED + 1)

    def _has_mark(self, seq: int) -> bool:
        return seq >= 0 and self._first_mark <= seq <= self.sequence

    def _mark_of(self, seq: int) -> int:
        return self._marks[seq % REMEMBERED]

    def _set(self, status: MirrorStatus, reason: str, cause: str | None = None) -> None:
        self.status = status
        self.reason = reason
        self._cause = reason if cause is None else cause


def _empties_all(payload: bytes) -> bool:
    try:
        return read_changes(payload).clears_all
    except BatchError:
        return False
