"""What a mirror says of itself, rule by rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from blockpool.pool import AllBlocksCleared, BlockRemoved, BlockStored
from blockpool.wire import (
    HashFormError,
    KVEventBatch,
    Mirror,
    PublisherStatus,
    ReplayWanted,
    SnapshotWanted,
    encode_batch,
)
from blockpool.wire.holdings import MOST_SAID
from blockpool.wire.protocol import decode_status

A, B, C = (letter * 32 for letter in (b"a", b"b", b"c"))


def stores(*hashes: bytes | int, ts: float = 0.0, medium: str | None = "GPU", group: int = 0) -> bytes:
    event = BlockStored(
        block_hashes=list(hashes),
        parent_block_hash=None,
        token_ids=[0] * len(hashes),
        block_size=1,
        lora_id=None,
        medium=medium,
        lora_name=None,
        group_idx=group,
    )
    return encode_batch(KVEventBatch(ts, [event]))


def removes(*hashes: bytes | int, medium: str | None = "GPU", ts: float = 0.0) -> bytes:
    return encode_batch(KVEventBatch(ts, [BlockRemoved(block_hashes=list(hashes), medium=medium)]))


def clears(medium: str | None = None) -> bytes:
    return encode_batch(KVEventBatch(0.0, [AllBlocksCleared(medium=medium)]))


def status(publisher: str = "one", next_seq: int = 0, **more: Any) -> PublisherStatus:
    return PublisherStatus(publisher=publisher, next_seq=next_seq, **{"snapshots": True} | more)


def live(*payloads: bytes, **options: Any) -> Mirror:
    """A mirror that has caught up with these batches."""
    mirror = Mirror(**options)
    mirror.connected()
    assert mirror.wanted == ReplayWanted(0)
    mirror.replayed(list(enumerate(payloads)), status(next_seq=len(payloads)))
    assert (mirror.status, mirror.sequence) == ("live", len(payloads) - 1)
    return mirror


def test_never_fed_is_no_zero() -> None:
    mirror = Mirror()
    assert (mirror.status, mirror.num_blocks) == ("never_fed", 0)
    mirror.connected()
    assert mirror.status == "never_fed"
    mirror.receive(0, stores(A))
    assert (mirror.status, mirror.lag) == ("never_fed", 1)  # whether there was something before is not known yet
    mirror.replayed([(0, stores(A))], None)
    assert (mirror.status, mirror.lag, mirror.counts.duplicates) == ("live", 0, 0)


def test_a_first_batch_without_anybody_to_ask() -> None:
    mirror = Mirror(can_replay=False)
    mirror.receive(0, stores(A))
    assert (mirror.status, A in mirror) == ("live", True)
    late = Mirror(can_replay=False)
    late.receive(3, stores(A))
    assert (late.status, A in late) == ("stale", True)
    late.receive(4, stores(B))
    assert (late.status, B in late) == ("stale", True)


def test_a_gap_is_asked_for_with_one_batch_that_is_known() -> None:
    mirror = live(stores(A), stores(B))
    mirror.receive(3, removes(A))
    assert (mirror.status, mirror.wanted, mirror.lag) == ("catching_up", ReplayWanted(1), 2)
    assert "2 to 2" in mirror.reason
    assert A in mirror  # what it knows, unchanged
    mirror.replayed([(1, stores(B)), (2, stores(C)), (3, removes(A))], status(next_seq=4))
    assert (mirror.status, mirror.sequence) == ("live", 3)
    assert [one in mirror for one in (A, B, C)] == [False, True, True]


def test_what_no_replay_has_is_asked_for_as_a_snapshot() -> None:
    mirror = live(stores(A), stores(B))
    mirror.receive(5, stores(C))
    mirror.replayed([(4, removes(A)), (5, stores(C))], status(next_seq=6))
    assert (mirror.status, mirror.wanted) == ("catching_up", SnapshotWanted())
    mirror.receive(6, stores(A, ts=6.0))
    mirror.snapshot(5, [stores(B, C, ts=5.5)], status(next_seq=6))
    assert (mirror.status, mirror.sequence, mirror.num_blocks) == ("live", 6, 3)


def test_what_a_snapshot_contains_may_arrive_late() -> None:
    mirror = live(stores(A))
    mirror.receive(3, stores(C))
    mirror.replayed([(2, stores(B))], status(next_seq=4))
    mirror.snapshot(3, [stores(A, B, C, ts=10.0)], status(next_seq=4))
    mirror.receive(2, stores(B, ts=2.0))
    assert (mirror.status, mirror.counts.restarts, mirror.counts.repeated) == ("live", 0, 0)
    mirror.receive(0, stores(A, ts=11.0))  # younger than the snapshot: another life
    assert (mirror.status, mirror.counts.restarts, mirror.num_blocks) == ("catching_up", 1, 0)


def test_without_snapshots_it_is_stale_and_goes_on() -> None:
    mirror = live(stores(A))
    mirror.receive(2, stores(C))
    mirror.replayed([(2, stores(C))], status(next_seq=3, snapshots=False))
    assert (mirror.status, mirror.wanted) == ("stale", None)
    assert [one in mirror for one in (A, B, C)] == [True, False, True]
    mirror.receive(3, clears("GPU"))  # of one tier: the others may have anything
    assert mirror.status == "stale"
    mirror.receive(4, clears())  # here truth begins again
    assert (mirror.status, mirror.num_blocks) == ("live", 0)
    mirror.receive(5, stores(B))
    assert (mirror.status, mirror.num_blocks) == ("live", 1)


def test_a_stale_mirror_is_healed_when_snapshots_are_to_be_had_again() -> None:
    mirror = live(stores(A))
    mirror.receive(2, stores(C))
    mirror.replayed([(2, stores(C))], status(next_seq=3))
    mirror.snapshot(-1, [], None)
    assert mirror.status == "stale"
    mirror.heard(status(next_seq=3))
    assert mirror.wanted == SnapshotWanted()


def test_duplicates_are_applied_once() -> None:
    mirror = live(stores(A), removes(A))
    mirror.receive(0, stores(A))
    mirror.receive(1, removes(A))
    assert (mirror.status, mirror.num_blocks, mirror.counts.duplicates) == ("live", 0, 2)


@pytest.mark.parametrize("can_replay", [True, False])
def test_a_restart_behind_a_proxy_is_seen_by_an_old_number_with_a_new_content(can_replay: bool) -> None:
    if can_replay:
        mirror = live(stores(A), stores(B))
    else:
        mirror = Mirror(can_replay=False)
        mirror.receive(0, stores(A))
        mirror.receive(1, stores(B))
    mirror.receive(0, stores(C))
    assert mirror.counts.restarts == 1
    assert [one in mirror for one in (A, B)] == [False, False]
    if can_replay:
        assert (mirror.status, mirror.wanted) == ("catching_up", ReplayWanted(0))
        mirror.replayed([(0, stores(C))], status("two", 1))
    else:  # or two publishers send, of which nobody can say who sends what comes next
        assert (mirror.status, mirror.reason[:27]) == ("stale", "the publisher has restarted")
        for seq, payload in enumerate([stores(A), stores(B), clears()], 1):
            mirror.receive(seq, payload)
            assert mirror.status == "stale"
        mirror.disconnected()
        mirror.connected()
        mirror.receive(0, stores(C, ts=1.0))
    assert (mirror.status, mirror.sequence, C in mirror) == ("live", 0, True)


def test_a_slow_reader_is_told_of_no_restart() -> None:
    """A replay has brought more than is remembered; what waited in the socket meanwhile comes after it."""
    payloads = [stores(A, ts=float(seq)) if seq % 2 == 0 else removes(A, ts=float(seq)) for seq in range(3000)]
    mirror = live(*payloads[:2])
    mirror.receive(2, payloads[2])
    mirror.receive(10, payloads[10])
    assert mirror.wanted == ReplayWanted(2)
    mirror.replayed(list(enumerate(payloads))[2:], status(next_seq=3000))
    assert (mirror.status, mirror.sequence) == ("live", 2999)
    for seq in range(11, 3000):
        mirror.receive(seq, payloads[seq])
        assert (mirror.status, mirror.sequence, mirror.counts.restarts) == ("live", 2999, 0)
    assert (mirror.num_blocks, mirror.counts.batches, mirror.counts.duplicates) == (0, 3000, 2989)
    # Numbers that fall are something else: a batch of long ago, or another publisher. That can be asked.
    mirror.receive(5, payloads[5])
    assert (mirror.status, mirror.wanted, mirror.counts.restarts) == ("catching_up", ReplayWanted(2999), 0)
    mirror.replayed([(2999, payloads[2999])], status(next_seq=3000))
    assert (mirror.status, mirror.sequence) == ("live", 2999)
    mirror.receive(5, stores(C))
    mirror.replayed([(5, stores(C))], status("two", 6))
    assert (mirror.counts.restarts, mirror.num_blocks) == (1, 0)


def test_what_is_still_to_be_read_is_not_missing() -> None:
    mirror = live(stores(A))
    for _ in range(3):
        mirror.heard(status(next_seq=9), known=0, is_reading=True)
        assert (mirror.status, mirror.lag) == ("live", 8)
    mirror.heard(status(next_seq=9), known=0)
    assert (mirror.status, mirror.wanted) == ("catching_up", ReplayWanted(0))


def test_the_first_status_tells_that_the_publisher_has_sent_less() -> None:
    """Somebody else's batch has fitted; a batch that came after the status was asked says nothing."""
    mirror = live(stores(A))
    mirror.receive(1, stores(B))
    mirror.heard(status(next_seq=1), known=0)
    assert mirror.status == "live"
    mirror = live(stores(A))
    mirror.receive(1, stores(B))
    mirror.heard(status(next_seq=1), known=1)
    assert (mirror.status, mirror.wants_reconnect, mirror.num_blocks) == ("catching_up", True, 0)


def test_an_answer_that_is_too_long_is_no_answer() -> None:
    mirror = live(stores(A))
    mirror.receive(3, stores(B))
    mirror.too_long("too long")
    assert mirror.wanted == SnapshotWanted()
    mirror.too_long("too long")
    assert (mirror.status, mirror.wanted) == ("stale", None)
    mirror.heard(status(next_seq=4))
    assert mirror.wanted is None  # the next one would be as long


def test_a_restart_without_anybody_to_ask_in_the_middle() -> None:
    mirror = Mirror(can_replay=False)
    for seq, payload in enumerate([stores(A), stores(B), stores(C)]):
        mirror.receive(seq, payload)
    mirror.receive(1, stores(C))
    assert (mirror.status, A in mirror, C in mirror) == ("stale", False, True)


def test_a_heartbeat_of_another_publisher_wants_a_new_connection() -> None:
    mirror = live(stores(A))
    mirror.heard(status("two", 1))
    assert (mirror.status, mirror.wants_reconnect, mirror.wanted, mirror.num_blocks) == ("catching_up", True, None, 0)
    mirror.receive(1, stores(B))  # of either: it does not count
    assert mirror.num_blocks == 0
    mirror.disconnected()
    mirror.connected()
    assert (mirror.wants_reconnect, mirror.wanted) == (False, ReplayWanted(0))


def test_two_contents_of_one_number_want_a_new_connection() -> None:
    mirror = live(stores(A))
    mirror.receive(2, stores(C))
    mirror.replayed([(0, stores(A)), (1, stores(B)), (2, stores(B))], status(next_seq=3))
    assert (mirror.status, mirror.wants_reconnect) == ("catching_up", True)


def test_a_cut_connection_is_not_live_and_what_it_held_does_not_count() -> None:
    mirror = live(stores(A))
    mirror.disconnected()
    assert (mirror.status, mirror.wanted) == ("catching_up", None)
    mirror.receive(1, stores(B))
    assert B not in mirror
    mirror.connected()
    assert mirror.wanted == ReplayWanted(0)
    mirror.receive(2, stores(C))
    mirror.disconnected()
    mirror.connected()
    mirror.replayed([(0, stores(A)), (1, stores(B))], status(next_seq=2))
    assert (mirror.status, mirror.sequence, C in mirror) == ("live", 1, False)


def test_a_successor_with_fitting_numbers_is_told_by_its_content() -> None:
    """vLLM's publisher has no id: the batch that is known already says whether it is the same."""
    mirror = Mirror()
    mirror.connected()
    mirror.replayed([(0, stores(A)), (1, stores(B))], None)
    mirror.disconnected()
    mirror.connected()
    mirror.replayed([(1, stores(C)), (2, stores(A))], None)
    assert (mirror.counts.restarts, mirror.num_blocks, mirror.wants_reconnect) == (1, 0, True)


def test_a_successor_that_is_behind_is_asked_for_everything() -> None:
    mirror = Mirror()
    mirror.connected()
    mirror.replayed([(0, stores(A)), (1, stores(B))], None)
    mirror.disconnected()
    mirror.connected()
    mirror.replayed([], None)
    assert (mirror.status, mirror.wanted) == ("catching_up", ReplayWanted(0))
    mirror.replayed([(0, stores(C))], None)
    assert (mirror.status, mirror.sequence, mirror.num_blocks, C in mirror) == ("live", 0, 1, True)


def test_the_last_batches_may_be_the_lost_ones() -> None:
    mirror = live(stores(A))
    mirror.heard(status(next_seq=3))
    assert (mirror.status, mirror.lag) == ("live", 2)  # they may be on their way
    mirror.heard(status(next_seq=3))
    assert (mirror.status, mirror.wanted) == ("catching_up", ReplayWanted(0))
    mirror.replayed([(0, stores(A))], status(next_seq=3))
    assert mirror.wanted == SnapshotWanted()


def test_the_last_batches_of_a_publisher_without_status_are_looked_for() -> None:
    mirror = Mirror()
    mirror.connected()
    mirror.replayed([(0, stores(A))], None)
    mirror.look_again()
    assert (mirror.status, mirror.wanted) == ("live", ReplayWanted(0))
    mirror.receive(2, stores(C))
    assert mirror.status == "live"  # as of its sequence
    mirror.replayed([(0, stores(A)), (1, stores(B))], None)
    assert (mirror.status, mirror.sequence) == ("live", 2)


def test_a_batch_that_cannot_be_read_is_lost() -> None:
    mirror = live(stores(A))
    mirror.receive(1, b"?")
    assert (mirror.status, mirror.wanted, mirror.counts.unreadable) == ("catching_up", SnapshotWanted(), 1)
    mirror.snapshot(1, [stores(B)], status(next_seq=2))
    assert (mirror.status, B in mirror, A in mirror) == ("live", True, False)


def test_copies_are_counted_unless_only_first_and_last_are_announced() -> None:
    for convention, left in (("detect", 1), ("per_copy", 1), ("first_last", 0)):
        mirror = live(stores(A), stores(A), convention=convention)
        mirror.receive(2, removes(A))
        assert mirror.copies(A) == left
        mirror.receive(3, removes(A))
        assert (mirror.copies(A), mirror.counts.unknown, mirror.counts.repeated) == (0, 1 - left, 1)
    assert live(stores(A), stores(A)).convention == "per_copy"
    told = Mirror()
    told.connected()
    told.replayed([], status(convention="first_last"))
    assert told.convention == "first_last"
    with pytest.raises(ValueError, match="convention"):
        Mirror(convention="none")  # type: ignore[arg-type]


def test_groups_and_tiers_are_apart() -> None:
    mirror = live(stores(A), stores(A, medium="CPU"), stores(A, group=1), stores(B, medium=None))
    assert mirror.tiers == {"GPU": 3, "CPU": 1}
    mirror.receive(4, removes(A, medium="CPU"))
    assert [mirror.copies(A, 0, "CPU"), mirror.copies(A, 0), mirror.copies(A, 1)] == [0, 1, 1]
    mirror.receive(5, clears("CPU"))
    mirror.receive(6, clears("GPU"))
    assert mirror.num_blocks == 0


def test_memory_is_bounded() -> None:
    mirror = live(stores(1, 2, 3), max_blocks=4)
    mirror.receive(1, stores(4, 5))
    assert (mirror.status, mirror.num_blocks, mirror.wanted) == ("stale", 0, None)
    assert "more than 4 blocks" in mirror.reason
    waiting = live(stores(A), max_pending=3)
    for seq in range(2, 50):
        waiting.receive(seq, stores(B))
    assert len(waiting._pending) <= 3


def test_groups_and_tiers_without_end_are_bounded() -> None:
    """Whatever says them: events with blocks or without, removals, kinds; and the shelves go with the worker."""
    odd = BlockStored(
        block_hashes=[A],
        parent_block_hash=None,
        token_ids=[0],
        block_size=1,
        lora_id=None,
        medium="GPU",
        lora_name=None,
    )

    def by_kind(at: int) -> bytes:
        return encode_batch(KVEventBatch(0.0, [msgspec.structs.replace(odd, kv_cache_spec_kind=f"{at}")]))

    floods: dict[str, Callable[[int], bytes]] = {
        "groups": lambda at: stores(A, group=at),
        "tiers": lambda at: stores(A, medium=f"{at}"),
        "kinds": by_kind,
    }
    for name, flood in floods.items():
        mirror = live(stores(B), max_blocks=10**6)
        for at in range(MOST_SAID + 2):
            mirror.receive(at + 1, flood(at))
        assert mirror.status == "stale", name
        assert f"more than {MOST_SAID} groups" in mirror.reason
        assert mirror.wanted is None
        for at in range(2 * MOST_SAID):
            mirror.receive(mirror.sequence + 1, flood(at))
            assert len(mirror.catalogue.shelves) + sum(map(len, mirror.holdings.facts.values())) <= MOST_SAID
        mirror.leave()
        assert mirror.catalogue.shelves == {}
    quiet = live(max_blocks=4)
    for at in range(20):
        payload = encode_batch(KVEventBatch(0.0, [msgspec.structs.replace(odd, block_hashes=[], group_idx=500 * at)]))
        quiet.receive(2 * at, payload)
        quiet.receive(2 * at + 1, removes(A, medium=f"{at}"))
    assert (quiet.status, quiet.holdings.places, quiet.counts.unknown) == ("live", {}, 20)


def test_it_gives_up_when_told_that_it_takes_too_long() -> None:
    mirror = live(stores(A))
    mirror.receive(2, stores(C))
    mirror.gave_up("nobody answers")
    assert (mirror.status, mirror.reason, mirror.wanted) == ("stale", "nobody answers", None)
    assert C in mirror
    mirror.disconnected()
    mirror.connected()
    assert mirror.wanted == ReplayWanted(0)
    mirror.replayed([(2, stores(C))], status(next_seq=3, snapshots=False))  # not from the beginning
    assert (mirror.status, A in mirror, C in mirror) == ("stale", True, True)
    mirror.disconnected()
    mirror.connected()
    mirror.replayed([(0, stores(A)), (1, removes(A)), (2, stores(C))], status(next_seq=3))
    assert (mirror.status, mirror.num_blocks) == ("live", 1)


def test_a_batch_that_cannot_be_read_is_given_in_its_turn() -> None:
    """Live, in a replay, waiting, without anybody to ask: who records or checks must see it."""
    given: list[tuple[int, bytes]] = []

    def give(seq: int, payload: bytes) -> None:
        given.append((seq, payload))

    batches = list(enumerate([stores(A), b"?", stores(B), b"", stores(C)]))
    mirror = Mirror(on_batch=give)
    mirror.connected()
    mirror.replayed(batches[:3], None)
    mirror.receive(*batches[3])
    mirror.snapshot(-1, [], None)  # vLLM's publisher gives none
    mirror.receive(*batches[4])
    assert (mirror.status, given, mirror.counts.unreadable) == ("stale", batches, 2)
    assert [one in mirror for one in (A, B, C)] == [True, True, True]
    given.clear()
    alone = Mirror(can_replay=False, on_batch=give)
    for batch in batches:
        alone.receive(*batch)
    assert (alone.status, given) == ("stale", batches)
    given.clear()
    late = Mirror(on_batch=give)
    late.connected()
    late.replayed(batches[2:], None)
    late.snapshot(-1, [], None)
    assert (late.status, given) == ("stale", batches[2:])  # what there is, though it does not begin at 0


@pytest.mark.parametrize("too_wide", [1 << 64, -(1 << 63) - 1])
def test_an_integer_of_more_than_64_bits_is_refused(too_wide: int) -> None:
    mirror = live(stores(0, 2**63))
    with pytest.raises(HashFormError, match="64 bits"):
        mirror.copies(too_wide)
    with pytest.raises(HashFormError, match="64 bits"):
        assert too_wide in mirror
    assert [mirror.copies(one) for one in (0, 2**63, -(2**63), -1)] == [1, 1, 1, 0]


@pytest.mark.parametrize("more", [1, 2, 3])
def test_a_restart_under_the_same_id_straight_behind_a_snapshot(more: int) -> None:
    """No batch is known that could be compared, and the successor has as many batches, or more."""
    mirror = live(stores(A))
    mirror.receive(3, stores(C))
    mirror.replayed([(3, stores(C))], status(next_seq=4))
    mirror.snapshot(3, [stores(A, B, C, ts=1.0)], status(next_seq=4))
    assert (mirror.status, mirror.sequence) == ("live", 3)
    mirror.disconnected()
    mirror.connected()
    assert mirror.wanted == ReplayWanted(3)
    answer = [(3 + at, stores(bytes([at]) * 32)) for at in range(more)]
    mirror.replayed(answer, status(next_seq=3 + more))
    assert (mirror.status, mirror.wanted) == ("catching_up", SnapshotWanted())
    mirror.snapshot(2 + more, [stores(B, ts=1.0)], status(next_seq=3 + more))
    assert (mirror.status, mirror.sequence, mirror.num_blocks, B in mirror) == ("live", 2 + more, 1, True)


def test_answers_nobody_waits_for_change_nothing() -> None:
    mirror = live(stores(A))
    mirror.replayed([(0, stores(C))], status("two"))
    mirror.snapshot(9, [stores(C)], status())
    assert (mirror.status, mirror.sequence, C in mirror) == ("live", 0, False)


def test_a_restart_under_the_same_id_is_seen_by_a_heartbeat_with_fewer_batches() -> None:
    mirror = live(stores(A), stores(B), stores(C))
    mirror.heard(status(next_seq=3))
    mirror.receive(3, removes(A))
    mirror.heard(status(next_seq=3))  # asked before the last batch came
    assert mirror.status == "live"
    mirror.heard(status(next_seq=1))
    assert (mirror.status, mirror.counts.restarts, mirror.num_blocks) == ("catching_up", 1, 0)
    assert mirror.wants_reconnect
    mirror.connected()
    mirror.replayed([(0, stores(C))], status(next_seq=1))
    assert (mirror.status, mirror.sequence, A in mirror, C in mirror) == ("live", 0, False, True)


def test_a_restart_under_the_same_id_is_seen_by_a_replay_with_fewer_batches() -> None:
    mirror = live(stores(A), stores(B))
    mirror.disconnected()
    mirror.connected()
    mirror.replayed([], status(next_seq=1))
    assert (mirror.counts.restarts, mirror.num_blocks, mirror.wants_reconnect) == (1, 0, True)


def test_a_restart_may_change_the_convention() -> None:
    mirror = Mirror()
    mirror.connected()
    mirror.replayed([(0, stores(A)), (1, stores(A))], status(next_seq=2, convention="first_last"))
    assert mirror.convention == "first_last"
    mirror.heard(status("two", 1))
    assert mirror.convention == "detect"
    mirror.connected()
    mirror.replayed([(0, stores(A))], status("two", 1))
    assert mirror.convention == "detect"  # what was repeated before does not count
    mirror.heard(status("three", 1))
    mirror.connected()
    mirror.replayed([(0, stores(A)), (1, stores(A))], status("three", 2, convention="per_copy"))
    assert (mirror.convention, mirror.copies(A)) == ("per_copy", 2)


def test_a_restart_forgets_what_was_said_of_the_groups() -> None:
    mirror = live(stores(A))
    assert mirror.holdings.has_byte_hashes
    assert mirror.holdings.facts == {0: [(1, None, None)]}
    mirror.heard(status("two", 1))
    assert mirror.holdings.facts == {}
    assert not mirror.holdings.has_byte_hashes
    mirror.connected()
    mirror.replayed([(0, stores(1))], status("two", 1))
    assert mirror.holdings.facts == {0: [(1, None, None)]}  # said again
    assert (mirror.holdings.has_byte_hashes, mirror.holdings.has_int_hashes) == (False, True)


def too_deep() -> bytes:
    """A batch whose event has a field that nobody knows, nested without end."""
    names = b"".join(bytes([0xA0 + len(name)]) + name for name in (b"type",))
    head = b"\x92\xcb" + bytes(8) + b"\x91\x82" + names + bytes([0xA0 + 16]) + b"AllBlocksCleared" + b"\xa1z"
    return head + b"\x91" * 100_000


@pytest.mark.parametrize("wrong", ["nested", "block_size"])
def test_what_cannot_be_read_is_named_and_not_raised(wrong: str) -> None:
    if wrong == "nested":
        payload = too_deep()
    else:
        event = BlockStored(
            block_hashes=[A],
            parent_block_hash=None,
            token_ids=[],
            block_size=0,
            lora_id=None,
            medium="GPU",
            lora_name=None,
        )
        payload = encode_batch(KVEventBatch(0.0, [event]))
    mirror = live(stores(B))
    mirror.receive(1, payload)
    assert (mirror.status, mirror.counts.unreadable, mirror.num_blocks) == ("catching_up", 1, 1)
    assert "batch 1 cannot be read" in mirror.reason
    mirror.snapshot(1, [payload], status(next_seq=2))
    assert mirror.status == "stale"
    assert "the snapshot cannot be read" in mirror.reason
    again = Mirror()
    again.connected()
    again.replayed([(0, payload)], status(next_seq=1))
    assert again.counts.unreadable == 1


def test_a_status_that_is_nested_too_deeply_is_none() -> None:
    assert decode_status(b"\x81\xa1q" + b"\x91" * 100_000) is None


def test_a_reason_does_not_grow_with_each_heartbeat() -> None:
    full = Mirror(max_blocks=1)
    full.connected()
    full.replayed([(0, stores(A, B))], status(next_seq=1))
    lost = live(stores(A))
    lost.receive(2, stores(C))
    lost.replayed([(2, stores(C))], status(next_seq=3))
    for mirror in (full, lost):
        reasons = set()
        for _ in range(4):
            mirror.snapshot(-1, [], None)
            mirror.heard(status(next_seq=3))
            mirror.gave_up(f"not caught up ({mirror.reason})")
            reasons.add(mirror.reason)
            mirror.heard(status(next_seq=3))
        assert len(reasons) == 1
