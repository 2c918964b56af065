"""Pages in a Valkey or Redis server, or a cluster of them, that many engines share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
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
#: More than these are not kept for whoever takes changes.
MOST_CHANGES = 100_000
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
    `retry_after_s` by `clock`; then one call asks, and the others when it has been answered. A server that answers
    what is no answer is gone as well. What was UNREACHABLE in `store` may be there nevertheless, whole. Pages come
    and go by others' hands: `take_changes` reports what this tier did, and of more than MOST_CHANGES nothing but that
    all is unknown (CLEARED). A page of another length than its buffer stays, and is MISSING.
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
        self._slots_are_old = False
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
            answers += self._ask([("EXISTS", self._name_of(keys[place])) for place in some], _is_count)
        return [answer == 1 for answer in answers]

    def load(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> list[Loaded]:
        """Raises PageError."""
        views = pages_to_fill(keys, pages)
        results = []
        for some in _batches([len(view) for view in views]):
            values = self._ask([("GET", self._name_of(keys[place])) for place in some], _is_value)
            for place, value in zip(some, values, strict=True):
                if value is None:
                    results.append(Loaded.MISSING)
                elif isinstance(value, bytes):
                    results.append(self._form.unwrap(value, keys[place], views[place]))
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
            present = self._ask([self._renewal(self._name_of(keys[place])) for place in some], _is_count)
            absent = []
            for place, answer in zip(some, present, strict=True):
                if answer == 1:
                    results[place] = Stored.PRESENT
                elif answer == 0:
                    absent.append(place)
            if not absent:
                continue
            answers = self._ask([self._setting(keys[place], views[place]) for place in absent], _is_done)
            for place, answer in zip(absent, answers, strict=True):
                results[place] = self._stored(answer)
        with self._lock:
            count_stores(self._stats, results, [len(view) for view in views])
            if self.reports_changes:
                new = [key for key, result in zip(keys, results, strict=True) if result is Stored.OK]
                self._note([Change(ChangeKind.STORED, key) for key in new])
        return results

    def discard(self, keys: Sequence[bytes]) -> int:
        """How many the server says there were."""
        answers: list[Any] = []
        for some in _batches([0] * len(keys)):
            answers += self._ask([("UNLINK", self._name_of(keys[place])) for place in some], _is_count)
        with self._lock:
            if self.reports_changes:
                gone = [key for key, answer in zip(keys, answers, strict=True) if answer == 1]
                self._note([Change(ChangeKind.REMOVED, key) for key in gone])
        return sum(answer == 1 for answer in answers)

    def clear(self) -> int:
        """Delete all pages of the namespace, some at a time. Of what is stored meanwhile, some may stay.

        When the server goes away in the middle or refuses, the rest stays, no change is reported, and `is_reachable`
        is false for `retry_after_s`.
        """
        pattern = _escaped(self._prefix + self.namespace.prefix) + b"*"
        num_cleared = 0
        names: list[bytes] = []
        client, is_first = self._connected()
        if client is None:
            return 0
        try:
            for name in client.scan_iter(match=pattern, count=1000):
                names.append(name)
                if len(names) == KEYS_AT_ONCE:
                    num_cleared += self._unlink(client, names)
                    names = []
            num_cleared += self._unlink(client, names)
        except Exception as why:
            self._went_away(why, client)
            return num_cleared
        except BaseException:
            self._was_not_answered(is_first)
            raise
        self._was_answered(is_first)
        with self._lock:
            if self.reports_changes:
                self._note([Change(ChangeKind.CLEARED, b"")])
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
        return ("SET", self._name_of(key), self._form.wrap(key, page), "NX", *life)

    def _stored(self, answer: Any) -> Stored:
        if answer in (True, b"OK"):
            return Stored.OK
        if answer is None:
            return Stored.PRESENT  # somebody else was faster
        if isinstance(answer, self._redis.exceptions.ResponseError) and not self._is_loss(answer):
            is_full = isinstance(answer, self._redis.exceptions.OutOfMemoryError) or _starts(answer, "OOM")
            return Stored.NO_ROOM if is_full else Stored.FAILED
        return Stored.UNREACHABLE

    def _unlink(self, client: Any, names: list[bytes]) -> int:
        """Raises what the client raises, or got as an answer."""
        answers = self._answers(client, [("UNLINK", name) for name in names], _is_count)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return sum(answers)

    def _note(self, changes: list[Change]) -> None:
        self._changes += changes
        if len(self._changes) > MOST_CHANGES:
            self._changes = [Change(ChangeKind.CLEARED, b"")]

    def _ask(self, commands: list[tuple[Any, ...]], is_answer: Callable[[Any], bool]) -> list[Any]:
        """The answer to each, or an exception in its place."""
        client, is_first = self._connected() if commands else (None, False)
        if client is None:
            return [ConnectionError()] * len(commands)
        try:
            answers = self._answers(client, commands, is_answer)
        except Exception as why:  # whatever the client makes of what a server says
            self._went_away(why, client)
            return [why] * len(commands)
        except BaseException:
            self._was_not_answered(is_first)
            raise
        loss = next((answer for answer in answers if self._is_loss(answer)), None)
        if loss is not None:
            self._went_away(loss, client)
        else:
            self._was_answered(is_first)
        return answers

    def _answers(self, client: Any, commands: list[tuple[Any, ...]], is_answer: Callable[[Any], bool]) -> list[Any]:
        """Of one server, or of the nodes one after the other until one is lost. Raises what the client raises."""
        if not hasattr(client, "get_node_from_key"):
            return self._pipelined(client, commands, is_answer)
        # redis-py would ask a lost node again for each command, and wait each time
        if self._slots_are_old:
            client.nodes_manager.initialize()
            self._slots_are_old = False
        answers: list[Any] = [None] * len(commands)
        places = list(range(len(commands)))
        for _ in range(2):
            by_node: dict[str, tuple[Any, list[int]]] = {}
            for place in places:
                node = client.get_node_from_key(commands[place][1])
                if node is None:
                    raise self._redis.exceptions.ClusterDownError("no node has the slot")
                by_node.setdefault(node.name, (node, []))[1].append(place)
            for node, some in by_node.values():
                connection = client.get_redis_connection(node)
                replies = self._pipelined(connection, [commands[place] for place in some], is_answer)
                for place, reply in zip(some, replies, strict=True):
                    answers[place] = reply
            places = [place for place in places if isinstance(answers[place], self._redis.exceptions.MovedError)]
            if not places:
                break
            client.nodes_manager.initialize()
        return answers

    def _pipelined(self, client: Any, commands: list[tuple[Any, ...]], is_answer: Callable[[Any], bool]) -> list[Any]:
        pipeline = client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        answers: list[Any] = pipeline.execute(raise_on_error=False)
        odd = [answer for answer in answers if not isinstance(answer, Exception) and not is_answer(answer)]
        if odd or len(answers) != len(commands):
            says = f"{len(answers)} answers to {len(commands)} commands, such as {str(odd[:1])[:100]}"
            raise self._redis.exceptions.InvalidResponse(says)
        return answers

    def _connected(self) -> tuple[Any, bool]:
        """A client, None while the server is not to be asked; and whether this call is the first after a failure."""
        if self._closed:
            raise TierClosedError(f"tier {self.name!r} is closed")
        with self._lock:
            if not self.is_reachable:
                return None, False
            is_first = self._asked_again_at is not None
            self._was_not_answered(is_first)
        client = self._client
        if client is not None:
            return client, is_first
        with self._connecting:
            if self._client is None and (is_first or self.is_reachable):
                try:
                    self._client = self._connect()
                except Exception as why:
                    self._went_away(why, None)
            return self._client, is_first

    def _was_not_answered(self, is_first: bool) -> None:
        """The others wait for this call, or for their turn."""
        if is_first:
            self._asked_again_at = self._clock() + self._retry_after_s

    def _was_answered(self, is_first: bool) -> None:
        if is_first:
            self._asked_again_at = None

    def _is_loss(self, answer: Any) -> bool:
        """The connection or the cluster went, not the command."""
        if isinstance(answer, self._redis.exceptions.ResponseError):
            return isinstance(answer, self._redis.exceptions.ClusterDownError)
        return isinstance(answer, self._gone)

    def _went_away(self, why: Exception, client: Any) -> None:
        self._last_failure = why
        self._asked_again_at = self._clock() + self._retry_after_s
        self._slots_are_old = True
        if client is not None:
            # what is left unread in a connection must not answer a later question
            with suppress(Exception):
                nodes = client.get_nodes() if hasattr(client, "get_node_from_key") else []
                for one in [node.redis_connection for node in nodes] or [client]:
                    if one is not None:
                        one.connection_pool.disconnect(inuse_connections=False)

    def _connect(self) -> Any:
        # a connection that was closed meanwhile is made anew; what was waited for in vain is not waited for again
        closed = (self._redis.exceptions.ConnectionError,)
        retry = import_module("redis.retry").Retry(import_module("redis.backoff").NoBackoff(), 1, closed)
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
        if "decode_responses" in options:
            raise ServerError(f"{url!r} decodes responses: pages are bytes")
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


def _is_count(answer: Any) -> bool:
    return isinstance(answer, int) and answer in (0, 1)


def _is_value(answer: Any) -> bool:
    return answer is None or isinstance(answer, bytes)


def _is_done(answer: Any) -> bool:
    return answer is None or answer is True or answer == b"OK"
