"""What each architecture keeps, computed by hand. Sizes are those of one rank; a number has 2 bytes unless said."""

from __future__ import annotations

from typing import Any

import pytest

from blockpool.managers import KVCacheSpec, MambaSpec
from blockpool.models import CacheLayout, groups_as_text, lay_out, read_model
from blockpool.models.catalogue import FOLDER

GIB = 2**30
MEMORY = 40 * GIB


def layout_of(name: str, block_size: int = 16, **options: Any) -> CacheLayout:
    return lay_out(read_model(FOLDER / f"{name}.json", **options), block_size=block_size)


def check(
    layout: CacheLayout, groups: str, layers: list[int], bytes_per_token: int, bytes_per_block: int, num_blocks: int
) -> None:
    assert groups_as_text(layout.kv_cache_groups) == groups
    assert [len(group.layer_names) for group in layout.kv_cache_groups] == layers
    assert layout.bytes_per_token == bytes_per_token
    assert layout.bytes_per_block == bytes_per_block
    assert layout.num_blocks(MEMORY) == num_blocks
    # the arithmetic of `num_blocks`, and nothing of it lost
    assert num_blocks * bytes_per_block <= MEMORY < (num_blocks + 1) * bytes_per_block
    for part in layout.groups:
        spec = part.group.kv_cache_spec
        assert part.used_bytes_per_block == part.bytes_per_state + part.bytes_per_token * spec.block_size
        assert 0 < part.used_bytes_per_block <= bytes_per_block


def test_llama() -> None:
    # 2 (keys, values) * 8 heads * 128 numbers * 2 bytes = 4,096 bytes per token and layer
    # 32 layers: 131,072 per token, * 16 tokens = 2,097,152 per block; 42,949,672,960 / 2,097,152 = 20,480
    layout = layout_of("llama-3.1-8b")
    check(layout, "full:16", [32], 131_072, 2_097_152, 20_480)
    assert layout.max_model_len == 131_072
    assert layout.notes == ()


def test_qwen_dense() -> None:
    # Qwen3 8B: 2 * 8 * 128 * 2 = 4,096; 36 layers: 147,456 per token; * 16 = 2,359,296
    check(layout_of("qwen3-8b"), "full:16", [36], 147_456, 2_359_296, 18_204)
    # Qwen2.5 7B: heads of 3,584 / 28 = 128 numbers, 4 of them with keys and values: 2 * 4 * 128 * 2 = 2,048;
    # 28 layers: 57,344 per token. Its window is not in use.
    check(layout_of("qwen2.5-7b"), "full:16", [28], 57_344, 917_504, 46_811)


def test_mistral() -> None:
    # 2 * 8 * 128 * 2 = 4,096; 32 layers: 131,072 per token. 0.1 has a window in every layer, 0.3 in none.
    check(layout_of("mistral-7b-v0.1"), "window=4096:16", [32], 131_072, 2_097_152, 20_480)
    check(layout_of("mistral-7b-v0.3"), "full:16", [32], 131_072, 2_097_152, 20_480)


def test_gemma_2() -> None:
    # 2 * 8 * 256 * 2 = 8,192 per token and layer; 42 layers: 344,064 per token
    # window and full by turns, the window first: 21 and 21, so a block has 21 pages: 21 * 8,192 * 16 = 2,752,512
    layout = layout_of("gemma-2-9b")
    check(layout, "window=4096:16,full:16", [21, 21], 344_064, 2_752_512, 15_603)
    assert layout.kv_cache_groups[0].layer_names[:2] == ("layers.0", "layers.2")
    assert layout.notes == ("the checkpoint is float32: 16 bits per number assumed, as engines run it",)


def test_gemma_3() -> None:
    # 27B: 2 * 16 * 128 * 2 = 8,192 per token and layer; 62 layers: 507,904 per token
    # every 6th layer is full: 62 // 6 = 10, so 52 windows; 52 / 10 -> 6 groups of 9, 9, 9, 9, 8, 8 layers
    # a block has 10 pages: 10 * 8,192 * 16 = 1,310,720
    layout = layout_of("gemma-3-27b")
    check(layout, "window=1024:16*6,full:16", [9, 9, 9, 9, 8, 8, 10], 507_904, 1_310_720, 32_768)
    assert [part.used_bytes_per_block for part in layout.groups[4:]] == [8 * 131_072, 8 * 131_072, 10 * 131_072]
    # 4B, whose configuration leaves out 8 heads, 4 of them with keys and values, of 256 numbers:
    # 2 * 4 * 256 * 2 = 4,096; 34 layers: 139,264 per token; 34 // 6 = 5 full, 29 windows in 6 groups
    # 5 * 4,096 * 16 = 327,680
    layout = layout_of("gemma-3-4b")
    check(layout, "window=1024:16*6,full:16", [5, 5, 5, 5, 5, 4, 5], 139_264, 327_680, 131_072)
    assert layout.max_model_len == 131_072


def test_llama_4() -> None:
    # 2 * 8 * 128 * 2 = 4,096; 48 layers: 196,608 per token; every 4th without rotation, full: 12, chunks: 36 = 3 * 12
    # 12 * 4,096 * 16 = 786,432
    layout = layout_of("llama-4-scout")
    check(layout, "chunk=8192:16*3,full:16", [12, 12, 12, 12], 196_608, 786_432, 54_613)
    assert layout.kv_cache_groups[3].layer_names[:2] == ("layers.3", "layers.7")


def test_gpt_oss() -> None:
    # 2 * 8 * 64 * 2 = 2,048; 24 layers: 49,152 per token; window and full by turns: 12 and 12
    # 12 * 2,048 * 16 = 393,216. The sinks are weights: no blocks, no group.
    layout = layout_of("gpt-oss-20b")
    check(layout, "window=128:16,full:16", [12, 12], 49_152, 393_216, 109_226)
    assert layout.notes == ("the configuration names no dtype: 16 bits per number assumed",)


def test_deepseek() -> None:
    # one latent per token: (512 + 64) * 2 = 1,152; 61 layers: 70,272 per token; * 16 = 1,124,352
    check(layout_of("deepseek-v3"), "full:16", [61], 70_272, 1_124_352, 38_199)
    # V2 Lite: the same latent, 27 layers: 31,104 per token; * 16 = 497,664
    check(layout_of("deepseek-v2-lite"), "full:16", [27], 31_104, 497_664, 86_302)


def test_deepseek_with_an_indexer() -> None:
    # a latent of 1,152, and 128 indexer keys of one byte with one scale of 4: 132. Both read the whole prefix: one
    # group of 2 * 61 layers. 61 * (1,152 + 132) = 78,324 per token; * 64 = 5,012,736
    check(layout_of("deepseek-v3.2", 64), "full:64", [122], 78_324, 5_012_736, 8_568)
    # in 8 bits: 512 + 4 scales * 4 + 64 * 2 = 656 and 132: 61 * 788 = 48,068 per token; * 64 = 3,076,352
    check(layout_of("deepseek-v3.2", 64, kv_cache_dtype="fp8"), "full:64", [122], 48_068, 3_076_352, 13_961)


def test_qwen_next() -> None:
    # attention: 2 * 2 * 256 * 2 = 2,048 per token and layer, in every 4th of 48 layers: 12 * 2,048 = 24,576
    # state: convolution (2 * 16 * 128 + 32 * 128) * 3 = 24,576 numbers, matrices 32 * 128 * 128 = 524,288 numbers:
    # 548,864 * 2 bytes = 1,097,728. / 2,048 = 536 tokens, in steps of 16: 544
    # page 544 * 2,048 = 1,114,112; 12 pages: 13,369,344; 36 states = 3 groups of 12
    layout = layout_of("qwen3-next-80b")
    check(layout, "mamba:544*3,full:544", [12, 12, 12, 12], 24_576, 13_369_344, 3_212)
    assert [part.bytes_per_state for part in layout.groups] == [12 * 1_097_728] * 3 + [0]
    assert [part.group.clear_new_blocks for part in layout.groups] == [False] * 3 + [True]


def test_jamba() -> None:
    # attention: 2 * 8 * 128 * 2 = 4,096, in layers 4, 12, 20, 28 of 32: 16,384 per token
    # state: 2 * 4,096 = 8,192 channels; * 3 inputs and * 16 numbers: 8,192 * 19 * 2 bytes = 311,296
    # 311,296 / 4,096 = 76 tokens, in steps of 16: 80; page 80 * 4,096 = 327,680; * 4 = 1,310,720; 28 states = 7 * 4
    layout = layout_of("jamba-v0.1")
    check(layout, "mamba:80*7,full:80", [4] * 8, 16_384, 1_310_720, 32_768)
    assert layout.kv_cache_groups[7].layer_names == ("layers.4", "layers.12", "layers.20", "layers.28")
    # in steps of 64: 128; 128 * 4,096 * 4 = 2,097,152
    check(layout_of("jamba-v0.1", 64), "mamba:128*7,full:128", [4] * 8, 16_384, 2_097_152, 20_480)


def test_nemotron_h() -> None:
    # 52 letters: 24 Mamba 2, 4 attention, 24 plain. Attention: 2 * 8 * 128 * 2 = 4,096; * 4 = 16,384 per token
    # state: convolution (128 * 64 + 2 * 8 * 128) * 3 = 30,720 numbers of 2 bytes, recurrent 128 * 64 * 128 =
    # 1,048,576 numbers of 4 bytes: 61,440 + 4,194,304 = 4,255,744. / 4,096 = 1,039 tokens, in steps of 16: 1,040
    # page 1,040 * 4,096 = 4,259,840; * 4 = 17,039,360; 24 states = 6 * 4
    layout = layout_of("nemotron-h-8b")
    check(layout, "mamba:1040*6,full:1040", [4] * 7, 16_384, 17_039_360, 2_520)
    assert layout.groups[0].bytes_per_state == 4 * 4_255_744
    assert layout.kv_cache_groups[6].layer_names == ("layers.7", "layers.18", "layers.29", "layers.40")
    # everything in 2 bytes: 30,720 + 1,048,576 = 1,079,296 * 2 = 2,158,592; / 4,096 = 527; in steps of 16: 528
    small = layout_of("nemotron-h-8b", mamba_ssm_cache_dtype="bfloat16")
    check(small, "mamba:528*6,full:528", [4] * 7, 16_384, 4 * 528 * 4_096, 4_964)


def test_whisper() -> None:
    # 20 heads of 1,280 / 20 = 64 numbers: 2 * 20 * 64 * 2 = 5,120 per token and layer, in 32 decoder layers, for the
    # decoder's own tokens and for the encoder's: 2 * 32 * 5,120 = 327,680; 32 * 5,120 * 16 = 2,621,440
    layout = layout_of("whisper-large-v3")
    check(layout, "full:16,cross:16", [32, 32], 327_680, 2_621_440, 16_384)
    assert (layout.max_model_len, layout.num_encoder_tokens) == (448, 1_500)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "head_bytes"),
    [
        ("auto", 128 * 2),
        ("bfloat16", 128 * 2),
        ("fp8", 128),
        ("fp8_e5m2", 128),
        ("int8_per_token_head", 128 + 4),
        ("fp8_per_token_head", 128 + 4),
        ("nvfp4", 64 + 8),
    ],
)
def test_quantised_caches(kv_cache_dtype: str, head_bytes: int) -> None:
    # keys and values of 8 heads in 32 layers
    per_token = 2 * 8 * 32 * head_bytes
    layout = layout_of("llama-3.1-8b", kv_cache_dtype=kv_cache_dtype)
    check(layout, "full:16", [32], per_token, 16 * per_token, MEMORY // (16 * per_token))


def test_a_quantised_latent() -> None:
    # 576 numbers of one byte; as fp8_ds_mla 656 bytes
    assert layout_of("deepseek-v3", kv_cache_dtype="fp8").bytes_per_token == 61 * 576
    assert layout_of("deepseek-v3", kv_cache_dtype="fp8_ds_mla").bytes_per_token == 61 * 656


def test_quantised_keys_beside_states() -> None:
    # Qwen3-Next: the state stays 1,097,728 bytes, a token of attention takes 1,024: exactly 1,072 = 67 * 16 tokens
    layout = layout_of("qwen3-next-80b", kv_cache_dtype="fp8")
    check(layout, "mamba:1072*3,full:1072", [12] * 4, 12_288, 12 * 1_097_728, 3_260)


@pytest.mark.parametrize(
    ("name", "ranks", "bytes_per_token", "bytes_per_state"),
    [
        ("llama-3.1-8b", 4, 131_072 // 4, 0),
        ("llama-3.1-8b", 16, 131_072 // 8, 0),  # 8 heads on 16 ranks: each rank has one, twice over
        ("deepseek-v3", 8, 70_272, 0),  # a latent is not shared
        ("qwen3-next-80b", 2, 24_576 // 2, 1_097_728 // 2),
        # 2 heads on 4 ranks; a quarter of the state: 274,432
        ("qwen3-next-80b", 4, 24_576 // 2, 274_432),
        ("jamba-v0.1", 4, 16_384 // 4, 311_296 // 4),
        # 16 ranks, 8 groups: each rank has one. (8 * 64 + 2 * 128) * 3 * 2 + 8 * 64 * 128 * 4 = 4,608 + 262,144
        ("nemotron-h-8b", 16, 16_384 // 8, 266_752),
        ("whisper-large-v3", 4, 327_680 // 4, 0),
    ],
)
def test_tensor_parallel_ranks(name: str, ranks: int, bytes_per_token: int, bytes_per_state: int) -> None:
    layout = layout_of(name, tensor_parallel_size=ranks)
    assert layout.bytes_per_token == bytes_per_token
    states = [part for part in layout.groups if part.bytes_per_state]
    assert {part.bytes_per_state // len(part.group.layer_names) for part in states} == (
        {bytes_per_state} if bytes_per_state else set()
    )


def test_states_that_cannot_be_hit() -> None:
    def modes(**options: Any) -> set[str]:
        specs: list[KVCacheSpec] = [
            group.kv_cache_spec for group in layout_of("jamba-v0.1", **options).kv_cache_groups
        ]
        return {spec.mamba_cache_mode for spec in specs if isinstance(spec, MambaSpec)}

    assert modes() == {"align"}
    assert modes(prefix_caching=False) == {"none"}
