"""Pages in a Valkey or Redis server, or a cluster of them, that many engines share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import msgspec

from blockpool.offload.checksum import best_checksum
from blockpool.offload.errors import MissingExtraError, ServerError, TierClosedError, TierSizeError
from blockpool.offload.namespace import Namespace
from blockpool.offload.pages import pages_to_fill, pages_to_store
from blockpool.offload.tally import count_loads, count_stores
from blockpool.offload.tier import Buffer, Change, ChangeKind, Loaded, Stored, TierStats
from blockpool.offload.valkey_value import ValueForm

#: What one pipeline carries at most.
KEYS_AT_ONCE = 256
BYTES_AT_ONCE = 16 * 2**20
CLUSTER = "redis+cluster://"
SCHEMES = {
    "redis://": "redis://",
    "rediss://": "rediss://",
    "unix://": "unix://",
    "valkey://": "redis://",
    "valkeys://": "rediss://",
    CLUSTER: "redis://",
}


class ValkeyTier:
    """See Tier. Values are checked when they are loaded: what another client wrote over them is CORRUPT.

    `server`: a URL (redis://, rediss://, valkey://, unix://, or redis+cluster:// for a cluster, of which one node is
    enough), or a client of redis-py 5 or later (Redis, RedisCluster) without `decode_responses`; a client that was
    given is not closed. `namespace`: all that `clear` deletes; the keys of calls begin with its prefix.
    `ttl_s`: how long a page is kept since it was last stored; None: until the server evicts it.
    `prefix`: the start of all keys in the server.

    A server that is gone raises nothing: the answer is UNREACHABLE, and the server is not asked again before
    `retry_after_s` by `clock`. What was UNREACHABLE in `store` may be there nevertheless, whole. Pages come and go
    by others' hands: `take_changes` reports what this tier did. A page of another length than its buffer is CORRUPT.
    """

    is_remote = True
    medium = "STORAGE"

    def __init__(
        self,
        server: str | Any,
        page_bytes: int,
        *,
        namespace: Namespace,
        ttl_s: float | None = None,
        prefix: str = "blockpool",
        name: str = "valkey",
        retry_after_s: float = 5.0,
        timeout_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connects at the first call. Raises MissingExtraError, ServerError, TierSizeError."""
        if page_bytes < 1:
            raise TierSizeError(f"tier {name!r}: a page of {page_bytes} bytes")
        self.name = name
        self.page_bytes = page_bytes
        self.reports_changes = False
        self.namespace = namespace
        self._ttl_ms = None if ttl_s is None else max(1, round(ttl_s * 1000))
        self._prefix = prefix.encode() + b":"
        self._retry_after_s = retry_after_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._asked_again_at: float | None = None
        self._last_failure: Exception | None = None
        self._form = ValueForm(best_checksum())
        self._stats = TierStats()
        self._changes: list[Change] = []
        self._lock = threading.Lock()
        self._closed = False
        try:
            self._redis: Any = import_module("redis")
        except ImportError:
            raise MissingExtraError(f"tier {name!r} needs redis: pip install 'blockpool[valkey]'") from None
        exceptions = self._redis.exceptions
        self._gone = (exceptions.RedisError, exceptions.RedisClusterException, OSError)
        self._connecting = threading.Lock()
        self._client: Any = None
        self._url = ""
        if isinstance(server, str):
            self._url = self._checked(server)
        else:
            if server.get_encoder().decode_responses:
                raise ServerError("the client decodes responses: pages are bytes")
            self._client = server

    @property
    def capacity_bytes(self) -> int | None:
        return None

    @property
    def used_bytes(self) -> int | None:
        return None

    @property
    def is_reachable(self) -> bool:
        """Whether the server would be asked now."""
        return self._asked_again_at is None or self._clock() >= self._asked_again_at

    @property
    def last_failure(self) -> Exception | None:
        """Why it was UNREACHABLE last: the client's exception. A wrong password is one."""
        return self._last_failure

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        answers: list[Any] = []
        for some in _batches([0] * len(keys)):
            answers += self._ask([("EXISTS", self._name_of(keys[place])) for place in some])
        return [answer == 1 for answer in answers]

    def load(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> list[Loaded]:
        """Raises PageError."""
        views = pages_to_fill(keys, pages)
        results = []
        for some in _batches([len(view) for view in views]):
            values = self._ask([("GET", self._name_of(keys[place])) for place in some])
            for place, value in zip(some, values, strict=True):
                if value is None:
                    results.append(Loaded.MISSING)
                elif isinstance(value, bytes):
                    results.append(self._form.unwrap(value, views[place]))
                elif isinstance(value, self._redis.exceptions.ResponseError):
                    # the key has something that is no value
                    results.append(Loaded.CORRUPT if _starts(value, "WRONGTYPE") else Loaded.UNREACHABLE)
                else:
                    results.append(Loaded.UNREACHABLE)
        corrupt = [key for key, result in zip(keys, results, strict=True) if result is Loaded.CORRUPT]
        if corrupt:
            self.discard(corrupt)
        with self._lock:
            count_loads(self._stats, results, [len(view) for view in views])
        return results

    def store(self, keys: Sequence[bytes], pages: Sequence[Buffer]) -> list[Stored]:
        """A page that is there lives on for another `ttl_s`. Raises PageError and KeyLengthError."""
        views = pages_to_store(keys, pages, self.page_bytes, 2**16)
        results = [Stored.UNREACHABLE] * len(keys)
        for some in _batches([len(view) for view in views]):
            present = self._ask([self._renewal(self._name_of(keys[place])) for place in some])
            absent = []
            for place, answer in zip(some, present, strict=True):
                if answer == 1:
                    results[place] = Stored.PRESENT
                elif answer == 0:
                    absent.append(place)
            if not absent:
                continue
            answers = self._ask([self._setting(keys[place], views[place]) for place in absent])
            for place, answer in zip(absent, answers, strict=True):
                results[place] = self._stored(answer)
        with self._lock:
            count_stores(self._stats, results, [len(view) for view in views])
            if self.reports_changes:
                new = [key for key, result in zip(keys, results, strict=True) if result is Stored.OK]
                self._changes += [Change(ChangeKind.STORED, key) for key in new]
        return results

    def discard(self, keys: Sequence[bytes]) -> int:
        """How many the server says there were."""
        answers: list[Any] = []
        for some in _batches([0] * len(keys)):
            answers += self._ask([("UNLINK", self._name_of(keys[place])) for place in some])
        with self._lock:
            if self.reports_changes:
                gone = [key for key, answer in zip(keys, answers, strict=True) if answer == 1]
                self._changes += [Change(ChangeKind.REMOVED, key) for key in gone]
        return sum(answer == 1 for answer in answers)

    def clear(self) -> int:
        """Delete all pages of the namespace, some at a time. Of what is stored meanwhile, some may stay.

        When the server goes away in the middle (`is_reachable` is false) the rest stays, and no change is reported.
        """
        pattern = _escaped(self._prefix + self.namespace.prefix) + b"*"
        num_cleared = 0
        names: list[bytes] = []
        client = self._connected()
        if client is None:
            return 0
        try:
            for name in client.scan_iter(match=pattern, count=1000):
                names.append(name)
                if len(names) == KEYS_AT_ONCE:
                    num_cleared += self._unlink(names)
                    names = []
        except self._gone as why:
            self._went_away(why)
            return num_cleared
        num_cleared += self._unlink(names)
        with self._lock:
            if self.reports_changes and self.is_reachable:
                self._changes.append(Change(ChangeKind.CLEARED, b""))
        return num_cleared

    def stats(self) -> TierStats:
        with self._lock:
            return msgspec.structs.replace(self._stats)

    def take_changes(self) -> list[Change]:
        with self._lock:
            taken, self._changes = self._changes, []
            return taken

    def close(self) -> None:
        """Close the connections that it made."""
        with self._connecting:
            if self._closed:
                return
            self._closed = True
            if self._url and self._client is not None:
                self._client.close()

    def _name_of(self, key: bytes) -> bytes:
        return self._prefix + key

    def _renewal(self, name: bytes) -> tuple[Any, ...]:
        return ("EXISTS", name) if self._ttl_ms is None else ("PEXPIRE", name, self._ttl_ms)

    def _setting(self, key: bytes, page: memoryview) -> tuple[Any, ...]:
        life = () if self._ttl_ms is None else ("PX", self._ttl_ms)
        return ("SET", self._name_of(key), self._form.wrap(page), "NX", *life)

    def _stored(self, answer: Any) -> Stored:
        if answer in (True, b"OK"):
            return Stored.OK
        if answer is None:
            return Stored.PRESENT  # somebody else was faster
        if isinstance(answer, self._redis.exceptions.ResponseError) and not self._is_loss(answer):
            is_full = isinstance(answer, self._redis.exceptions.OutOfMemoryError) or _starts(answer, "OOM")
            return Stored.NO_ROOM if is_full else Stored.FAILED
        return Stored.UNREACHABLE

    def _unlink(self, names: list[bytes]) -> int:
        return sum(answer == 1 for answer in self._ask([("UNLINK", name) for name in names]))

    def _ask(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        """The answer to each, or an exception in its place."""
        client = self._connected() if commands else None
        if client is None:
            return [ConnectionError()] * len(commands)
        try:
            pipeline = client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            answers: list[Any] = pipeline.execute(raise_on_error=False)
        except self._gone as why:
            self._went_away(why)
            return [why] * len(commands)
        loss = next((answer for answer in answers if self._is_loss(answer)), None)
        if loss is not None:
            self._went_away(loss)
        return answers

    def _connected(self) -> Any:
        """A client; None while the server is not to be asked."""
        if self._closed:
            raise TierClosedError(f"tier {self.name!r} is closed")
        if not self.is_reachable:
            return None
        self._asked_again_at = None
        with self._connecting:
            if self._client is None:
                try:
                    self._client = self._connect()
                except self._gone as why:
                    self._went_away(why)
            return self._client

    def _is_loss(self, answer: Any) -> bool:
        """The connection or the cluster went, not the command."""
        if isinstance(answer, self._redis.exceptions.ResponseError):
            return isinstance(answer, self._redis.exceptions.ClusterDownError)
        return isinstance(answer, self._gone)

    def _went_away(self, why: Exception) -> None:
        self._last_failure = why
        self._asked_again_at = self._clock() + self._retry_after_s

    def _connect(self) -> Any:
        retry = import_module("redis.retry").Retry(import_module("redis.backoff").NoBackoff(), 1)
        make = self._redis.RedisCluster if self._url.startswith(CLUSTER) else self._redis.Redis
        scheme = next(scheme for scheme in SCHEMES if self._url.startswith(scheme))
        return make.from_url(
            SCHEMES[scheme] + self._url.removeprefix(scheme),
            socket_timeout=self._timeout_s,
            socket_connect_timeout=self._timeout_s,
            retry=retry,
        )

    def _checked(self, url: str) -> str:
        scheme = next((scheme for scheme in SCHEMES if url.startswith(scheme)), None)
        if scheme is None:
            raise ServerError(f"{url!r} begins with none of {', '.join(SCHEMES)}")
        try:
            options = import_module("redis.connection").parse_url(SCHEMES[scheme] + url.removeprefix(scheme))
        except ValueError as why:
            raise ServerError(f"{url!r}: {why}") from None
        if scheme == CLUSTER and options.get("db", 0) != 0:
            raise ServerError(f"{url!r}: a cluster has no database but 0")
        return url


def _batches(lengths: list[int]) -> Iterator[range]:
    """Consecutive places, few enough for one pipeline."""
    first = num_bytes = 0
    for place, length in enumerate(lengths):
        if place > first and (num_bytes + length > BYTES_AT_ONCE or place - first == KEYS_AT_ONCE):
            yield range(first, place)
            first, num_bytes = place, 0
        num_bytes += length
    if lengths:
        yield range(first, len(lengths))


def _escaped(name: bytes) -> bytes:
    """As a pattern that matches nothing else."""
    return b"".join(b"\\" + bytes([byte]) if byte in b"*?[]\\^-" else bytes([byte]) for byte in name)


def _starts(error: Exception, word: str) -> bool:
    return str(error).startswith(word)
