"""What the wire refuses, by name."""


class WireError(Exception):
    """Base of what the wire refuses."""


class MissingExtraError(WireError, ImportError):
    """A socket without pyzmq, which the extra `blockpool[wire]` installs."""


class EndpointError(WireError, ValueError):
    """An endpoint that is none, that cannot be opened, or that has no place for a data-parallel rank."""


class PublisherClosedError(WireError, RuntimeError):
    """Publishing after `close()`."""


class BatchError(WireError, ValueError):
    """Bytes that are no batch of events, or a batch with something that is no event."""


class RecordingError(WireError, ValueError):
    """A recording that cannot be read: file, line, field."""


class WorkerError(WireError, ValueError):
    """A worker that joins twice, or that is not there."""


class GroupRuleError(WireError, ValueError):
    """A group whose rule is not known: its kind was not announced, and nobody has stated its spec."""


class HashFormError(WireError, ValueError):
    """Integer hashes asked of workers that announce whole digests, or of more than 64 bits."""
