"""One run of vLLM's tests in a process of its own, continued in a new one when that process dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
MAX_DEATHS = 10
PYTEST_ENDED = (0, 1, 5)  # all passed, some failed, none left to run
SECONDS_TO_START = 900.0  # importing vLLM from a cold disk takes minutes
SECONDS_BEYOND_LIMIT = 60.0  # a test that pytest could not stop at its own limit hangs in compiled code


class RunFailed(Exception):
    """A run gave no result: the environment is wrong, or pytest could not start. Not the pool's verdict."""


@dataclass(frozen=True)
class Outcome:
    """What became of one test: passed, failed, skipped, error, crashed (its process died) or lost (never ran)."""

    outcome: str
    seconds: float = 0.0
    text: str = ""


@dataclass
class RunResult:
    pool: dict[str, object] = field(default_factory=dict)
    collected: list[str] = field(default_factory=list)
    uncollected: dict[str, str] = field(default_factory=dict)
    tests: dict[str, Outcome] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def passed(self) -> set[str]:
        return {node for node, test in self.tests.items() if test.outcome == "passed"}


@dataclass(frozen=True)
class Peer:
    """A virtual environment in which vLLM's scheduler side imports, with vLLM's tests in `vllm-tests`."""

    folder: Path

    @property
    def tests(self) -> Path:
        return self.folder / "vllm-tests"

    def check(self) -> None:
        for path in (self.folder / "bin/python", self.tests / "tests/v1/core"):
            if not path.exists():
                raise RunFailed(f"{path} is missing: compat/vllm/README.md says what belongs there")

    def command(self, python_path: Sequence[Path], arguments: Sequence[str]) -> list[str]:
        """The peer's Python with these arguments, `python_path` in front, vLLM's tests behind."""
        path = ":".join(map(str, python_path))
        return ["env", f"PYTHONPATH={path}", str(HERE / "in_peer"), str(self.folder), *arguments]


class OneRun:
    """`expected` says what is tested: "ours", our pool from `python_path`; "managed", our manager too; "theirs"."""

    def __init__(
        self, peer: Peer, expected: str, python_path: Sequence[Path], scratch: Path, *, seconds_per_test: int
    ) -> None:
        self.peer = peer
        self.expected = expected
        self.python_path = (*python_path, HERE)
        self.record = scratch / f"{expected}.jsonl"
        self.log = scratch / f"{expected}.log"
        self.done = scratch / f"{expected}.done"
        self.seconds_per_test = seconds_per_test
        self.stop = threading.Event()

    def run(self, tests: Sequence[str], on_progress: Callable[[int, int], None]) -> RunResult:
        """Runs `tests` (files, folders or node ids). Raises RunFailed when there is no result to speak of."""
        self.record.unlink(missing_ok=True)
        self.log.unlink(missing_ok=True)
        began = time.monotonic()
        for _ in range(MAX_DEATHS):
            finished = self._one_process(tests, on_progress)
            result = self._read()
            if finished or self.stop.is_set():
                break
            if not result.pool or not result.collected:
                raise RunFailed(f"the run on {self.expected} did not start:\n{self.log_tail()}")
        for node in result.collected:
            result.tests.setdefault(node, Outcome("lost"))
        result.seconds = round(time.monotonic() - began, 1)
        return result

    def log_tail(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-1500:].strip()

    def _one_process(self, tests: Sequence[str], on_progress: Callable[[int, int], None]) -> bool:
        result = self._read()
        self.done.write_text("\n".join(result.tests), encoding="utf-8")
        environment = os.environ | {
            "COMPAT_RECORD": str(self.record),
            "COMPAT_POOL": self.expected,
            "COMPAT_DONE": str(self.done),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        for variable in ("BLOCKPOOL_VLLM", "BLOCKPOOL_VLLM_MANAGER"):
            environment.pop(variable, None)
        command = self.peer.command(
            self.python_path,
            [
                "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "watch_run", "--no-header", "--tb=short",
                "--continue-on-collection-errors", f"--timeout={self.seconds_per_test}", *tests,
            ],
        )  # fmt: skip
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command, cwd=self.peer.tests, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                return self._follow(process, on_progress)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                self._close_record()

    def _close_record(self) -> None:
        with self.record.open("a", encoding="utf-8") as record:
            record.write('\n{"event": "gone"}\n')

    def _follow(self, process: subprocess.Popen[bytes], on_progress: Callable[[int, int], None]) -> bool:
        """Waits for the end. True when pytest came to its own end, False when the process died or went silent."""
        size, news, limit = -1, time.monotonic(), SECONDS_TO_START
        while process.poll() is None:
            if self.stop.wait(0.5):
                return False
            now = self.record.stat().st_size if self.record.exists() else 0
            if now != size:
                size, news = now, time.monotonic()
                result = self._read()
                on_progress(len(result.tests), len(result.collected))
                if len(result.tests) > 0:
                    limit = self.seconds_per_test + SECONDS_BEYOND_LIMIT
            elif time.monotonic() - news > limit:
                return False
        return process.returncode in PYTEST_ENDED and bool(self._read().pool)

    def _read(self) -> RunResult:
        result = RunResult()
        started: str | None = None
        lines = self.record.read_text(encoding="utf-8").splitlines() if self.record.exists() else []
        for line in lines:
            try:
                note = json.loads(line)
            except ValueError:  # the line that a killed process was writing
                continue
            match note.pop("event"):
                case "pool":
                    result.pool = note
                case "collected":
                    result.collected = note["node_ids"]
                case "uncollected":
                    result.uncollected[note["node_id"]] = note["text"]
                case "started":
                    started = note["node_id"]
                case "ended":
                    node = note.pop("node_id")
                    result.tests[node] = Outcome(**note)
                    started = None
                case "gone" if started:  # the process died in this test
                    result.tests[started] = Outcome("crashed")
                    started = None
        return result
