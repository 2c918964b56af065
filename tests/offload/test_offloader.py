"""What goes down, when, under what guard; what comes up, and what is said when it does not."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator, Sequence
from threading import Event
from typing import Any

import pytest

from blockpool.cache import KVCacheConfig, KVCacheManager
from blockpool.engine import FinishReason, ShadowStore
from blockpool.managers import KVCacheGroupSpec, MambaSpec, SlidingWindowSpec
from blockpool.offload import Loaded, Offloader, OffloadError, Stored
from blockpool.offload.offloader import Answer
from blockpool.offload.tier import Buffer
from tests.offload.house import FULL, NAMESPACE, House, prompt
from tests.offload.plain_tier import PlainTier

# -- down ----------------------------------------------------------------------------------------------


def test_only_what_an_acknowledged_step_has_written_goes_down() -> None:
    tier = PlainTier(100)
    house = House([tier])
    house.scheduler.add_request(prompt("a", 9))
    output = house.scheduler.schedule()
    house.poll()
    assert house.move() == 0
    results = house.worker.execute(output)
    house.poll()
    assert house.move() == 0
    house.scheduler.update(output.step_id, results)
    house.poll()
    house.move()
    assert len(tier.pages) == 2  # the third block is not full
    house.poll()
    house.sound()


def test_a_step_that_never_ran_leaves_nothing_below() -> None:
    tier = PlainTier(100)
    house = House([tier])
    request = prompt("a", 9)
    manager = house.manager
    manager.begin_step(0)
    manager.allocate_slots(request, 9)
    manager.cancel_step(0)
    manager.free(request)
    manager.begin_step(0)
    manager.acknowledge(0)
    house.poll()
    assert house.move() == 0


def test_what_was_evicted_above_is_loaded_from_below() -> None:
    tier = PlainTier(100)
    house = House([tier])
    assert house.computed(prompt("a", 17)) == 17
    house.forget()
    again = prompt("b", 17)
    assert house.computed(again) == 1
    assert house.offloader.num_loaded_tokens == 16
    assert house.manager.stats.total.external_hits == 16
    house.sound()


def test_a_load_goes_on_where_the_local_hit_ends() -> None:
    tier = PlainTier(100)
    house = House([tier])
    house.run(prompt("a", 25))
    house.run(prompt("other", range(100, 116)))  # takes the deepest three of a's blocks
    hit = house.manager.get_computed_blocks(prompt("b", 25)).num_tokens
    assert 0 < hit < 24
    assert house.computed(prompt("b", 25)) == 1
    assert house.offloader.num_loaded_tokens == 24 - hit
    house.sound()


def test_a_block_that_is_handed_out_before_it_was_read_is_given_up() -> None:
    tier = PlainTier(100)
    house = House([tier], usable_blocks=3)
    house.engine.add_request(prompt("a", 9))
    house.step()
    house.poll()  # a's two blocks are on their way
    house.engine.add_request(prompt("b", range(50, 59)))
    house.step()  # and are b's now
    house.move()
    house.poll()
    assert house.offloader.losses["store: reused"] == 2
    house.move()
    house.poll()
    assert len(tier.pages) == 2  # b's
    house.forget()
    assert house.computed(prompt("c", 9)) == 9
    house.sound()


def test_a_block_that_is_handed_out_while_it_is_read_is_given_up() -> None:
    """The bytes are half the old and half the new owner's: they go nowhere."""
    tier = PlainTier(100)
    house = House([tier], usable_blocks=3)
    read_page = house.store.read_page

    def interrupted(group_id: int, block_id: int, page: memoryview) -> None:
        read_page(group_id, block_id, page)
        if not house.scheduler.has_work and not interrupted_once:
            interrupted_once.append(block_id)
            house.engine.add_request(prompt("b", range(50, 59)))
            house.scheduler.schedule()

    interrupted_once: list[int] = []
    house.engine.add_request(prompt("a", 9))
    house.step()
    house.poll()
    house.store.read_page = interrupted  # type: ignore[method-assign]
    house.move()
    assert interrupted_once
    assert tier.pages == {}
    house.poll()
    assert house.offloader.losses["store: reused"] == 2


def test_a_block_under_a_hold_waits_for_its_copy() -> None:
    tier = PlainTier(100)
    house = House([tier], usable_blocks=3, guard="hold")
    house.engine.add_request(prompt("a", 9))
    house.step()
    house.poll()
    assert house.pool.get_num_free_blocks() == 1
    house.engine.add_request(prompt("b", range(50, 59)))
    assert house.step() is None  # b waits
    house.move()
    assert len(tier.pages) == 2
    assert house.step() is not None
    house.poll()
    house.move()
    house.poll()
    house.sound()


def test_at_eviction_only_the_head_of_the_queue_goes_down() -> None:
    tier = PlainTier(100)
    house = House([tier], usable_blocks=8, store_when="eviction", evict_ahead=4)
    house.run(prompt("a", 25))
    assert len(tier.pages) <= 4
    before = len(tier.pages)
    for number in range(4):
        house.run(prompt(f"r{number}", range(100 * number + 100, 100 * number + 109)))
    assert len(tier.pages) > before
    assert house.computed(prompt("again", 25)) == 1  # all of it was written back before it went
    house.sound()


def test_after_n_hits() -> None:
    tier = PlainTier(100)
    house = House([tier], usable_blocks=20, store_when="hits=2")
    house.run(prompt("a", 9))
    house.run(prompt("b", 9))
    assert tier.pages == {}
    house.run(prompt("c", [0, 1, 2, 3, 9, 9, 9]))  # hits the first block alone
    assert len(tier.pages) == 1
    house.run(prompt("d", 9))
    assert len(tier.pages) == 2
    house.sound()


def test_each_tier_stores_when_it_is_told_to() -> None:
    fast, slow = PlainTier(100, "fast"), PlainTier(100, "slow", "STORAGE")
    house = House([fast, slow], usable_blocks=20, store_when={"slow": "hits=1"})
    house.run(prompt("a", 9))
    assert (len(fast.pages), len(slow.pages)) == (2, 0)
    house.run(prompt("b", 9))
    assert (len(fast.pages), len(slow.pages)) == (2, 2)
    assert fast.pages == slow.pages


def test_what_there_is_no_room_for_is_lost_and_counted_and_no_step_waits() -> None:
    tier = PlainTier(100)
    house = House([tier], usable_blocks=20, most_pages=3)
    house.engine.add_request(prompt("a", 33))
    house.step()
    house.poll()
    assert house.offloader.losses["store: busy"] == 5
    house.move()
    house.poll()
    assert len(tier.pages) == 3
    house.sound()


def test_requests_that_ask_for_it_leave_nothing() -> None:
    tier = PlainTier(100)
    house = House([tier])
    house.run(prompt("a", 9, no_store=True))
    assert tier.pages == {}
    house.run(prompt("b", 9))
    house.forget()
    assert house.computed(prompt("c", 9, skip_reading_prefix_cache=True)) == 9


# -- up ------------------------------------------------------------------------------------------------


def test_the_fastest_tier_that_has_a_page_gives_it_and_faster_ones_get_a_copy() -> None:
    fast, slow = PlainTier(2, "fast"), PlainTier(100, "slow", "STORAGE")
    house = House([fast, slow], usable_blocks=20)
    house.run(prompt("a", 17))
    kept_fast = set(fast.pages)
    assert len(kept_fast) == 2
    house.forget()
    assert house.computed(prompt("b", 17)) == 1
    assert set(fast.pages) == kept_fast or len(fast.pages) == 2
    assert len(slow.pages) == 4


def test_several_groups_each_load_what_they_need() -> None:
    tier = PlainTier(100)
    specs = (FULL, SlidingWindowSpec(4, sliding_window=6), MambaSpec(4, mamba_cache_mode="align"))
    house = House([tier], usable_blocks=60, specs=specs)
    house.run(prompt("a", 33))
    house.forget()
    request = prompt("b", 33)
    house.engine.add_request(request)
    output = house.step()
    assert output is not None
    (load,) = output.loads
    assert [sum(block > 0 for block in row) for row in load.block_ids[:2]] == [8, 2]
    assert load.last == 32
    house.run()
    assert house.offloader.load_failures == []
    assert house.offloader.num_loaded_tokens == 32
    house.sound()


def test_a_window_whose_tail_is_gone_ends_the_hit_earlier() -> None:
    tier = PlainTier(100)
    specs = (FULL, SlidingWindowSpec(4, sliding_window=6))
    house = House([tier], usable_blocks=60, specs=specs)
    house.run(prompt("a", 33))
    house.forget()
    keys = house.offloader._finder.keys(prompt("b", 33))
    assert tier.discard([keys[1][6]]) == 1
    house.engine.add_request(prompt("b", 33))
    output = house.step()
    assert output is not None
    assert output.loads[0].last == 24
    house.run()
    house.sound()


@pytest.mark.parametrize("lost", range(4))
def test_a_page_that_fails_ends_the_prefix_there(lost: int) -> None:
    """What was good before it is found by the next lookup; the request says so, and computes the rest."""
    tier = PlainTier(100)
    house = House([tier], usable_blocks=20)
    house.run(prompt("a", 17))
    house.forget()
    request = prompt("b", 17)
    house.engine.add_request(request)
    house.step()
    house.poll()
    key = house.offloader._finder.keys(request)[0][lost]
    tier.discard([key])
    output = None
    for _ in range(10):
        house.move()
        output = house.step()
        if output is not None and output.num_scheduled_tokens:
            break
    assert output is not None
    assert output.num_scheduled_tokens == {"b": 17 - 4 * lost}
    (failure,) = house.offloader.load_failures
    assert (failure.request_id, failure.first, failure.last) == ("b", 0, 16)
    assert failure.num_tokens == (4 * lost,)
    assert failure.reasons == {"missing": 1}
    house.run()
    house.sound()


def test_a_state_that_fails_leaves_what_was_loaded_of_the_other_groups() -> None:
    tier = PlainTier(100)
    house = House([tier], usable_blocks=60, specs=(FULL, MambaSpec(4, mamba_cache_mode="align")))
    house.run(prompt("a", 33))
    house.forget()
    request = prompt("b", 33)
    keys = house.offloader._finder.keys(request)
    house.engine.add_request(request)
    house.step()
    tier.discard([keys[1][7]])
    house.move()
    house.poll()
    (failure,) = house.offloader.load_failures
    assert failure.num_tokens == (32, 28)
    digests = request.digests(0, 8)
    assert [house.pool.get_cached_block(digests[32 * at : 32 * at + 32], [0]) is not None for at in range(8)] == [
        True
    ] * 8
    house.run()
    house.sound()


def test_who_waits_for_the_same_pages_is_told_and_does_not_load_them_twice() -> None:
    tier = PlainTier(100)
    house = House([tier], usable_blocks=40)
    house.run(prompt("a", 17))
    house.forget()
    requests = [prompt(name, 17) for name in "bcd"]
    for request in requests:
        house.engine.add_request(request)
    output = house.step()
    assert output is not None
    assert [load.request_id for load in output.loads] == ["b"]
    assert house.step() is None  # the others wait
    tier.discard([house.offloader._finder.keys(requests[0])[0][2]])
    house.move()
    house.poll()
    (failure,) = house.offloader.load_failures
    assert failure.shared_by == ("c", "d")
    ended = house.run()
    assert {one.reason for one in ended} == {FinishReason.LENGTH}
    assert len(ended) == 3
    house.sound()


class Breaking(PlainTier):
    """A tier that breaks its promise: it raises in what `broken` names."""

    def __init__(self, num_pages: int, *broken: str, name: str = "breaking") -> None:
        super().__init__(num_pages, name)
        self.broken = broken

    def _may(self, what: str) -> None:
        if what in self.broken:
            raise OSError("no such device")

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        self._may("lookup")
        return super().lookup(keys)

    def load(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> list[Loaded]:
        self._may("load")
        return super().load(keys, pages)

    def store(self, keys: Sequence[bytes], pages: Sequence[Buffer]) -> list[Stored]:
        self._may("store")
        return super().store(keys, pages)


def test_a_tier_that_raises_is_a_miss_with_a_name() -> None:
    tier = Breaking(100, "load")
    house = House([tier], usable_blocks=20)
    house.run(prompt("a", 17))
    house.forget()
    assert house.computed(prompt("b", 17)) == 17
    assert house.offloader.losses["load: OSError"] > 0
    assert house.offloader.losses["load: unreachable"] > 0
    house.sound()


@pytest.mark.parametrize("broken", ["lookup", "load", "store"])
@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("num_threads", [0, 1])
def test_a_tier_that_raises_takes_nobody_with_it(broken: str, is_remote: bool, num_threads: int) -> None:
    """Neither the tiers behind it nor the threads: the next requests are served as if it were not there."""
    bad, good = Breaking(100, broken), PlainTier(100, "good")
    bad.is_remote = is_remote
    house = House([bad, good], usable_blocks=20, num_threads=num_threads)
    try:
        for number in range(4):
            computed = house.computed(prompt(f"r{number}", 17)) if not num_threads else 17
            if num_threads:
                house.engine.add_request(prompt(f"r{number}", 17))
                house.engine.run()
                house.offloader.drain(house.scheduler)
            assert computed == 17 or number
            assert len(good.pages) == 4
            house.forget()
        assert house.offloader.num_loaded_tokens == 48
        assert house.offloader.losses[f"{broken}: OSError"] > 0
        house.sound()
    finally:
        house.offloader.close()


def test_a_lookup_that_raises_once_is_asked_again() -> None:
    tier = Breaking(100)
    house = House([tier], usable_blocks=20)
    house.run(prompt("a", 17))
    house.forget()
    tier.broken = ("lookup",)
    assert house.computed(prompt("b", 17)) == 17
    tier.broken = ()
    house.forget()
    assert house.computed(prompt("c", 17)) == 1


# -- aborts: S7 b and c ---------------------------------------------------------------------------------


def test_an_aborted_load_gives_its_blocks_back_once() -> None:
    tier = PlainTier(100)
    house = House([tier], usable_blocks=4)
    house.run(prompt("a", 9))
    house.forget()
    house.engine.add_request(prompt("b", 9))
    house.step()
    assert house.pool.get_num_free_blocks() == 2
    house.engine.abort(["b"])
    assert house.pool.get_num_free_blocks() == 2  # it may be writing yet
    house.move()
    house.poll()
    assert house.pool.get_num_free_blocks() == 4
    assert house.scheduler.num_late_reports == 1
    house.poll()
    house.sound()


def test_a_load_that_was_planned_and_aborted_before_its_step_has_run() -> None:
    tier = PlainTier(100)
    house = House([tier], usable_blocks=4)
    house.run(prompt("a", 9))
    house.forget()
    house.scheduler.add_request(prompt("b", 9))
    output = house.scheduler.schedule()
    assert output.loads
    house.scheduler.abort(["b"])
    house.worker.execute(output)
    house.offloader.step_has_run(output)
    assert house.move() == 0
    house.scheduler.update(output.step_id, {})
    house.poll()
    house.sound()


def test_an_id_that_is_used_again_is_another_load() -> None:
    """The lease of the first has ended; its late end is nothing to the second."""
    now = 0.0
    tier = PlainTier(100)
    house = House([tier], usable_blocks=6, lease=10.0, clock=lambda: now)
    house.run(prompt("a", 9))
    house.run(prompt("b", range(50, 63)))
    house.forget()
    house.engine.add_request(prompt("r", 9))
    house.step()
    transfers: Any = house.offloader.transfers
    late = transfers._loads.get()
    house.engine.abort(["r"])
    now = 11.0
    again = prompt("r", range(50, 63))
    house.engine.add_request(again)
    output = house.step()
    assert output is not None
    assert output.loads[0].last == 12
    late()
    house.poll()
    assert house.scheduler.num_late_reports == 1
    assert again.is_loading
    assert house.pool.get_num_free_blocks() == 3
    house.run()
    assert house.offloader.num_loaded_tokens == 12
    assert again.output_token_ids
    house.sound()


class Gated(PlainTier):
    """Its loads stand at a gate, in a thread, until it is opened."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self.arrived = Event()
        self.gate = Event()

    def load(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> list[Loaded]:
        outcomes = super().load(keys, pages)
        self.arrived.set()
        assert self.gate.wait(60)
        return outcomes


@pytest.mark.parametrize("when", ["in time", "late", "before the abort"])
def test_a_late_completion_finds_nothing_to_do(when: str) -> None:
    """S7 b and c, with a real thread that has the bytes in its hands and a clock of the test's."""
    now = 0.0
    tier = Gated(100)
    tier.gate.set()
    house = House([tier], usable_blocks=4, num_threads=1, lease=10.0, clock=lambda: now)
    try:
        house.engine.add_request(prompt("a", 9))
        house.engine.run()
        house.offloader.drain(house.scheduler)
        house.forget()
        tier.arrived.clear()
        tier.gate.clear()
        house.engine.add_request(prompt("b", 9))
        house.step()
        assert tier.arrived.wait(60)
        if when == "before the abort":
            tier.gate.set()
            house.offloader.wait()
            house.engine.abort(["b"])  # done, and nobody was told
            house.poll()
            assert house.pool.get_num_free_blocks() == 4
            assert house.scheduler.num_late_reports == 1
            house.offloader.drain(house.scheduler)
            house.sound()
            return
        house.engine.abort(["b"])
        assert house.pool.get_num_free_blocks() == 2
        house.engine.add_request(prompt("c", range(50, 63)))  # wants all four
        now = 9.0
        assert house.step() is None
        if when == "in time":
            tier.gate.set()
            house.offloader.wait()
            house.poll()
            assert house.pool.get_num_free_blocks() == 4
        now = 10.0
        output = house.step()
        assert output is not None
        assert output.num_scheduled_tokens == {"c": 13}  # and its reads are checked
        now = 11.0
        tier.gate.set()
        house.offloader.drain(house.scheduler)
        assert house.scheduler.num_late_reports == 1
        house.engine.run()
        house.engine.add_request(prompt("d", range(50, 63)))
        house.engine.run()  # reads what c has written, and nobody else
        house.offloader.drain(house.scheduler)
        house.sound()
    finally:
        tier.gate.set()
        house.offloader.close()


# -- room, and order -----------------------------------------------------------------------------------


def test_at_eviction_what_found_no_room_is_tried_again() -> None:
    tier = PlainTier(100)
    house = House([tier], usable_blocks=20, store_when="eviction", most_pages=2)
    house.manager.allocate_slots(prompt("plain", [1] * 3), 3)  # nothing else is free but what is cached
    house.run(prompt("a", 33))
    house.run(prompt("b", range(50, 83)))
    for _ in range(20):
        house.poll()
        house.move()
    assert len(tier.pages) >= 15
    assert house.offloader.losses["store: busy"] == 0


def test_at_eviction_what_is_on_its_way_to_one_tier_goes_to_the_other_too() -> None:
    fast, slow = PlainTier(100, "fast"), PlainTier(100, "slow", "STORAGE")
    house = House([fast, slow], usable_blocks=8, store_when={"slow": "eviction"})
    for number in range(6):
        house.run(prompt(f"r{number}", range(100 * number, 100 * number + 13)))
    house.move()
    assert len(fast.pages) == 18
    assert len(slow.pages) == 18


def test_at_eviction_what_is_handed_out_before_there_was_room_is_counted() -> None:
    tier = PlainTier(100)
    house = House([tier], usable_blocks=4, store_when="eviction", most_pages=1)
    house.engine.add_request(prompt("a", 13))
    house.step()
    house.poll()
    house.engine.add_request(prompt("b", range(50, 63)))
    house.step()
    house.poll()
    assert house.offloader.losses["store: too late"] == 2


def test_a_large_load_is_not_starved_by_small_ones() -> None:
    tier = PlainTier(200)
    house = House([tier], usable_blocks=40, most_pages=4)
    for at in range(5):  # each within what is queued at a time
        house.run(prompt(f"w{at}", range(at * 4 + 5)))
    for at in range(8):
        house.run(prompt(f"v{at}", [90 + at] * 5))
    house.forget()
    house.engine.add_request(prompt("small", [90] * 5))
    house.step()
    big = prompt("big", 21)
    house.engine.add_request(big)
    for at in range(1, 8):
        house.engine.add_request(prompt(f"small{at}", [90 + at] * 5))
        house.step()
        house.move(1)
        if big.is_loading or big.num_output_tokens:
            break
    else:
        raise AssertionError("it waits and waits")
    house.run()
    house.sound()


def test_a_server_that_has_lost_its_pages_gets_all_of_them_back_at_once() -> None:
    tier = PlainTier(1000)
    tier.is_remote = True
    house = House([tier], usable_blocks=120, num_tokens=400)
    house.run(prompt("a", 401))
    assert len(tier.pages) == 100
    house.forget()
    tier.clear()
    assert house.computed(prompt("b", 401)) == 401
    assert len(tier.pages) == 100
    house.forget()
    assert house.computed(prompt("c", 401)) == 1
    house.sound()


def test_a_prefix_that_is_near_asks_no_server() -> None:
    near, far = PlainTier(100, "near"), PlainTier(100, "far")
    far.is_remote = True
    house = House([near, far], usable_blocks=20)
    house.run(prompt("a", 17))
    house.forget()
    house.engine.add_request(prompt("b", 17))
    transfers: Any = house.offloader.transfers
    output = house.step()
    assert output is not None
    assert output.loads
    assert transfers._questions.empty()
    house.run()


def test_a_server_is_not_sent_what_it_has_nor_is_the_memory_read_for_it() -> None:
    tier = PlainTier(100)
    tier.is_remote = True
    house = House([tier], usable_blocks=20)
    house.run(prompt("a", 17))
    read: list[int] = []
    read_page = house.store.read_page

    def counted(group_id: int, block_id: int, page: memoryview) -> None:
        read.append(block_id)
        read_page(group_id, block_id, page)

    house.store.read_page = counted  # type: ignore[method-assign]
    house.forget()
    assert house.computed(prompt("b", 17)) == 1
    assert read == []


# -- what is refused -----------------------------------------------------------------------------------


def test_what_cannot_be_is_refused_by_name() -> None:
    groups = (KVCacheGroupSpec(("layer",), FULL),)
    config = KVCacheConfig(9, groups, hash_block_size=4)
    store = ShadowStore(config)
    manager = KVCacheManager(config)
    tier = PlainTier(10)

    def build(**options: Any) -> None:
        usual: dict[str, Any] = {"manager": manager, "memory": store, "tiers": [tier], "namespace": NAMESPACE}
        Offloader(**(usual | options))

    with pytest.raises(OffloadError, match="names of their own"):
        build(tiers=[tier, PlainTier(3)])
    with pytest.raises(OffloadError, match=r"'plain'.*group 0.*64 bytes.*room for 8"):
        build(tiers=[PlainTier(10, page_bytes=8)])
    for when in ("sometimes", "hits=0", "hits=x", "hits", ""):
        with pytest.raises(OffloadError, match="hits=N"):
            build(store_when=when)
    with pytest.raises(OffloadError, match="names \\['disk'\\], tiers are \\['plain'\\]"):
        build(store_when={"disk": "completion"})
    with pytest.raises(OffloadError, match="guard"):
        build(guard="hope")
    with pytest.raises(OffloadError, match="most_pages"):
        build(most_pages=0)
    with pytest.raises(OffloadError, match="evict_ahead"):
        build(evict_ahead=0)
    with pytest.raises(OffloadError, match="num_threads"):
        build(num_threads=-1)
    first = Offloader(manager, store, [tier], namespace=NAMESPACE)
    with pytest.raises(OffloadError, match="has an Offloader already"):
        build()
    first.close()
    build(num_threads=0)


# -- in the end ----------------------------------------------------------------------------------------


def test_after_close_nothing_starts_and_what_was_begun_is_told() -> None:
    tier = PlainTier(100)
    house = House([tier], usable_blocks=20, num_threads=1)
    house.engine.add_request(prompt("a", 17))
    house.engine.run()
    house.offloader.drain(house.scheduler)
    house.forget()
    house.engine.add_request(prompt("b", 17))
    house.step()  # b's load is on its way
    house.offloader.close()
    house.offloader.close()
    house.engine.add_request(prompt("c", range(50, 67)))
    ended = house.engine.run()
    assert {one.request_id: one.reason for one in ended}["b"] is FinishReason.LENGTH
    assert house.offloader.num_loaded_tokens == 16
    assert house.computed(prompt("d", [7] * 9)) == 9
    assert len(tier.pages) == 4  # of a alone
    house.sound()


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    """Whatever became of them: run, aborted while they waited, or loaded."""
    tier = PlainTier(100)
    house = House([tier], usable_blocks=6)
    for number in range(30):
        request = prompt(f"r{number}", [number % 5] * 9)
        house.engine.add_request(request)
        house.engine.add_request(prompt(f"s{number}", [number % 7] * 13))
        house.step()
        house.engine.abort([f"s{number}"])
        house.run()
    house.step()
    values = [getattr(house.offloader, name) for name in dir(house.offloader) if not name.startswith("__")]
    held = [value for value in values if isinstance(value, (dict, set, list, deque))]
    assert [one for one in held if one and one not in (house.offloader.tiers, house.offloader.losses)] == []
    house.sound()


def test_a_poll_between_a_plan_and_its_step_costs_no_load() -> None:
    tier = PlainTier(100)
    house = House([tier], usable_blocks=20)
    house.run(prompt("a", 17))
    house.forget()
    house.scheduler.add_request(prompt("b", 17))
    output = house.scheduler.schedule()
    house.poll()
    results = house.worker.execute(output)
    house.offloader.step_has_run(output)
    house.scheduler.update(output.step_id, results)
    house.move()
    house.poll()
    assert house.offloader.num_loaded_tokens == 16
    house.run()


def test_a_server_is_asked_for_ever() -> None:
    """Not for the first so many requests alone."""
    tier = PlainTier(1000)
    tier.is_remote = True
    house = House([tier], usable_blocks=8)
    for number in range(150):
        house.run(prompt(f"r{number}", range(10 * (number % 75), 10 * (number % 75) + 9)))
    assert house.offloader.num_loaded_tokens == 75 * 8
    house.sound()


def test_steps_that_were_planned_before_their_loads_began() -> None:
    """An engine that plans ahead: each step runs when the next was planned already."""
    tier = PlainTier(1000)
    house = House([tier], usable_blocks=100)
    prompts = [[number, *range(8)] for number in range(10)]
    for number, tokens in enumerate(prompts):
        house.run(prompt(f"w{number}", tokens))
    house.forget()
    scheduler = house.scheduler
    before: Any = None
    for number, tokens in enumerate(prompts):
        scheduler.add_request(prompt(f"r{number}", tokens))
        house.poll()
        output = scheduler.schedule()
        if before is not None:
            results = house.worker.execute(before)
            house.offloader.step_has_run(before)
            scheduler.update(before.step_id, results)
            house.move()
        before = output if output.step_id >= 0 else None
    if before is not None:
        results = house.worker.execute(before)
        house.offloader.step_has_run(before)
        scheduler.update(before.step_id, results)
    house.run()
    assert house.offloader.num_loaded_tokens == 80
    assert house.offloader.losses == {}
    house.sound()


def test_loads_of_one_step_share_the_room() -> None:
    tier = PlainTier(1000)
    house = House([tier], usable_blocks=100, most_pages=4)
    for number in range(8):
        house.run(prompt(f"w{number}", [number] * 9))
    house.forget()
    for number in range(8):
        house.engine.add_request(prompt(f"r{number}", [number] * 9))
    house.step()
    assert house.offloader.transfers.num_loading == 4
    house.run()
    assert house.offloader.num_loaded_tokens == 64
    house.sound()


def test_what_is_hit_while_it_is_on_its_way_elsewhere_goes_to_both() -> None:
    fast, slow = PlainTier(100, "fast"), PlainTier(100, "slow", "STORAGE")
    house = House([fast, slow], usable_blocks=40, store_when={"slow": "hits=1"})
    house.engine.add_request(prompt("a", 9))
    house.step()
    house.poll()  # on its way to the fast one
    house.engine.add_request(prompt("b", 9))
    house.step()
    house.poll()
    assert (len(fast.pages), len(slow.pages)) == (0, 0)
    house.move()
    house.poll()
    house.move()
    house.poll()
    assert (len(fast.pages), len(slow.pages)) == (2, 2)
    house.sound()


def test_after_close_the_cache_tells_nobody() -> None:
    tier = PlainTier(100)
    house = House([tier], usable_blocks=20)
    house.run(prompt("a", 9))
    house.offloader.close()
    assert not house.manager.tells_stored
    house.run(prompt("b", 9))
    assert house.manager.take_hits() == []
    assert house.manager.take_stored() == []


def test_who_waits_for_a_load_goes_through_its_pages_once() -> None:
    tier = PlainTier(1000)
    house = House([tier], usable_blocks=100)
    house.run(prompt("a", 41))
    house.forget()
    for name in "bcd":
        house.engine.add_request(prompt(name, 41))
    house.step()
    house.step()
    waiting = house.scheduler.requests["c"].connector_answer
    assert isinstance(waiting, Answer)
    assert waiting.waits_for is not None

    class Untouched(list[bytes]):
        def __iter__(self) -> Iterator[bytes]:
            raise AssertionError("once is enough")

    waiting.keys = Untouched(waiting.keys)
    house.step()
    waiting.keys = []
    house.run()
    house.sound()


def test_a_prompt_of_a_million_tokens_is_looked_up_by_a_thread() -> None:
    tier = PlainTier(10)
    house = House([tier], usable_blocks=10)
    request = prompt("a", 1_000_000)
    assert house.offloader.get_num_external_tokens(request, 0) is None
    transfers: Any = house.offloader.transfers
    assert transfers._questions.qsize() == 1
    assert house.offloader.get_num_external_tokens(request, 0) is None
    assert transfers._questions.qsize() == 1
    house.move()
    assert house.offloader.get_num_external_tokens(request, 0) == 0


def test_a_busy_server_is_not_asked_more_and_nobody_is_looked_up_twice() -> None:
    near, far = Breaking(100, name="near"), PlainTier(100, "far")
    far.is_remote = True
    house = House([near, far], usable_blocks=10)
    requests = [prompt(f"r{number}", [number] * 9) for number in range(100)]
    for request in requests:
        assert house.offloader.get_num_external_tokens(request, 0) is None
    transfers: Any = house.offloader.transfers
    assert transfers._questions.qsize() == 64
    near.broken = ("lookup",)
    for request in requests:
        assert house.offloader.get_num_external_tokens(request, 0) is None
    near.broken = ()
    for _ in range(3):
        house.move()
        answers = [house.offloader.get_num_external_tokens(request, 0) for request in requests]
    assert answers == [0] * 100
    assert house.offloader.losses == {}


def test_a_request_that_waited_is_gone_with_its_last_reference() -> None:
    """No cycle: engines run without the garbage collector."""
    tier = PlainTier(100)
    house = House([tier], usable_blocks=20)
    house.run(prompt("a", 9))
    house.forget()
    request = prompt("b", 9)
    assert house.offloader.get_num_external_tokens(request, 0) == 8
    house.offloader._claimed.clear()
    answer = request.connector_answer
    assert isinstance(answer, Answer)
    assert request not in gc.get_referents(answer)
