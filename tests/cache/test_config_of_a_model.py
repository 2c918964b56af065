"""From a model to a cache in one call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blockpool.cache import ConfigError, KVCacheConfig, KVCacheManager, Request
from blockpool.models import ModelError, UnknownArchitecture, groups_as_text, known_models

GIB = 2**30
GEMMA = known_models()["google/gemma-3-27b-it"]
QWEN_NEXT = known_models()["Qwen/Qwen3-Next-80B-A3B-Instruct"]


def test_groups_and_blocks_are_those_of_the_model() -> None:
    # 10 layers * 8,192 bytes per token * 16 tokens = 1,310,720 bytes per block; 40 GiB / that = 32,768
    config = KVCacheConfig.from_hf_config(GEMMA, memory_bytes=40 * GIB)
    assert config.num_blocks == 32_768
    assert groups_as_text(config.kv_cache_groups) == "window=1024:16*6,full:16"
    assert (config.hash_block_size, config.retention_interval, config.partial_hits) == (None, None, True)
    manager = KVCacheManager(config)
    assert manager.allocate_slots(Request("first", num_prompt_tokens=100), 100) is not None
    assert [one.num_kept("first") for one in manager.managers] == [7] * 7


def test_file_folder_content_and_name_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(GEMMA.read_text())
    configs = [
        KVCacheConfig.from_hf_config(source, memory_bytes=GIB)
        for source in (GEMMA, tmp_path, "config.json", json.loads(GEMMA.read_text()), "google/gemma-3-27b-it")
    ]
    assert all(config == configs[0] for config in configs)


def test_how_the_model_is_run_and_what_the_cache_keeps() -> None:
    config = KVCacheConfig.from_hf_config(
        QWEN_NEXT,
        memory_bytes=40 * GIB,
        block_size=64,
        kv_cache_dtype="fp8",
        tensor_parallel_size=2,
        mamba_ssm_cache_dtype="float32",
        hash_block_size=64,
        digest_size=16,
        retention_interval=0,
        partial_hits=False,
    )
    # a rank: convolution 12,288 numbers of 2 bytes, matrices 262,144 of 4: 1,073,152 bytes; a token takes
    # 2 * 1 * 256 = 512: 2,096 tokens, in steps of 64: 2,112; 12 pages of 2,112 * 512 bytes
    assert groups_as_text(config.kv_cache_groups) == "mamba:2112*3,full:2112"
    assert config.num_blocks == 40 * GIB // (12 * 2_112 * 512)
    assert (config.hash_block_size, config.digest_size) == (64, 16)
    assert (config.retention_interval, config.partial_hits) == (0, False)


def test_what_does_not_fit_together_is_named() -> None:
    with pytest.raises(ModelError, match="a pool needs 2"):
        KVCacheConfig.from_hf_config(GEMMA, memory_bytes=1_310_720)
    with pytest.raises(UnknownArchitecture):
        KVCacheConfig.from_hf_config({"architectures": ["MambaForCausalLM"]}, memory_bytes=GIB)
    with pytest.raises(ConfigError, match="not a multiple of the hash block size 7"):
        KVCacheConfig.from_hf_config(GEMMA, memory_bytes=GIB, hash_block_size=7)
    for wrong in ("40GiB", 1.5, True, -1):
        with pytest.raises(ConfigError, match="memory_bytes must be an int of at least 0 bytes"):
            KVCacheConfig.from_hf_config(GEMMA, memory_bytes=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        KVCacheConfig.from_hf_config(GEMMA, memory_bytes=GIB, block_sise=16)
