"""The publisher of one pool's events: vLLM 0.33's sockets and bytes, from a thread of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any, Literal

import msgspec

from blockpool.pool import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from blockpool.wire.codec import HashForm
from blockpool.wire.desk import Answers, Desk, Frames
from blockpool.wire.endpoints import check_rank, endpoint_of_rank, is_bound
from blockpool.wire.errors import BatchError, EndpointError, PublisherClosedError
from blockpool.wire.extra import import_zmq

#: How many batches are sent before the replay socket is looked at.
SENT_IN_A_ROW = 64
IDLE_MS = 1000
#: Messages of an answer that wait in a socket for one reader; the others are not made yet.
ANSWER_HWM = 64
#: When somebody who is owed an answer has no room for it.
LOOK_AGAIN_MS = 5
#: Turns of the thread in a row that may fail before it gives up.
MOST_FAILURES = 100


class PublisherCounts(msgspec.Struct, frozen=True):
    """Since the publisher was made. `failed`: batches that could not be written or sent; they count as dropped too.

    `waiting`: batches in the queue now. `refused`: questions whose answers could not be made.
    """

    batches: int = 0
    events: int = 0
    blocks: int = 0
    dropped: int = 0
    failed: int = 0
    waiting: int = 0
    refused: int = 0


class Publisher:
    """Sends batches of events; `publish` never waits. One thread at a time may publish.

    `endpoint`: of the PUB socket; `replay_endpoint`: of a ROUTER that repeats the last `buffer_steps` batches, says
    how the publisher is and gives snapshots; both are those of rank 0, of which each rank has its own.
    `data_parallel_rank`: stamped on each batch, None leaves it out. `hash_form`: whole digests, or "int", their
    64-bit form, as vLLM by default. `convention`: how the pool announces copies, for readers who ask.
    `max_queue_size`: batches that may wait to be sent; `hwm`: messages that wait for one slow reader. `snapshots`:
    whether to keep what a snapshot needs (some hundred bytes per announced block, on the publisher's thread; while
    one is given, as much again for each reader at most).
    `publisher_id`: how its id begins; how it goes on is new each time, so that readers notice a restart.

    Raises MissingExtraError without pyzmq, EndpointError when an endpoint cannot be opened.
    """

    def __init__(
        self,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        data_parallel_rank: int | None = None,
        hash_form: HashForm = "bytes",
        convention: Literal["first_last", "per_copy"] | None = None,
        buffer_steps: int = 10_000,
        max_queue_size: int = 100_000,
        hwm: int = 100_000,
        snapshots: bool = True,
        publisher_id: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._zmq = import_zmq("Publisher")
        if hash_form not in ("bytes", "int"):
            raise ValueError(f'hash_form must be "bytes" or "int", not {hash_form!r}')
        if buffer_steps < 1 or max_queue_size < 1:
            raise ValueError(f"buffer_steps {buffer_steps} and max_queue_size {max_queue_size} must be at least 1")
        check_rank(data_parallel_rank)
        life = os.urandom(16).hex()
        self.publisher_id = f"{publisher_id}-{life}" if publisher_id else life
        self._desk = Desk(
            self.publisher_id,
            topic=topic.encode(),
            data_parallel_rank=data_parallel_rank,
            hash_form=hash_form,
            convention=convention,
            buffer_steps=buffer_steps,
            max_queue_size=max_queue_size,
            snapshots=snapshots,
            clock=clock,
        )
        self._answers = Answers(lambda question: self._desk.answers(question))
        self._closing = False
        self._died_of: str | None = None
        self._deadline = 0.0
        self._idle = False
        # A name inside the process can be reached through the process's own context alone.
        inside = any(one is not None and one.startswith("inproc://") for one in (endpoint, replay_endpoint))
        self._context = self._zmq.Context.instance() if inside else self._zmq.Context()
        self._is_context_ours = not inside
        self._pub: Any = None
        self._router: Any = None
        self.replay_endpoint: str | None = None
        rank = data_parallel_rank or 0
        try:
            self._pub, self.endpoint = self._open("PUB", endpoint_of_rank(endpoint, rank), hwm)
            if replay_endpoint is not None:
                own = endpoint_of_rank(replay_endpoint, rank)
                self._router, self.replay_endpoint = self._open("ROUTER", own, ANSWER_HWM)
        except BaseException:
            self._close_sockets(0)
            raise
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._thread = Thread(target=self._run, name="blockpool-publisher", daemon=True)
        self._thread.start()

    # -- the step's thread -----------------------------------------------------------------------------

    def publish(self, events: Sequence[KVCacheEvent]) -> int | None:
        """Hand over the events of a step, and do not change them any more. Their sequence number; None for none.

        Never waits: when the queue is full the batch is dropped and counted, and readers see the gap.
        Raises PublisherClosedError after `close()`, BatchError for what is no event.
        """
        if self._closing:
            raise PublisherClosedError("this publisher is closed")
        if not events:
            return None
        for event in events:
            if not isinstance(event, BlockStored | BlockRemoved | AllBlocksCleared):
                raise BatchError(f"not an event: {event!r}")
        seq = self._desk.put(events if isinstance(events, list) else list(events))
        if self._idle:
            self._ring()
        return seq

    @property
    def next_seq(self) -> int:
        """The number of the next batch."""
        return self._desk.outbox.next_seq

    @property
    def last_error(self) -> str | None:
        """Why a batch could not be written, sent or followed, or a question not answered; what ended the thread."""
        return self._died_of or self._desk.last_error or self._answers.last_error

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs: False after `close()`, in a forked child, and when it has given up.

        Nothing is sent and nobody answered then, though `publish` goes on as if its queue were full.
        """
        return self._thread.is_alive()

    @property
    def counts(self) -> PublisherCounts:
        desk = self._desk
        return PublisherCounts(
            desk.num_batches,
            desk.num_events,
            desk.num_blocks,
            desk.num_dropped,
            desk.num_failed,
            desk.outbox.num_batches,
            self._answers.num_refused,
        )

    def close(self, timeout_s: float = 1.0) -> None:
        """Send what is waiting, for `timeout_s` at most, and close the sockets. A second call does nothing."""
        if self._closing:
            return
        self._deadline = time.monotonic() + timeout_s
        self._closing = True
        self._ring()
        self._thread.join(timeout_s + 1.0)
        self._bell.close()
        self._ringer.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ring(self) -> None:
        self._idle = False
        try:
            self._ringer.send(b"!")
        except OSError:  # it has been rung often enough, or is gone
            return

    # -- the publisher's thread ------------------------------------------------------------------------

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._bell, self._zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, self._zmq.POLLIN)
        outbox = self._desk.outbox
        num_failures = 0
        try:
            while not (self._closing and (not len(outbox) or time.monotonic() > self._deadline)):
                try:
                    self._turn(poller)
                    num_failures = 0
                except Exception as error:  # one turn's trouble is not the next one's, unless it never ends
                    num_failures += 1
                    self._desk.last_error = f"{type(error).__name__}: {error}"
                    if num_failures == MOST_FAILURES:
                        self._died_of = f"the thread gave up: {self._desk.last_error}"
                        return
        finally:
            left = max(0.0, self._deadline - time.monotonic()) if self._closing else 0.0
            self._close_sockets(int(1000 * left))

    def _turn(self, poller: Any) -> None:
        answers, outbox = self._answers, self._desk.outbox
        busy = self._send_some() or answers.is_working
        if not busy:
            # Said before the queue is looked at once more: who puts something in later rings.
            self._idle = True
            busy = len(outbox) > 0 or self._closing
        ready = dict(poller.poll(0 if busy else LOOK_AGAIN_MS if len(answers) else IDLE_MS))
        self._idle = False
        if self._bell.fileno() in ready:
            self._hush()
        if self._router in ready:
            answers.ask(self._router.recv_multipart())
        if len(answers):
            answers.go_on(self._send_answer)

    def _hush(self) -> None:
        try:
            self._bell.recv(4096)
        except OSError:
            return

    def _send_some(self) -> bool:
        """Whether anything was waiting."""
        for sent in range(SENT_IN_A_ROW):
            if not self._desk.send_one(self._send):
                return sent > 0
        return True

    def _send(self, frames: Frames) -> None:
        self._pub.send_multipart(frames, flags=self._zmq.NOBLOCK)

    def _send_answer(self, frames: Frames) -> bool:
        return send_answer(self._zmq, self._router, frames)

    # -- sockets ---------------------------------------------------------------------------------------

    def _open(self, kind: str, endpoint: str, hwm: int) -> tuple[Any, str]:
        """The socket, and where it really is: a wildcard is given a port."""
        made = self._context.socket(getattr(self._zmq, kind))
        made.setsockopt(self._zmq.SNDHWM, hwm)
        made.setsockopt(self._zmq.LINGER, 0)
        if kind == "ROUTER":
            made.setsockopt(self._zmq.ROUTER_MANDATORY, 1)
        if "::" in endpoint:
            made.setsockopt(self._zmq.IPV6, 1)
        try:
            if is_bound(endpoint) or kind == "ROUTER":  # who is asked is always at home
                made.bind(endpoint)
            else:
                made.connect(endpoint)
        except self._zmq.ZMQError as error:
            made.close(0)
            raise EndpointError(f"cannot open {endpoint!r}: {error}") from None
        return made, made.LAST_ENDPOINT.decode() or endpoint

    def _close_sockets(self, linger_ms: int) -> None:
        # The replay socket first: whoever reaches a new publisher must not be answered by this one.
        for one in (self._router, self._pub):
            if one is not None:
                self._give_up_name(one)
                one.close(linger_ms)
        if self._is_context_ours:
            self._context.term()

    def _give_up_name(self, one: Any) -> None:
        """Inside the process a closed socket is taken apart later, on another thread: its name is free at once."""
        endpoint = one.LAST_ENDPOINT.decode()
        if endpoint.startswith("inproc://"):
            with contextlib.suppress(self._zmq.ZMQError):
                one.unbind(endpoint)


def send_answer(zmq: Any, router: Any, frames: Frames) -> bool:
    """Whether the asker has room. Raises ConnectionError when it is gone."""
    try:
        router.send_multipart(frames, flags=zmq.NOBLOCK)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        raise ConnectionError(f"{error}") from None
    return True
