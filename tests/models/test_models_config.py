"""A configuration is read as its class in `transformers` would read it, and what is wrong with it is named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from blockpool.managers import FullAttentionSpec, SlidingWindowSpec
from blockpool.models import (
    KV_CACHE_DTYPES,
    LayerCache,
    ModelCache,
    ModelError,
    UnknownArchitecture,
    groups_as_text,
    known_architectures,
    lay_out,
    read_model,
)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "torch_dtype": "bfloat16",
}
GEMMA_3 = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "torch_dtype": "bfloat16",
    "text_config": {"num_hidden_layers": 8, "sliding_window": 512},
}
LLAMA_4 = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": {"num_hidden_layers": 8}}
QWEN_2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
NEMOTRON_H = {
    "architectures": ["NemotronHForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 8,
    "hybrid_override_pattern": "M-*E",
}
JAMBA = {**LLAMA, "architectures": ["JambaForCausalLM"], "num_hidden_layers": 8}
WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"],
    "d_model": 64,
    "decoder_layers": 2,
    "decoder_attention_heads": 8,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "torch_dtype": "float16",
}
QWEN_NEXT = {**LLAMA, "architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 4}


def kinds(fields: dict[str, Any]) -> list[str]:
    """The kind of each layer, as text with blocks of one token."""
    names = {}
    for part in lay_out(read_model(fields), block_size=1).kv_cache_groups:
        text = groups_as_text([part]).rpartition(":")[0]
        names |= dict.fromkeys(part.layer_names, text)
    return [names[name] for name in sorted(names, key=lambda name: int(name.split(".")[1]))]


def bytes_per_token(fields: dict[str, Any], **options: Any) -> int:
    return lay_out(read_model(fields, **options)).bytes_per_token


def test_a_file_its_folder_and_its_content_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_model(tmp_path) == read_model(str(tmp_path / "config.json")) == read_model(LLAMA)


def test_heads_and_their_size_may_be_left_out() -> None:
    # as many heads with keys and values as heads, of hidden_size / heads numbers: 2 layers * 2 * 8 * 8 * 2 bytes
    assert bytes_per_token(LLAMA) == 512
    assert bytes_per_token({**LLAMA, "num_key_value_heads": None, "head_dim": None}) == 512
    assert bytes_per_token({**LLAMA, "num_key_value_heads": 2, "head_dim": 32}) == 512
    assert bytes_per_token({**LLAMA, "architectures": ["GemmaForCausalLM"]}) == 512 * 256 // 8  # heads of 256


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["bfloat16", "float16", "torch.float16"])
def test_dtypes_of_16_bits(field: str, value: str) -> None:
    fields = {name: given for name, given in LLAMA.items() if name != "torch_dtype"}
    assert read_model(fields).notes == ("the configuration names no dtype: 16 bits per number assumed",)
    model = read_model({**fields, field: value})
    assert (model.layers[0].bytes_per_token, model.notes) == (256, ())


def test_what_the_checkpoint_was_quantised_for() -> None:
    modelopt = {"quantization_config": {"kv_cache_quant_algo": "FP8"}}
    compressed = {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}
    for quantised in (modelopt, compressed):
        model = read_model({**LLAMA, **quantised})
        assert model.layers[0].bytes_per_token == 128
        assert model.notes == ("the checkpoint is quantised for 8-bit keys and values: kv_cache_dtype fp8",)
        assert bytes_per_token({**LLAMA, **quantised}, kv_cache_dtype="bfloat16") == 512
    weights_only = {"quantization_config": {"quant_method": "awq", "bits": 4, "kv_cache_scheme": None}}
    assert bytes_per_token({**LLAMA, **weights_only}) == 512


def test_listed_kinds_come_before_the_rule() -> None:
    assert kinds(GEMMA_3) == ["window=512"] * 5 + ["full"] + ["window=512"] * 2
    listed = ["full_attention"] * 7 + ["sliding_attention"]
    assert kinds({**GEMMA_3, "text_config": {**GEMMA_3["text_config"], "layer_types": listed}}) == (
        ["full"] * 7 + ["window=512"]
    )


@pytest.mark.parametrize("field", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_the_length_of_a_pattern(field: str) -> None:
    fields = {**GEMMA_3, "text_config": {**GEMMA_3["text_config"], field: 4}}
    assert kinds(fields) == [*["window=512"] * 3, "full"] * 2


def test_a_window_is_in_use_only_where_the_configuration_says_so() -> None:
    windowed = {**QWEN_2, "num_hidden_layers": 4, "sliding_window": 32, "max_window_layers": 1}
    assert kinds(windowed) == ["full"] * 4
    assert kinds({**windowed, "use_sliding_window": True}) == ["full", *["window=32"] * 3]
    defaults = kinds({**QWEN_2, "num_hidden_layers": 30, "use_sliding_window": True})
    assert defaults == ["full"] * 28 + ["window=4096"] * 2
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"]}
    assert kinds(mistral) == ["window=4096"] * 2  # what its class assumes
    assert kinds({**mistral, "sliding_window": None}) == ["full"] * 2
    assert kinds({**mistral, "architectures": ["MixtralForCausalLM"]}) == ["full"] * 2


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Mixtral", "Gemma"])
def test_a_window_and_the_layers_that_have_it(name: str) -> None:
    # As vLLM plans them: a window alone is every layer's, and a list without a window is of full attention.
    fields = {**LLAMA, "architectures": [f"{name}ForCausalLM"], "num_hidden_layers": 8, "sliding_window": 1024}
    listed = ["sliding_attention"] * 3 + ["full_attention"]
    assert kinds(fields) == ["window=1024"] * 8
    assert kinds({**fields, "layer_types": listed * 2}) == [*["window=1024"] * 3, "full"] * 2
    assert kinds({**fields, "layer_types": ["full_attention"] * 8}) == ["full"] * 8
    assert kinds({**fields, "layer_types": listed * 2, "sliding_window": None}) == ["full"] * 8
    groups = lay_out(read_model({**fields, "layer_types": listed * 2})).kv_cache_groups
    assert groups_as_text(groups) == "window=1024:16*3,full:16"


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3"])
def test_listed_windows_that_are_not_in_use(name: str) -> None:
    listed = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 64}
    fields = {**LLAMA, "architectures": [f"{name}ForCausalLM"], "num_hidden_layers": 4, **listed}
    assert kinds({**fields, "use_sliding_window": False}) == ["full"] * 4
    assert read_model(fields).notes == ()
    in_use = {**fields, "use_sliding_window": True}
    assert kinds(in_use) == ["window=64", "full"] * 2
    assert read_model(in_use).notes == (
        "only some layers have a window: vLLM has full attention in all of them, or refuses it",
    )


def test_chunks_are_where_positions_are_rotated() -> None:
    rule = [*["chunk=8192"] * 3, "full"] * 2

    def with_fields(**fields: Any) -> list[str]:
        return kinds({**LLAMA_4, "text_config": {"num_hidden_layers": 8, **fields}})

    assert with_fields() == with_fields(no_rope_layers=[]) == rule
    assert with_fields(no_rope_layers=[1, 0] * 4) == ["chunk=8192", "full"] * 4
    assert with_fields(no_rope_layer_interval=2) == ["chunk=8192", "full"] * 4
    assert with_fields(attention_chunk_size=None) == ["full"] * 8


def test_a_pattern_of_letters_or_of_words() -> None:
    letters = read_model(NEMOTRON_H)
    assert [layer.name for layer in letters.layers] == ["layers.0", "layers.2"]
    assert letters.layers[1].bytes_per_token == 2 * 8 * 128 * 2
    small = read_model({**NEMOTRON_H, "attention_head_dim": 64})  # what its first configurations call it
    assert small.layers[1].bytes_per_token == 2 * 8 * 64 * 2
    for field, words in (
        ("layers_block_type", ["mamba", "mlp", "attention", "moe"]),
        ("layer_types", ["linear_attention", "mlp", "full_attention", "moe"]),
    ):
        assert read_model({**NEMOTRON_H, "hybrid_override_pattern": None, field: words}) == letters


def test_the_dtypes_of_a_state() -> None:
    def bytes_of(fields: dict[str, Any], **options: Any) -> int:
        return max(layer.bytes_per_state for layer in read_model(fields, **options).layers)

    conv, ssm = 24_576, 524_288  # numbers, as in the figures of Qwen3-Next
    assert bytes_of(QWEN_NEXT) == 2 * conv + 2 * ssm
    # which vLLM does not follow for this architecture
    assert bytes_of({**QWEN_NEXT, "mamba_ssm_dtype": "float32"}) == 2 * conv + 2 * ssm
    assert read_model({**QWEN_NEXT, "mamba_ssm_dtype": "float32"}).notes == (
        "mamba_ssm_dtype is not followed, as vLLM does not: states have the model's dtype",
    )
    assert bytes_of(QWEN_NEXT, mamba_ssm_cache_dtype="float32") == 2 * conv + 4 * ssm
    assert bytes_of(QWEN_NEXT, mamba_cache_dtype="float32") == 4 * (conv + ssm)
    assert bytes_of(QWEN_NEXT, mamba_cache_dtype="float32", mamba_ssm_cache_dtype="bfloat16") == 4 * conv + 2 * ssm


def test_an_unknown_architecture_is_said_so_with_the_way_out() -> None:
    with pytest.raises(UnknownArchitecture) as caught:
        read_model({"architectures": ["MambaForCausalLM"]})
    message = str(caught.value)
    assert message.startswith(
        "config: 'MambaForCausalLM' is not among the known architectures (DeepseekV2ForCausalLM,"
    )
    assert "'full:16,window=1024:16,mamba:256'" in message
    for name in known_architectures():
        assert name in message
    assert isinstance(caught.value, ModelError)


@pytest.mark.parametrize(
    ("fields", "options", "said"),
    [
        ({}, {}, 'config: architectures: expected a list such as ["LlamaForCausalLM"]'),
        ({"architectures": []}, {}, "config: architectures: expected a list"),
        ({"architectures": "LlamaForCausalLM"}, {}, "config: architectures: expected a list"),
        ({"architectures": [7]}, {}, "config: architectures: expected a list"),
        ({**LLAMA, "num_hidden_layers": None}, {}, "config: num_hidden_layers: missing"),
        ({**LLAMA, "num_hidden_layers": 0}, {}, "config: num_hidden_layers: expected an int of at least 1, not 0"),
        ({**LLAMA, "num_attention_heads": "8"}, {}, "config: num_attention_heads: expected an int"),
        ({**LLAMA, "num_attention_heads": True}, {}, "config: num_attention_heads: expected an int"),
        ({**LLAMA, "num_key_value_heads": 2.0}, {}, "config: num_key_value_heads: expected an int"),
        ({**LLAMA, "torch_dtype": "int8"}, {}, "config: torch_dtype: expected one of float16"),
        ({**LLAMA, "torch_dtype": 16}, {}, "config: torch_dtype: expected one of float16"),
        ({**QWEN_2, "use_sliding_window": "no"}, {}, "config: use_sliding_window: expected true or false"),
        (
            {**QWEN_2, "use_sliding_window": True, "max_window_layers": -1},
            {},
            "config: max_window_layers: expected an int of at least 0",
        ),
        ({**GEMMA_3, "text_config": {"layer_types": ["full_attention"]}}, {}, "config: layer_types: expected a list"),
        (
            {**GEMMA_3, "text_config": {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}},
            {},
            "config: layer_types: 'linear_attention' is none of",
        ),
        ({**QWEN_NEXT, "layer_types": ["sliding_attention"] * 4}, {}, "config: layer_types: 'sliding_attention' is"),
        ({**NEMOTRON_H, "hybrid_override_pattern": "M?"}, {}, "config: the pattern of layers has '?'"),
        ({**NEMOTRON_H, "hybrid_override_pattern": None}, {}, "config: hybrid_override_pattern: missing"),
        (
            {**NEMOTRON_H, "hybrid_override_pattern": None, "layer_types": [5]},
            {},
            "config: the pattern of layers has 5",
        ),
        ({**NEMOTRON_H, "hybrid_override_pattern": 5}, {}, "config: hybrid_override_pattern: expected text"),
        ({**NEMOTRON_H, "num_hidden_layers": 5}, {}, "config: num_hidden_layers: 5, but the pattern has 4 layers"),
        (LLAMA, {"tensor_parallel_size": 3}, "config: num_attention_heads: 8 cannot be shared equally by 3 ranks"),
        (
            {**LLAMA, "num_attention_heads": 12, "num_key_value_heads": 3},
            {"tensor_parallel_size": 2},
            "config: num_key_value_heads: 3 cannot be shared equally by 2 ranks",
        ),
        (LLAMA, {"tensor_parallel_size": 0}, "tensor_parallel_size must be an int of at least 1 rank, not 0"),
        (LLAMA, {"tensor_parallel_size": True}, "tensor_parallel_size must be an int"),
        (LLAMA, {"kv_cache_dtype": "fp4"}, "kv_cache_dtype must be one of auto, float16"),
        (LLAMA, {"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype fp8_ds_mla is for latents"),
        (LLAMA, {"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype nvfp4 needs heads of a multiple of 16 numbers, not 8"),
        (QWEN_NEXT, {"mamba_cache_dtype": "fp8"}, "mamba_cache_dtype must be one of auto"),
        (QWEN_NEXT, {"mamba_ssm_cache_dtype": "fp8"}, "mamba_ssm_cache_dtype must be one of auto"),
        ({**NEMOTRON_H, "mamba_ssm_cache_dtype": "int4"}, {}, "the configuration's dtype of states must be one of"),
        ({**LLAMA, "num_attention_heads": 5000}, {}, "config: hidden_size: 64 numbers cannot be shared by the 5000"),
        ({**LLAMA, "hidden_size": 7}, {}, "config: hidden_size: 7 numbers cannot be shared by the 8 heads of"),
        ({**WHISPER, "d_model": 3}, {}, "config: d_model: 3 numbers cannot be shared by the 8 heads of decoder_att"),
        ({**JAMBA, "mamba_d_state": 10**12}, {}, "config: mamba_d_state: expected an int of at most 2,147,483,647"),
        ({**LLAMA, "num_hidden_layers": 10**9}, {}, "config: num_hidden_layers: 1,000,000,000 layers are more than"),
        (
            {**WHISPER, "decoder_layers": 10**6},
            {},
            "config: decoder_layers: 1,000,000 layers are more than the 1,000",
        ),
        (
            {**NEMOTRON_H, "hybrid_override_pattern": "M" * 1_001},
            {},
            "config: hybrid_override_pattern: 1,001 layers are more than the 1,000",
        ),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_model(fields, **options)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kv_cache_dtype", ["int8_per_token_head", "nvfp4"])
def test_a_latent_has_no_heads(kv_cache_dtype: str) -> None:
    fields = {**LLAMA, "architectures": ["DeepseekV3ForCausalLM"]}
    with pytest.raises(ModelError, match=f"^kv_cache_dtype {kv_cache_dtype} is for keys and values per head"):
        read_model(fields, kv_cache_dtype=kv_cache_dtype)
    with pytest.raises(ModelError, match=r"^kv_cache_dtype fp8_ds_mla is for latents of 512 \+ 64 numbers, not 320"):
        read_model({**fields, "kv_lora_rank": 256}, kv_cache_dtype="fp8_ds_mla")


def test_every_dtype_is_for_some_model() -> None:
    latent = {**LLAMA, "architectures": ["DeepseekV3ForCausalLM"]}
    for kv_cache_dtype in KV_CACHE_DTYPES:
        sizes = []
        for fields in ({**LLAMA, "head_dim": 64}, latent):
            try:
                sizes.append(bytes_per_token(fields, kv_cache_dtype=kv_cache_dtype))
            except ModelError:
                continue
        assert sizes


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"architectures": ["\xff"]}', "not JSON"),
        (b"[1]", "expected a JSON object"),
        (b"null", "expected a JSON object"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read_model(path)
    assert str(caught.value).startswith(f"{path}: {said}")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "absent.json", "a\0b"):
        with pytest.raises(ModelError, match="cannot be read: "):
            read_model(source)


def test_a_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    assert read_model(path) == read_model(LLAMA)


def test_what_could_be_read_forever_is_not_read(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for source in (fifo, Path("/dev/zero")):
        with pytest.raises(ModelError, match="cannot be read: it is not a regular file"):
            read_model(source)
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(2**40)  # nothing of it is on the disk
    with pytest.raises(ModelError, match="cannot be read: it has more than 4,194,304 bytes"):
        read_model(large)


def test_blocks_that_no_pool_can_count() -> None:
    for state_size in (10**6, 2**31 - 1):
        model = read_model({**JAMBA, "mamba_d_state": state_size, "mamba_expand": 2**16})
        with pytest.raises(ModelError, match=r"^layers\.0: its pages would need blocks of [\d,]* tokens"):
            lay_out(model)


def test_a_layer_that_keeps_nothing() -> None:
    layers = (LayerCache("a", FullAttentionSpec(1), 4), LayerCache("b", SlidingWindowSpec(1, 8), 0))
    with pytest.raises(ModelError, match=r"^b: a layer without bytes"):
        lay_out(ModelCache("Handmade", layers))


def test_an_error_names_the_model_and_not_where_its_configuration_is() -> None:
    with pytest.raises(ModelError, match=r"^Qwen/Qwen3-8B: num_attention_heads: 32 cannot be shared"):
        read_model("qwen3-8b", tensor_parallel_size=3)
