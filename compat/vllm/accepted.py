"""The accepted exceptions: a table in the documentation, read here, so that the page and the check cannot part.

The table stands between two HTML comments, and each row is ``| `node id` | cases | reason |``:

    <!-- accepted exceptions -->
    | test | cases | reason |
    | --- | --- | --- |
    | `tests/v1/core/test_x.py::test_y` | 1 | why ours differs |
    <!-- end of accepted exceptions -->

A node id without brackets stands for all cases of a parametrised test; ``*`` inside brackets matches anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

BEGIN = "<!-- accepted exceptions -->"
END = "<!-- end of accepted exceptions -->"
MAX_CASES = 30


class BadTable(Exception):
    """The page has no table of accepted exceptions, or one that cannot be read."""


@dataclass(frozen=True)
class Accepted:
    pattern: str
    num_cases: int
    reason: str

    @property
    def file(self) -> str:
        return self.pattern.partition("::")[0]

    def covers(self, node_id: str) -> bool:
        if "[" not in self.pattern:
            return node_id.partition("[")[0] == self.pattern
        # brackets mean themselves here, only the star is a wildcard
        return fnmatchcase(node_id, self.pattern.replace("[", "[[]").replace("?", "[?]"))


def read_accepted(page: Path) -> tuple[Accepted, ...]:
    """The rows of the table in `page`. Raises BadTable."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise BadTable(f"{page} has no table between '{BEGIN}' and '{END}'")
    body = text.partition(BEGIN)[2].partition(END)[0]
    rows = [line.strip() for line in body.splitlines() if line.strip().startswith("|")]
    return tuple(_row(page, line) for line in rows[2:])


def _row(page: Path, line: str) -> Accepted:
    match = re.fullmatch(r"\|\s*`([^`]+)`\s*\|\s*(\d+)\s*\|\s*(.*?\S)\s*\|", line)
    if match is None:
        raise BadTable(f"{page}: not a row of `node id` | cases | reason: {line}")
    return Accepted(match[1], int(match[2]), match[3])


def covered_by(accepted: Iterable[Accepted], node_id: str) -> Accepted | None:
    return next((row for row in accepted if row.covers(node_id)), None)
