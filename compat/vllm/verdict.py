"""What two runs of the same tests say about the pool: differences, and whether each is an accepted one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from accepted import MAX_CASES, Accepted, covered_by
from one_run import RunResult
from suite import is_in_a_suite


@dataclass(frozen=True)
class FileCount:
    file: str
    collected: int
    passed_theirs: int
    passed_ours: int
    differing: int


@dataclass(frozen=True)
class Difference:
    node_id: str
    theirs: str
    ours: str
    reason: str | None
    text: str

    @property
    def is_loss(self) -> bool:
        """Ours does not do what vLLM's does. The other way round is news, not a fault."""
        return self.ours != "passed"


@dataclass(frozen=True)
class Verdict:
    files: tuple[FileCount, ...]
    differences: tuple[Difference, ...]
    faults: tuple[str, ...]
    num_pass_neither: int

    @property
    def agrees(self) -> bool:
        return not self.faults


def differs(theirs: str, ours: str) -> bool:
    """A failure and an error are the same here: where a test breaks that cannot run is the environment's affair."""
    return theirs.replace("error", "failed") != ours.replace("error", "failed")


def judge(theirs: RunResult, ours: RunResult, accepted: Iterable[Accepted]) -> Verdict:
    """An exception is judged when its file was run; they count together whatever was run."""
    listed = tuple(accepted)
    collected = {node.partition("::")[0] for node in theirs.collected}
    rows = tuple(row for row in listed if row.file in collected)
    files: dict[str, list[int]] = {}
    differences = []
    cases_used: dict[Accepted, int] = dict.fromkeys(rows, 0)
    cases_alive: dict[Accepted, int] = dict.fromkeys(rows, 0)
    for node in sorted(theirs.tests.keys() | ours.tests.keys()):
        before = theirs.tests[node].outcome if node in theirs.tests else "absent"
        after = ours.tests[node].outcome if node in ours.tests else "absent"
        different = differs(before, after)
        count = files.setdefault(node.partition("::")[0], [0, 0, 0, 0])
        for i, one in enumerate((True, before == "passed", after == "passed", different)):
            count[i] += one
        row = covered_by(rows, node)
        if row is not None and before == "passed":
            cases_alive[row] += 1
            cases_used[row] += different
        if different:
            text = ours.tests[node].text if node in ours.tests else ""
            differences.append(Difference(node, before, after, row.reason if row else None, text))
    faults = [
        *_run_faults(theirs, ours),
        *(f"not accepted: {d.node_id} ({d.theirs} -> {d.ours})" for d in differences if d.is_loss and not d.reason),
        *_row_faults(cases_used, cases_alive),
    ]
    faults += [f"accepted, but no suite has its file: {row.pattern}" for row in listed if not is_in_a_suite(row.file)]
    if (num_listed := sum(row.num_cases for row in listed)) > MAX_CASES:
        faults.append(f"{num_listed} cases are accepted as exceptions; {MAX_CASES} is the most")
    neither = sum(1 for node in theirs.tests if node not in theirs.passed and node not in ours.passed)
    counts = tuple(FileCount(file, *numbers) for file, numbers in sorted(files.items()))
    return Verdict(counts, tuple(differences), tuple(faults), neither)


def _run_faults(theirs: RunResult, ours: RunResult) -> list[str]:
    faults = []
    if len(theirs.collected) != len(ours.collected):
        faults.append(f"collected: {len(theirs.collected)} tests on vLLM's pool, {len(ours.collected)} on ours")
    only_ours = ours.uncollected.keys() - theirs.uncollected.keys()
    faults += [f"cannot be collected on ours: {node}" for node in sorted(only_ours)]
    if not theirs.passed:
        faults.append("nothing passed on vLLM's own pool: the environment is broken")
    return faults


def _row_faults(cases_used: dict[Accepted, int], cases_alive: dict[Accepted, int]) -> list[str]:
    faults = []
    for row, used in cases_used.items():
        if cases_alive[row] == 0:
            faults.append(f"accepted, but no such test passes on vLLM's pool: {row.pattern}")
        elif used < cases_alive[row]:
            passing = cases_alive[row] - used
            faults.append(f"accepted, but {passing} of {cases_alive[row]} cases do not differ: {row.pattern}")
        elif used != row.num_cases:
            faults.append(f"accepted for {row.num_cases} cases, but it has {used}: {row.pattern}")
    return faults
