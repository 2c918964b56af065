"""New weights, salts, sleep and wake, restarts, quotas: nothing old is served, and what may stay stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockpool.hashing import ExtraKeys
from blockpool.managers import FullAttentionSpec
from blockpool.offload import DiskTier, HostTier, Namespace, OffloadError
from tests.offload.house import FULL, NAMESPACE, House, prompt
from tests.offload.plain_tier import PlainTier

PAGE = 64  # of the memory of fingerprints: 4 slots of 16 bytes


def generation(number: int) -> ExtraKeys:
    return ExtraKeys(generation=number)


def test_new_weights_find_nothing_old_and_nothing_is_scanned() -> None:
    tier = PlainTier(100)
    house = House([tier], usable_blocks=20)
    house.run(prompt("a", 17, generation(1)))
    assert house.computed(prompt("b", 17, generation(2))) == 17  # neither above nor below
    house.forget()
    assert house.computed(prompt("c", 17, generation(2))) == 1
    assert house.computed(prompt("d", 17, generation(1))) == 1  # who goes back to the old ones finds theirs
    house.sound()


def test_a_request_in_flight_cannot_publish_under_new_weights() -> None:
    """It was begun under the old ones: whatever it leaves has their name, however late it comes."""
    tier = PlainTier(100)
    house = House([tier], usable_blocks=40)
    old = prompt("old", 9, generation(1), max_tokens=20)
    house.engine.add_request(old)
    house.step()
    for _ in range(19):  # the weights change here: what is computed from now on mixes both
        house.step()
        house.move()
    house.poll()
    house.move()
    assert len(tier.pages) >= 6
    again = prompt("new", old.tokens[:25], generation(2))
    assert house.manager.get_computed_blocks(again).num_tokens == 0
    assert house.offloader._finder.furthest(again, 0, tier.lookup) == 0
    house.run()
    house.sound()


def test_a_salted_region_shares_the_public_prefix_before_it() -> None:
    tier = PlainTier(100)
    house = House([tier], usable_blocks=40)
    house.run(prompt("a", 25, ExtraKeys(salt_from=[(8, "tenant a")])))
    house.forget()
    request = prompt("b", 25, ExtraKeys(salt_from=[(8, "tenant b")]))
    assert house.computed(request) == 25 - 8
    assert house.offloader.num_loaded_tokens == 8
    house.forget()
    assert house.computed(prompt("c", 25, ExtraKeys(salt_from=[(8, "tenant a")]))) == 1
    house.sound()


@pytest.mark.parametrize("keep", [None, ("slow",), ()])
def test_sleep_loses_the_gpu_and_the_tiers_that_are_not_kept(keep: tuple[str, ...] | None) -> None:
    fast, slow = PlainTier(100, "fast"), PlainTier(100, "slow", "STORAGE")
    house = House([fast, slow], usable_blocks=20, num_threads=1)
    try:
        house.engine.add_request(prompt("a", 17))
        assert house.engine.run()
        assert house.offloader.sleep(house.scheduler, keep)
        house.store.clear(0, list(range(1, 21)))  # the memory is given back, and comes back empty
        assert (bool(fast.pages), bool(slow.pages)) == (keep is None, keep != ())
        request = prompt("b", 17)
        house.engine.add_request(request)
        house.engine.run()
        house.offloader.drain(house.scheduler)
        assert house.offloader.num_loaded_tokens == (0 if keep == () else 16)
        house.sound()
    finally:
        house.offloader.close()


def test_before_sleep_what_would_go_down_at_eviction_goes() -> None:
    tier = PlainTier(1000)
    house = House([tier], usable_blocks=300, num_threads=1, store_when="eviction", evict_ahead=4, most_pages=8)
    try:
        for number in range(5):
            house.engine.add_request(prompt(f"r{number}", range(100 * number, 100 * number + 81)))
        house.engine.run()
        assert house.offloader.sleep(house.scheduler)
        assert len(tier.pages) == 100
        house.sound()
    finally:
        house.offloader.close()


def test_a_tier_that_cannot_be_cleared_is_named() -> None:
    gone, here = PlainTier(100, "gone"), PlainTier(100, "here")
    gone.is_reachable = False  # type: ignore[attr-defined]
    house = House([gone, here], usable_blocks=20)
    house.run(prompt("a", 9))
    with pytest.raises(OffloadError, match=r"\['gone'\] cannot be reached"):
        house.offloader.sleep(house.scheduler, ())
    assert here.pages == {}
    assert house.manager.get_computed_blocks(prompt("b", 9)).num_tokens == 0


def test_nobody_is_put_to_sleep_who_runs() -> None:
    tier = PlainTier(100)
    house = House([tier], usable_blocks=20, num_threads=1)
    try:
        house.engine.add_request(prompt("a", 9, max_tokens=5))
        house.step()
        refused = house.offloader.sleep(house.scheduler, ())
        assert not refused
        assert list(refused.requests) == ["a"]
        assert tier.pages  # and nothing was cleared
        with pytest.raises(OffloadError, match="'attic'"):
            house.offloader.sleep(house.scheduler, ["attic"])
        house.engine.run()
    finally:
        house.offloader.close()


def test_a_worker_that_starts_again_finds_its_disk_warm(tmp_path: Path) -> None:
    def start() -> tuple[House, DiskTier]:
        disk = DiskTier(tmp_path / "tier", 100 * PAGE, PAGE)
        return House([HostTier(100 * PAGE, PAGE), disk], usable_blocks=20), disk

    house, disk = start()
    house.run(prompt("a", 17))
    disk.close()
    house, disk = start()
    assert house.computed(prompt("b", 17)) == 1
    assert house.offloader.tiers[0].used_bytes == 4 * PAGE  # promoted
    disk.close()
    house.sound()


def test_another_layout_under_the_same_hashes_is_another_namespace() -> None:
    tier = PlainTier(100)
    house = House([tier], usable_blocks=20)
    house.run(prompt("a", 17))
    other = House([tier], usable_blocks=20, namespace=Namespace(model="shadow", layout="fp8"))
    assert other.computed(prompt("b", 17)) == 17
    same = House([tier], usable_blocks=20)
    assert same.computed(prompt("c", 17)) == 1


def test_another_block_size_is_another_page() -> None:
    """The digest at the end of a larger block is that of a smaller one."""
    tier = PlainTier(100)
    house = House([tier], usable_blocks=40)
    house.run(prompt("a", 33))
    other = House([tier], usable_blocks=40, specs=(FullAttentionSpec(8),))
    assert other.computed(prompt("b", 33)) == 33
    assert other.offloader.load_failures == []
    other.forget()
    assert other.computed(prompt("c", 33)) == 1
    house.forget()
    assert house.computed(prompt("d", 33)) == 1


def test_clearing_one_tier_leaves_the_others() -> None:
    fast, slow = HostTier(100 * PAGE, PAGE), PlainTier(100, "slow", "STORAGE")
    house = House([fast, slow], usable_blocks=20)
    house.run(prompt("a", 17))
    assert fast.clear() == 4
    assert len(slow.pages) == 4
    house.forget()
    assert house.computed(prompt("b", 17)) == 1
    assert slow.clear() == 4
    house.forget()
    assert house.computed(prompt("c", 17)) == 1  # the fast one got its copy back


def test_a_namespace_stays_within_its_quota_and_takes_from_nobody() -> None:
    mine, other = NAMESPACE, Namespace(model="other")
    tier = HostTier(10 * PAGE, PAGE, quotas={mine.prefix: 3 * PAGE})
    first = House([tier], usable_blocks=40, namespace=other)
    first.run(prompt("a", 29))
    house = House([tier], usable_blocks=40)
    house.run(prompt("b", 33))
    assert tier.used_bytes == 10 * PAGE
    first.forget()
    assert first.computed(prompt("c", 29)) == 1  # all seven are still there
    house.forget()
    assert house.computed(prompt("d", 33)) >= 33 - 12


def test_a_full_block_alone_is_a_page() -> None:
    """A tail inside a block is the pool's own: pages are of whole blocks."""
    tier = PlainTier(100)
    house = House([tier], usable_blocks=20, specs=(FULL,))
    house.run(prompt("a", 11))
    assert len(tier.pages) == 2
