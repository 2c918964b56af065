"""What workers have of a prompt: the engine's own answer, for every kind of group, and apart for each tier."""

from __future__ import annotations

import hashlib
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpool.managers import (
    ChunkedLocalAttentionSpec,
    Coordinator,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
    make_manager,
)
from blockpool.pool import BlockPool, BlockStored, StorePayload
from blockpool.wire import Fleet, GroupRuleError, HashFormError, KVEventBatch, Mirror, WorkerError, encode_batch
from blockpool.wire.codec import with_int_hashes
from tests.sizes import property_settings
from tests.wire.test_wire_mirror import removes, status, stores

UNIT = 4
DIGESTS = [hashlib.sha256(bytes([i])).digest() for i in range(40)]
KINDS = [
    FullAttentionSpec(4),
    FullAttentionSpec(8),
    SlidingWindowSpec(4, 9),
    SlidingWindowSpec(8, 20),
    SlidingWindowSpec(4, 1),
    MambaSpec(8, 0, "align"),
    ChunkedLocalAttentionSpec(4, 16),
    CrossAttentionSpec(4),
]


def fed(fleet: Fleet, name: str, *payloads: bytes) -> Mirror:
    mirror = fleet.join(name)
    mirror.connected()
    mirror.replayed(list(enumerate(payloads)), None)
    return mirror


@property_settings(250)
@given(seed=st.integers(0, 10**6), partial_hits=st.booleans())
def test_the_engines_own_answer(seed: int, partial_hits: bool) -> None:
    """Of several workers with random holes in their caches, for groups of any kinds."""
    rng = random.Random(seed)
    specs = rng.sample(KINDS, rng.randint(1, 3))
    groups = {
        i: KVCacheGroupSpec((str(i),), spec, draft_margin=not spec.is_state and rng.random() < 0.3)
        for i, spec in enumerate(specs)
    }
    fleet = Fleet(hash_block_size=UNIT, groups=groups, partial_hits=partial_hits)
    chain = b"".join(DIGESTS)
    coordinators: dict[str, Coordinator] = {}
    for number in range(rng.choice([1, 3])):
        pool = BlockPool(200, hash_block_size=UNIT, events="first_last")
        managers = [make_manager(pool, i, group) for i, group in groups.items()]
        density = rng.choice([0.6, 0.9, 0.97, 1.0])
        for manager in managers:
            if not manager.prefix_cacheable:
                continue
            count = len(DIGESTS) * UNIT // manager.block_size
            mask = [rng.random() < density for _ in range(count)]
            blocks = pool.get_new_blocks(count)
            pool.cache_full_blocks(
                blocks,
                chain,
                0,
                count,
                manager.block_size,
                manager.group_id,
                mask,
                StorePayload(token_ids=range(1000)),
            )
            if manager.factor > 1 and rng.random() < 0.7:
                (inside,) = pool.get_new_blocks(1)
                at = rng.randint(1, len(DIGESTS) - 1)
                payload = StorePayload(token_ids=range(1000), parent=DIGESTS[at - 1])
                pool.cache_partial_block(
                    inside, DIGESTS[at], (at + 1) * UNIT, manager.group_id, manager.block_size, payload=payload
                )
        events = pool.take_events()
        form = rng.choice([lambda event: event, with_int_hashes])
        fed(fleet, str(number), encode_batch(KVEventBatch(0.0, [form(event) for event in events])))
        coordinators[str(number)] = Coordinator(managers, partial_hits)
    for length in (len(DIGESTS), rng.randint(1, len(DIGESTS))):
        answer = fleet.overlap(DIGESTS[:length])
        for name, coordinator in coordinators.items():
            asked = chain[: 32 * length]
            assert answer[name].tokens == {"GPU": coordinator.longest_common_hit(asked, length * UNIT).num_tokens}, (
                specs,
                length,
                name,
            )


def test_kinds_are_learned_from_events() -> None:
    """A window group's tail is no prefix: its last blocks alone are enough, and only with the other group's."""

    def events(group: int, hashes: list[bytes], kind: str, window: int | None) -> bytes:
        payload = StorePayload(token_ids=range(100), kv_cache_spec_kind=kind, kv_cache_spec_sliding_window=window)
        pool = BlockPool(50, hash_block_size=UNIT, events="first_last")
        table = [b if DIGESTS[i] in hashes else 0 for i, b in enumerate(pool.get_new_blocks(10))]
        pool.cache_full_blocks(table, b"".join(DIGESTS), 0, 10, UNIT, group, payload=payload)
        return encode_batch(KVEventBatch(0.0, pool.take_events()))

    fleet = Fleet()
    fed(
        fleet,
        "both",
        events(0, DIGESTS[:8], "full_attention", None),
        events(1, DIGESTS[4:6], "sliding_window", 2 * UNIT + 1),
    )
    fed(fleet, "full alone", events(0, DIGESTS[:8], "full_attention", None))
    fed(fleet, "window alone", events(1, DIGESTS[4:6], "sliding_window", 2 * UNIT + 1))
    tokens = {worker: one.tokens for worker, one in fleet.overlap(DIGESTS[:10]).items()}
    assert tokens == {"both": {"GPU": 6 * UNIT}, "full alone": {"GPU": 0}, "window alone": {"GPU": 0}}


@pytest.mark.parametrize("kind", ["chunked_local_attention", "unknown"])
def test_a_kind_that_events_do_not_explain_must_be_stated(kind: str) -> None:
    pool = BlockPool(4, hash_block_size=UNIT, events="first_last")
    pool.cache_full_blocks(
        pool.get_new_blocks(1),
        DIGESTS[0],
        0,
        1,
        UNIT,
        3,
        payload=StorePayload(token_ids=range(9), kv_cache_spec_kind=kind),
    )
    payload = encode_batch(KVEventBatch(0.0, pool.take_events()))
    fleet = Fleet()
    fed(fleet, "w", payload)
    with pytest.raises(GroupRuleError, match="group 3"):
        fleet.overlap(DIGESTS[:2])
    stated = Fleet(groups={3: KVCacheGroupSpec(("x",), ChunkedLocalAttentionSpec(UNIT, 8))}, hash_block_size=UNIT)
    fed(stated, "w", payload)
    assert stated.overlap(DIGESTS[:1])["w"].tokens == {"GPU": UNIT}


def test_tiers_add_up_from_the_fastest_on() -> None:
    fleet = Fleet()
    fed(fleet, "w", stores(*DIGESTS[:3]), stores(*DIGESTS[2:6], medium="CPU"), stores(DIGESTS[7], medium="disk"))
    fed(fleet, "v", stores(*DIGESTS[:2], medium="STORAGE"))
    answer = fleet.overlap(DIGESTS[:10])
    assert answer["w"].tokens == {"GPU": 3, "CPU": 6, "STORAGE": 6, "disk": 6}
    assert answer["v"].tokens == {"GPU": 0, "CPU": 0, "STORAGE": 2, "disk": 2}


def test_what_is_not_live_is_no_silent_zero() -> None:
    fleet = Fleet()
    fed(fleet, "live", stores(*DIGESTS[:3]))
    gone = fed(fleet, "gone", stores(*DIGESTS[:2]))
    gone.disconnected()
    fleet.join("new")
    answer = fleet.overlap(DIGESTS[:5])
    assert [(name, one.status, one.tokens, one.last_known) for name, one in answer.items()] == [
        ("live", "live", {"GPU": 3}, {"GPU": 3}),
        ("gone", "catching_up", None, {"GPU": 2}),
        ("new", "never_fed", None, None),
    ]


def test_workers_join_and_leave() -> None:
    fleet = Fleet()
    for number in range(130):
        fed(fleet, str(number), stores(*DIGESTS[: number % 30]))
    with pytest.raises(WorkerError):
        fleet.join("7")
    for number in range(0, 130, 2):
        fleet.leave(str(number))
    with pytest.raises(WorkerError):
        fleet.leave("0")
    fed(fleet, "again", stores(DIGESTS[0]))
    answer = fleet.overlap(DIGESTS)
    assert {worker: one.tokens for worker, one in answer.items()} == {
        **{str(number): {"GPU": number % 30} for number in range(1, 130, 2)},
        "again": {"GPU": 1},
    }
    assert len(fleet.mirrors) == 66
    for worker in fleet.mirrors:
        fleet.leave(worker)
    assert (fleet.overlap(DIGESTS), fleet.catalogue.num_keys) == ({}, 0)


def test_integers_are_not_asked_of_who_announces_digests() -> None:
    fleet = Fleet()
    fed(fleet, "w", stores(DIGESTS[0]))
    with pytest.raises(HashFormError, match="'w'"):
        fleet.overlap([1, 2])
    ints = Fleet()
    fed(ints, "v", stores(5, -1), removes(5))
    assert ints.overlap([2**64 - 1])["v"].tokens == {"GPU": 1}


def of_size(size: int, *hashes: bytes, group: int = 0) -> bytes:
    event = BlockStored(
        block_hashes=list(hashes),
        parent_block_hash=None,
        token_ids=[0] * size * len(hashes),
        block_size=size,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=group,
    )
    return encode_batch(KVEventBatch(0.0, [event]))


def test_hashes_of_a_finer_unit_than_any_block_are_no_silent_zero() -> None:
    """Blocks of 16 tokens, hashes of 4: until a boundary inside a block is announced nobody can tell."""
    blocks = DIGESTS[3:16:4]
    fleet = Fleet()
    holder = fed(fleet, "has some", of_size(16, *blocks))
    fed(fleet, "has none", of_size(16, DIGESTS[30]))
    answer = fleet.overlap(DIGESTS[:18])
    assert (answer["has some"].status, answer["has some"].tokens, answer["has some"].last_known) == (
        "stale",
        None,
        None,
    )
    assert "hash_block_size" in answer["has some"].reason
    assert (answer["has none"].status, answer["has none"].tokens) == ("live", {"GPU": 0})
    assert fleet.overlap(DIGESTS[20:29])["has some"].tokens == {"GPU": 0}  # of whatever unit, it has nothing
    assert fleet.overlap(DIGESTS[:1])["has some"].tokens == {"GPU": 0}
    holder.receive(1, of_size(4, DIGESTS[31]))
    assert fleet.overlap(DIGESTS[:18])["has some"].tokens == {"GPU": 64}
    stated = Fleet(hash_block_size=4)
    fed(stated, "has some", of_size(16, *blocks))
    assert stated.overlap(DIGESTS[:18])["has some"].tokens == {"GPU": 64}


def test_hashes_of_the_announced_unit_are_recognized() -> None:
    fleet = Fleet()
    fed(fleet, "w", of_size(16, *DIGESTS[:3]))
    assert fleet.overlap(DIGESTS[:5])["w"].tokens == {"GPU": 48}
    fed(fleet, "hole", of_size(16, *DIGESTS[2:3]))  # the 3rd of 3: no unit is a third of 16
    assert fleet.overlap(DIGESTS[:5])["hole"].tokens == {"GPU": 0}
    larger = Fleet()  # of a group with blocks of two hashes every 2nd is all there is
    fed(larger, "w", of_size(16, *DIGESTS[:4]), of_size(32, *DIGESTS[1:4:2], group=1))
    assert larger.overlap(DIGESTS[:5])["w"].tokens == {"GPU": 64}
    finer = Fleet()
    fed(finer, "w", of_size(16, *DIGESTS[1:8:2]), of_size(32, *DIGESTS[3:8:4], group=1))
    assert finer.overlap(DIGESTS[:9])["w"].status == "stale"


def test_empty_questions_and_empty_fleets() -> None:
    assert Fleet().overlap(DIGESTS) == {}
    fleet = Fleet()
    mirror = fleet.join("w")
    mirror.connected()
    mirror.replayed([], status())
    assert fleet.overlap(DIGESTS)["w"].tokens == {"GPU": 0}
    assert fleet.overlap([])["w"].tokens == {"GPU": 0}


@pytest.mark.parametrize("too_wide", [1 << 64, -(1 << 63) - 1])
def test_an_integer_of_more_than_64_bits_is_refused(too_wide: int) -> None:
    fleet = Fleet()
    fed(fleet, "one", stores(1))
    with pytest.raises(HashFormError, match="64 bits"):
        fleet.overlap([1, too_wide])
    assert fleet.overlap([1])["one"].tokens == {"GPU": 1}


def test_a_worker_that_announces_no_block_size_disturbs_nobody() -> None:
    fleet = Fleet()
    fed(fleet, "good", stores(DIGESTS[0]))
    wrong = stores(DIGESTS[0]).replace(b"block_size\x01", b"block_size\x00")
    bad = fed(fleet, "bad", wrong)
    assert bad.status != "live"
    overlap = fleet.overlap(DIGESTS[:1])
    assert overlap["good"].tokens == {"GPU": 1}
    assert overlap["bad"].tokens is None


ODD_FACTS = {
    "another size": {"block_size": 24},
    "an unknown kind": {"kv_cache_spec_kind": "chunked_local_attention"},
    "a window without a size": {"kv_cache_spec_kind": "sliding_window"},
    "a window of nothing": {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 0},
    "another kind": {"kv_cache_spec_kind": "mamba"},
    "a group that is none": {"group_idx": -1},
}


@pytest.mark.parametrize("odd", ODD_FACTS.values(), ids=ODD_FACTS)
def test_what_one_worker_says_of_groups_changes_nobody_elses_answer(odd: dict[str, object]) -> None:
    def announced(digests: list[bytes], **changes: object) -> bytes:
        event = BlockStored(
            block_hashes=digests,  # type: ignore[arg-type]
            parent_block_hash=None,
            token_ids=[0] * (16 * len(digests)),
            block_size=16,
            lora_id=None,
            medium="GPU",
            lora_name=None,
        )
        return encode_batch(KVEventBatch(0.0, [msgspec.structs.replace(event, **changes)]))

    fleet = Fleet()
    fed(fleet, "a", announced(DIGESTS[:4]))
    fed(fleet, "odd", announced(DIGESTS[5:6], **odd))
    found = fleet.overlap(DIGESTS[:4])
    assert found["a"].tokens == {"GPU": 64}
    assert (found["odd"].status, found["odd"].tokens, found["odd"].last_known) == ("stale", None, None)
    assert "group" in found["odd"].reason
    fleet.leave("odd")
    assert fleet.overlap(DIGESTS[:4])["a"].tokens == {"GPU": 64}


@pytest.mark.parametrize("wrong", [None, "x", 1.5])
def test_what_is_no_hash_is_refused(wrong: object) -> None:
    fleet = Fleet()
    fed(fleet, "w", stores(DIGESTS[0]))
    with pytest.raises(HashFormError, match="a hash is bytes or an integer"):
        fleet.overlap([wrong])  # type: ignore[list-item]
    with pytest.raises(HashFormError):
        fleet.mirrors["w"].copies(wrong)  # type: ignore[arg-type]
