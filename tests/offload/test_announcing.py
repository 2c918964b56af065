"""Events of the tiers: a mirror of them and of the pool knows what each holds, tier by tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockpool.managers import SlidingWindowSpec
from blockpool.offload import DiskTier, HostTier, Namespace, OffloadError
from blockpool.offload.namespace import digest_of
from blockpool.pool import AllBlocksCleared, BlockRemoved, BlockStored
from blockpool.wire.ledger import Ledger
from tests.offload.house import FULL, House, prompt
from tests.offload.plain_tier import PlainTier


def announced(ledger: Ledger) -> dict[tuple[int | None, str | None], set[bytes | int]]:
    return {place: set(keys) for place, keys in ledger._keys.items() if keys}


def test_what_is_announced_is_what_the_tiers_hold() -> None:
    fast, slow = PlainTier(5, "fast"), PlainTier(12, "slow", "STORAGE")
    house = House([fast, slow], usable_blocks=30, specs=(FULL, SlidingWindowSpec(4, 6)), events=True)
    ledger = Ledger()
    for number in range(8):
        house.run(prompt(f"r{number}", [*range(number % 3 * 4), *range(10 * number, 10 * number + 14)]))
        for event in house.offloader.take_events():
            ledger.apply(event)
        expected: dict[tuple[int | None, str | None], set[bytes | int]] = {}
        for tier in (fast, slow):
            for key in tier.pages:
                group_id = int.from_bytes(key[-4:], "big")
                expected.setdefault((group_id, tier.medium), set()).add(digest_of(key))
        assert announced(ledger) == expected
    fast.clear()
    for event in house.offloader.take_events():
        ledger.apply(event)
    assert {medium for _, medium in announced(ledger)} == {"STORAGE"}


def test_stores_say_parent_tokens_and_kind() -> None:
    tier = PlainTier(100, medium="CPU")
    house = House([tier], usable_blocks=30, events=True)
    request = prompt("a", 13)
    house.run(request)
    digests = [request.digests(at, at + 1) for at in range(3)]
    events = house.offloader.take_events()
    assert [event for event in events if not isinstance(event, BlockStored)] == []
    stored = [event for event in events if isinstance(event, BlockStored)]
    assert [event.block_hashes for event in stored] == [[digest] for digest in digests]
    assert [event.parent_block_hash for event in stored] == [None, *digests[:2]]
    assert [event.token_ids for event in stored] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert {(event.medium, event.block_size, event.group_idx, event.kv_cache_spec_kind) for event in stored} == {
        ("CPU", 4, 0, "full_attention")
    }
    tier.discard(list(tier.pages)[:1])
    tier.clear()
    removed, cleared = house.offloader.take_events()
    assert isinstance(removed, BlockRemoved)
    assert (removed.block_hashes, removed.medium) == ([digests[0]], "CPU")
    assert isinstance(cleared, AllBlocksCleared)
    assert cleared.medium == "CPU"
    assert house.offloader.take_events() == []


@pytest.mark.parametrize("events", [False, True])
def test_nothing_is_kept_for_nobody(events: bool) -> None:
    tier = HostTier(64 * 100, 64)
    house = House([tier], usable_blocks=30, events=events)
    house.run(prompt("a", 13))
    assert len(house.offloader.take_events()) == (3 if events else 0)
    assert tier.take_changes() == []


def test_what_a_disk_kept_is_announced_when_it_is_opened_again(tmp_path: Path) -> None:
    def start() -> tuple[House, DiskTier]:
        disk = DiskTier(tmp_path / "tier", 100 * 64, 64)
        return House([disk], usable_blocks=20, events=True), disk

    house, disk = start()
    house.run(prompt("a", 17))
    disk.close()
    house, disk = start()
    events = house.offloader.take_events()
    assert {event.medium for event in events if isinstance(event, BlockStored)} == {"STORAGE"}
    assert len(events) == 4
    disk.close()


def test_only_pages_that_can_be_read_here_are_announced_and_by_one() -> None:
    tier = HostTier(64 * 100, 64)
    other = House([tier], usable_blocks=20, namespace=Namespace(model="other"))
    other.run(prompt("a", 17))
    house = House([tier], usable_blocks=20, events=True)
    other.run(prompt("b", [9] * 9))
    house.run(prompt("c", 9))
    assert len(house.offloader.take_events()) == 2
    with pytest.raises(OffloadError, match=r"'host'.*another Offloader"):
        House([tier], usable_blocks=20, events=True)
    house.offloader.close()
    house.offloader.close()
    assert not tier.reports_changes
    other.run(prompt("d", [8] * 9))
    assert tier.take_changes() == []
    House([tier], usable_blocks=20, events=True)


def test_tiers_of_one_medium_cannot_be_told_apart() -> None:
    tiers = [PlainTier(10, "one"), PlainTier(10, "two")]
    with pytest.raises(OffloadError, match=r"\['CPU', 'CPU'\]"):
        House(tiers, events=True)
    House(tiers)
