"""What all tiers do alike, against a dictionary of bytes."""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockpool.offload.disk import DiskTier
from blockpool.offload.errors import KeyLengthError, PageError, TierClosedError
from blockpool.offload.host import HostTier
from blockpool.offload.tier import Change, ChangeKind, Loaded, Stored, Tier
from blockpool.offload.valkey import ValkeyTier
from tests.offload.content import ONE, key_of, page_of, room_for
from tests.offload.servers import Server, need_a_server
from tests.sizes import LONG

PAGE_BYTES = 5000
NUM_PAGES = 8
MakeTier = Callable[[int], Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    need_a_server()
    one = Server(tmp_path_factory.mktemp("server"))
    yield one
    one.kill()


@pytest.fixture(params=["host lru", "host arc", "disk lru", "disk arc", "disk sha1", "valkey"])
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeTier]:
    """A tier of eight pages of so many bytes; a server has room for all."""
    made: list[Tier] = []
    kind, _, detail = request.param.partition(" ")
    if kind == "valkey":
        url = request.getfixturevalue("server").url
    if detail == "sha1":
        monkeypatch.setattr("blockpool.offload.disk.best_checksum", lambda: "sha1")
        detail = "lru"

    def make_one(page_bytes: int) -> Tier:
        tier: Tier
        if kind == "host":
            tier = HostTier(NUM_PAGES * page_bytes, page_bytes, detail)
        elif kind == "disk":
            tier = DiskTier(tmp_path / f"tier{len(made)}", NUM_PAGES * page_bytes, page_bytes, detail)
        else:
            tier = ValkeyTier(url, page_bytes, namespace=ONE, prefix=f"{request.node.nodeid} {len(made)}")
        tier.reports_changes = True
        made.append(tier)
        return tier

    yield make_one
    for tier in made:
        assert not isinstance(tier, HostTier | DiskTier) or not tier.audit()
        tier.close()


def store(tier: Tier, *keys: bytes) -> list[Stored]:
    return tier.store(keys, [page_of(key, tier.page_bytes) for key in keys])


def as_floats(data: bytes | bytearray) -> Any:
    return np.frombuffer(data, np.float32)


def as_matrix(data: bytes | bytearray) -> Any:
    return np.frombuffer(data, np.uint8).reshape(64, 64)


def mapped(data: bytes | bytearray) -> Any:
    found = mmap.mmap(-1, len(data))
    found[:] = bytes(data)
    return found


def load(tier: Tier, *keys: bytes) -> list[Loaded]:
    """The bytes are right whenever a load says so."""
    pages = [room_for(key, tier.page_bytes) for key in keys]
    results = tier.load(keys, pages)
    for key, page, result in zip(keys, pages, results, strict=True):
        assert result is not Loaded.OK or page == page_of(key, tier.page_bytes)
    return results


@pytest.mark.parametrize(
    "kind", [bytes, bytearray, memoryview, as_floats, as_matrix, mapped], ids=lambda one: one.__name__
)
def test_pages_of_any_kind(make: MakeTier, kind: Callable[[bytes], Any]) -> None:
    """Whatever has the buffer protocol and is one run of bytes: as what it was, it is filled again."""
    tier = make(4096)
    key, data = key_of(0), random.Random(7).randbytes(4096)
    assert tier.store((key,), (kind(data),)) == [Stored.OK]
    page = bytearray(4096) if kind is bytes else kind(bytearray(4096))
    assert tier.load((key,), (page,)) == [Loaded.OK]
    assert bytes(memoryview(page).cast("B") if kind is not as_matrix else page) == data


@pytest.mark.parametrize("odd", ["b", None, 5, bytearray(b"b")])
def test_a_key_of_another_type_is_refused_and_changes_nothing(make: MakeTier, odd: Any) -> None:
    tier = make(4096)
    if isinstance(tier, ValkeyTier):
        return  # it has no books of its own
    key = key_of(0)
    store(tier, key)
    before = tier.stats()
    for call in (
        lambda: tier.discard([key, odd]),
        lambda: tier.load([key, odd], [bytearray(4096)] * 2),
        lambda: tier.store([key_of(1), odd], [bytes(4096)] * 2),
    ):
        with pytest.raises(TypeError, match=f"a key is bytes, not {type(odd).__name__}"):
            call()
        assert (tier.audit(), tier.stats(), tier.lookup([key, key_of(1)])) == ([], before, [True, False])


def test_neighbours_into_one_buffer(make: MakeTier) -> None:
    """The last one's bytes are there, and nothing is taken for corrupt."""
    tier = make(4096)
    keys = [key_of(number) for number in range(3)]
    tier.store(keys, [page_of(key, 4096, full=True) for key in keys])
    page = bytearray(4096)
    assert tier.load(keys, [page] * 3) == [Loaded.OK] * 3
    assert tier.lookup(keys) == [True] * 3


def test_what_was_stored_comes_back(make: MakeTier) -> None:
    tier = make(PAGE_BYTES)
    a, b, c = map(key_of, range(3))
    assert store(tier, a, b) == [Stored.OK] * 2
    assert store(tier, b, c) == [Stored.PRESENT, Stored.OK]
    assert tier.lookup([a, b, c, key_of(9)]) == [True, True, True, False]
    assert load(tier, a, key_of(9), c, a) == [Loaded.OK, Loaded.MISSING, Loaded.OK, Loaded.OK]
    assert tier.discard([a, key_of(9)]) == 1
    assert tier.lookup([a, b]) == [False, True]
    assert load(tier, a) == [Loaded.MISSING]
    stats = tier.stats()
    sizes = [len(page_of(key, PAGE_BYTES)) for key in (a, b, c)]
    assert (stats.stored_pages, stats.stored_bytes) == (3, sum(sizes))
    assert (stats.loaded_pages, stats.loaded_bytes, stats.missing_pages) == (3, 2 * sizes[0] + sizes[2], 2)
    assert tier.used_bytes in (None, sizes[1] + sizes[2])


def test_changes_tell_what_came_and_went(make: MakeTier) -> None:
    tier = make(PAGE_BYTES)
    a, b = map(key_of, range(2))
    store(tier, a)
    store(tier, a, b)
    tier.discard([a, a])
    assert tier.take_changes() == [
        Change(ChangeKind.STORED, a),
        Change(ChangeKind.STORED, b),
        Change(ChangeKind.REMOVED, a),
    ]
    assert tier.take_changes() == []
    tier.reports_changes = False
    store(tier, a)
    assert tier.take_changes() == []


def test_clear_forgets_all(make: MakeTier) -> None:
    tier = make(PAGE_BYTES)
    keys = [key_of(number) for number in range(5)]
    store(tier, *keys)
    assert tier.clear() == 5
    assert tier.lookup(keys) == [False] * 5
    assert tier.take_changes()[-1] == Change(ChangeKind.CLEARED, b"")
    assert store(tier, keys[0]) == [Stored.OK]
    assert load(tier, *keys[:2]) == [Loaded.OK, Loaded.MISSING]


def test_a_page_twice_in_one_call(make: MakeTier) -> None:
    tier = make(PAGE_BYTES)
    a = key_of(0)
    assert set(store(tier, a, a)) <= {Stored.OK, Stored.PRESENT}
    assert tier.lookup([a]) == [True]
    assert load(tier, a, a) == [Loaded.OK] * 2


def test_buffers_of_any_kind(make: MakeTier) -> None:
    np = pytest.importorskip("numpy")
    tier = make(PAGE_BYTES)
    a, b, c = map(key_of, range(3))
    numbers = np.arange(100, dtype=np.float32).reshape(10, 10)
    assert tier.store([a, b, c], [bytearray(b"xyz"), memoryview(numbers), b"1"]) == [Stored.OK] * 3
    back = np.zeros((10, 10), np.float32)
    assert tier.load([b], [memoryview(back)]) == [Loaded.OK]
    assert (back == numbers).all()


def test_pages_that_do_not_fit_are_refused_by_name(make: MakeTier) -> None:
    tier = make(PAGE_BYTES)
    a, b = map(key_of, range(2))
    with pytest.raises(PageError, match=f"{b.hex()} has {PAGE_BYTES + 1} bytes; this tier takes 1 to {PAGE_BYTES}"):
        tier.store([a, b], [b"good", bytes(PAGE_BYTES + 1)])
    with pytest.raises(PageError, match="0 bytes"):
        tier.store([a], [b""])
    with pytest.raises(PageError, match="1 keys with 2 pages"):
        tier.store([a], [b"good", b"good"])
    with pytest.raises(PageError, match="not one run"):
        tier.store([a], [memoryview(b"every second byte")[::2]])
    with pytest.raises(PageError, match="cannot be written"):
        tier.load([a], [memoryview(b"good")])
    with pytest.raises(KeyLengthError):
        tier.store([b""], [b"good"])
    with pytest.raises(KeyLengthError):
        tier.store([bytes(2**16 + 1)], [b"good"])
    assert tier.lookup([a, b]) == [False, False]
    assert tier.stats().stored_pages == 0


def test_a_buffer_of_another_length_gets_nothing(make: MakeTier) -> None:
    """The page is good, and stays for those whom it fits."""
    tier = make(PAGE_BYTES)
    a = key_of(0)
    tier.store([a], [b"0123456789"])
    for length in (9, 11):
        assert tier.load([a], [memoryview(bytearray(length))]) == [Loaded.MISSING]
    assert tier.stats().missing_pages == 2
    into = memoryview(bytearray(10))
    assert tier.load([a], [into]) == [Loaded.OK]
    assert into == b"0123456789"


def test_nothing_asked_nothing_done(make: MakeTier) -> None:
    tier = make(PAGE_BYTES)
    assert tier.lookup([]) == tier.load([], []) == tier.store([], []) == []
    assert tier.discard([]) == tier.clear() == 0


def test_a_closed_tier_says_so(make: MakeTier) -> None:
    tier = make(PAGE_BYTES)
    tier.close()
    tier.close()
    for call in (lambda: store(tier, key_of(0)), lambda: load(tier, key_of(0)), lambda: tier.lookup([key_of(0)])):
        with pytest.raises(TierClosedError):
            call()


@pytest.mark.parametrize("seed", range(60 if LONG else 3))
def test_random_operations_against_a_dictionary(make: MakeTier, seed: int) -> None:
    """The changes alone say what is there."""
    tier = make(PAGE_BYTES)
    rng = random.Random(seed)
    keys = [key_of(number) for number in range(16)]
    there: dict[bytes, bytes] = {}
    for _ in range(150):
        some = rng.choices(keys, k=rng.randint(1, 5))
        action = rng.choices(["store", "load", "discard", "clear"], [10, 10, 3, 0.3])[0]
        if action == "store":
            before = set(there)
            results = store(tier, *some)
            if len(set(some)) == len(some):
                assert [result is Stored.PRESENT for result in results] == [key in before for key in some]
            assert set(results) <= {Stored.OK, Stored.PRESENT}
            assert all(tier.lookup(some))
        elif action == "load":
            results = load(tier, *some)
            assert results == [Loaded.OK if key in there else Loaded.MISSING for key in some]
        elif action == "discard":
            assert tier.discard(some) == len(set(some) & set(there))
        else:
            assert tier.clear() == len(there)
        for kind, key in tier.take_changes():
            if kind is ChangeKind.STORED:
                assert key not in there
                there[key] = page_of(key, PAGE_BYTES)
            elif kind is ChangeKind.REMOVED:
                del there[key]
            else:
                there.clear()
        assert tier.lookup(keys) == [key in there for key in keys]
        if tier.capacity_bytes is not None:
            assert len(there) <= NUM_PAGES
            assert tier.used_bytes == sum(map(len, there.values()))


def test_threads_never_see_other_bytes(make: MakeTier) -> None:
    """Four threads on few pages, long enough that copies overlap."""
    tier = make(200_000)
    keys = [key_of(number) for number in range(24)]
    contents = {key: page_of(key, tier.page_bytes) for key in keys}
    wrong: list[object] = []

    def run(seed: int) -> None:
        rng = random.Random(seed)
        loaded = 0
        try:
            for _ in range(2000 if LONG else 150):
                some = rng.choices(keys, k=rng.randint(1, 2))
                action = rng.choices(["store", "load", "discard", "clear"], [5, 10, 1, 0.1])[0]
                if action == "store":
                    results = tier.store(some, [contents[key] for key in some])
                    wrong.extend(set(results) - {Stored.OK, Stored.PRESENT, Stored.NO_ROOM})
                elif action == "load":
                    pages = [memoryview(bytearray(len(contents[key]))) for key in some]
                    for key, page, result in zip(some, pages, tier.load(some, pages), strict=True):
                        loaded += result is Loaded.OK
                        if result is Loaded.OK and page != contents[key]:
                            wrong.append(key)
                        if result not in (Loaded.OK, Loaded.MISSING):
                            wrong.append(result)
                elif action == "discard":
                    tier.discard(some)
                else:
                    tier.clear()
            assert loaded
        except BaseException as why:
            wrong.append(why)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
