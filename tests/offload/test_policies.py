"""The order in which pages go, against models that are lists."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from blockpool.offload.arc import ArcPolicy
from blockpool.offload.lru import LruPolicy
from blockpool.offload.policy import Policy
from tests.sizes import machine_settings

KEYS = st.integers(0, 11)


class LruModel:
    """The times of last use."""

    def __init__(self) -> None:
        self.now = 0
        self.last_use: dict[int, int] = {}

    def added(self, key: int) -> None:
        self.now += 1
        self.last_use[key] = self.now

    used = added

    def removed(self, key: int) -> None:
        self.last_use.pop(key)

    evicted = removed

    def order(self) -> list[int]:
        return sorted(self.last_use, key=self.last_use.__getitem__)


class ArcModel:
    """The paper's four lists, most recent last."""

    def __init__(self, c: int) -> None:
        self.c, self.p = c, 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def added(self, key: int) -> None:
        to = self.t1
        if key in self.b1:
            self.p = min(self.c, self.p + max(1, len(self.b2) / len(self.b1)))
            self.b1.remove(key)
            to = self.t2
        elif key in self.b2:
            self.p = max(0, self.p - max(1, len(self.b1) / len(self.b2)))
            self.b2.remove(key)
            to = self.t2
        to.append(key)
        self.trim()

    def used(self, key: int) -> None:
        self.removed(key)
        self.t2.append(key)

    def removed(self, key: int) -> None:
        (self.t1 if key in self.t1 else self.t2).remove(key)

    def evicted(self, key: int) -> None:
        (self.b1 if key in self.t1 else self.b2).append(key)
        self.removed(key)
        self.trim()

    def trim(self) -> None:
        while len(self.t1) + len(self.b1) > self.c:
            self.b1.pop(0)
        while len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) > 2 * self.c:
            self.b2.pop(0)

    def order(self) -> list[int]:
        t1, t2, order = list(self.t1), list(self.t2), []
        while t1 or t2:
            from_t1 = bool(t1) and (len(t1) > self.p or not t2)
            order.append((t1 if from_t1 else t2).pop(0))
        return order


class Machine(RuleBasedStateMachine):
    capacity = 5
    policy: Policy[int]
    model: Any

    def here(self) -> list[int]:
        return self.model.order()  # type: ignore[no-any-return]

    @rule(key=KEYS)
    def ask(self, key: int) -> None:
        """As a cache does."""
        if key in self.policy:
            self.policy.used(key)
            self.model.used(key)
            return
        if len(self.policy) == self.capacity:
            victim = next(iter(self.policy.victims()))
            self.policy.evicted(victim)
            self.model.evicted(victim)
        self.policy.added(key)
        self.model.added(key)

    @precondition(lambda self: self.here())
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.here())))
        self.policy.removed(key)
        self.model.removed(key)

    @precondition(lambda self: self.here())
    @rule(data=st.data())
    def evict_another(self, data: st.DataObject) -> None:
        """The first may not go, as when it is being read."""
        key = data.draw(st.sampled_from(sorted(self.here())))
        self.policy.evicted(key)
        self.model.evicted(key)

    @invariant()
    def same_order(self) -> None:
        assert list(self.policy.victims()) == self.model.order()
        assert len(self.policy) == len(self.model.order())
        assert [key for key in range(12) if key in self.policy] == sorted(self.model.order())


class LruMachine(Machine):
    def __init__(self) -> None:
        super().__init__()
        self.policy = LruPolicy()
        self.model = LruModel()

    @rule()
    def clear(self) -> None:
        self.policy.clear()
        self.model = LruModel()


class ArcMachine(Machine):
    def __init__(self) -> None:
        super().__init__()
        self.policy = ArcPolicy(self.capacity)
        self.model = ArcModel(self.capacity)

    @rule()
    def clear(self) -> None:
        self.policy.clear()
        self.model = ArcModel(self.capacity)

    @invariant()
    def same_split(self) -> None:
        assert isinstance(self.policy, ArcPolicy)
        assert self.policy.recent_share == self.model.p


LruMachine.TestCase.settings = machine_settings()
ArcMachine.TestCase.settings = machine_settings()
TestLru = LruMachine.TestCase
TestArc = ArcMachine.TestCase


def hits(policy: Policy[int], capacity: int, keys: list[int]) -> int:
    found = 0
    for key in keys:
        if key in policy:
            found += 1
            policy.used(key)
            continue
        if len(policy) == capacity:
            policy.evicted(next(iter(policy.victims())))
        policy.added(key)
    return found


def test_a_scan_does_not_displace_what_is_used_again() -> None:
    often = list(range(50)) * 2
    scan = list(range(1000, 1400))
    arc: ArcPolicy[int] = ArcPolicy(100)
    lru: LruPolicy[int] = LruPolicy()
    for policy in (arc, lru):
        hits(policy, 100, often + scan)
    assert all(key in arc for key in range(50))
    assert not any(key in lru for key in range(50))


def test_the_split_grows_when_recent_pages_return() -> None:
    arc: ArcPolicy[int] = ArcPolicy(10)
    hits(arc, 10, list(range(8)) * 2)  # frequent
    hits(arc, 10, [100, 101, 102, 103, 100])  # 100 was evicted when 102 came, and returns
    assert arc.recent_share == 1
    assert 100 in arc


def test_the_split_shrinks_when_frequent_pages_return() -> None:
    arc: ArcPolicy[int] = ArcPolicy(4)
    hits(arc, 4, [0, 0, 1, 1, 2, 3, 4, 2])  # 2 returns: more for recent pages
    share = arc.recent_share
    assert share >= 1
    hits(arc, 4, list(range(20, 24)))
    gone = [key for key in (0, 1) if key not in arc]
    assert gone
    hits(arc, 4, gone)
    assert arc.recent_share < share


@pytest.mark.parametrize("seed", range(3))
def test_a_mixed_load_hits_no_less_than_lru(seed: int) -> None:
    """A working set used again and again, between scans of pages that never return."""
    rng = random.Random(seed)
    keys: list[int] = []
    for scan in range(40):
        keys += rng.choices(range(80), k=120)
        keys += range(1000 + scan * 100, 1100 + scan * 100)
    assert hits(ArcPolicy(100), 100, keys) > 1.2 * hits(LruPolicy(), 100, keys)
