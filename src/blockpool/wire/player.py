"""Sends a recording over sockets again, byte for byte, as if its publisher were there."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from blockpool.wire.codec import KVEventBatch
from blockpool.wire.desk import Answers, Frames
from blockpool.wire.endpoints import is_bound, scheme_of
from blockpool.wire.errors import EndpointError, RecordingError
from blockpool.wire.extra import import_zmq
from blockpool.wire.protocol import END, sequence_bytes
from blockpool.wire.publisher import ANSWER_HWM, LOOK_AGAIN_MS, send_answer
from blockpool.wire.recording import Recorded

#: Longer pauses are a mistake in the recording.
LONGEST_PAUSE_S = 366 * 86_400.0
#: One look at the replay socket, whose timeout is a 32-bit number of milliseconds.
LONGEST_LOOK_S = 3600.0


class Player:
    """A PUB socket, and a ROUTER that repeats what has been sent; the numbers are the recorded ones.

    Raises MissingExtraError without pyzmq, EndpointError when an endpoint cannot be opened.
    """

    def __init__(self, endpoint: str, replay_endpoint: str | None = None, topic: str = "") -> None:
        self._zmq = import_zmq("Player")
        for one in (endpoint, replay_endpoint):
            if one is not None:
                scheme_of(one)
        self._topic = topic.encode()
        self._sent: list[tuple[int, bytes]] = []
        self._answers = Answers(self._answer)
        self._context = self._zmq.Context()
        self._pub = self._context.socket(self._zmq.PUB)
        self._router: Any = None
        self._pub.setsockopt(self._zmq.SNDHWM, 0)
        try:
            (self._pub.bind if is_bound(endpoint) else self._pub.connect)(endpoint)
            self.endpoint = self._pub.LAST_ENDPOINT.decode()
            if replay_endpoint is not None:
                self._router = self._context.socket(self._zmq.ROUTER)
                self._router.setsockopt(self._zmq.SNDHWM, ANSWER_HWM)
                self._router.setsockopt(self._zmq.ROUTER_MANDATORY, 1)
                self._router.bind(replay_endpoint)
                self.replay_endpoint = self._router.LAST_ENDPOINT.decode()
        except self._zmq.ZMQError as error:
            self.close()
            raise EndpointError(f"cannot open {endpoint!r} or {replay_endpoint!r}: {error}") from None

    def play(
        self, batches: Iterable[Recorded], speed: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> int:
        """Send them all, `speed` times as fast as they were recorded, 0 for at once. How many.

        Raises RecordingError for a pause of more than a year.
        """
        first: float | None = None
        start = due = clock()
        count = 0
        for one in batches:
            if speed > 0 and isinstance(one.batch, KVEventBatch) and math.isfinite(one.batch.ts):
                first = one.batch.ts if first is None else first
                due = start + (one.batch.ts - first) / speed
            pause = max(0.0, due - clock())
            if pause > LONGEST_PAUSE_S:
                raise RecordingError(f"{one.place}: ts: {pause:.3g} s to wait; speed 0 does not wait")
            self.serve(pause)
            self._pub.send_multipart((self._topic, sequence_bytes(one.seq), one.payload), flags=self._zmq.NOBLOCK)
            self._sent.append((one.seq, one.payload))
            count += 1
        return count

    def serve(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Answer who asks for a replay, for so long."""
        end = clock() + seconds
        while True:
            left = max(0.0, end - clock())
            if self._router is None:
                time.sleep(left)
                return
            wait_ms = int(1000 * min(left, LONGEST_LOOK_S))
            asked = self._router.poll(min(wait_ms, LOOK_AGAIN_MS) if len(self._answers) else wait_ms)
            if asked:
                self._answers.ask(self._router.recv_multipart())
            self._answers.go_on(lambda frames: send_answer(self._zmq, self._router, frames))
            if not asked and left == 0.0:
                return

    def _answer(self, question: bytes) -> Iterator[Frames]:
        first = int.from_bytes(question, "big")  # a text is beyond all numbers
        for seq, payload in self._sent[:]:
            if len(question) == 8 and seq >= first:
                yield b"", self._topic, sequence_bytes(seq), payload
        yield END

    def close(self, linger_s: float = 1.0) -> None:
        for one in (self._router, self._pub):
            if one is not None:
                one.close(int(1000 * linger_s))
        self._context.term()

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
