"""`blockpool replay --tier`: what it shows, and what it refuses."""

import json
from pathlib import Path

import pytest

from .test_cli_replay import bad_input, mooncake, replay, replay_json
from .test_cli_replay_models import HYBRID


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Two prompts of three blocks that take turns."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": n, "input_length": 1540, "output_length": 1, "hash_ids": [10 * (n % 2) + at for at in range(4)]}
        for n in range(6)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)


def test_tiers_are_shown(trace: str):
    lines = replay(
        *(trace, "--num-blocks", "5", "--block-bytes", "1MiB", "--prefill-rate", "1000"),
        *("--tier", "host=3MiB@1GiB/s", "--tier", "disk=1GiB@1MiB/s"),
    ).stdout.splitlines()
    rows = [line.split() for line in lines]
    assert ["5", "GPU", "0", "0.0%", *["-"] * 7] in rows
    # A prompt's three pages are the other's when it comes: host has what disk had, and gives nothing.
    assert ["host", "0", "0.0%", "0", "KiB", "6", "MiB", "12", "MiB", "3.00", "-", "15", "15"] in rows
    assert ["disk", "6,144", "66.5%", "12", "MiB", "6", "MiB", "0", "KiB", "1.00", "0.50", "0", "0"] in rows
    assert (
        "At 5 blocks of 512 tokens, 0.0% of the prompt tokens were found on the GPU (0), 0.0% more with host (0), "
        "66.5% more with disk (6,144): 66.5% in all (6,144 of 9,240)." in lines
    )
    assert (
        "At 5 blocks loading 12 MiB takes 12.0 s at the stated bandwidths, computing these 6,144 tokens 6.144 s at "
        "1,000 tokens/s: 5.856 s are lost by loading." in lines
    )
    assert not any("computed again" in line for line in lines)


def test_the_json_of_tiers(trace: str):
    options = (trace, "--num-blocks", "5", "--block-bytes", "10", "--tier", "a=20B", "--tier", "b=1KiB@1KB/s")
    stores = ("--tier-store", "eviction", "--tier-store", "a=hits=2", "--tier-policy", "b=arc")
    (run,) = replay_json(*options, *stores, "--prefill-tokens-per-s", "2048")["runs"]
    a, b = run["tiers"]
    assert (a["name"], a["capacity_bytes"], a["store"], a["order"]) == ("a", 20, "hits=2", "lru")
    assert a["read_bytes_per_s"] is None
    assert (a["hit_tokens"], a["stored_bytes"], a["loaded_bytes"], a["load_s"]) == (0, 0, 0, 0.0)
    assert b == {
        "name": "b",
        "capacity_bytes": 1024,
        "store": "eviction",
        "order": "arc",
        "read_bytes_per_s": 1000.0,
        "hit_tokens": 6144,
        "loaded_pages": 12,
        "loaded_bytes": 120,
        "stored_pages": 6,
        "stored_bytes": 60,
        "promoted_pages": 0,
        "promoted_bytes": 0,
        "distinct_pages": 6,
        "distinct_bytes": 60,
        "evicted_pages": 0,
        "evicted_unread_pages": 0,
        "held_pages": 6,
        "held_bytes": 60,
        "hit_rate": 6144 / 9240,
        "written_bytes": 60,
        "write_amplification": 1.0,
        "written_per_loaded": 0.5,
        "load_s": 0.12,
    }
    assert (run["hit_tokens"], run["found_tokens"], run["found_rate"]) == (0, 6144, 6144 / 9240)
    assert (run["prefill_tokens_per_s"], run["load_s"], run["recompute_s"]) == (2048.0, 0.12, 3.0)
    assert run["saved_s"] == pytest.approx(2.88)
    assert run["losses"] == []
    (untimed,) = replay_json(*options[:-1], "b=1KiB")["runs"]
    assert (untimed["load_s"], untimed["recompute_s"], untimed["saved_s"]) == (None, None, None)


def test_without_tiers_nothing_is_said_of_them(trace: str):
    assert "GPU" not in replay(trace, "--num-blocks", "5").stdout
    (run,) = replay_json(trace, "--num-blocks", "5")["runs"]
    assert not {"tiers", "found_tokens", "load_s", "saved_s"} & set(run)


def test_a_model_says_what_its_pages_cost(trace: str):
    options = ("--model", "Qwen/Qwen3-8B", "--block-size", "512", "--num-blocks", "5", "--tier", "host=100GiB")
    (run,) = replay_json(trace, *options)["runs"]
    (tier,) = run["tiers"]
    # 36 layers of 8 heads of 128 numbers of 2 bytes, keys and values
    assert tier["stored_bytes"] == tier["stored_pages"] * 512 * 36 * 8 * 128 * 2 * 2
    assert tier["hit_tokens"] == 6144


def test_groups_have_tiers_too(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    path.write_text(mooncake())
    options = (str(path), "--groups", HYBRID, "--num-blocks", "300", "--tier", "host=1GiB", "--block-bytes", "1000")
    (run,) = replay_json(*options)["runs"]
    assert run["tiers"][0]["stored_bytes"] == 1000 * run["tiers"][0]["stored_pages"] > 0
    assert run["found_tokens"] >= run["hit_tokens"]


def test_bytes_per_token_say_it_too(trace: str):
    options = ("--memory", "5KiB", "--bytes-per-token", "2", "--tier", "host=1MiB")
    (run,) = replay_json(trace, *options)["runs"]
    assert run["tiers"][0]["distinct_bytes"] == 6 * 1024


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--tier", "host"], "--tier: 'host' is not a name and a size such as host=64GiB or host=64GiB@25GB/s"),
        (["--tier", "=1GiB"], "--tier: '=1GiB' is not a name and a size such as host=64GiB or host=64GiB@25GB/s"),
        (
            ["--tier", "GPU=1GiB"],
            "--tier: 'GPU=1GiB' is not a name and a size such as host=64GiB or host=64GiB@25GB/s",
        ),
        (["--tier", "host=much"], "--tier host: 'much' is not a memory size such as 40GiB, 40GB or 1048576"),
        (["--tier", "host="], "--tier host: '' is not a memory size such as 40GiB, 40GB or 1048576"),
        (["--tier", "host=-1GiB"], "--tier host: '-1GiB' is not a memory size such as 40GiB, 40GB or 1048576"),
        (["--tier", "host=0GiB"], "--tier host: a tier of 0GiB holds nothing"),
        (
            ["--tier", "host=1GiB@25Gb/s"],
            "--tier host: '25Gb/s' may be bits or bytes: write bytes, such as 25GB/s",
        ),
        (["--tier", "host=1GiB@"], "--tier host: '' is not a read bandwidth such as 25GB/s"),
        (["--tier", "host=1GiB@25GB"], "--tier host: '25GB' is not a read bandwidth such as 25GB/s"),
        (["--tier", "host=1GiB@fast/s"], "--tier host: 'fast/s' is not a read bandwidth such as 25GB/s"),
        (["--tier", "host=1GiB@0GB/s"], "--tier host: '0GB/s' is not a read bandwidth such as 25GB/s"),
        (["--tier", "a=1GiB", "--tier", "a=2GiB"], "--tier: two tiers are named a"),
        (["--tier", "host=63B"], "tier host: 63 bytes do not hold one page of 64 bytes"),
        (
            ["--tier", "a=1GiB", "--tier-store", "sometimes"],
            "--tier-store: 'sometimes' is not completion, eviction or hits=N with N at least 1",
        ),
        (
            ["--tier", "a=1GiB", "--tier-store", "a=hits=0"],
            "--tier-store: 'hits=0' is not completion, eviction or hits=N with N at least 1",
        ),
        (["--tier", "a=1GiB", "--tier-store", "b=eviction"], "--tier-store: there is no tier 'b', but a"),
        (
            ["--tier", "a=1GiB", "--tier-store", "a=eviction", "--tier-store", "a=hits=1"],
            "--tier-store: tier a has two values, eviction and hits=1",
        ),
        (
            ["--tier", "a=1GiB", "--tier-policy", "lru", "--tier-policy", "arc"],
            "--tier-policy: lru and arc are both for all tiers: name them, as in a=arc",
        ),
        (["--tier", "a=1GiB", "--tier-policy", "fifo"], "--tier-policy: 'fifo' is not one of lru, arc"),
        (["--tier", "a=1GiB", "--prefill-rate", "0"], "a prompt is computed at more than 0 tokens/s, not 0.0"),
        (
            ["--tier", "a=1GiB", "--mode", "concurrent"],
            "--tier is for --mode sequential: the concurrent replay has no tiers yet",
        ),
    ],
)
def test_bad_tiers(trace: str, options: list[str], says: str):
    assert bad_input(trace, "--block-bytes", "64", "--num-blocks", "5", *options) == says


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--tier", "a=1GiB"],
            "--tier needs the bytes of a block: give --model, --block-bytes, or --memory with --bytes-per-token",
        ),
        (
            ["--tier", "a=1GiB", "--model", "Qwen/Qwen3-8B", "--block-bytes", "64"],
            "--block-bytes is not needed with --model or --bytes-per-token, which say it",
        ),
        (
            ["--tier", "a=1GiB", "--num-blocks", "5", "--block-bytes", "2 furlongs"],
            "--block-bytes: '2 furlongs' is not a memory size such as 40GiB, 40GB or 1048576",
        ),
        (
            ["--tier", "a=1GiB", "--num-blocks", "5", "--block-bytes", "0"],
            "--block-bytes: a block of 0 holds nothing",
        ),
        (["--block-bytes", "64"], "--block-bytes says what a page of a tier costs: it needs --tier"),
        (["--tier-store", "eviction"], "--tier-store says what a tier does: it needs --tier"),
        (["--tier-policy", "arc"], "--tier-policy says what a tier does: it needs --tier"),
        (
            ["--prefill-rate", "10"],
            "--prefill-tokens-per-s is for --mode concurrent: one after the other, requests take no time",
        ),
    ],
)
def test_options_that_miss_each_other(trace: str, options: list[str], says: str):
    assert bad_input(trace, "--num-blocks", "5", *options) == says
