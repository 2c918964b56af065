"""Rules of the comparison itself: what must not pass unnoticed. Run by `make test-vllm`, with vLLM's Python."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from accepted import BEGIN, END, MANAGER_BEGIN, MANAGER_END, MAX_CASES, Accepted, BadTable, read_accepted
from deliberate import Deliberate
from lockstep import first_difference, same_outcome
from one_run import OneRun, Outcome, Peer, RunFailed, RunResult
from verdict import Verdict, judge

A = "tests/v1/core/test_scheduler.py"


def result(**tests: str) -> RunResult:
    """A run in which `test_name` had that outcome."""
    outcomes = {f"{A}::{name}": Outcome(outcome) for name, outcome in tests.items()}
    return RunResult(pool={"vllm": "0.33.0"}, collected=list(outcomes), tests=outcomes)


def verdict(theirs: dict[str, str], ours: dict[str, str], *accepted: Accepted) -> Verdict:
    return judge(result(**theirs), result(**ours), accepted)


def test_equal_runs_agree() -> None:
    both = {"test_x": "passed", "test_y": "skipped"}
    assert verdict(both, both).agrees


def test_failing_in_both_is_the_environments_affair() -> None:
    found = verdict({"test_x": "passed", "test_y": "failed"}, {"test_x": "passed", "test_y": "error"})
    assert found.agrees
    assert found.num_pass_neither == 1


@pytest.mark.parametrize("ours", ["failed", "error", "skipped", "crashed", "lost"])
def test_a_loss_is_a_fault(ours: str) -> None:
    found = verdict({"test_x": "passed", "test_y": "passed"}, {"test_x": "passed", "test_y": ours})
    assert found.faults == (f"not accepted: {A}::test_y (passed -> {ours})",)


def test_what_vllm_skips_must_not_fail() -> None:
    assert not verdict({"test_x": "passed", "test_y": "skipped"}, {"test_x": "passed", "test_y": "failed"}).agrees


def test_a_crash_is_a_fault_where_vllm_only_fails() -> None:
    assert not verdict({"test_x": "passed", "test_y": "failed"}, {"test_x": "passed", "test_y": "crashed"}).agrees


def test_an_accepted_loss_is_none() -> None:
    row = Accepted(f"{A}::test_y", 1, "on purpose")
    found = verdict({"test_x": "passed", "test_y": "passed"}, {"test_x": "passed", "test_y": "failed"}, row)
    assert found.agrees
    assert found.differences[0].reason == "on purpose"


def test_an_exception_that_passes_is_stale() -> None:
    row = Accepted(f"{A}::test_x", 1, "on purpose")
    both = {"test_x": "passed"}
    assert "do not differ" in verdict(both, both, row).faults[0]


def test_an_exception_for_no_test_is_stale() -> None:
    both = {"test_x": "passed"}
    assert "no such test" in verdict(both, both, Accepted(f"{A}::test_gone", 1, "once")).faults[0]


def test_an_exception_is_judged_when_its_file_is_run() -> None:
    both = {"test_x": "passed"}
    assert verdict(both, both, Accepted("tests/v1/core/test_async_scheduler.py::test_z", 1, "elsewhere")).agrees
    assert (
        "no suite" in verdict(both, both, Accepted("tests/v1/core/test_nothing.py::test_z", 1, "nowhere")).faults[0]
    )


def test_an_exception_must_cover_exactly_the_cases_that_differ() -> None:
    theirs = {"test_x": "passed", "test_y[1]": "passed", "test_y[2]": "passed"}
    some = {"test_x": "passed", "test_y[1]": "failed", "test_y[2]": "passed"}
    every = {"test_x": "passed", "test_y[1]": "failed", "test_y[2]": "failed"}
    assert not verdict(theirs, some, Accepted(f"{A}::test_y", 1, "on purpose")).agrees
    assert not verdict(theirs, every, Accepted(f"{A}::test_y", 1, "on purpose")).agrees
    assert verdict(theirs, every, Accepted(f"{A}::test_y", 2, "on purpose")).agrees
    assert verdict(theirs, some, Accepted(f"{A}::test_y[1]", 1, "on purpose")).agrees


def test_cases_are_counted_not_rows() -> None:
    number = MAX_CASES + 1
    theirs = {f"test_y[{i}]": "passed" for i in range(number)} | {"test_x": "passed"}
    ours = dict.fromkeys(theirs, "failed") | {"test_x": "passed"}
    assert f"{number} cases are accepted" in verdict(theirs, ours, Accepted(f"{A}::test_y", number, "all")).faults[0]


def test_another_number_of_tests_is_a_fault() -> None:
    faults = verdict({"test_x": "passed", "test_y": "passed"}, {"test_x": "passed"}).faults
    assert faults[0].startswith("collected: 2 tests on vLLM's pool, 1 on ours")


def test_a_broken_environment_does_not_agree() -> None:
    both = {"test_x": "failed"}
    assert not verdict(both, both).agrees


def test_the_table_is_read(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    row = f"| `{A}::test_y[a-*]` | 3 | its reason |"
    page.write_text(f"text\n{BEGIN}\n\n| test | cases | reason |\n| --- | --- | --- |\n{row}\n{END}\n")
    (accepted,) = read_accepted(page)
    assert accepted == Accepted(f"{A}::test_y[a-*]", 3, "its reason")
    assert accepted.covers(f"{A}::test_y[a-1]")
    assert not accepted.covers(f"{A}::test_y[b-1]")
    assert not accepted.covers(f"{A}::test_y")


def test_the_managers_exceptions_come_on_top(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    head = "| test | cases | reason |\n| --- | --- | --- |\n"
    one, other = (f"| `{A}::test_{name}` | 1 | its reason |\n" for name in "xy")
    page.write_text(f"{BEGIN}\n{head}{one}{END}\n{MANAGER_BEGIN}\n{head}{other}{MANAGER_END}\n")
    assert [row.pattern for row in read_accepted(page)] == [f"{A}::test_x"]
    assert [row.pattern for row in read_accepted(page, manager=True)] == [f"{A}::test_x", f"{A}::test_y"]
    page.write_text(f"{BEGIN}\n{head}{one}{END}\n")
    with pytest.raises(BadTable, match="manager"):
        read_accepted(page, manager=True)


@pytest.mark.parametrize("text", ["", BEGIN, f"{BEGIN}\n| a |\n| - |\n| not a row |\n{END}"])
def test_a_page_without_a_readable_table_is_refused(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(BadTable):
        read_accepted(page)


def test_a_value_error_must_be_one_on_both_sides() -> None:
    assert same_outcome(("raised", ValueError()), ("raised", TypeError()))
    assert same_outcome(("raised", AssertionError()), ("returned", None))
    assert same_outcome(("raised", AssertionError()), ("raised", TypeError())) is None


def test_types_count() -> None:
    assert first_difference([1], (1,))
    assert first_difference({"a": 1}, {"a": True})
    assert first_difference({"a": [1, 2]}, {"a": [1, 3]}) == ("/a", [1, 2], [1, 3])


def stored(*hashes: int) -> tuple[str, dict[str, object]]:
    return ("events.BlockStored", {"block_hashes": ("list", list(hashes))})


def removed(block_hash: int, group: int = 0) -> tuple[str, dict[str, object]]:
    return ("events.BlockRemoved", {"block_hashes": ("list", [block_hash]), "group_idx": ("int", group)})


def test_only_the_named_differences_of_events_are_let_through() -> None:
    siblings = frozenset({(1, 0), (2, 0)})
    deliberate = Deliberate()
    assert deliberate.difference([stored(), stored(1)], [stored(1)], siblings) is None
    assert deliberate.difference([removed(1), removed(2)], [removed(2), removed(1)], siblings) is None
    assert deliberate.counts == {"empty stored": 1, "order of a set": 1}
    assert deliberate.difference([removed(1), removed(3)], [removed(3), removed(1)], siblings)
    assert deliberate.difference([removed(1), stored(1)], [stored(1), removed(1)], siblings)
    assert deliberate.difference([stored(1)], [], siblings)


@pytest.mark.skipif("COMPAT_PEER" not in os.environ, reason="COMPAT_PEER names no environment with vLLM")
@pytest.mark.parametrize("expected", ["ours", "managed", "theirs"])
def test_vllm_is_never_compared_with_itself(tmp_path: Path, expected: str) -> None:
    """Without the drop-in on the path no run on ours begins, and a drop-in that installs itself in every process
    ends the run on vLLM's own."""
    metadata = tmp_path / "meddler-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: meddler\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nmeddler = meddler:register\n")
    (tmp_path / "meddler.py").write_text(
        "def register():\n"
        "    from vllm.v1.core import block_pool\n"
        "    block_pool.BlockPool = type('BlockPool', (), {'__module__': 'blockpool.integrations.vllm'})\n"
    )
    path = () if expected != "theirs" else (tmp_path,)
    run = OneRun(Peer(Path(os.environ["COMPAT_PEER"])), expected, path, tmp_path, seconds_per_test=60)
    with pytest.raises(RunFailed, match=f"this run is about {expected}"):
        run.run(["tests/v1/core/test_kv_cache_metrics.py"], lambda done, total: None)
