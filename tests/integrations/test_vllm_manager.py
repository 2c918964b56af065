"""Our KVCacheManager as vLLM's scheduler calls it. That it is the same as vLLM's own is shown in compat/vllm."""

from __future__ import annotations

import logging
from hashlib import sha256
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from blockpool.integrations.vllm import KVCacheManager
from tests.integrations.stand_in import StandIn

SIZE = 4


@pytest.fixture(autouse=True)
def _vllm(vllm: StandIn) -> None:
    vllm.add_manager()


def spec(kind: str, size: int = SIZE, **more: Any) -> Any:
    return getattr(import_module("vllm.v1.kv_cache_interface"), kind)(size, **more)


def manager(*specs: Any, num_blocks: int = 20, unit: int = SIZE, interval: int | None = None, **more: Any) -> Any:
    interface = import_module("vllm.v1.kv_cache_interface")
    groups = [interface.KVCacheGroupSpec([f"layer{i}"], one) for i, one in enumerate(specs)]
    config = interface.KVCacheConfig(num_blocks, groups, interval)
    block_size = max(one.block_size for one in specs)
    return KVCacheManager(config, 100, block_size, unit, log_stats=True, **more)


def request(name: str, num_tokens: int, first: int = 0, unit: int = SIZE) -> Any:
    """Its tokens count up from `first`; it knows the hashes of its units."""
    made = SimpleNamespace(
        request_id=name,
        all_token_ids=list(range(first, first + num_tokens)),
        num_prompt_tokens=num_tokens,
        num_tokens=num_tokens,
        num_computed_tokens=0,
        num_in_flight_tokens=0,
        num_preemptions=0,
        shared_prefix_boundary=0,
        skip_reading_prefix_cache=False,
        status=import_module("vllm.v1.request").RequestStatus.WAITING,
        block_hashes=[],
        lora_request=None,
        mm_features=[],
        cache_salt=None,
    )
    hash_more(made, unit)
    return made


def hash_more(made: Any, unit: int = SIZE) -> None:
    tokens = made.all_token_ids
    for end in range(unit * (len(made.block_hashes) + 1), len(tokens) + 1, unit):
        made.block_hashes.append(sha256(repr(tokens[:end]).encode()).digest())


def admit(books: Any, made: Any, num_tokens: int | None = None, **more: Any) -> Any:
    """Look up and allocate; the ids of the new blocks, or None."""
    blocks, hit, _ = books.get_computed_blocks(made)
    count = made.num_tokens - hit if num_tokens is None else num_tokens
    new = books.allocate_slots(made, count, hit, blocks, **more)
    if new is None:
        return None
    books.record_prefix_cache_stats(made, hit)
    made.num_computed_tokens = hit + count
    return new.get_block_ids()


def test_a_prompt_is_found_again_but_for_its_last_block() -> None:
    books = manager(spec("FullAttentionSpec"))
    assert admit(books, request("a", 12)) == ([1, 2, 3],)
    again = request("b", 12)
    blocks, hit, junction = books.get_computed_blocks(again)
    assert (blocks.get_block_ids(), hit, junction) == (([1, 2],), 8, 0)
    assert books.block_pool.blocks[1].ref_cnt == 1, "nothing is held yet"
    assert admit(books, again) == ([4],)
    assert books.get_block_ids("b") == ([1, 2, 4],)
    assert books.make_prefix_cache_stats().hits == 8
    assert books.estimate_cached_tokens(again) == 12


def test_a_step_that_takes_nothing_gets_the_one_empty_answer() -> None:
    books = manager(spec("FullAttentionSpec"))
    made = request("a", 5)
    admit(books, made)
    made.all_token_ids.append(99)
    made.num_tokens += 1
    assert books.allocate_slots(made, 1) is books.empty_kv_cache_blocks


def test_blocks_go_back_deepest_first_and_only_once() -> None:
    books = manager(spec("FullAttentionSpec"), num_blocks=6)
    made = request("a", 14)
    admit(books, made)
    books.free(made)
    books.free(made)
    assert [block.block_id for block in books.block_pool.free_block_queue.get_all_free_blocks()] == [4, 5, 3, 2, 1]
    assert books.usage == 0.0


def test_the_scheduler_may_give_the_blocks_back_itself() -> None:
    books = manager(spec("FullAttentionSpec"))
    made = request("a", 9)
    admit(books, made)
    blocks = books.pop_blocks_for_free(made)
    assert [block.block_id for block in blocks] == [1, 2, 3]
    assert books.get_block_ids("a") == ([],)
    assert books.usage > 0
    books.block_pool.free_blocks(reversed(blocks))
    assert books.usage == 0.0


def test_what_a_window_no_longer_reads_goes_back_even_if_the_step_is_refused() -> None:
    books = manager(spec("SlidingWindowSpec", sliding_window=5), num_blocks=5)
    made = request("a", 16)
    admit(books, made, 12)
    assert books.block_pool.get_num_free_blocks() == 1
    assert books.allocate_slots(made, 4, reserved_blocks=9) is None
    assert books.get_block_ids("a") == ([0, 0, 3],)
    assert books.block_pool.get_num_free_blocks() == 3


def test_tokens_in_flight_keep_their_window() -> None:
    books = manager(spec("SlidingWindowSpec", sliding_window=5))
    made = request("a", 16)
    admit(books, made, 12)
    made.num_in_flight_tokens = 8
    books.allocate_slots(made, 1)
    assert books.get_block_ids("a") == ([1, 2, 3, 4],)


def test_reserve_and_watermark_are_kept_back() -> None:
    books = manager(spec("FullAttentionSpec"), num_blocks=10, watermark=0.2)
    assert admit(books, request("a", 32)) is None
    assert admit(books, request("b", 28), reserved_blocks=1) is None
    assert admit(books, request("c", 32), has_scheduled_reqs=False) is not None


def test_the_whole_prompt_must_fit_if_that_is_asked() -> None:
    books = manager(spec("FullAttentionSpec"), num_blocks=5)
    assert admit(books, request("a", 20), 4, full_sequence_must_fit=True) is None
    assert admit(books, request("a", 20), 4) is not None


def test_nothing_to_do_is_an_error() -> None:
    with pytest.raises(ValueError, match="num_new_tokens"):
        manager(spec("FullAttentionSpec")).allocate_slots(request("a", 4), 0)


def test_loaded_blocks_come_first_are_not_told_as_new_and_are_registered_when_they_are_there() -> None:
    books = manager(spec("FullAttentionSpec"), spec("SlidingWindowSpec", sliding_window=5))
    made = request("a", 16)
    new = books.allocate_slots(made, 0, num_external_computed_tokens=12, delay_cache_blocks=True)
    assert new is books.empty_kv_cache_blocks
    assert books.get_block_ids("a") == ([1, 2, 3], [0, 0, 4])
    assert books.get_computed_blocks(request("b", 16))[1] == 0
    books.cache_blocks(made, 12)
    assert books.get_computed_blocks(request("b", 16))[1] == 12


def test_new_blocks_to_be_zeroed_are_named_once() -> None:
    books = manager(spec("FullAttentionSpec"), spec("MambaSpec"))
    admit(books, request("a", 8))
    assert books.take_new_block_ids() == [1, 2], "states are not zeroed"
    assert books.take_new_block_ids() == []
    books.record_blocks_for_zeroing("a", 4)
    assert books.take_new_block_ids() == [2]


def test_a_hit_inside_a_block_is_copied_and_both_ends_stay_until_they_are_given_back() -> None:
    books = manager(spec("FullAttentionSpec", 2), spec("MambaSpec", 8), unit=2)
    made = request("a", 13, unit=2)
    admit(books, made, 12)
    books.new_step_starts()
    made.num_computed_tokens = 12
    books.allocate_slots(made, 1)
    copies, ends = books.take_kv_cache_block_copies()
    ((source, target),) = copies
    assert [block.block_id for block in ends] == [source, target]
    assert [block.ref_cnt for block in ends] == [2, 1]
    assert books.take_boundary_state_offloads() == {"a": [(1, target, 12)]}
    books.block_pool.free_blocks(reversed(ends))
    books.new_step_starts()
    again = request("b", 13, unit=2)
    blocks, hit, _ = books.get_computed_blocks(again)
    assert (hit, blocks.get_block_ids()[1]) == (12, [0, target])
    new = books.allocate_slots(again, 1, hit, blocks)
    (copy,), ends = books.take_kv_cache_block_copies()
    assert copy.src_block_id == target
    assert new.get_block_ids()[1] == [copy.dst_block_id]
    books.block_pool.free_blocks(reversed(ends))
    for one in (made, again):
        books.free(one)
    assert books.usage == 0.0


def test_a_state_is_not_read_in_the_step_that_writes_it() -> None:
    books = manager(spec("FullAttentionSpec"), spec("MambaSpec"))
    assert admit(books, request("a", 8)) is not None
    same_prefix = request("b", 12)
    assert admit(books, same_prefix) is None
    books.new_step_starts()
    assert admit(books, same_prefix) is not None


def test_events_say_what_was_removed_before_what_was_stored_and_of_what_kind() -> None:
    books = manager(spec("FullAttentionSpec"), num_blocks=4, enable_kv_cache_events=True)
    first = request("a", 12)
    admit(books, first)
    books.free(first)
    books.take_events()
    admit(books, request("b", 8, first=50))
    events = books.take_events()
    assert [type(event).__name__ for event in events] == ["BlockRemoved", "BlockRemoved", "BlockStored"]
    assert events[-1].kv_cache_spec_kind == "full_attention"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"num_prefill_checkpoint_blocks": 1}, "prefill checkpoint blocks"),
        ({"mamba_cache_mode": "none"}, "mode 'none'"),
    ],
)
def test_vllms_own_manager_is_built_for_what_ours_does_not_do(
    more: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "vllm"):
        built = manager(spec("FullAttentionSpec"), spec("MambaSpec", **more), watermark=0.1)
    assert type(built) is import_module("vllm.v1.core.kv_cache_manager").KVCacheManager
    assert built.asked["watermark"] == 0.1
    assert reason in caplog.text


def test_views_for_those_who_look_inside() -> None:
    books = manager(spec("FullAttentionSpec"), spec("SlidingWindowSpec", sliding_window=5))
    admit(books, request("a", 10))
    coordinator = books.coordinator
    assert isinstance(coordinator, import_module("vllm.v1.core.kv_cache_coordinator").HybridKVCacheCoordinator)
    full, window = coordinator.single_type_managers
    assert isinstance(full, import_module("vllm.v1.core.single_type_kv_cache_manager").FullAttentionManager)
    row = full.req_to_blocks["a"]
    assert [block.block_id for block in row] == [1, 2, 3]
    assert row[-1] is books.block_pool.blocks[3]
    assert window.num_cached_block["a"] == 2
    assert "b" not in full.req_to_blocks
    assert list(full.req_to_blocks["b"]) == []
    coordinator.retention_interval = 0
    assert coordinator.retention_interval == 0
    assert coordinator.find_longest_cache_hit_per_group(request("c", 12).block_hashes, 11)[1] == (8, 8)
    needed = coordinator.get_num_blocks_to_allocate("new", 12, ((), ()), 0, 0, 0, 12)
    assert needed == 6


def test_hits_can_be_cut_at_the_end_of_a_block() -> None:
    books = manager(spec("FullAttentionSpec"))
    admit(books, request("a", 16))
    blocks, hit, _ = books.get_computed_blocks(request("b", 16))
    assert hit == 12
    assert books.truncate_computed_blocks(blocks, 8).get_block_ids() == ([1, 2],)


def test_the_prefix_cache_is_reset_when_nothing_is_held() -> None:
    books = manager(spec("FullAttentionSpec"))
    made = request("a", 8)
    admit(books, made)
    assert not books.reset_prefix_cache()
    books.free(made)
    assert books.reset_prefix_cache()
    assert books.make_prefix_cache_stats().reset
    assert books.get_computed_blocks(request("b", 8))[1] == 0
