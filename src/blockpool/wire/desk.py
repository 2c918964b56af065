"""What a publisher does, but for its sockets and its thread: from the queue to messages, and answers to questions."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from blockpool.pool import AllBlocksCleared, KVCacheEvent
from blockpool.wire.codec import HashForm, KVEventBatch, encode_batch, with_int_hashes
from blockpool.wire.ledger import SLICE, Ledger, Overflow, Told
from blockpool.wire.outbox import Outbox, Waiting
from blockpool.wire.protocol import (
    END,
    SNAPSHOT,
    STATUS,
    PublisherStatus,
    encode_status,
    sequence_bytes,
    snapshot_end,
)

#: Blocks per batch of a snapshot.
SNAPSHOT_BLOCKS = 1024
#: Blocks that are gone through before whoever waits for a snapshot sees a sign of life.
SIGN_BLOCKS = 1 << 17
#: Batches of a replay that are looked up in one go.
PIECE = 256
#: Slices of work in a row for one answer, before batches are sent again.
SLICES = 8
#: Who may wait for answers at a time, with how many questions, and how many of them for snapshots, which are large.
MOST_ASKERS = 256
MOST_QUESTIONS = 16
MOST_SNAPSHOTS = 4
#: Who takes nothing for so long is not answered any more.
PATIENCE_S = 30.0
Frames = tuple[bytes, ...]


def breathe() -> None:
    """Let a step that waits for the interpreter go first: a sleep of nothing would not."""
    time.sleep(0.00002)


class Desk:
    """`outbox` is filled by the step's thread; everything else belongs to the publisher's."""

    def __init__(
        self,
        publisher_id: str,
        *,
        topic: bytes = b"",
        data_parallel_rank: int | None = None,
        hash_form: HashForm = "bytes",
        convention: str | None = None,
        buffer_steps: int = 10_000,
        max_queue_size: int = 100_000,
        snapshots: bool = True,
        clock: Callable[[], float],
    ) -> None:
        self.publisher_id = publisher_id
        self.topic = topic
        self.data_parallel_rank = data_parallel_rank
        self.hash_form = hash_form
        self.convention = convention
        self.clock = clock
        self.counts_copies = convention != "first_last"
        self.outbox = Outbox(max_queue_size, self.counts_copies)
        self.gives_snapshots = snapshots
        self.ledger: Ledger | None = Ledger(self.counts_copies) if snapshots else None
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self.last_settled = -1  # the last number whose batch was sent or given up
        self.num_batches = 0
        self.num_events = 0
        self.num_blocks = 0
        self.num_failed = 0
        self.last_error: str | None = None

    @property
    def num_dropped(self) -> int:
        """Numbers that were spent on batches that nobody gets."""
        return self.outbox.num_dropped + self.num_failed

    def put(self, events: list[KVCacheEvent]) -> int:
        """The step's thread hands over a batch; its number."""
        return self.outbox.put(self.clock(), events)

    def send_one(self, send: Callable[[Frames], object]) -> bool:
        """Bring the next batch to its readers. False when none is waiting."""
        item = self.outbox.get()
        if item is None:
            return False
        if isinstance(item, Overflow):
            self._settle_dropped(item)
        else:
            self._send(item, send)
        return True

    def _send(self, item: Waiting, send: Callable[[Frames], object]) -> None:
        events: list[KVCacheEvent] | None = None
        try:
            events = self._in_form(item.events)
            num_blocks = sum([len(getattr(event, "block_hashes", ())) for event in events])
            payload = encode_batch(KVEventBatch(item.ts, events, self.data_parallel_rank))
            send((self.topic, sequence_bytes(item.seq), payload))
        except Exception as error:  # its number is spent: readers see a gap, and a snapshot heals it
            self.num_failed += 1
            self.last_error = f"batch {item.seq}: {error}"
        else:
            self.buffer.append((item.seq, payload))
            self.num_batches += 1
            self.num_events += len(events)
            self.num_blocks += num_blocks
        self._settle(item.seq, events)

    def _in_form(self, events: list[KVCacheEvent]) -> list[KVCacheEvent]:
        return events if self.hash_form == "bytes" else [with_int_hashes(event) for event in events]

    def _settle_dropped(self, item: Overflow) -> None:
        events: list[KVCacheEvent] | None = None
        try:
            events = self._in_form(list(item.settle()))
        except Exception as error:
            self.last_error = f"batch {item.last_seq}: {error}"
        self._settle(item.last_seq, events)

    def _settle(self, seq: int, events: list[KVCacheEvent] | None) -> None:
        """`events`: None when they could not be brought into the form that is sent."""
        if events is None:
            self.ledger = None
        elif self.gives_snapshots:
            self._follow(seq, events)
        self.last_settled = seq

    def _follow(self, seq: int, events: list[KVCacheEvent]) -> None:
        """What cannot be read again cannot be given: there are no snapshots until every tier is cleared."""
        for event in events:
            if self.ledger is None and isinstance(event, AllBlocksCleared) and event.medium is None:
                self.ledger = Ledger(self.counts_copies)
            if self.ledger is not None:
                try:
                    self.ledger.apply(event)
                except Exception as error:
                    self.ledger = None
                    self.last_error = f"batch {seq}: {error}; there are no snapshots any more"

    # -- the replay socket -----------------------------------------------------------------------------

    def answers(self, question: bytes) -> Iterator[Frames | None]:
        """The messages that answer a question, without the identity of who has asked.

        Made as they are taken: a replay of what the buffer still has when its turn comes, up to what was there when
        it began; a snapshot of the moment at which it began. None: there is more, after a little work.
        """
        if question == STATUS:
            yield b"", self.topic, sequence_bytes(self.last_settled + 1), encode_status(self.status())
            return
        if question == SNAPSHOT:
            count = 0
            for frames in self._snapshot():
                count += frames is not None
                yield frames
            yield snapshot_end(count) if count else END
            return
        if len(question) == 8:
            first, last = int.from_bytes(question, "big"), self.last_settled
            while piece := [one for one in self.buffer if first <= one[0] <= last][:PIECE]:
                for seq, payload in piece:
                    yield b"", self.topic, sequence_bytes(seq), payload
                first = piece[-1][0] + 1
        yield END

    def status(self) -> PublisherStatus:
        return PublisherStatus(
            publisher=self.publisher_id,
            next_seq=self.last_settled + 1,
            oldest_seq=self.buffer[0][0] if self.buffer else None,
            dropped=self.num_dropped,
            convention=self.convention,
            snapshots=self.ledger is not None,
        )

    def _snapshot(self) -> Iterator[Frames | None]:
        """Batches that together are the index, each under the number of the last batch that it contains.

        While it is gathered, batches without events say that it comes.
        """
        if self.ledger is None:
            return
        # Batches after this time are not in it, however long it takes to write.
        view, number, ts = self.ledger.view(), sequence_bytes(self.last_settled), self.clock()
        events: list[Told] = []
        num_blocks = num_slices = 0
        for event in view.events():
            if event is None:
                num_slices += 1
                if num_slices * SLICE % SIGN_BLOCKS == 0:
                    yield b"", self.topic, number, self._encoded(ts, [])
                yield None
                continue
            events.append(event)
            num_blocks += len(event.block_hashes)
            if num_blocks >= SNAPSHOT_BLOCKS:
                yield b"", self.topic, number, self._encoded(ts, events)
                events, num_blocks = [], 0
        yield b"", self.topic, number, self._encoded(ts, events)

    def _encoded(self, ts: float, events: list[Told]) -> bytes:
        return encode_batch(KVEventBatch(ts, events, self.data_parallel_rank))  # type: ignore[arg-type]


class _Asker:
    """Who has asked, and what is owed."""

    def __init__(self, now: float) -> None:
        self.questions: deque[bytes] = deque()
        self.answer: Iterator[Frames | None] = iter(())
        self.next: Frames | None = None
        self.is_busy = False  # its answer has not ended
        self.is_snapshot = False
        self.took_at = now


class Answers:
    """Answers on their way, each as far as its asker takes it: one that does not read costs next to nothing.

    An answer that raises is refused: it ends there, and is counted. `is_working`: whether somebody waits for what has
    to be made first, and not for room.
    """

    def __init__(
        self, answer: Callable[[bytes], Iterable[Frames | None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._answer = answer
        self._clock = clock
        self._askers: dict[bytes, _Asker] = {}
        self.is_working = False
        self.num_refused = 0
        self.last_error: str | None = None

    def __len__(self) -> int:
        """How many wait for something."""
        return len(self._askers)

    def ask(self, frames: list[bytes]) -> None:
        """A message of the ROUTER: identity, empty, question. What is none, or too much, is not answered."""
        if len(frames) != 3 or frames[1] != b"":
            return
        asker = self._askers.get(frames[0])
        if asker is None:
            if len(self._askers) >= MOST_ASKERS:
                return
            asker = self._askers[frames[0]] = _Asker(self._clock())
        if len(asker.questions) < MOST_QUESTIONS:
            asker.questions.append(frames[2])

    def go_on(self, send: Callable[[Frames], bool]) -> None:
        """A few messages to everybody who is owed some. `send` says whether there was room; OSError: it is gone."""
        now = self._clock()
        self.is_working = False
        for who, asker in list(self._askers.items()):
            try:
                is_owed = self._send_some(who, asker, send, now)
            except OSError:
                is_owed = False
            if not is_owed or now - asker.took_at > PATIENCE_S:
                del self._askers[who]

    def _send_some(self, who: bytes, asker: _Asker, send: Callable[[Frames], bool], now: float) -> bool:
        """Whether there is more."""
        slices = 0
        for _ in range(PIECE):
            if asker.next is None:
                asker.took_at = now
                if not asker.is_busy and not self._begin(asker):
                    return bool(asker.questions)
                if not self._take_next(asker):
                    breathe()
                    slices += 1
                    if slices == SLICES:
                        self.is_working = True
                        return True
                    continue
            if asker.next is not None:
                if not send((who, *asker.next)):
                    return True
                asker.took_at = now
                asker.next = None
        self.is_working = True
        return True

    def _begin(self, asker: _Asker) -> bool:
        """The answer to its next question. False when it has none, or has to wait."""
        asker.is_snapshot = False
        if not asker.questions:
            return False
        if asker.questions[0] == SNAPSHOT:
            if sum(one.is_snapshot for one in self._askers.values()) >= MOST_SNAPSHOTS:
                return False
            asker.is_snapshot = True
        asker.is_busy = True
        question = asker.questions.popleft()
        try:
            asker.answer = iter(self._answer(question))
        except Exception as error:
            self._refuse(asker, error)
        return True

    def _take_next(self, asker: _Asker) -> bool:
        """Its next message, or the end of its answer. False when it is not made yet."""
        try:
            asker.next = next(asker.answer)
        except StopIteration:
            asker.is_busy = asker.is_snapshot = False
            return True
        except Exception as error:
            self._refuse(asker, error)
            return True
        return asker.next is not None

    def _refuse(self, asker: _Asker, error: Exception) -> None:
        self.num_refused += 1
        self.last_error = f"an answer: {error}"
        asker.answer = iter((END,))
