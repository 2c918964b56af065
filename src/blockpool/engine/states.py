"""Where a request stands, and how it ended."""

from __future__ import annotations

from enum import Enum

import msgspec


class RequestState(Enum):
    WAITING = "waiting"  # for its turn; holds nothing
    WAITING_FOR_REMOTE_KVS = "waiting_for_remote_kvs"  # holds its blocks; somebody else fills them
    RUNNING = "running"
    PREEMPTED = "preempted"  # waits again, and will be computed again; holds nothing
    FINISHED = "finished"


class FinishReason(Enum):
    STOP = "stop"  # one of its stop tokens came
    LENGTH = "length"  # its max_tokens, or the model's length, is reached
    ABORT = "abort"
    ERROR = "error"  # it can never be computed here; the message says why


class FinishedRequest(msgspec.Struct, frozen=True):
    """`message`: why, for an error; else empty."""

    request_id: str
    reason: FinishReason
    message: str = ""
