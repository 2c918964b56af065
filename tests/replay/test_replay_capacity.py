"""What a request takes, computed by hand, and how many fit, by admitting them."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpool.cache import ConfigError, KVCacheConfig, KVCacheManager, Refusal, Request
from blockpool.cli.memory_size import parse_memory
from blockpool.hashing import BlockHashes
from blockpool.managers import KVCacheGroupSpec
from blockpool.models import CacheLayout, lay_out, parse_groups, read_model
from blockpool.models.catalogue import FOLDER
from blockpool.replay import ReplayError
from blockpool.replay.capacity import (
    PromptUse,
    blocks_for,
    common_unit,
    findable_tokens,
    measure_prompt,
    most_concurrent,
    num_reserved_blocks,
)
from blockpool.replay.capacity_report import blocks_in, measure_setting, needs_of, pool_of
from blockpool.replay.memory_text import enough_memory_text
from tests.sizes import property_settings

GIB = 2**30


def layout_of(stem: str) -> CacheLayout:
    return lay_out(read_model(FOLDER / f"{stem}.json"))


def use_of(stem: str, length: int, output: int = 0, chunk: int = 8192, retention: int | None = None) -> PromptUse:
    layout = layout_of(stem)
    return measure_prompt(
        layout.kv_cache_groups,
        num_prompt_tokens=length,
        num_output_tokens=output,
        max_num_batched_tokens=chunk,
        num_encoder_tokens=layout.num_encoder_tokens,
        retention_interval=retention,
    )


# -- by hand -------------------------------------------------------------------------------------------


def test_full_attention() -> None:
    # 1,000 / 16 = 62.5: 63 blocks, of which 62 are full and so can be found: 992 tokens; of 1,000 tokens one is
    # computed, so the same prompt finds 999 tokens, which is 62 whole blocks
    use = use_of("llama-3.1-8b", 1_000)
    assert (use.at_rest, use.peak, use.peak_tokens, use.left) == ((63,), (63,), 1_000, (62,))
    assert (use.first_reusable, use.same_again, use.num_hashed_tokens) == (16, 992, 992)
    # 8,192 + 100 = 8,292 tokens: 518.25 blocks
    assert use_of("llama-3.1-8b", 8_192, output=100).at_rest == (519,)


def test_full_attention_in_memory() -> None:
    # 40 GiB are 20,480 blocks, one of them the null block. 8,192 tokens take 512: 40 requests would take all 20,480
    layout, use = layout_of("llama-3.1-8b"), use_of("llama-3.1-8b", 8_192)
    groups = layout.kv_cache_groups
    assert layout.num_blocks(40 * GIB) == 20_480
    assert most_concurrent(20_480, groups, use) == 39
    assert most_concurrent(20_481, groups, use) == 40
    assert blocks_for(40, groups, use) == 20_481
    assert findable_tokens(20_480, groups, use) == 20_479 * 16


def test_windows() -> None:
    # Gemma 3 27B: six groups of windows of 1,024 tokens, one full. Chunks of 8,192 tokens, 512 blocks.
    # At rest the next token reads 1,023 tokens back, from 31,745 = block 1,984 on: 64 of 2,048 blocks.
    # The last chunk begins at 24,576 and reads from 23,553 = block 1,472 on: 2,048 - 1,472 = 576 blocks.
    use = use_of("gemma-3-27b", 32_768)
    assert use.at_rest == (64,) * 6 + (2_048,)
    assert use.peak == (576,) * 6 + (2_048,)
    assert use.peak_tokens == 32_768
    # everything stays findable, wherever a prompt branches off
    assert use.left == (2_048,) * 7
    assert use.first_reusable == 16


def test_windows_that_keep_the_prompts_end_only() -> None:
    # Retention 0. The same prompt resumes at 32,752 = 2,047 * 16 and reads from 31,729 = block 1,983 on: 64 blocks.
    use = use_of("gemma-3-27b", 32_768, retention=0)
    assert use.left == (64,) * 6 + (2_048,)
    assert (use.first_reusable, use.same_again) == (32_752, 32_752)


def test_windows_in_memory() -> None:
    # 40 GiB: 32,768 blocks. 8,192 tokens are one chunk: 7 * 512 = 3,584 at the peak, 6 * 64 + 512 = 896 at rest.
    # 32,767 - 3,584 = 29,183 = 32 * 896 + 511: 32 at rest beside one at its peak.
    layout, use = layout_of("gemma-3-27b"), use_of("gemma-3-27b", 8_192)
    assert (use.num_peak_blocks, use.num_rest_blocks) == (3_584, 896)
    assert most_concurrent(layout.num_blocks(40 * GIB), layout.kv_cache_groups, use) == 33


def test_chunks() -> None:
    # Llama 4: three groups of chunks of 8,192 tokens, one full; 12,000 tokens. The first 8,192 take 512 blocks in
    # each of four groups, and are given back in three of them when the second chunk of attention begins: 3,808
    # tokens, 238 blocks, beside 750 of full attention. So the peak is in the middle.
    use = use_of("llama-4-scout", 12_000)
    assert use.at_rest == (238, 238, 238, 750)
    assert (use.peak, use.peak_tokens) == ((512,) * 4, 8_192)
    # where a chunk of attention ends, nothing of it is read again
    assert use_of("llama-4-scout", 8_192).at_rest == (0, 0, 0, 512)


def test_states() -> None:
    # Qwen3-Next: three groups of states, one full, blocks of 544 tokens; 8,192 / 544 = 15.06. A step ends at the last
    # boundary that a replay can use, 15 * 544 = 8,160, and its state stays while the next one is written.
    use = use_of("qwen3-next-80b", 8_192)
    assert use.at_rest == (1, 1, 1, 16)
    assert (use.peak, use.peak_tokens) == ((2, 2, 2, 16), 8_192)
    assert use.left == (1, 1, 1, 15)
    assert (use.first_reusable, use.same_again) == (8_160, 8_160)
    # 32,768 tokens: chunks of at most 8,192 end at multiples of 544: 8,160, 16,320, 24,480 and 32,640
    use = use_of("qwen3-next-80b", 32_768)
    assert use.left == (4, 4, 4, 60)
    assert (use.first_reusable, use.same_again) == (8_160, 32_640)
    # shorter chunks end more often: 1,632 = 3 * 544 is the first end
    assert use_of("qwen3-next-80b", 8_192, chunk=2_048).first_reusable == 1_632
    # one prompt's own end only, 8,192 tokens or more
    assert use_of("qwen3-next-80b", 32_768, retention=0).left == (1, 1, 1, 60)
    # shorter than a block: nothing to find
    use = use_of("qwen3-next-80b", 500)
    assert (use.left, use.first_reusable, use.same_again) == ((0, 0, 0, 0), None, 0)
    assert findable_tokens(100, layout_of("qwen3-next-80b").kv_cache_groups, use) is None


def test_an_encoder() -> None:
    # Whisper: 448 / 16 = 28 blocks, 1,500 / 16 = 93.75: 94 for what the encoder has written, never found again
    use = use_of("whisper-large-v3", 448)
    assert (use.at_rest, use.peak, use.left) == ((28, 94), (28, 94), (28, 0))
    # 16,383 blocks / 122
    layout = layout_of("whisper-large-v3")
    assert most_concurrent(layout.num_blocks(40 * GIB), layout.kv_cache_groups, use) == 134


def test_sinks_are_taken_from_the_pool_once() -> None:
    groups = parse_groups("sink=32:16")
    use = measure_prompt(groups, num_prompt_tokens=160)
    assert (use.at_rest, num_reserved_blocks(groups)) == ((10,), 1 + 2)
    assert [most_concurrent(num_blocks, groups, use) for num_blocks in (12, 13, 22, 23)] == [0, 1, 1, 2]


def test_nothing_at_rest_is_no_limit() -> None:
    groups = parse_groups("chunk=32:16")
    use = measure_prompt(groups, num_prompt_tokens=64, max_num_batched_tokens=32)
    assert (use.num_rest_blocks, use.num_peak_blocks) == (0, 2)
    assert [most_concurrent(num_blocks, groups, use) for num_blocks in (2, 3)] == [0, None]


def test_the_common_unit() -> None:
    assert common_unit(parse_groups("full:16,mamba:48")) == 48
    assert common_unit(parse_groups("full:16,mamba:24")) == 48
    assert common_unit(parse_groups("full:16,sink=32:32"), 64) == 32
    with pytest.raises(ConfigError, match="multiple of the alignment 48"):
        common_unit(parse_groups("full:16,mamba:48"), 64)


def test_a_request_that_is_too_large_to_be_measured() -> None:
    with pytest.raises(ReplayError, match=r"20,000,000 tokens takes 20,000,\d* blocks"):
        measure_prompt(parse_groups("full:1"), num_prompt_tokens=20_000_000)


# -- by admitting them ---------------------------------------------------------------------------------

KINDS = (
    "full:4",
    "full:8",
    "window=6:4",
    "window=20:4*2",
    "window=9:8",
    "chunk=16:4",
    "chunk=24:8*2",
    "mamba:8",
    "mamba:16*2",
    "running-mamba:8",
    "reference=6:4",
    "ring:4",
    "cross:4",
    "sink=8:4",
)


def compute(
    manager: KVCacheManager,
    name: int,
    length: int,
    output: int,
    chunk: int,
    encoder: int,
    *,
    answer_step: int = 1,
    full_sequence_must_fit: bool = False,
) -> bool:
    """Admit a request whose prompt nobody shares, and compute it to its full length; false when there is no room."""
    unit = manager.pool.hash_block_size
    hashes = BlockHashes.from_digests(
        Random(name).randbytes(32 * (length // unit)), digest_size=32, hash_block_size=unit
    )
    request = Request(str(name), num_prompt_tokens=length, block_hashes=hashes)
    request.num_tokens = length + output
    has_states = any(one.is_state and one.prefix_cacheable for one in manager.managers)
    computed = 0
    while computed < length + output:
        end = min(length, computed + chunk) if computed < length else min(length + output, computed + answer_step)
        if has_states and computed < length:
            stop = manager.next_checkpoint(request)
            whole = end - end % manager.alignment
            if stop is not None and stop <= end:
                end = stop
            elif end < length and whole > computed:
                end = whole
        plan = manager.plan(
            request,
            end - computed,
            num_encoder_tokens=encoder,
            full_sequence_must_fit=full_sequence_must_fit and computed == 0,
        )
        if isinstance(plan, Refusal):
            return False
        manager.commit(plan)
        request.num_computed_tokens = computed = end
    manager.drop(request, computed)  # as the next step would
    return True


@property_settings(150)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    length=st.integers(1, 70),
    output=st.integers(0, 20),
    chunk=st.integers(1, 50),
    encoder=st.integers(1, 20),
    num_requests=st.integers(1, 6),
    spare=st.integers(-1, 3),
)
def test_so_many_requests_fit_and_no_more(
    kinds: list[str], length: int, output: int, chunk: int, encoder: int, num_requests: int, spare: int
) -> None:
    groups = parse_groups(",".join(kinds))
    use = measure_prompt(
        groups,
        num_prompt_tokens=length,
        num_output_tokens=output,
        max_num_batched_tokens=chunk,
        num_encoder_tokens=encoder,
    )
    num_blocks = blocks_for(num_requests, groups, use) + spare
    expected = most_concurrent(num_blocks, groups, use)
    manager = KVCacheManager(KVCacheConfig(num_blocks, groups, partial_hits=False))
    count = 0
    while count < num_requests + 5 and compute(manager, count, length, output, chunk, encoder):
        count += 1
    assert count == (num_requests + 5 if expected is None else min(expected, num_requests + 5))


@property_settings(60)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    length=st.integers(1, 70),
    num_blocks=st.integers(2, 200),
    more=st.integers(0, 50),
)
def test_more_memory_never_holds_less(kinds: list[str], length: int, num_blocks: int, more: int) -> None:
    groups = parse_groups(",".join(kinds))
    use = measure_prompt(groups, num_prompt_tokens=length)
    few, many = (most_concurrent(size, groups, use) for size in (num_blocks, num_blocks + more))
    assert many is None or (few is not None and few <= many)
    held, more_held = (findable_tokens(size, groups, use) for size in (num_blocks, num_blocks + more))
    assert held is None or (more_held is not None and held <= more_held)
    for num_requests in range(1, 4):
        needed = blocks_for(num_requests, groups, use)
        fits = most_concurrent(needed, groups, use)
        assert fits is None or fits == num_requests


@property_settings(60)
@given(
    stem=st.sampled_from(("llama-3.1-8b", "gemma-3-27b", "llama-4-scout", "qwen3-next-80b", "whisper-tiny")),
    length=st.integers(1, 20_000),
    num_requests=st.integers(1, 5_000),
    block_size=st.sampled_from((1, 16, 24, 128)),
)
def test_the_memory_that_is_named_holds_so_many(stem: str, length: int, num_requests: int, block_size: int) -> None:
    layout = lay_out(read_model(FOLDER / f"{stem}.json"), block_size=block_size)
    setting = measure_setting(layout.kv_cache_groups, layout=layout, lengths=[length], max_num_batched_tokens=4096)
    (need,) = needs_of(setting, num_requests)
    assert need.memory_bytes is not None
    (count,) = pool_of(setting, blocks_in(setting, parse_memory(enough_memory_text(need.memory_bytes)))).concurrency
    assert count is None or count >= num_requests


@given(st.integers(1, 2**55))
@property_settings(300)
def test_memory_is_rounded_up_by_less_than_a_hundredth(num_bytes: int) -> None:
    text = enough_memory_text(num_bytes)
    unit = parse_memory("1" + text.split()[1])
    assert num_bytes <= parse_memory(text) < num_bytes + unit / 100 + 1


def test_an_engine_that_admits_by_the_worst_case_holds_fewer() -> None:
    """Gemma 3 27B in 40 GiB, 1,000 tokens and 30,000 of output, all known: the guide's figures."""
    layout, use = layout_of("gemma-3-27b"), use_of("gemma-3-27b", 1_000, output=30_000)
    num_blocks = layout.num_blocks(40 * GIB)
    assert most_concurrent(num_blocks, layout.kv_cache_groups, use) == 14
    config = KVCacheConfig(num_blocks, layout.kv_cache_groups, partial_hits=False)
    manager = KVCacheManager(config, max_in_flight_tokens=8192)
    count = 0
    # the answer in steps, which take 32 blocks more per group and no more than the bound has
    while compute(manager, count, 1_000, 30_000, 8192, 0, answer_step=512, full_sequence_must_fit=True):
        count += 1
    assert count == 12


def test_what_is_left_is_what_the_cache_has() -> None:
    """Equal groups are measured once: the figures are those of a cache that has all of them."""
    groups: tuple[KVCacheGroupSpec, ...] = parse_groups("window=20:4*3,full:4,mamba:8*2")
    use = measure_prompt(groups, num_prompt_tokens=60, max_num_batched_tokens=24)
    manager = KVCacheManager(KVCacheConfig(1_000, groups, partial_hits=False))
    assert compute(manager, 0, 60, 0, 24, 0)
    kept = tuple(one.num_kept("0") for one in manager.managers)
    manager.free("0")
    cached = manager.pool.get_cached_by_group()
    assert use.at_rest == kept
    assert use.left == tuple(cached[group] for group in range(len(groups)))
