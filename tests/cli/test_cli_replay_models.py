"""`blockpool replay` with a model or groups: what it shows, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

import blockpool.replay as replay_package

from .test_cli_replay import bad_input, mooncake, replay, replay_json

HYBRID = "full:16,window=64:16*2,mamba:128"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text(mooncake())
    return str(path)


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A small Gemma 2: two layers with a window, two without, 2 * 2 heads * 64 numbers * 2 bytes a token each."""
    path = tmp_path / "config.json"
    fields: dict[str, Any] = {
        "architectures": ["Gemma2ForCausalLM"],
        "torch_dtype": "bfloat16",
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "sliding_window": 64,
        "max_position_embeddings": 8192,
    }
    path.write_text(json.dumps(fields))
    return str(path)


def test_groups_are_shown_by_kind(trace: str):
    lines = replay(trace, "--groups", HYBRID, "--num-blocks", "500,2000").stdout.splitlines()
    assert HYBRID in lines
    assert "6 requests; hits end at multiples of 128 tokens" in lines
    # The last prompt, 3,172 tokens, finds 2,560; its first chunk ends at 3,072, where a replay would resume. Then it
    # has 192 blocks of 16 tokens, and of each window the 4 before the chunk and its 32; and the states at both ends.
    assert any(line.split()[:4] == ["500", "0", "full:16", "192"] for line in lines)
    assert any(line.split()[:3] == ["1-2", "window=64:16", "72"] for line in lines)
    assert any(line.split()[:3] == ["3", "mamba:128", "2"] for line in lines)


def test_the_json_of_groups(trace: str):
    document = replay_json(trace, "--groups", HYBRID, "--num-blocks", "3000", "--retention-interval", "512")
    assert (document["model"], document["bytes_per_block"]) == (None, None)
    assert (document["retention_interval"], document["max_num_batched_tokens"]) == (512, 8192)
    assert document["hash_block_size"] == 16
    (run,) = document["runs"]
    assert run["block_size"] == 128
    assert [group["kind"] for group in run["groups"]] == ["full:16", "window=64:16", "window=64:16", "mamba:128"]
    assert sum(loss["tokens"] for loss in run["losses"]) == run["reusable_tokens"] - run["hit_tokens"]


def test_without_a_size_some_are_derived(trace: str):
    document = replay_json(trace, "--groups", HYBRID)
    assert "blocks that hold every prefix of this trace once" in document["sizes_from"]
    assert all(run["refused_requests"] == 0 for run in document["runs"])
    assert document["runs"][-1]["evicted_blocks"] == 0


def test_a_model_from_its_configuration(trace: str, config: str):
    document = replay_json(trace, "--model", config, "--memory", "8MiB,16MiB")
    assert document["model"] == "Gemma2ForCausalLM"
    assert document["bytes_per_block"] == 2 * 2 * 2 * 64 * 2 * 16
    assert [run["num_blocks"] for run in document["runs"]] == [512, 1024]
    assert "8MiB,16MiB, 16,384 bytes per block" in document["sizes_from"]
    assert (
        replay(trace, "--model", config, "--num-blocks", "700")
        .stdout.splitlines()[1]
        .startswith("Gemma2ForCausalLM: ")
    )


def test_what_changes_the_bytes_changes_the_blocks(trace: str, config: str):
    def num_blocks(*options: str) -> int:
        (run,) = replay_json(trace, "--model", config, "--memory", "16MiB", *options)["runs"]
        return int(run["num_blocks"])

    assert num_blocks("--kv-cache-dtype", "fp8") == 2048
    assert num_blocks("--tensor-parallel-size", "2") == 2048
    assert num_blocks("--block-size", "32") == 512


def test_a_model_by_its_name(trace: str):
    document = replay_json(trace, "--model", "Qwen/Qwen3-8B", "--memory", "1GiB")
    assert document["model"] == "Qwen3ForCausalLM"
    # 36 layers * 2 * 8 heads * 128 * 2 bytes * 16 tokens
    assert document["bytes_per_block"] == 2_359_296
    (run,) = document["runs"]
    assert run["num_blocks"] == 2**30 // 2_359_296


def test_an_encoder_is_held_by_each_request(trace: str):
    def refused(*options: str) -> int:
        (run,) = replay_json(trace, "--num-blocks", "250", *options)["runs"]
        return int(run["refused_requests"])

    # 1,500 encoder tokens are 94 blocks, beside the 201 of the longest prompt and its answer.
    as_groups = ("--groups", "full:16,cross:16", "--encoder-tokens")
    assert refused("--model", "whisper-large-v3") == refused(*as_groups, "1500") > 0
    assert refused(*as_groups, "16") == 0


def test_chunks_leave_states(trace: str):
    def hits(*options: str) -> int:
        (run,) = replay_json(trace, "--groups", "full:16,mamba:16", "--num-blocks", "9000", *options)["runs"]
        return int(run["hit_tokens"])

    assert hits("--max-num-batched-tokens", "16") == hits("--retention-interval", "16") > hits()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "MODEL", "--groups", "full:16"), "give one of them"),
        (("--groups", "full:16", "--block-size", "16"), "both say how many tokens a block has"),
        (("--groups", "full:16", "--hash-block-size", "16"), "--hash-block-size is for one group"),
        (("--groups", "full:16", "--memory", "1GiB"), "--bytes-per-token need each other, or --model"),
        (("--model", "MODEL", "--memory", "1GiB", "--bytes-per-token", "5"), "--bytes-per-token is for one group"),
        (("--model", "MODEL", "--memory", "1GiB", "--num-blocks", "5"), "give one of them"),
        (("--groups", "full:16;mamba"), "groups: 'full:16;mamba' is not a group"),
        (("--groups", "full:17"), "have only 1 in common"),
        (("--groups", "full:16", "--retention-interval", "often"), "'often' is neither dense nor a number"),
        (("--groups", "full:16", "--retention-interval", "17"), "multiple of the alignment 16, not 17"),
        (("--kv-cache-dtype", "fp8"), "they need --model"),
        (("--groups", "full:16", "--tensor-parallel-size", "2"), "they need --model"),
        (("--groups", "full:16,cross:16"), "say how many with --encoder-tokens"),
        (("--groups", "full:16", "--encoder-tokens", "5"), "no group has cross attention"),
        (("--model", "no/such-model"), "is no file, and no model that is known here"),
        (("--model", "absent/config.json"), "config.json"),
        (("--model", "MODEL", "--memory", "1KiB"), "a pool needs 2"),
        (("--model", "MODEL", "--kv-cache-dtype", "fp7"), "fp7"),
        (("--model", "MODEL", "--tensor-parallel-size", "3"), "3"),
    ],
)
def test_options_that_contradict_or_miss_each_other(trace: str, config: str, options: tuple[str, ...], message: str):
    assert message in bad_input(trace, *(config if option == "MODEL" else option for option in options))


# -- requests that overlap -------------------------------------------------------------------------------


def test_the_concurrent_mode_runs_with_and_without_cache(trace: str):
    output = replay(trace, "--mode", "concurrent", "--num-blocks", "40,50").stdout
    lines = output.splitlines()
    assert lines[:2] == [trace, "full:512"]
    assert "6 requests as they arrive; at most 256 at a time, 8,192 tokens a step" in lines
    rows = [line.split() for line in lines if line.split()[1:2] in (["on"], ["off"])]
    assert [row[:4] for row in rows] == [[size, cache, "6", "0"] for size in ("40", "50") for cache in ("on", "off")]
    assert "At 50 blocks the cache spared" in output


def test_the_json_of_the_concurrent_mode(trace: str):
    options = (
        "--mode",
        "concurrent",
        "--groups",
        HYBRID,
        "--num-blocks",
        "3000",
        "--decode-ms",
        "0",
        "--max-num-seqs",
        "3",
    )
    document = replay_json(trace, *options)
    assert document["format"] == "blockpool.replay.concurrent/1"
    assert document["max_num_seqs"] == 3
    assert document["cost"] == {"step_overhead_us": 500.0, "prefill_tokens_per_s": 20_000.0, "decode_ms": 0.0}
    on, off = document["runs"]
    assert (on["with_cache"], off["with_cache"]) == (True, False)
    assert on["hit_rate"] > off["hit_rate"] == 0.0
    # The sum of the prompts, and of all answers but their last tokens.
    assert off["computed_tokens"] == off["prompt_tokens"] + 6 * 29
    assert on["computed_tokens"] + on["hit_tokens"] == off["computed_tokens"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--mode", "parallel"), "'parallel' is neither sequential nor concurrent"),
        (("--decode-ms", "3"), "--decode-ms is for --mode concurrent"),
        (("--max-num-seqs", "3"), "--max-num-seqs is for --mode concurrent"),
        (("--mode", "concurrent", "--decode-ms", "-1"), "decode_ms must be a time of at least 0"),
        (("--mode", "concurrent", "--decode-ms", "nan"), "decode_ms must be a time of at least 0"),
        (("--mode", "concurrent", "--prefill-tokens-per-s", "0"), "prefill_tokens_per_s must be above 0"),
    ],
)
def test_options_of_the_concurrent_mode(trace: str, options: tuple[str, ...], message: str):
    assert message in bad_input(trace, "--num-blocks", "50", *options)


def test_ctrl_c_in_the_concurrent_mode_shows_the_runs_that_are_done(trace: str, monkeypatch: pytest.MonkeyPatch):
    whole = replay_package.replay_concurrently
    calls = []

    def until_the_third(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole(*arguments, **options)

    monkeypatch.setattr(replay_package, "replay_concurrently", until_the_third)
    options = ("--mode", "concurrent", "--num-blocks", "40,50")
    result = replay(trace, *options, code=130)
    assert "Interrupted after 2 runs" in result.stdout
    assert result.stderr == "interrupted\n"
    calls.clear()
    document = json.loads(replay(trace, *options, "--json", "-", code=130).stdout)
    assert document["interrupted"] is True
    assert len(document["runs"]) == 2
