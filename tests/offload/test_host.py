"""The books of a tier of slots: quotas, order, readers and writers. All of it holds for the disk as well."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from blockpool.offload.errors import PolicyError, TierSizeError
from blockpool.offload.host import HostTier
from blockpool.offload.namespace import Namespace
from blockpool.offload.tier import ChangeKind, Loaded, Stored
from tests.offload.content import ONE, TWO, key_of, page_of, room_for
from tests.sizes import machine_settings

PAGE_BYTES = 100
THREE = Namespace(model="three")
KEYS = [key_of(number, namespace) for namespace in (ONE, TWO, THREE) for number in range(5)]


def tier_of(num_pages: int, **options: Any) -> HostTier:
    return HostTier(num_pages * PAGE_BYTES, PAGE_BYTES, **options)


def store(tier: HostTier, *keys: bytes) -> list[Stored]:
    return tier.store(keys, [page_of(key, PAGE_BYTES) for key in keys])


def load(tier: HostTier, *keys: bytes) -> list[Loaded]:
    pages = [room_for(key, PAGE_BYTES) for key in keys]
    results = tier.load(keys, pages)
    for key, page, result in zip(keys, pages, results, strict=True):
        assert result is not Loaded.OK or page == page_of(key, PAGE_BYTES)
    return results


class QuotaMachine(RuleBasedStateMachine):
    """ONE may have 3 pages and TWO none; others have what is left of 7. The model: a list for each, oldest first."""

    def __init__(self) -> None:
        super().__init__()
        quotas = {ONE.prefix: 3 * PAGE_BYTES + 99, TWO.prefix: PAGE_BYTES - 1}
        self.tier = tier_of(7, quotas=quotas)
        self.room = {ONE.prefix: 3, TWO.prefix: 0, THREE.prefix: 4}
        self.order: dict[bytes, list[bytes]] = {prefix: [] for prefix in self.room}

    def of(self, key: bytes) -> list[bytes]:
        return self.order[key[:8]]

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=5, unique=True))
    def store(self, keys: list[bytes]) -> None:
        results = store(self.tier, *keys)
        held = {key for key in keys if key in self.of(key)}  # what the call itself has found or stored
        expected = []
        for key in keys:
            mine = self.of(key)
            if key in mine:
                expected.append(Stored.PRESENT)
                continue
            num_new = sum(other not in mine for other in held if other[:8] == key[:8])
            victims = [other for other in mine if other not in held]
            if len(mine) + num_new >= self.room[key[:8]]:
                if not victims:
                    expected.append(Stored.NO_ROOM)
                    continue
                mine.remove(victims[0])
            held.add(key)
            expected.append(Stored.OK)
        self.use([key for key in keys if key in held])
        assert results == expected

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=5))
    def load(self, keys: list[bytes]) -> None:
        there = [key in self.of(key) for key in keys]
        assert load(self.tier, *keys) == [Loaded.OK if here else Loaded.MISSING for here in there]
        self.use([key for key, here in zip(keys, there, strict=True) if here])

    def use(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            mine = self.of(key)
            if key in mine:
                mine.remove(key)
            mine.append(key)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=2, unique=True))
    def discard(self, keys: list[bytes]) -> None:
        there = [key for key in keys if key in self.of(key)]
        assert self.tier.discard(keys) == len(there)
        for key in there:
            self.of(key).remove(key)

    @rule()
    def clear(self) -> None:
        assert self.tier.clear() == sum(map(len, self.order.values()))
        for keys in self.order.values():
            keys.clear()

    @invariant()
    def same_pages(self) -> None:
        assert sorted(self.tier.keys()) == sorted(key for mine in self.order.values() for key in mine)
        assert self.tier.audit() == []
        assert len(self.order[ONE.prefix]) <= 3

    def teardown(self) -> None:
        self.tier.close()


QuotaMachine.TestCase.settings = machine_settings(60)
TestQuotas = QuotaMachine.TestCase


def during(tier: HostTier, method: str, monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Do something in the middle of the next page that is read or written, as another thread might."""
    original = getattr(tier, method)

    def first(*arguments: Any) -> Any:
        monkeypatch.setattr(tier, method, original)
        act()
        return original(*arguments)

    monkeypatch.setattr(tier, method, first)


def test_a_page_that_is_read_is_not_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = tier_of(2)
    a, b, c, d = KEYS[:4]
    store(tier, b)
    store(tier, a)
    load(tier, b)  # a would go first
    results: list[Stored] = []
    during(tier, "_read", monkeypatch, lambda: results.extend([*store(tier, c), *store(tier, d)]))
    assert load(tier, a) == [Loaded.OK]
    assert results == [Stored.OK, Stored.OK]
    assert tier.lookup([a, b, c, d]) == [True, False, False, True]
    assert not tier.audit()


def test_no_room_when_all_pages_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = tier_of(1)
    a, b = KEYS[:2]
    store(tier, a)
    results: list[Stored] = []
    during(tier, "_read", monkeypatch, lambda: results.extend(store(tier, b)))
    assert load(tier, a) == [Loaded.OK]
    assert results == [Stored.NO_ROOM]
    assert tier.stats().refused_pages == 1
    assert store(tier, b) == [Stored.OK]


def test_a_page_that_is_discarded_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot is nobody else's before the read is over."""
    tier = tier_of(1)
    a, b = KEYS[:2]
    store(tier, a)
    seen: list[object] = []

    def discard_and_store() -> None:
        seen.extend([tier.discard([a]), tier.lookup([a]), store(tier, b)])

    during(tier, "_read", monkeypatch, discard_and_store)
    assert load(tier, a) == [Loaded.OK]
    assert seen == [1, [False], [Stored.NO_ROOM]]
    assert store(tier, b) == [Stored.OK]
    assert not tier.audit()


def test_a_page_that_is_written_cannot_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = tier_of(2)
    a = KEYS[0]
    seen: list[object] = []
    during(tier, "_write", monkeypatch, lambda: seen.extend([tier.lookup([a]), load(tier, a)]))
    assert store(tier, a) == [Stored.OK]
    assert seen == [[False], [Loaded.MISSING]]
    assert tier.lookup([a]) == [True]


@pytest.mark.parametrize("forget", ["discard", "clear"])
def test_a_page_that_is_forgotten_while_it_is_written(monkeypatch: pytest.MonkeyPatch, forget: str) -> None:
    tier = tier_of(2)
    a, b = KEYS[:2]
    during(tier, "_write", monkeypatch, lambda: tier.clear() if forget == "clear" else tier.discard([a]))
    assert store(tier, a, b) == [Stored.OK] * 2
    assert tier.lookup([a, b]) == [False, forget == "discard"]
    assert not tier.audit()


def test_two_threads_store_the_same_page(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = tier_of(2)
    a = KEYS[0]
    results: list[Stored] = []
    during(tier, "_write", monkeypatch, lambda: results.extend(store(tier, a)))
    assert store(tier, a) == [Stored.PRESENT]
    assert results == [Stored.OK]
    assert load(tier, a) == [Loaded.OK]
    assert not tier.audit()


def test_close_waits_for_who_is_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is there until the last copy is done."""
    tier = tier_of(2)
    store(tier, KEYS[0])
    arena = tier._arena
    closing = threading.Thread(target=tier.close)

    def close_elsewhere() -> None:
        closing.start()
        while not tier._closed:
            pass
        with tier._calls:  # which close gives up only to wait
            assert tier._arena is arena

    during(tier, "_read", monkeypatch, close_elsewhere)
    assert load(tier, KEYS[0]) == [Loaded.OK]
    closing.join()
    assert tier._arena is not arena


def test_an_exception_in_the_middle_gives_slots_back(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = tier_of(2)
    a, b = KEYS[:2]

    def fail() -> None:
        raise KeyboardInterrupt

    during(tier, "_write", monkeypatch, fail)
    with pytest.raises(KeyboardInterrupt):
        store(tier, a, b)
    assert tier.lookup([a, b]) == [False, False]
    assert store(tier, a, b) == [Stored.OK] * 2
    during(tier, "_read", monkeypatch, fail)
    with pytest.raises(KeyboardInterrupt):
        load(tier, a, b)
    assert not tier.audit()


def test_of_a_prefix_the_end_is_evicted_first() -> None:
    tier = tier_of(4)
    store(tier, *KEYS[:4])
    store(tier, KEYS[4])
    assert tier.lookup(KEYS[:5]) == [True, True, True, False, True]
    load(tier, *KEYS[:3])
    store(tier, KEYS[5], KEYS[6])
    assert tier.lookup(KEYS[:7]) == [True, True, False, False, False, True, True]


def test_pages_of_one_call_do_not_evict_each_other() -> None:
    tier = tier_of(2)
    assert store(tier, *KEYS[:3]) == [Stored.OK, Stored.OK, Stored.NO_ROOM]
    assert tier.lookup(KEYS[:3]) == [True, True, False]
    assert store(tier, KEYS[2], KEYS[1], KEYS[3]) == [Stored.OK, Stored.PRESENT, Stored.NO_ROOM]


@pytest.mark.parametrize("seed", range(8))
def test_changes_that_nobody_takes_are_few(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """And say still what came and went since they were taken."""
    monkeypatch.setattr("blockpool.offload.shelf.FEW_CHANGES", 0)
    tier, rng, most = tier_of(4), random.Random(seed), 4 * 4
    tier.reports_changes = True
    there: set[bytes] = set()
    num_changes = 0
    for step in range(400):
        some = rng.sample(KEYS, rng.randint(1, 3))
        action = rng.choices([store, HostTier.discard, HostTier.clear], [8, 4, 0.1])[0]
        _ = (
            store(tier, *some)
            if action is store
            else tier.clear()
            if action is HostTier.clear
            else tier.discard(some)
        )
        assert len(tier._shelf._changes) <= most
        if step % 100 == 99:
            for kind, key in tier.take_changes():
                num_changes += 1
                if kind is ChangeKind.STORED:
                    assert key not in there
                    there.add(key)
                elif kind is ChangeKind.REMOVED:
                    there.remove(key)
                else:
                    there.clear()
            assert sorted(there) == sorted(tier.keys())
    assert num_changes


def test_sizes_and_names_are_checked() -> None:
    with pytest.raises(TierSizeError, match="less than one page of 100 bytes"):
        HostTier(99, 100)
    with pytest.raises(TierSizeError, match="a page of 0 bytes"):
        HostTier(99, 0)
    with pytest.raises(TierSizeError, match="1 pages more than the capacity of 2 pages"):
        tier_of(2, quotas={ONE.prefix: 200, TWO.prefix: 100})
    with pytest.raises(TierSizeError, match="negative"):
        tier_of(2, quotas={ONE.prefix: -1})
    with pytest.raises(PolicyError, match="'clock' is not known"):
        tier_of(2, policy="clock")


def test_capacity_is_whole_pages() -> None:
    tier = HostTier(250, 100)
    assert tier.capacity_bytes == 200
    assert (tier.name, tier.medium, tier.is_remote) == ("host", "CPU", False)
