"""Servers that come and go, lose, share and garble pages; a cluster."""

from __future__ import annotations

import gc
import random
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blockpool.offload.errors import MissingExtraError, ServerError, TierSizeError
from blockpool.offload.namespace import Namespace
from blockpool.offload.tier import ChangeKind, Loaded, Stored
from blockpool.offload.valkey import KEYS_AT_ONCE, ValkeyTier
from tests.offload.content import ONE, TWO, key_of, page_of, room_for
from tests.offload.servers import Cluster, Parrot, Server, need_a_server

PAGE_BYTES = 4000
KEYS = [key_of(number) for number in range(20)]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def redis() -> Any:
    return need_a_server()


@pytest.fixture(scope="module")
def shared(redis: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("shared"))
    yield server
    server.kill()


@pytest.fixture
def server(shared: Server, redis: Any) -> Server:
    """With nothing in it."""
    with redis.Redis(port=shared.port) as client:
        client.flushall()
    return shared


@pytest.fixture
def mortal(redis: Any, tmp_path: Path) -> Iterator[Server]:
    """One that may be killed."""
    server = Server(tmp_path)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def cluster(redis: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    three = Cluster(tmp_path_factory.mktemp("cluster"), redis)
    yield three
    three.kill()


MADE: list[ValkeyTier] = []


@pytest.fixture(autouse=True)
def close_all() -> Iterator[None]:
    yield
    while MADE:
        MADE.pop().close()


def tier_on(server: Any, namespace: Namespace = ONE, **options: Any) -> ValkeyTier:
    tier = ValkeyTier(getattr(server, "url", server), PAGE_BYTES, namespace=namespace, **options)
    MADE.append(tier)
    return tier


def store(tier: ValkeyTier, *keys: bytes) -> list[Stored]:
    return tier.store(keys, [page_of(key, PAGE_BYTES) for key in keys])


def load(tier: ValkeyTier, *keys: bytes) -> list[Loaded]:
    pages = [room_for(key, PAGE_BYTES) for key in keys]
    results = tier.load(keys, pages)
    for key, page, result in zip(keys, pages, results, strict=True):
        assert result is not Loaded.OK or page == page_of(key, PAGE_BYTES)
    return results


def test_engines_share_pages(server: Server) -> None:
    a, b = tier_on(server), tier_on(server)
    assert store(a, *KEYS) == [Stored.OK] * 20
    assert store(b, *KEYS[:2]) == [Stored.PRESENT] * 2
    assert load(b, *KEYS) == [Loaded.OK] * 20
    assert tier_on(server, prefix="another").lookup(KEYS) == [False] * 20
    assert (a.name, a.medium, a.is_remote, a.capacity_bytes, a.used_bytes) == ("valkey", "STORAGE", True, None, None)


def test_clear_deletes_its_own_namespace(server: Server, redis: Any) -> None:
    """Whatever bytes are in a prefix: none is a pattern."""
    plain = tier_on(server, prefix="a*[b]?\\^-")
    other = tier_on(server, TWO, prefix="a*[b]?\\^-")
    near = tier_on(server, prefix="aXb?\\^-")
    many = [key_of(number) for number in range(2 * KEYS_AT_ONCE + 10)]
    store(plain, *many)
    store(other, *(key_of(number, TWO) for number in range(4)))
    store(near, *KEYS)
    plain.reports_changes = True
    assert plain.clear() == len(many)
    assert [change.kind for change in plain.take_changes()] == [ChangeKind.CLEARED]
    assert not any(plain.lookup(many))
    assert other.lookup([key_of(number, TWO) for number in range(4)]) == [True] * 4
    assert near.lookup(KEYS) == [True] * 20


def test_any_byte_in_a_namespace(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes are digests: every byte may be in them, and none is a pattern."""
    tier = tier_on(server)
    for number in range(256):
        prefix = bytes([number]) * 8
        near = prefix[:-1] + bytes([number ^ 1])
        monkeypatch.setattr(Namespace, "prefix", property(lambda _, prefix=prefix: prefix))
        assert tier.store([prefix + b"key", near + b"key"], [b"1", b"2"]) == [Stored.OK] * 2
        assert tier.clear() == 1
        assert tier.lookup([prefix + b"key", near + b"key"]) == [False, True]
        assert tier.discard([near + b"key"]) == 1


def test_pages_live_for_a_time_after_they_were_stored(server: Server, redis: Any) -> None:
    tier = tier_on(server, ttl_s=100)
    store(tier, KEYS[0])
    with redis.Redis(port=server.port) as client:
        name = b"blockpool:" + KEYS[0]
        assert 90_000 < client.pttl(name) <= 100_000
        client.pexpire(name, 5000)
        assert store(tier, KEYS[0]) == [Stored.PRESENT]
        assert 90_000 < client.pttl(name) <= 100_000
        client.pexpire(name, 0)
        assert load(tier, KEYS[0]) == [Loaded.MISSING]
        store(tier_on(server), KEYS[1])
        assert client.pttl(b"blockpool:" + KEYS[1]) == -1


@pytest.mark.parametrize("place", [0, 4, 10, 20, 40, -1])
def test_what_others_wrote_over_a_page_is_corrupt(server: Server, redis: Any, place: int) -> None:
    tier = tier_on(server)
    store(tier, *KEYS[:2])
    with redis.Redis(port=server.port) as client:
        value = bytearray(client.get(b"blockpool:" + KEYS[0]))
        value[place] ^= 4
        client.set(b"blockpool:" + KEYS[0], bytes(value))
    assert load(tier, *KEYS[:2]) == [Loaded.CORRUPT, Loaded.OK]
    assert tier.lookup(KEYS[:2]) == [False, True]
    assert tier.stats().corrupt_pages == 1
    assert store(tier, KEYS[0]) == [Stored.OK]


def test_what_is_no_page_at_all(server: Server, redis: Any) -> None:
    tier = tier_on(server)
    with redis.Redis(port=server.port) as client:
        client.rpush(b"blockpool:" + KEYS[0], "a list")
        client.set(b"blockpool:" + KEYS[1], "")
    assert load(tier, *KEYS[:3]) == [Loaded.CORRUPT, Loaded.CORRUPT, Loaded.MISSING]
    assert tier.lookup(KEYS[:2]) == [False, False]


def test_a_checksum_that_cannot_be_computed_here(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is left to those who can."""
    pytest.importorskip("xxhash")
    able = tier_on(server)
    store(able, KEYS[0])
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "xxhash", None)
        unable = tier_on(server)
        assert load(unable, KEYS[0]) == [Loaded.MISSING]
        assert store(unable, KEYS[1]) == [Stored.OK]
    assert load(able, *KEYS[:2]) == [Loaded.OK] * 2


def test_a_server_that_is_full(mortal: Server, redis: Any) -> None:
    tier = tier_on(mortal)
    store(tier, KEYS[0])
    with redis.Redis(port=mortal.port) as client:
        client.config_set("maxmemory", "1")
    assert store(tier, *KEYS[:2]) == [Stored.PRESENT, Stored.NO_ROOM]
    assert tier.stats().refused_pages == 1
    assert load(tier, KEYS[0]) == [Loaded.OK]
    assert tier.is_reachable


def test_a_server_that_goes_and_comes_back(mortal: Server) -> None:
    clock = Clock()
    tier = tier_on(mortal, retry_after_s=5, clock=clock)
    store(tier, *KEYS[:2])
    mortal.kill()
    assert load(tier, *KEYS[:2]) == [Loaded.UNREACHABLE] * 2
    assert not tier.is_reachable
    assert "refused" in str(tier.last_failure)
    mortal.start()
    assert store(tier, KEYS[0]) == [Stored.UNREACHABLE]  # not asked yet
    clock.now += 4.9
    assert tier.lookup(KEYS[:1]) == [False]
    assert tier.discard(KEYS[:1]) == 0
    assert tier.clear() == 0
    clock.now += 0.2
    assert store(tier, KEYS[0]) == [Stored.OK]
    assert load(tier, *KEYS[:2]) == [Loaded.OK, Loaded.MISSING]
    stats = tier.stats()
    assert (stats.unreachable_pages, stats.refused_pages, stats.missing_pages) == (2, 1, 1)
    tier.close()


def test_a_server_that_restarts_between_two_calls_is_not_missed(mortal: Server) -> None:
    tier = tier_on(mortal)
    store(tier, KEYS[0])
    mortal.kill()
    mortal.start()
    assert load(tier, KEYS[0]) == [Loaded.MISSING]
    assert tier.is_reachable


NO_ANSWERS = [
    b":abc",
    b"*abc",
    b"$abc",
    b"+OK",
    b":1",
    b":7",
    b"*-1",
    b"*3",
    b"$-1",
    b"#x",
    b",x",
    b"-\xff",
    b"\xff\xfe",
]


@pytest.mark.parametrize("handshake", [True, False])
@pytest.mark.parametrize("answer", [*NO_ANSWERS, b"*1\r\n" * 5000], ids=lambda answer: repr(answer[:9]))
def test_a_server_that_answers_anything(redis: Any, answer: bytes, handshake: bool) -> None:
    """Nothing raises and nothing is found; what the client cannot make sense of is a server that is gone."""
    parrot = Parrot(answer + b"\r\n")
    client = redis.Redis.from_url(parrot.url, protocol=2, lib_name=None, lib_version=None, socket_timeout=0.05)
    tier = tier_on(parrot if handshake else client, timeout_s=0.05, retry_after_s=0)
    try:
        assert tier.lookup(KEYS[:1]) in ([False], [True])
        assert load(tier, KEYS[0])[0] is not Loaded.OK
        assert store(tier, KEYS[0])[0] in Stored
        assert tier.discard(KEYS[:1]) in (0, 1)
        tier.reports_changes = True
        assert tier.clear() == 0
        assert tier.take_changes() == []
        assert tier.last_failure is not None
        assert tier.stats().unreachable_pages + tier.stats().corrupt_pages + tier.stats().missing_pages == 1
    finally:
        client.close()
        parrot.close()


def test_the_page_of_another_key_is_corrupt(server: Server, redis: Any) -> None:
    """As when a connection gives the answer to another question."""
    tier = tier_on(server)
    assert tier.store(KEYS[:2], [b"page of one", b"page of two"]) == [Stored.OK] * 2
    with redis.Redis(port=server.port) as client:
        client.copy(b"blockpool:" + KEYS[1], b"blockpool:" + KEYS[0], replace=True)
    assert tier.load(KEYS[:1], [memoryview(bytearray(11))]) == [Loaded.CORRUPT]


class Waits:
    """A redis-py connection's reads that a hung server left without an answer."""

    def __init__(self, redis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        connection = redis.connection.Connection
        read = connection.read_response

        def counted(*arguments: Any, **options: Any) -> Any:
            try:
                return read(*arguments, **options)
            except redis.exceptions.TimeoutError:
                self.count += 1
                raise

        monkeypatch.setattr(connection, "read_response", counted)


@pytest.mark.parametrize("call", ["lookup", "load", "store", "discard", "clear"])
@pytest.mark.parametrize("kind", ["one", "cluster"])
def test_a_server_that_hangs_is_waited_for_once(
    shared: Server, cluster: Cluster, redis: Any, monkeypatch: pytest.MonkeyPatch, kind: str, call: str
) -> None:
    """Not for each page or batch, and not again before its time."""
    hung = shared if kind == "one" else cluster.nodes[1]
    clock = Clock()
    tier = tier_on(shared if kind == "one" else cluster, timeout_s=0.2, clock=clock)
    many = [key_of(number) for number in range(2 * KEYS_AT_ONCE)]
    tier.lookup(many)
    calls: dict[str, Callable[[], object]] = {
        "lookup": lambda: tier.lookup(many),
        "load": lambda: load(tier, *many),
        "store": lambda: store(tier, *many),
        "discard": lambda: tier.discard(many),
        "clear": tier.clear,
    }
    waits = Waits(redis, monkeypatch)
    assert hung.process is not None
    hung.process.send_signal(signal.SIGSTOP)
    try:
        calls[call]()
        waited = waits.count
        assert 1 <= waited <= (1 if call != "clear" or kind == "one" else 3)
        for again in calls.values():
            again()
        assert waits.count == waited
        assert not tier.is_reachable
    finally:
        hung.process.send_signal(signal.SIGCONT)
    clock.now += 5
    tier.lookup(many)
    assert tier.is_reachable


def test_after_a_failure_one_call_asks_first(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    tier = tier_on(server, clock=clock)
    store(tier, KEYS[0])
    tier._went_away(OSError("gone"), None)
    clock.now += 5
    pipelined = tier._pipelined

    def meanwhile(*arguments: Any) -> Any:
        assert tier.lookup(KEYS[:1]) == [False]
        return pipelined(*arguments)

    monkeypatch.setattr(tier, "_pipelined", meanwhile)
    assert load(tier, KEYS[0]) == [Loaded.OK]
    monkeypatch.undo()
    assert tier.lookup(KEYS[:1]) == [True]


def test_a_clear_that_the_server_refuses_says_so(mortal: Server, redis: Any) -> None:
    tier = tier_on(mortal, clock=Clock())
    store(tier, *KEYS)
    tier.reports_changes = True
    with redis.Redis(port=mortal.port) as client:
        client.execute_command("ACL", "SETUSER", "default", "-unlink")
    assert tier.clear() == 0
    assert not tier.is_reachable
    assert "unlink" in str(tier.last_failure).lower()
    assert tier.take_changes() == []


def test_changes_that_nobody_takes_are_few(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockpool.offload.valkey.MOST_CHANGES", 10)
    tier = tier_on(server)
    tier.reports_changes = True
    store(tier, *KEYS[:11])
    store(tier, KEYS[11])
    assert tier.take_changes() == [(ChangeKind.CLEARED, b""), (ChangeKind.STORED, KEYS[11])]


def test_a_password_that_is_wrong(mortal: Server, redis: Any) -> None:
    """It says why nothing comes."""
    with redis.Redis(port=mortal.port) as client:
        client.config_set("requirepass", "secret")
    tier = tier_on(mortal)
    assert store(tier, KEYS[0]) == [Stored.UNREACHABLE]
    assert "auth" in str(tier.last_failure).lower()
    able = tier_on(mortal.url.replace("//", "//:secret@"))
    assert store(able, KEYS[0]) == [Stored.OK]
    assert able.last_failure is None


def test_a_server_that_is_not_there_yet(mortal: Server) -> None:
    clock = Clock()
    mortal.kill()
    tiers = [tier_on(mortal, clock=clock), tier_on(mortal.url.replace("redis:", "redis+cluster:"), clock=clock)]
    for tier in tiers:
        assert store(tier, KEYS[0]) == [Stored.UNREACHABLE]
        assert tier.lookup(KEYS[:1]) == [False]
    mortal.start()
    clock.now += 5
    assert store(tiers[0], KEYS[0]) == [Stored.OK]
    assert store(tiers[1], KEYS[0]) == [Stored.UNREACHABLE]  # it is no cluster


def test_a_server_killed_while_threads_work(mortal: Server) -> None:
    """Five times: no exception, no other bytes, and pages again once it is back."""
    tier = tier_on(mortal, retry_after_s=0)
    wrong: list[object] = []
    stop = threading.Event()

    def run(seed: int) -> None:
        rng = random.Random(seed)
        try:
            while not stop.is_set():
                some = rng.sample(KEYS, 3)
                wrong.extend(set(store(tier, *some)) - {Stored.OK, Stored.PRESENT, Stored.UNREACHABLE})
                wrong.extend(set(load(tier, *some)) - {Loaded.OK, Loaded.MISSING, Loaded.UNREACHABLE})
                tier.discard(rng.sample(KEYS, 1))
        except BaseException as why:
            wrong.append(why)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            loaded = tier.stats().loaded_pages
            while tier.stats().loaded_pages < loaded + 50 and not wrong:
                pass
            mortal.kill()
            mortal.start()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    store(tier, *KEYS)
    assert load(tier, *KEYS) == [Loaded.OK] * 20


@pytest.mark.parametrize("given", ["url", "client"])
def test_a_cluster(cluster: Cluster, redis: Any, given: str) -> None:
    server = cluster.url if given == "url" else redis.RedisCluster(host="127.0.0.1", port=cluster.nodes[1].port)
    tier = tier_on(server, prefix=given, ttl_s=1000)
    many = [key_of(number) for number in range(KEYS_AT_ONCE + 44)]
    other = tier_on(server, TWO, prefix=given)
    store(other, key_of(0, TWO))
    assert store(tier, *many) == [Stored.OK] * 300
    assert store(tier, many[0]) == [Stored.PRESENT]
    assert load(tier, *many, key_of(999)) == [Loaded.OK] * 300 + [Loaded.MISSING]
    for node in cluster.nodes:
        with redis.Redis(port=node.port) as client:
            assert client.dbsize() > 50
    assert tier.discard(many[:10]) == 10
    assert tier.lookup(many) == [False] * 10 + [True] * 290
    assert tier.clear() == 290
    assert tier.lookup(many) == [False] * 300
    assert other.lookup([key_of(0, TWO)]) == [True]
    for made in (tier, other):
        made.close()
    if given == "client":
        assert server.ping(target_nodes="random")  # it is not ours to close
        server.close()


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # redis-py forgets those of the lost node
def test_a_cluster_that_loses_a_node(redis: Any, tmp_path: Path) -> None:
    three = Cluster(tmp_path, redis)
    try:
        tier = tier_on(three, retry_after_s=0)
        assert store(tier, *KEYS) == [Stored.OK] * 20
        three.nodes[2].kill()
        stored, loaded = store(tier, *KEYS), load(tier, *KEYS)
        assert set(stored) <= {Stored.PRESENT, Stored.UNREACHABLE}
        assert set(loaded) <= {Loaded.OK, Loaded.UNREACHABLE}
        assert Loaded.UNREACHABLE in loaded
        tier.lookup(KEYS)
        tier.clear()
        tier.close()
    finally:
        three.kill()
        MADE.clear()
        gc.collect()


def test_what_cannot_be_a_server(redis: Any, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("http://host", "127.0.0.1:6379", "redis://host:port", "redis+cluster://host/2"):
        with pytest.raises(ServerError, match=re.escape(url)):
            tier_on(url)
    with pytest.raises(ServerError, match="decodes"):
        tier_on(redis.Redis(port=server.port, decode_responses=True))
    with pytest.raises(ServerError, match="decodes"):
        tier_on(f"{server.url}?decode_responses=True")
    with pytest.raises(TierSizeError):
        ValkeyTier(server.url, 0, namespace=ONE)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingExtraError, match=r"blockpool\[valkey\]"):
        tier_on(server)
