"""Feeds a mirror from sockets: the subscription, and the replay socket that it is asked what is missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from blockpool.wire.endpoints import scheme_of
from blockpool.wire.errors import EndpointError, WireError
from blockpool.wire.extra import import_zmq
from blockpool.wire.mirror import Mirror, MirrorStatus, ReplayWanted, SnapshotWanted, Wanted
from blockpool.wire.protocol import (
    NO_MORE,
    SNAPSHOT,
    STATUS,
    PublisherStatus,
    decode_status,
    sequence_bytes,
    sequence_number,
)

#: Messages that are taken in before the clock and the other socket are looked at, and for how long at most.
READ_IN_A_ROW = 256
READ_S = 0.05
#: A connection whose other end says nothing for so long is tried by TCP itself, so often, so many times.
KEEPALIVE_IDLE_S = 10
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_TRIES = 3
#: Messages of an answer that may wait in the socket, and at least these: vLLM's drops what finds no room.
LEAST_ANSWER_HWM = 1000

#: How long a port that was just given up may stay taken.
REBIND_S = 2.0


class _Question:
    """What the replay socket was asked, and what it has answered so far. `wanted` is None for a heartbeat.

    A status is asked before what is wanted and after it: with the same id in both, nobody else has answered between.
    """

    def __init__(self, wanted: Wanted | None, known: int, asked_at: float) -> None:
        self.wanted = wanted
        self.known = known
        self.heard_at = asked_at
        self.before: PublisherStatus | None = None
        self.answers: list[tuple[int, bytes]] = []
        self.num_messages = -1  # of a snapshot, as its end says
        self.parts_left = 1 if wanted is None else 3


class Subscriber:
    """Drives one mirror. Nothing happens but in `poll`, on the thread that calls it.

    `endpoint`: the publisher's PUB socket (one with `*` is bound here, for publishers that connect);
    `replay_endpoint`: its ROUTER, without which a gap cannot be closed. `heartbeat_s`: how often its status is asked;
    `reply_timeout_s`: how long an answer may pause; `give_up_s`: how long a mirror may be catching up before it is
    stale. `on_fault(rule, seq, payload)`: told of what the mirror is not, a message that came twice ("duplicate") and
    one that is none ("frames", without a number). `clock`: seconds that only rise.

    Raises MissingExtraError without pyzmq, EndpointError when an endpoint cannot be opened, and for inproc:// without
    a replay endpoint: there nothing says when a publisher goes.
    """

    def __init__(
        self,
        mirror: Mirror,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        heartbeat_s: float = 5.0,
        reply_timeout_s: float = 5.0,
        give_up_s: float = 60.0,
        hwm: int = 100_000,
        on_fault: Callable[[str, int, bytes], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._zmq = import_zmq("Subscriber")
        if scheme_of(endpoint) == "inproc" and replay_endpoint is None:
            raise EndpointError(f"{endpoint!r} needs a replay endpoint: nothing else says when its publisher goes")
        self.mirror = mirror
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        self._is_bound = "*" in endpoint
        self.heartbeat_s = heartbeat_s
        self.reply_timeout_s = reply_timeout_s
        self.give_up_s = give_up_s
        self.has_status: bool | None = None  # not known yet
        self._clock = clock
        self._question: _Question | None = None
        self._next_heartbeat = clock() + heartbeat_s
        self._well_until = clock()
        self._dealer: Any = None
        self._monitor: Any = None
        self._on_fault = on_fault
        self._num_peers = 0
        self._heard_last = -1  # the number of the newest batch of this subscription
        self._has_unread = False  # more has come than was taken in
        mirror.can_replay = replay_endpoint is not None
        inside = any(one is not None and scheme_of(one) == "inproc" for one in (endpoint, replay_endpoint))
        self._context = self._zmq.Context.instance() if inside else self._zmq.Context()
        self._is_context_ours = not inside
        self._topic = topic.encode()
        self._hwm = hwm
        self._sub: Any = None
        try:
            if replay_endpoint is not None:
                self._open_dealer()
            self._open_subscription()
        except (self._zmq.ZMQError, EndpointError) as error:
            self.close()
            raise EndpointError(f"cannot open {endpoint!r} or {replay_endpoint!r}: {error}") from None

    # -- one turn ----------------------------------------------------------------------------------------

    def poll(self, timeout_s: float = 0.0) -> int:
        """Take in what is there, or comes within `timeout_s`; how many batches of the subscription it was.

        Raises WireError after `close()`, EndpointError when a port that was bound has been taken by somebody else.
        """
        if self._context is None:
            raise WireError("this subscriber is closed")
        self._wait(timeout_s)
        self._watch_connection()
        received = self._read_subscription()
        self._read_answers()
        self._keep_time()
        self._ask()
        return received

    def close(self) -> None:
        """Close the sockets; the mirror keeps what it has, and is not live any more."""
        if self._context is None:
            return
        self._close_subscription()
        if self._dealer is not None:
            self._dealer.close(0)
            self._dealer = None
        if self._is_context_ours:
            self._context.term()
        self._context = None
        self.mirror.disconnected()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def sockets(self) -> list[Any]:
        """What to wait for, beside `poll`'s own waiting."""
        return [one for one in (self._sub, self._monitor, self._dealer) if one is not None]

    def _wait(self, timeout_s: float) -> None:
        if timeout_s <= 0:
            return
        poller = self._zmq.Poller()
        for one in self.sockets:
            poller.register(one, self._zmq.POLLIN)
        if self.replay_endpoint is not None:
            timeout_s = min(timeout_s, max(0.001, self._next_heartbeat - self._clock()))
        poller.poll(int(1000 * timeout_s))

    # -- the subscription --------------------------------------------------------------------------------

    def _open_subscription(self) -> None:
        """A socket for one connection: what was not read when it was cut is lost with it, and never taken for what
        comes over the next one.
        """
        zmq = self._zmq
        self._close_subscription()
        self._num_peers = 0
        self._heard_last = -1
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.LINGER, 0)
        self._sub.setsockopt(zmq.RCVHWM, self._hwm)
        # No ZMQ_HEARTBEAT_IVL: where it gives up a connection whose input stands still at RCVHWM, libzmq (4.3.5; its
        # issues 3937 and 4767) aborts the process. TCP looks after the connection, `status` after the publisher.
        self._keep_alive(self._sub)
        self._sub.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._sub.setsockopt(zmq.SUBSCRIBE, self._topic)
        if "::" in self.endpoint:
            self._sub.setsockopt(zmq.IPV6, 1)
        if scheme_of(self.endpoint) != "inproc":
            self._monitor = self._sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        if self._is_bound:
            self._bind()
        else:
            self._sub.connect(self.endpoint)
        if self._monitor is None:
            self._connected()

    def _keep_alive(self, made: Any) -> None:
        made.setsockopt(self._zmq.TCP_KEEPALIVE, 1)
        made.setsockopt(self._zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
        made.setsockopt(self._zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S)
        made.setsockopt(self._zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_TRIES)

    def _bind(self) -> None:
        """Where the last socket was, whatever port a wildcard gave it; it may be a moment until that is free."""
        end = time.monotonic() + REBIND_S
        while True:
            try:
                self._sub.bind(self.endpoint)
            except self._zmq.ZMQError as error:
                if error.errno != self._zmq.EADDRINUSE or "*" in self.endpoint or time.monotonic() > end:
                    raise EndpointError(f"{self.endpoint!r}: {error}") from None
                time.sleep(0.001)
            else:
                self.endpoint = self._sub.LAST_ENDPOINT.decode()
                return

    def _close_subscription(self) -> None:
        if self._monitor is not None:
            self._sub.disable_monitor()
            self._monitor.close(0)
            self._monitor = None
        if self._sub is not None:
            self._sub.close(0)
            self._sub = None

    def _connected(self) -> None:
        self.mirror.connected()
        if self.replay_endpoint is not None:
            self._open_dealer()  # whoever answers now is whoever publishes now

    def _watch_connection(self) -> bool:
        """Whether the socket is the one of before."""
        while self._monitor is not None:
            try:
                frames = self._monitor.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                break
            number = int.from_bytes(frames[0][:2], "little")
            if number == self._zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._num_peers += 1
                if self._num_peers == 1:
                    self._connected()
                else:  # of which one may be gone soon; their batches may fit each other by chance
                    self.mirror.disconnected(f"{self._num_peers} publishers are connected")
            elif number == self._zmq.EVENT_DISCONNECTED:
                self.mirror.disconnected()
                self._open_subscription()
                return False
        if self.mirror.wants_reconnect:
            self.mirror.disconnected()
            self._open_subscription()
            return False
        return True

    def _read_subscription(self) -> int:
        end = time.monotonic() + READ_S
        self._has_unread = True
        for received in range(READ_IN_A_ROW):
            if time.monotonic() > end:
                return received
            try:
                frames = self._sub.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                self._has_unread = False
                return received
            # What cut the connection was noticed before anything came over the next one.
            if not self._watch_connection():
                return received
            if len(frames) != 3 or len(frames[1]) != 8 or frames[1] == NO_MORE:
                self._blame("frames", -1, b"".join(frames))
                continue
            self._receive(sequence_number(frames[1]), frames[2])
        return READ_IN_A_ROW

    def _receive(self, seq: int, payload: bytes) -> None:
        num_duplicates = self.mirror.counts.duplicates if seq <= self._heard_last else 0
        self.mirror.receive(seq, payload)
        if seq <= self._heard_last and self.mirror.counts.duplicates > num_duplicates:
            self._blame("duplicate", seq, payload)
        self._heard_last = max(self._heard_last, seq)

    def _blame(self, rule: str, seq: int, payload: bytes) -> None:
        if self._on_fault is not None:
            self._on_fault(rule, seq, payload)

    # -- the replay socket -------------------------------------------------------------------------------

    def _open_dealer(self) -> None:
        """A socket for what is asked from now on: answers to what was asked before are lost with theirs."""
        if self._dealer is not None:
            self._dealer.close(0)
        self._question = None
        self._dealer = self._context.socket(self._zmq.DEALER)
        self._dealer.setsockopt(self._zmq.LINGER, 0)
        self._dealer.setsockopt(self._zmq.RCVHWM, max(LEAST_ANSWER_HWM, self.mirror.max_pending))
        self._keep_alive(self._dealer)
        self._dealer.setsockopt(self._zmq.RECONNECT_IVL_MAX, 1000)
        self._dealer.connect(self.replay_endpoint)

    def _ask(self) -> None:
        if self._dealer is None or self._question is not None:
            return
        is_due = self._clock() >= self._next_heartbeat
        if is_due and self.has_status is False:
            self.mirror.look_again()
        wanted = self.mirror.wanted
        if wanted is None and (not is_due or self.has_status is False):
            return
        self._next_heartbeat = self._clock() + self.heartbeat_s
        self._question = _Question(wanted, self.mirror.sequence, self._clock())
        questions = [STATUS]
        if isinstance(wanted, ReplayWanted):
            questions += [sequence_bytes(wanted.first), STATUS]
        elif isinstance(wanted, SnapshotWanted):
            questions += [SNAPSHOT, STATUS]
        try:
            for one in questions:
                self._dealer.send_multipart((b"", one), self._zmq.NOBLOCK)
        except self._zmq.Again:  # inside the process a socket whose other end has closed takes nothing any more
            self.mirror.unanswered("the publisher cannot be asked")
            self._open_dealer()

    def _read_answers(self) -> None:
        end = time.monotonic() + READ_S
        for _ in range(READ_IN_A_ROW):
            if self._dealer is None or self._question is None or time.monotonic() > end:
                return
            try:
                frames = self._dealer.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return
            question = self._question
            question.heard_at = self._clock()
            if len(frames) < 3 or len(frames[-2]) != 8:
                continue
            payload = frames[-1]
            if question.parts_left == 1:
                self._question = None
                status = decode_status(payload)
                self.has_status = status is not None
                self._give(question, status)
            elif question.parts_left == 3:
                question.parts_left = 2
                question.before = decode_status(payload)
            elif payload == b"" and frames[-2] == NO_MORE:
                question.parts_left = 1
                question.num_messages = _count_in(frames)
            elif len(question.answers) >= self.mirror.max_pending:
                self.mirror.too_long(f"the answer has more than {self.mirror.max_pending} messages")
                self._open_dealer()
            else:
                question.answers.append((sequence_number(frames[-2]), payload))

    def _give(self, question: _Question, status: PublisherStatus | None) -> None:
        answers, before = question.answers, question.before
        if question.wanted is None:
            pass
        elif (before and before.publisher) != (status and status.publisher):
            pass  # two have answered: the mirror still wants it, and it is asked again
        elif isinstance(question.wanted, ReplayWanted):
            self.mirror.replayed(answers, before)
        elif answers and len(answers) != question.num_messages:
            pass  # only a part has come
        else:
            self.mirror.snapshot(answers[-1][0] if answers else -1, [payload for _, payload in answers], before)
        if status is not None:
            self.mirror.heard(status, question.known, is_reading=self._has_unread)

    def _keep_time(self) -> None:
        now = self._clock()
        if self.mirror.status is MirrorStatus.LIVE:
            self._well_until = now
        elif now - self._well_until > self.give_up_s:
            self._well_until = now
            self.mirror.gave_up(f"not caught up within {self.give_up_s:g} s ({self.mirror.reason})")
        question = self._question
        if question is not None and now - question.heard_at > self.reply_timeout_s:
            self.mirror.unanswered(f"the publisher has not answered for {self.reply_timeout_s:g} s")
            self._open_dealer()


def _count_in(end: list[bytes]) -> int:
    """How many messages there were, as the end of a snapshot says; -1 where it does not."""
    return sequence_number(end[-3]) if len(end[-3]) == 8 else -1


def poll_all(subscribers: Iterable[Subscriber], timeout_s: float = 0.0) -> int:
    """One turn of each, after waiting for any; how many batches came."""
    every = list(subscribers)
    if timeout_s > 0 and every:
        zmq = import_zmq("poll_all")
        poller = zmq.Poller()
        for one in every:
            for opened in one.sockets:
                poller.register(opened, zmq.POLLIN)
        poller.poll(int(1000 * timeout_s))
    return sum(one.poll() for one in every)
