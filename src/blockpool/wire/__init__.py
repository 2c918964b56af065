"""Events on a socket, and mirrors of an index rebuilt from them elsewhere.

Needs pyzmq (`blockpool[wire]`) where a socket is made, and nowhere else. Knows the pool's events and each group's
rule for a resume, and must not know requests, engines or the command.
"""

from blockpool.wire.codec import KVEventBatch, decode_batch, encode_batch
from blockpool.wire.errors import (
    BatchError,
    EndpointError,
    GroupRuleError,
    HashFormError,
    MissingExtraError,
    PublisherClosedError,
    RecordingError,
    WireError,
    WorkerError,
)
from blockpool.wire.fleet import Fleet, Overlap
from blockpool.wire.mirror import Mirror, MirrorCounts, MirrorStatus, ReplayWanted, SnapshotWanted
from blockpool.wire.protocol import PublisherStatus
from blockpool.wire.publisher import Publisher, PublisherCounts
from blockpool.wire.subscriber import Subscriber, poll_all

__all__ = [
    "BatchError",
    "EndpointError",
    "Fleet",
    "GroupRuleError",
    "HashFormError",
    "KVEventBatch",
    "Mirror",
    "MirrorCounts",
    "MirrorStatus",
    "MissingExtraError",
    "Overlap",
    "Publisher",
    "PublisherClosedError",
    "PublisherCounts",
    "PublisherStatus",
    "RecordingError",
    "ReplayWanted",
    "SnapshotWanted",
    "Subscriber",
    "WireError",
    "WorkerError",
    "decode_batch",
    "encode_batch",
    "poll_all",
]
