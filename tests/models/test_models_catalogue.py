"""The models known by name: each configuration has its figures, here or in test_models_figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockpool.models import ModelCache, find_model, groups_as_text, known_models, lay_out, read_model
from blockpool.models.catalogue import FOLDER

# As published: configuration, layers with keys and values, heads that have them, numbers per head, longest sequence.
# Bytes per token: layers * 2 (keys and values) * heads * numbers * 2 bytes.
ATTENTION = [
    ("llama-2-7b", 32, 32, 128, 4_096),
    ("llama-2-13b", 40, 40, 128, 4_096),
    ("llama-2-70b", 80, 8, 128, 4_096),
    ("llama-3-8b", 32, 8, 128, 8_192),
    ("llama-3-70b", 80, 8, 128, 8_192),
    ("llama-3.1-70b", 80, 8, 128, 131_072),
    ("llama-3.1-405b", 126, 8, 128, 131_072),
    ("llama-3.2-1b", 16, 8, 64, 131_072),
    ("llama-3.2-3b", 28, 8, 128, 131_072),
    ("tinyllama-1.1b", 22, 4, 64, 2_048),
    ("qwen2.5-0.5b", 24, 2, 64, 32_768),
    ("qwen2.5-1.5b", 28, 2, 128, 32_768),
    ("qwen2.5-3b", 36, 2, 128, 32_768),
    ("qwen2.5-14b", 48, 8, 128, 32_768),
    ("qwen2.5-32b", 64, 8, 128, 32_768),
    ("qwen2.5-72b", 80, 8, 128, 32_768),
    ("qwen2.5-1.5b-base", 28, 2, 128, 131_072),
    ("qwen2.5-7b-base", 28, 4, 128, 131_072),
    ("qwen2.5-14b-base", 48, 8, 128, 131_072),
    ("qwen2.5-32b-base", 64, 8, 128, 131_072),
    ("qwen2.5-72b-base", 80, 8, 128, 131_072),
    ("qwq-32b", 64, 8, 128, 40_960),
    ("r1-distill-qwen-1.5b", 28, 2, 128, 131_072),
    ("r1-distill-qwen-7b", 28, 4, 128, 131_072),
    ("r1-distill-qwen-14b", 48, 8, 128, 131_072),
    ("r1-distill-qwen-32b", 64, 8, 128, 131_072),
    ("qwen3-0.6b", 28, 8, 128, 40_960),
    ("qwen3-1.7b", 28, 8, 128, 40_960),
    ("qwen3-4b", 36, 8, 128, 40_960),
    ("qwen3-4b-2507", 36, 8, 128, 262_144),
    ("qwen3-14b", 40, 8, 128, 40_960),
    ("qwen3-32b", 64, 8, 128, 40_960),
    ("qwen3-30b-a3b", 48, 4, 128, 40_960),
    ("qwen3-30b-a3b-2507", 48, 4, 128, 262_144),
    ("qwen3-235b-a22b", 94, 4, 128, 40_960),
    ("qwen3-235b-a22b-2507", 94, 4, 128, 262_144),
    ("qwen3-coder-480b-a35b", 62, 8, 128, 262_144),
    ("mistral-small-24b", 40, 8, 128, 32_768),
    ("mistral-large-2407", 88, 8, 128, 131_072),
    ("mixtral-8x7b", 32, 8, 128, 32_768),
    ("mixtral-8x22b", 56, 8, 128, 65_536),
    ("gemma-2b", 18, 1, 256, 8_192),
    ("gemma-7b", 28, 16, 256, 8_192),
    ("gemma-2-2b", 26, 4, 256, 8_192),
    ("gemma-2-27b", 46, 16, 128, 8_192),
    ("gemma-3-1b", 26, 1, 256, 32_768),
    ("gemma-3-12b", 48, 8, 256, 131_072),
    ("llama-4-maverick", 48, 8, 128, 1_048_576),
    ("gpt-oss-120b", 36, 8, 64, 131_072),
    ("jamba-large-1.5", 72 // 8, 8, 128, 262_144),
    ("nemotron-nano-9b-v2", 4, 8, 128, 131_072),
    ("nemotron-nano-12b-v2", 6, 8, 128, 131_072),
    ("nemotron-3-nano-30b-a3b", 6, 2, 128, 262_144),
    # decoder layers, each with its own tokens and the encoder's
    ("whisper-tiny", 2 * 4, 6, 64, 448),
    ("whisper-base", 2 * 6, 8, 64, 448),
    ("whisper-small", 2 * 12, 12, 64, 448),
    ("whisper-medium", 2 * 24, 16, 64, 448),
    ("whisper-large-v2", 2 * 32, 20, 64, 448),
    ("whisper-large-v3-turbo", 2 * 4, 20, 64, 448),
]
# (configuration, layers, longest sequence): one latent of 512 + 64 numbers per token.
LATENT = [("deepseek-v2", 60, 163_840), ("kimi-k2", 61, 131_072)]


def model(stem: str) -> ModelCache:
    return read_model(FOLDER / f"{stem}.json")


@pytest.mark.parametrize(("stem", "layers", "heads", "head_size", "longest"), ATTENTION)
def test_keys_and_values(stem: str, layers: int, heads: int, head_size: int, longest: int) -> None:
    layout = lay_out(model(stem))
    assert layout.bytes_per_token == layers * 2 * heads * head_size * 2
    assert layout.max_model_len == longest


@pytest.mark.parametrize(("stem", "layers", "longest"), LATENT)
def test_latents(stem: str, layers: int, longest: int) -> None:
    layout = lay_out(model(stem))
    assert (layout.bytes_per_token, layout.max_model_len) == (layers * (512 + 64) * 2, longest)


@pytest.mark.parametrize(
    ("stem", "groups"),
    [
        ("gemma-2-2b", "window=4096:16,full:16"),  # 13 and 13
        ("gemma-3-1b", "window=512:16*6,full:16"),  # 26 // 6 = 4 full, 22 windows / 4
        ("gemma-3-12b", "window=1024:16*5,full:16"),  # 48 // 6 = 8 full, 40 windows / 8
        ("llama-4-maverick", "chunk=8192:16*3,full:16"),
        ("gpt-oss-120b", "window=128:16,full:16"),  # 18 and 18
        # 2 * 8,192 = 16,384 channels * 19 * 2 bytes = 622,592 / 4,096 = 152 tokens, in steps of 16: 160; 63 / 9 = 7
        ("jamba-large-1.5", "mamba:160*7,full:160"),
        # (128 * 80 + 2 * 8 * 128) * 3 * 2 + 128 * 80 * 128 * 4 = 5,316,608 / 4,096 = 1,298: 1,312; 27 / 4 -> 7
        ("nemotron-nano-9b-v2", "mamba:1312*7,full:1312"),
        ("nemotron-nano-12b-v2", "mamba:1312*5,full:1312"),  # the same state; 28 / 6 -> 5
        # (64 * 64 + 2 * 8 * 128) * 3 * 2 + 64 * 64 * 128 * 4 = 2,134,016 / 1,024 = 2,084: 2,096; 23 / 6 -> 4
        ("nemotron-3-nano-30b-a3b", "mamba:2096*4,full:2096"),
    ],
)
def test_groups_of_more_than_one_kind(stem: str, groups: str) -> None:
    assert groups_as_text(lay_out(model(stem)).kv_cache_groups) == groups


def test_every_configuration_has_its_figures_and_a_name() -> None:
    """One added without figures would go unchecked."""
    figures = (Path(__file__).parent / "test_models_figures.py").read_text()
    listed = {stem for stem, *_ in [*ATTENTION, *LATENT]}
    for path in FOLDER.glob("*.json"):
        assert path.stem in listed or f'layout_of("{path.stem}"' in figures
    assert set(known_models().values()) == set(FOLDER.glob("*.json"))


def test_every_name_is_found_with_and_without_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name, path in known_models().items():
        for text in (name, name.lower(), name.partition("/")[2].upper()):
            assert find_model(text).path == path
