"""Runs vLLM's own tests twice, on its own pool and on ours, and says which come out differently.

    python compat/vllm/compare.py --peer DIR --with build/peer [--manager]

README.md says what DIR is; it is only read. Exit codes: 0 the two runs agree
but for the accepted exceptions, 1 they do not, 2 there is no result (wrong environment, a run that did not start).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from accepted import BadTable, read_accepted
from one_run import OneRun, Outcome, Peer, RunFailed, RunResult
from suite import CONNECTORS, SUITE, TESTED_VERSION
from verdict import Verdict, judge

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "integrations" / "vllm.md"


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="vLLM's own tests, on its pool and on ours.")
    parser.add_argument("--peer", type=Path, required=True, help="the environment with vLLM and its tests")
    parser.add_argument("--with", dest="ours", type=Path, required=True, help="a folder with an importable blockpool")
    parser.add_argument("--manager", action="store_true", help="our KVCacheManager too, not our pool alone")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page with the table of accepted exceptions")
    parser.add_argument("--no-page", action="store_true", help="accept no exception at all")
    parser.add_argument("--json", type=Path, help="write the whole outcome here, for documents to quote")
    parser.add_argument("--baseline", type=Path, help="keep the run on vLLM's own pool here, and reuse it")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=2, help="run the two at the same time (2) or not")
    parser.add_argument("--seconds-per-test", type=int, default=120)
    parser.add_argument("--connectors", action="store_true", help="the tests of KV connectors too")
    parser.add_argument("--verbose", action="store_true", help="show how each unaccepted test fails")
    parser.add_argument("tests", nargs="*", help="files, folders or node ids instead of the whole suite")
    return parser.parse_args(argv)


class Progress:
    """One line on a terminal, nothing anywhere else."""

    def __init__(self) -> None:
        self.shown = sys.stderr.isatty()
        self.lock = threading.Lock()
        self.counts = {"theirs": (0, 0), "ours": (0, 0)}

    def update(self, run: str, done: int, total: int) -> None:
        with self.lock:
            self.counts[run] = (done, total)
            if self.shown:
                parts = "   ".join(f"{name} {done}/{total or '?'}" for name, (done, total) in self.counts.items())
                print(f"\r{parts}   ", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.shown:
            print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)


def load_baseline(path: Path | None, tests: Sequence[str]) -> RunResult | None:
    if path is None or not path.exists():
        return None
    kept = json.loads(path.read_text(encoding="utf-8"))
    if kept.pop("suite") != list(tests):
        return None
    kept["tests"] = {node: Outcome(**test) for node, test in kept["tests"].items()}
    return RunResult(**kept)


def save_baseline(path: Path | None, tests: Sequence[str], result: RunResult) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"suite": list(tests), **asdict(result)}), encoding="utf-8")


def run_both(args: argparse.Namespace, tests: Sequence[str], scratch: Path) -> tuple[RunResult, RunResult]:
    peer = Peer(args.peer.resolve())
    peer.check()
    progress = Progress()
    limit = args.seconds_per_test
    theirs = OneRun(peer, "theirs", (), scratch, seconds_per_test=limit)
    ours = OneRun(
        peer, "managed" if args.manager else "ours", (args.ours.resolve(),), scratch, seconds_per_test=limit
    )
    kept = load_baseline(args.baseline, tests)
    with ThreadPoolExecutor(args.jobs) as runs:
        jobs: list[Future[RunResult]] = []
        if kept is None:
            jobs.append(runs.submit(baseline_run, theirs, tests, progress))
        jobs.append(runs.submit(ours.run, tests, lambda *counts: progress.update("ours", *counts)))
        try:
            for job in as_completed(jobs):
                job.result()
        except BaseException:  # Ctrl-C too: no process is left behind
            theirs.stop.set()
            ours.stop.set()
            raise
    progress.clear()
    result = jobs[-1].result()
    if kept is not None:
        return kept, result
    baseline = jobs[0].result()
    save_baseline(args.baseline, tests, baseline)
    return baseline, result


def baseline_run(theirs: OneRun, tests: Sequence[str], progress: Progress) -> RunResult:
    baseline = theirs.run(tests, lambda *counts: progress.update("theirs", *counts))
    try_again(theirs, baseline)
    return baseline


def try_again(run: OneRun, baseline: RunResult) -> None:
    """A test that fails once on vLLM's own pool and passes the next time passes: only steady failures are excused."""
    failing = [node for node, test in baseline.tests.items() if test.outcome in ("failed", "error", "crashed")]
    if failing:
        again = run.run(failing, lambda done, total: None)
        baseline.tests.update({node: test for node, test in again.tests.items() if test.outcome == "passed"})


def table(verdict: Verdict) -> str:
    width = max(len(count.file) for count in verdict.files)
    lines = [f"{'':{width}}  collected  passed without  passed with  differing"]
    totals = [0, 0, 0, 0]
    for count in verdict.files:
        numbers = (count.collected, count.passed_theirs, count.passed_ours, count.differing)
        totals = [total + number for total, number in zip(totals, numbers, strict=True)]
        lines.append(row(count.file, width, numbers))
    return "\n".join([*lines, row("all", width, totals)])


def row(name: str, width: int, numbers: Sequence[int]) -> str:
    collected, theirs, ours, differing = numbers
    return f"{name:{width}}  {collected:9,}  {theirs:14,}  {ours:11,}  {differing:9,}"


def report(verdict: Verdict, theirs: RunResult, ours: RunResult, *, managed: bool, verbose: bool) -> str:
    lines = [table(verdict), ""]
    lines.append(f"vLLM {ours.pool['vllm']}; without {theirs.seconds:.0f} s, with {ours.seconds:.0f} s")
    lines.append(f"ours is {ours.pool['build']}, {'with' if managed else 'without'} the manager")
    lines.append(f"{verdict.num_pass_neither} pass in neither run")
    if theirs.uncollected:
        lines.append(f"cannot be collected in this environment: {', '.join(sorted(theirs.uncollected))}")
    if ours.pool["vllm"] != TESTED_VERSION:
        lines.append(f"this comparison was made for vLLM {TESTED_VERSION}")
    for difference in verdict.differences:
        if difference.is_loss and difference.reason:
            lines.append(f"accepted: {difference.node_id}: {difference.reason}")
        elif not difference.is_loss:
            lines.append(f"passes on ours only: {difference.node_id}")
        if verbose and difference.is_loss and not difference.reason:
            lines += ["", f"--- {difference.node_id}", difference.text]
    lines += [f"FAULT {fault}" for fault in verdict.faults]
    lines.append("the two runs agree" if verdict.agrees else f"{len(verdict.faults)} faults")
    return "\n".join(lines)


def as_json(verdict: Verdict, ours: RunResult) -> str:
    """What two runs on the same versions have in common: no times, no paths."""
    outcome = {
        "agrees": verdict.agrees,
        "vllm": ours.pool["vllm"],
        "pass_neither": verdict.num_pass_neither,
        "files": [asdict(count) for count in verdict.files],
        "differences": [
            {"node_id": one.node_id, "theirs": one.theirs, "ours": one.ours, "reason": one.reason}
            for one in verdict.differences
        ],
        "faults": list(verdict.faults),
    }
    return json.dumps(outcome, indent=2) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    tests = tuple(args.tests) or SUITE + (CONNECTORS if args.connectors else ())
    try:
        accepted = () if args.no_page else read_accepted(args.page, manager=args.manager)
        with tempfile.TemporaryDirectory(prefix="compat-") as scratch:
            theirs, ours = run_both(args, tests, Path(scratch))
    except (RunFailed, BadTable) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    verdict = judge(theirs, ours, accepted)
    print(report(verdict, theirs, ours, managed=args.manager, verbose=args.verbose))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(as_json(verdict, ours), encoding="utf-8")
    return 0 if verdict.agrees else 1


if __name__ == "__main__":
    sys.exit(main())
