"""`blockpool replay` as a user meets it: output, JSON, sizes, errors."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from blockpool.cli import app
from blockpool.traces import TraceFormat

runner = CliRunner()


def mooncake(num_requests: int = 6) -> str:
    """Each request goes on where the one before ended."""
    return "".join(
        json.dumps(
            {
                "timestamp": 1000 * number,
                "input_length": 512 * number + 100,
                "output_length": 30,
                "hash_ids": [*range(number), 100 + number],
            }
        )
        + "\n"
        for number in range(1, num_requests + 1)
    )


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text(mooncake())
    return str(path)


def replay(*arguments: str, code: int = 0, **options: Any) -> Any:
    result = runner.invoke(app, ["replay", *arguments], **options)
    assert result.exit_code == code, result.output
    return result


def replay_json(*arguments: str, **options: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(replay(*arguments, "--json", "-", **options).stdout)
    return document


def bad_input(*arguments: str, **options: Any) -> str:
    """The one line on stderr."""
    result = replay(*arguments, code=2, **options)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("blockpool: error: ")
    return str(line.removeprefix("blockpool: error: "))


def test_the_json_of_a_run(trace: str):
    document = replay_json(trace, "--num-blocks", "50")
    assert document["traces"] == [trace]
    assert document["built_in"] is False
    assert document["interrupted"] is False
    assert document["trace_requests"] == 6
    (run,) = document["runs"]
    prompt_tokens = sum(512 * number + 100 for number in range(1, 7))
    assert run == {
        "num_blocks": 50,
        "block_size": 512,
        "requests": 6,
        "refused_requests": 0,
        "prompt_tokens": prompt_tokens,
        "hit_tokens": 512 * (0 + 1 + 2 + 3 + 4 + 5),
        "hit_rate": 512 * 15 / prompt_tokens,
        "reusable_tokens": 512 * (0 + 1 + 2 + 3 + 4 + 5),
        "evicted_blocks": 0,
        "evicted_unused_blocks": 0,
        "peak_held_blocks": 7,
        "trace_requests": 6,
        "groups": [
            {"kind": "full:512", "block_size": 512, "held_at_peak": 7, "evicted_blocks": 0, "cached_blocks": 6}
        ],
        "losses": [],
        "shortened_hits": {},
        "interrupted": False,
    }


def test_the_output_for_people(trace: str):
    output = replay(trace, "--num-blocks", "50").stdout
    lines = output.splitlines()
    assert lines[0] == trace
    assert "6 requests; blocks of 512 tokens" in lines
    assert "pool sizes: given" in lines
    assert any(line.split() == ["50", "6", "11,352", "7,680", "67.7%", "0", "0", "7", "0"] for line in lines)
    assert lines[-1] == "At 50 blocks nothing was evicted: for this trace a larger pool can bring no more hits."


def test_sizes_may_be_repeated_and_listed(trace: str):
    document = replay_json(trace, "--num-blocks", "50,5", "--num-blocks", " 9 ", "--num-blocks", "5")
    assert [run["num_blocks"] for run in document["runs"]] == [50, 5, 9]
    assert [run["refused_requests"] for run in document["runs"]] == [0, 3, 0]


@pytest.mark.parametrize("sizes", ["1", "0", "-5", "x", "", "5,,6", "5,", "1.5", str(2**31)])
def test_a_size_that_is_none(trace: str, sizes: str):
    assert bad_input(trace, f"--num-blocks={sizes}").startswith("--num-blocks: ")


@pytest.mark.parametrize(
    ("memory", "num_blocks"),
    [("1MiB", 8), ("1 mib", 8), ("1MB", 7), ("1048576", 8), ("1.5MiB", 12), ("1024KiB", 8), ("2097152B", 16)],
)
def test_a_size_in_memory(trace: str, memory: str, num_blocks: int):
    document = replay_json(trace, "--memory", memory, "--bytes-per-token", "256")
    assert [run["num_blocks"] for run in document["runs"]] == [num_blocks]


@pytest.mark.parametrize("memory", ["1", "100KiB"])
def test_too_little_memory(trace: str, memory: str):
    assert "a pool needs 2" in bad_input(trace, "--memory", memory, "--bytes-per-token", "256")


def test_pools_larger_than_a_pool_can_be(trace: str, tmp_path: Path):
    assert "larger than" in bad_input(trace, "--memory", "100PB", "--bytes-per-token", "1")
    huge = tmp_path / "huge.jsonl"
    huge.write_text('{"tokens": [1], "output_length": 2147483647}\n')
    assert "larger than" in bad_input(str(huge))


@pytest.mark.parametrize("memory", ["", "GiB", "40G", "-1GiB", "40 apples", "1e9", "0x10", "nan"])
def test_memory_that_is_none(trace: str, memory: str):
    assert bad_input(trace, f"--memory={memory}", "--bytes-per-token", "1").startswith("--memory: ")


def test_options_that_need_or_exclude_each_other(trace: str):
    assert "need each other" in bad_input(trace, "--memory", "1GiB")
    assert "need each other" in bad_input(trace, "--bytes-per-token", "5")
    both = ("--memory", "1GiB", "--bytes-per-token", "5", "--num-blocks", "7")
    assert "give one of them" in bad_input(trace, *both)


def test_block_sizes(trace: str):
    (run,) = replay_json(trace, "--num-blocks", "900", "--block-size", "16")["runs"]
    assert run["block_size"] == 16
    assert run["hit_tokens"] == 512 * 15, "the partial ids differ, the full ones are shared"
    document = replay_json(trace, "--num-blocks", "900", "--block-size", "256", "--hash-block-size", "64")
    assert document["hash_block_size"] == 64
    assert document["runs"][0]["hit_tokens"] == 512 * 15
    (run,) = replay_json(trace, "--num-blocks", "900", "--block-size", "1024")["runs"]
    assert run["hit_tokens"] == 1024 * (0 + 0 + 1 + 1 + 2 + 2)


def test_block_sizes_that_do_not_fit(trace: str):
    assert "does not divide" in bad_input(trace, "--block-size", "256", "--hash-block-size", "100")
    assert "do not fit" in bad_input(trace, "--block-size", "100")


def test_sizes_that_are_chosen_are_explained(trace: str):
    document = replay_json(trace)
    sizes = [run["num_blocks"] for run in document["runs"]]
    assert sizes == sorted(sizes)
    assert document["runs"][-1]["evicted_blocks"] == 0
    assert all(run["refused_requests"] == 0 for run in document["runs"])
    assert "no eviction" in document["sizes_from"]
    assert f"{sizes[-1]:,} blocks" in document["sizes_from"]
    assert document["sizes_from"] in replay(trace).stdout


def test_without_a_trace_the_built_in_workload_is_named(monkeypatch: pytest.MonkeyPatch):
    assert replay_json("--num-blocks", "3000")["built_in"] is True
    output = replay("--num-blocks", "3000").stdout
    assert output.startswith("No TRACE given, so this is the built-in workload")


def test_stdin(trace: str):
    for data in (Path(trace).read_bytes(), gzip.compress(Path(trace).read_bytes())):
        document = replay_json("-", "--num-blocks", "50", input=data)
        assert document["traces"] == ["<stdin>"]
        assert document["runs"] == replay_json(trace, "--num-blocks", "50")["runs"]


def test_several_files_are_one_trace(trace: str, tmp_path: Path):
    session = tmp_path / "session.json"
    requests = [{"t": 2.5, "in": 640, "out": 1, "hash_ids": list(range(10))}] * 2
    session.write_text(json.dumps({"block_size": 64, "hash_id_scope": "local", "requests": requests}))
    document = replay_json(trace, str(session), "--num-blocks", "900")
    assert document["trace_requests"] == 8
    assert document["runs"][0]["block_size"] == 64
    assert document["runs"][0]["hit_tokens"] == 512 * 15 + 64 * 9


def test_a_bad_line_stops_or_is_counted(trace: str, tmp_path: Path):
    path = tmp_path / "bad.jsonl"
    path.write_text(mooncake(2) + '{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": []}\n')
    assert bad_input(str(path)) == f"{path}:3: input_length: expected int >= 1"
    assert bad_input(trace, str(path)) == f"{path}:3: input_length: expected int >= 1"
    document = replay_json(str(path), "--skip-bad-lines", "--num-blocks", "50")
    assert (document["skipped_bad_lines"], document["trace_requests"]) == (1, 2)
    output = replay(str(path), "--skip-bad-lines", "--num-blocks", "50").stdout
    assert f"skipped 1 bad line, the first: {path}:3: input_length: " in output


def test_files_that_are_no_traces(tmp_path: Path):
    empty = tmp_path / "empty"
    empty.write_text("")
    assert bad_input(str(empty)) == f"{empty}: empty file"
    assert "No such file" in bad_input(str(tmp_path / "absent"))
    assert "Is a directory" in bad_input(str(tmp_path))
    assert "can be read only once" in bad_input("-", "-", input=b"")
    assert "empty file" in bad_input("-", input=b"")


def test_the_format_can_be_forced(trace: str):
    assert replay_json(trace, "--format", "mooncake", "--num-blocks", "50")["trace_requests"] == 6
    assert f"{trace}:1: tokens: missing" in bad_input(trace, "--format", "tokens")
    assert "'csv' is not one of mooncake, sessions, tokens" in bad_input(trace, "--format", "csv")


def test_the_help_names_every_format():
    text = " ".join(replay("--help").stdout.split())
    assert all(str(name) in text for name in TraceFormat)


def test_json_into_a_file(trace: str, tmp_path: Path):
    path = tmp_path / "result.json"
    output = replay(trace, "--num-blocks", "50", "--json", str(path)).stdout
    assert "hit rate" not in output.splitlines()[0]
    assert "At 50 blocks" in output
    assert json.loads(path.read_text()) == replay_json(trace, "--num-blocks", "50")


def test_json_that_cannot_be_written_is_refused_before_the_replay(trace: str, tmp_path: Path):
    assert "is a directory" in bad_input(trace, "--json", str(tmp_path))
    assert "there is no directory" in bad_input(trace, "--json", str(tmp_path / "absent" / "result.json"))


def test_all_refused(trace: str):
    result = replay(trace, "--num-blocks", "2")
    assert "At 2 blocks nothing was replayed: every request needs more than the whole pool." in result.stdout


def interrupt_after(monkeypatch: pytest.MonkeyPatch, num_updates: int) -> None:
    calls = iter(range(num_updates))

    def update(self: object, num_done: int) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr("blockpool.cli.progress.ProgressBar.update", update)


def test_ctrl_c_prints_what_is_known(trace: str, monkeypatch: pytest.MonkeyPatch):
    # Two updates per run of this short trace: the second run is interrupted before its first request.
    interrupt_after(monkeypatch, 2)
    result = replay(trace, "--num-blocks", "50,60,70", code=130)
    assert "At 50 blocks of 512 tokens, 67.7% of the prompt tokens" in result.stdout
    assert "The run with 60 blocks was interrupted after 0 of 6 requests" in result.stdout
    assert result.stderr == "interrupted\n"


def test_ctrl_c_in_json(trace: str, monkeypatch: pytest.MonkeyPatch):
    interrupt_after(monkeypatch, 2)
    document = json.loads(replay(trace, "--num-blocks", "50,60,70", "--json", "-", code=130).stdout)
    assert document["interrupted"] is True
    assert [(run["num_blocks"], run["interrupted"]) for run in document["runs"]] == [(50, False), (60, True)]


def test_ctrl_c_while_reading(trace: str, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("blockpool.traces.read_traces", interrupted)
    assert replay(trace, code=130).stderr == "interrupted\n"
