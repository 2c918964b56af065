"""`blockpool plan` as a user meets it: from a model's name to the answer, and what is wrong with the input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from blockpool.cli import app
from blockpool.models import known_models

runner = CliRunner()
LLAMA = ("--model", "meta-llama/Llama-3.1-8B-Instruct")
GEMMA = ("--model", "google/gemma-3-27b-it")
QWEN_NEXT = ("--model", "Qwen/Qwen3-Next-80B-A3B-Instruct")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder and an empty Hugging Face cache: names are those of the catalogue."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)


def plan(*arguments: str, code: int = 0, **options: Any) -> Any:
    result = runner.invoke(app, ["plan", *arguments], **options)
    assert result.exit_code == code, result.output
    return result


def plan_json(*arguments: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(plan(*arguments, "--json").stdout)
    return document


def bad_input(*arguments: str) -> str:
    """The one line on stderr."""
    result = plan(*arguments, code=2)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("blockpool: error: ")
    return str(line.removeprefix("blockpool: error: "))


def write_trace(path: Path, prompts: list[list[int]]) -> str:
    """Prompts of ids of 512 tokens, the last one of 100 tokens."""
    lines = [
        {"timestamp": at, "input_length": 512 * (len(ids) - 1) + 100, "output_length": 30, "hash_ids": ids}
        for at, ids in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def growing(count: int) -> list[list[int]]:
    """Each goes on where the one before ended."""
    return [[*range(number), 99] for number in range(1, count + 1)]


# -- from a name to the answer -------------------------------------------------------------------------


def test_a_name_and_memory_are_enough() -> None:
    text = plan(*LLAMA, "--memory", "40GiB").stdout
    assert "meta-llama/Llama-3.1-8B-Instruct, from blockpool's catalogue (LlamaForCausalLM)" in text
    assert "131,072 bytes per token in all layers, 2,097,152 bytes per block" in text
    # 20,479 blocks: 64, 512, 2,048 and 8,192 of them per prompt
    assert "room for 319 requests of 1,024 tokens, 39 requests of 8,192 tokens, 9 requests of 32,768 tokens" in text
    assert "or 2 requests of 131,072 tokens at once." in text
    assert "A prefix shorter than 16 tokens is never found again" in text
    assert "chunks of at most 8,192 tokens" in text


def test_a_configuration_is_enough_too(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(known_models()["Qwen/Qwen3-8B"].read_text())
    for source in ("config.json", ".", str(tmp_path)):
        document = plan_json("--model", source, "--memory", "40GiB")
        assert document["source"] == source
        assert document["pools"][0]["num_blocks"] == 18_204


def test_the_json_of_a_plan() -> None:
    document = plan_json(*GEMMA, "--memory", "40GiB", "--lengths", "8k")
    assert document["format"] == "blockpool.plan/1"
    assert (document["architecture"], document["max_model_len"]) == ("Gemma3ForConditionalGeneration", 131_072)
    (setting,) = document["settings"]
    assert [(part["kind"], part["groups"], part["layers"]) for part in setting["groups"]] == [
        ("window=1024:16", [0, 1, 2, 3, 4, 5], 52),
        ("full:16", [6], 10),
    ]
    # 9 + 9 + 9 + 9 + 8 + 8 layers in blocks with room for six times 10
    assert setting["groups"][0]["unused"] == pytest.approx(8 / 60)
    (use,) = setting["prompts"]
    assert (use["at_rest"], use["peak"]) == ([64] * 6 + [512], [512] * 7)
    (pool,) = document["pools"]
    assert (pool["setting"], pool["num_blocks"], pool["concurrency"]) == (0, 32_768, [33])
    assert document["verdict"][0].startswith("40 GiB hold 32,768 blocks")


def test_how_much_memory_is_needed() -> None:
    # 64 requests of 8,192 tokens: 64 * 512 blocks and the null block, 2 MiB each
    document = plan_json(*LLAMA, "--concurrency", "64", "--lengths", "8192")
    assert document["pools"] == []
    assert document["needs"] == [
        [{"num_requests": 64, "num_prompt_tokens": 8_192, "num_blocks": 32_769, "memory_bytes": 32_769 * 2**21}]
    ]
    (pool,) = plan_json(*LLAMA, "--memory", str(32_769 * 2**21), "--lengths", "8192")["pools"]
    assert pool["concurrency"] == [64]
    text = plan(*LLAMA, "--concurrency", "64", "--lengths", "8192").stdout
    assert "64 requests of 8,192 tokens at once need 64.01 GiB (32,769 blocks)." in text
    (pool,) = plan_json(*LLAMA, "--memory", "64.01 GiB", "--lengths", "8192")["pools"]
    assert pool["concurrency"] == [64]


def test_side_by_side() -> None:
    document = plan_json(
        *QWEN_NEXT,
        *("--memory", "40GiB,80GiB", "--block-size", "16,64", "--retention-interval", "dense,0", "--lengths", "8k"),
    )
    settings = [
        (setting["block_size"], setting["retention_interval"], setting["unit"]) for setting in document["settings"]
    ]
    assert settings == [(16, None, 544), (16, 0, 544), (64, None, 576), (64, 0, 576)]
    pools = [(pool["setting"], pool["memory_bytes"] // 2**30) for pool in document["pools"]]
    assert pools == [(setting, memory) for setting in range(4) for memory in (40, 80)]
    text = plan(*QWEN_NEXT, "--memory", "40GiB", "--block-size", "16,64", "--lengths", "8k").stdout
    assert "A prefix shorter than 544 or 576 tokens (the unit) is never found again" in text
    assert "with blocks of 544 tokens, retention dense" in text


def test_retention_is_what_is_left() -> None:
    settings = plan_json(*GEMMA, "--retention-interval", "dense,1024,0", "--lengths", "32k")["settings"]
    left = [setting["prompts"][0]["left"][0] for setting in settings]
    # windows: all 2,048 blocks; per 1,024 tokens the 64 blocks of a window, which are all again; the prompt's end
    assert left[0] == 2_048
    assert left[2] == 64
    assert left[0] >= left[1] > left[2]


def test_output_takes_blocks_too() -> None:
    setting = plan_json(*LLAMA, "--lengths", "1000", "--output-length", "100")["settings"][0]
    assert setting["prompts"][0]["at_rest"] == [69]  # 1,100 / 16 = 68.75
    text = plan(*LLAMA, "--lengths", "1000", "--output-length", "100", "--memory", "1GiB").stdout
    assert "7 requests of 1,000 tokens and 100 of output" in text


def test_shorter_chunks_lower_the_peak() -> None:
    def peak(chunk: str) -> int:
        arguments = (*GEMMA, "--lengths", "32k", "--max-num-batched-tokens", chunk)
        return int(plan_json(*arguments)["settings"][0]["prompts"][0]["peak"][0])

    assert (peak("8192"), peak("2048")) == (576, 64 + 128)


def test_bytes_and_ranks() -> None:
    (setting,) = plan_json(*LLAMA, "--kv-cache-dtype", "fp8", "--tensor-parallel-size", "4")["settings"]
    assert setting["bytes_per_block"] == 2_097_152 // 2 // 4
    assert (
        "each of 4 ranks; kv_cache_dtype fp8"
        in plan(*LLAMA, "--kv-cache-dtype", "fp8", "--tensor-parallel-size", "4").stdout
    )


def test_the_default_lengths_stay_within_the_model() -> None:
    def lengths(*arguments: str) -> list[int]:
        return [use["num_prompt_tokens"] for use in plan_json(*arguments)["settings"][0]["prompts"]]

    assert lengths(*LLAMA) == [1_024, 8_192, 32_768, 131_072]
    assert lengths(*LLAMA, "--max-model-len", "10000", "--output-length", "1000") == [1_024, 8_192, 9_000]
    assert lengths(*QWEN_NEXT) == [1_024, 8_192, 32_768, 131_072]  # of 262,144
    assert lengths("--model", "openai/whisper-large-v3") == [448]
    assert lengths("--groups", "full:16") == [1_024, 8_192, 32_768]


def test_an_encoder() -> None:
    document = plan_json("--model", "openai/whisper-large-v3")
    assert document["num_encoder_tokens"] == 1_500
    assert document["settings"][0]["prompts"][0]["at_rest"] == [28, 94]
    (setting,) = plan_json("--groups", "full:16,cross:16", "--encoder-tokens", "160", "--lengths", "16")["settings"]
    assert setting["prompts"][0]["at_rest"] == [1, 10]
    assert "for 1,500 encoder tokens" in plan("--model", "openai/whisper-large-v3").stdout


def test_groups_in_place_of_a_model() -> None:
    text = plan("--groups", "full:16,window=1024:16*5", "--num-blocks", "5000,10k", "--lengths", "8k").stdout
    # 4,999 blocks: 6 * 512 at the peak, 512 + 5 * 64 at rest
    assert "5,000 blocks, the null block included: room for 3 requests of 8,192 tokens at once." in text
    assert "10,240 blocks, the null block included: room for 9 requests of 8,192 tokens at once." in text
    arguments = ("--groups", "full:16", "--bytes-per-block", "1048576", "--memory", "1GiB", "--lengths", "8k")
    (pool,) = plan_json(*arguments)["pools"]
    assert (pool["num_blocks"], pool["concurrency"]) == (1_024, [1])


def test_nothing_at_rest_is_said_so() -> None:
    text = plan("--groups", "chunk=1024:16", "--num-blocks", "100", "--lengths", "1k").stdout
    assert "any number of requests of 1,024 tokens (computed one after the other: at rest they hold nothing)" in text


def test_what_does_not_fit() -> None:
    text = plan(*LLAMA, "--memory", "1GiB", "--lengths", "8k,32k").stdout
    assert "1 GiB hold 512 blocks, the null block included, of 2 MiB each.\n" in text
    assert "Not one request of 8,192 tokens fits there: at its peak it holds 512 blocks." in text


def test_chunks_are_explained() -> None:
    text = plan("--model", "meta-llama/Llama-4-Scout-17B-16E-Instruct", "--lengths", "8k").stdout
    assert "Groups of chunks hold nothing at the end of a chunk" in text


def test_notes() -> None:
    text = plan("--model", "openai/gpt-oss-20b", "--lengths", "1k").stdout
    assert "note: the configuration names no dtype: 16 bits per number assumed" in text


def test_the_list_of_models() -> None:
    lines = plan("--list-models").stdout.splitlines()
    assert [line.split()[-1] for line in lines[-len(known_models()) :]] == list(known_models())
    (line,) = [line for line in lines if line.endswith(" google/gemma-3-27b-it")]
    assert line.split() == ["507,904", "window=1024:16*6,full:16", "google/gemma-3-27b-it"]


# -- prompts against the pool --------------------------------------------------------------------------


def test_a_working_set(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", growing(6))
    arguments = (trace, "--groups", "full:512", "--num-blocks", "8,50", "--lengths", "1k")
    document = plan_json(*arguments)
    assert document["traces"] == [trace]
    # 6 distinct ids are full blocks: 0 .. 5
    assert document["settings"][0]["working_set"]["num_blocks"] == 6
    outcomes = [pool["outcome"] for pool in document["pools"]]
    assert [outcome["fits"] for outcome in outcomes] == [True, True]
    prompt_tokens = sum(512 * number + 100 for number in range(1, 7))
    assert outcomes[1]["hit_rate"] == pytest.approx(512 * 15 / prompt_tokens)
    assert f"The working set of {trace} is 6 blocks and fits the pool of 50 blocks" in plan(*arguments).stdout


def test_a_working_set_that_does_not_fit(tmp_path: Path) -> None:
    # 8 * 512 + 100 tokens take 263 blocks in each of seven groups: 1,841 of the 2,457 in 3 GiB, and the other prompt
    # as many, so that each is gone when it comes again
    one, other = list(range(9)), list(range(100, 109))
    trace = write_trace(tmp_path / "trace.jsonl", [one, other, one, other])
    document = plan_json(trace, *GEMMA, "--memory", "2GiB,3GiB,40GiB", "--lengths", "1k")
    working_set = document["settings"][0]["working_set"]
    # 4,196 tokens are 262 full blocks
    assert working_set["blocks"] == [2 * 262] * 7
    tiny, small, large = (pool["outcome"] for pool in document["pools"])
    assert [outcome["fits"] for outcome in (tiny, small, large)] == [False, False, True]
    assert [outcome["refused_requests"] for outcome in (tiny, small, large)] == [4, 0, 0]
    assert small["hit_rate"] < large["hit_rate"] == working_set["hit_rate"] == pytest.approx(2 * 4_192 / (4 * 4_196))
    text = plan(trace, *GEMMA, "--memory", "2GiB,3GiB", "--lengths", "1k").stdout
    assert "and does not fit 3 GiB of 2,457 blocks: " in text
    assert "0 blocks are evicted, and 4 requests never fit: the largest holds 1,841 blocks at its peak." in text
    assert "where a pool that never evicts finds 50.0%" in text


def test_a_working_set_that_fits_though_a_request_does_not(tmp_path: Path) -> None:
    # The prompt's last block has no hash: 1 + 9 blocks where only 8 are found again, and 9 beside the null block
    trace = write_trace(tmp_path / "trace.jsonl", [[0, 1, 99], [*range(8), 99]])
    text = plan(trace, "--groups", "full:512", "--num-blocks", "9", "--lengths", "1k").stdout
    assert f"The working set of {trace} is 8 blocks and would fit the pool of 9 blocks: " in text
    assert "0 blocks are evicted, and 1 request never fits: the largest holds 9 blocks at its peak." in text
    assert "does not fit" not in text


def test_a_working_set_that_has_no_room_beside_what_runs(tmp_path: Path) -> None:
    # Two prompts of 4 blocks and a rest leave 8 blocks; the second one takes 5 while the first one's 4 are there.
    trace = write_trace(tmp_path / "trace.jsonl", [[0, 1, 2, 3, 99], [10, 11, 12, 13, 99]])
    text = plan(trace, "--groups", "full:512", "--num-blocks", "9", "--lengths", "1k").stdout
    assert "is 8 blocks. The pool of 9 blocks would hold that alone, but not beside a request that runs: " in text
    assert "1 block is evicted." in text


# -- bad input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give --model or --groups"),
        ((*LLAMA, "--groups", "full:16"), "give one of them"),
        (("--model", ""), "the text is empty"),
        ((*GEMMA, "--encoder-tokens", "5"), "--encoder-tokens: there is no cross attention"),
        (("--groups", "full:16", "--encoder-tokens", "5"), "--encoder-tokens: there is no cross attention"),
        (("--groups", "full:16,cross:16"), "give --encoder-tokens"),
        ((*LLAMA, "--lengths", "-5"), "--lengths: -5 is not between 1 and 16777216"),
        ((*LLAMA, "--lengths", "9" * 14), f"--lengths: {'9' * 14} is not between 1 and 16777216"),
        ((*LLAMA, "--num-blocks", "9" * 5_000), "is not between 2 and 134217728"),
        ((*LLAMA, "--lengths", "1.5k"), "--lengths: '1.5k' is not a number"),
        (("--groups", "window=64:16", "--lengths", "16m", "--max-num-batched-tokens", "64"), "take 262,144 steps"),
        (("--groups", "window=64:16", "--lengths", "1k", "--output-length", str(2**24)), "take 1,048,577 steps"),
        (("--model", "acme/rocket"), "no model that is known here"),
        (("--model", "qwen3-9b"), "near: Qwen/Qwen3-8B"),
        (("--model", "absent.json"), "'absent.json': cannot be read: No such file"),
        (("--groups", "fool:16"), "'fool' is none of full"),
        ((*LLAMA, "--memory", "40 apples"), "--memory: '40 apples' is not a memory size"),
        ((*LLAMA, "--memory", "1MiB"), "a pool needs 2"),
        ((*LLAMA, "--memory", "1000PB"), "more than the 134,217,728 that a pool can have"),
        ((*LLAMA, "--memory", "1GiB", "--num-blocks", "100"), "give one of them"),
        ((*LLAMA, "--num-blocks", "1"), "--num-blocks: 1 is not between 2 and"),
        ((*LLAMA, "--num-blocks", "many"), "--num-blocks: 'many' is not a number"),
        ((*LLAMA, "--block-size", "0"), "--block-size: 0 is not between 1 and"),
        ((*LLAMA, "--block-size", ""), "--block-size: '' is not a number"),
        ((*LLAMA, "--lengths", "8k,\u0661"), "--lengths: '\u0661' is not a number"),
        ((*LLAMA, "--lengths", "200k"), "more than the 131072 tokens of the model"),
        ((*LLAMA, "--lengths", "1k", "--max-model-len", "1000"), "more than the 1000 tokens"),
        ((*LLAMA, "--output-length", "131072"), "leaves no room for a prompt"),
        ((*LLAMA, "--retention-interval", "sparse"), "--retention-interval: 'sparse' is neither dense nor"),
        ((*QWEN_NEXT, "--retention-interval", "1024"), "1024 is neither dense nor 0 nor a multiple of 544, the"),
        ((*LLAMA, "--retention-interval", "0,dense,17"), "17 is neither dense nor 0 nor a multiple of 16, the unit"),
        (
            (*LLAMA, "--block-size", "16,32", "--retention-interval", "16"),
            "multiple of 32, the unit of hits with blo",
        ),
        ((*LLAMA, "--kv-cache-dtype", "fp3"), "kv_cache_dtype must be one of"),
        ((*LLAMA, "--tensor-parallel-size", "3"), "Llama-3.1-8B-Instruct: num_attention_heads: 32 cannot be"),
        ((*LLAMA, "--bytes-per-block", "1000"), "--bytes-per-block is for --groups"),
        (("--groups", "full:16", "--memory", "1GiB"), "needs --bytes-per-block"),
        (("--groups", "full:16", "--block-size", "32"), "are for --model"),
        (("--groups", "full:16", "--kv-cache-dtype", "fp8"), "are for --model"),
        (("--groups", "full:16", "--tensor-parallel-size", "2"), "are for --model"),
        (("--groups", "full:1", "--lengths", "16m"), "more than the 8,388,608 that are measured"),
        (("trace.jsonl", *LLAMA), "give --memory or --num-blocks"),
        (("absent.jsonl", *LLAMA, "--memory", "1GiB"), "absent.jsonl"),
        (("absent.jsonl", "--model", "openai/whisper-tiny", "--memory", "1GiB"), "what an encoder reads"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], said: str) -> None:
    assert said in bad_input(*arguments)


def test_a_unit_that_the_trace_cannot_tell_apart(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", growing(6))
    assert "have only 1 in common" in bad_input(trace, "--groups", "full:7", "--num-blocks", "50")


def test_usage_errors() -> None:
    for arguments in (("--output-length", "-1"), ("--concurrency", "0"), ("--max-num-batched-tokens", "0")):
        assert f"Invalid value for '{arguments[0]}': " in bad_input(*LLAMA, *arguments)
    assert bad_input("--lenghts", "8k").endswith(" plan -h`")


# -- as a process --------------------------------------------------------------------------------------


def run(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    # not in the empty folder: the package may be found relative to where the tests run
    command = [sys.executable, "-m", "blockpool.cli", "plan", *arguments]
    return subprocess.run(command, capture_output=True, check=True, cwd=Path(__file__).parents[2])


def test_piped_output_has_no_escape_codes() -> None:
    for arguments in ((*LLAMA, "--memory", "40GiB", "--lengths", "1k"), ("--help",)):
        result = run(*arguments)
        assert result.stdout
        assert b"\x1b" not in result.stdout + result.stderr


def test_json_is_alone_on_stdout() -> None:
    result = run(*LLAMA, "--lengths", "1k", "--json")
    assert json.loads(result.stdout)["settings"]
    assert result.stderr == b""


def test_the_help_has_an_example_and_every_option() -> None:
    text = run("-h").stdout.decode()
    assert "Example: blockpool plan --model Qwen/Qwen3-8B --memory 40GiB" in text


def test_the_limits_are_those_of_the_books() -> None:
    from blockpool.cli.plan import MAX_NUM_BLOCKS
    from blockpool.pool.layout import MAX_BLOCKS
    from blockpool.replay import DEFAULT_BATCHED_TOKENS

    assert MAX_NUM_BLOCKS == MAX_BLOCKS
    assert f"chunks of at most {DEFAULT_BATCHED_TOKENS:,} tokens" in plan(*LLAMA, "--lengths", "1k").stdout
