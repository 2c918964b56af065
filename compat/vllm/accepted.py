"""The accepted exceptions: a table in the documentation, read here, so that the page and the check cannot part.

The table stands between two HTML comments, and each row is ``| `node id` | cases | reason |``:

    <!-- accepted exceptions -->
    | test | cases | reason |
    | --- | --- | --- |
    | `tests/v1/core/test_x.py::test_y` | 1 | why ours differs |
    <!-- end of accepted exceptions -->

What differs with our KVCacheManager alone stands in a table of its own, between `MANAGER_BEGIN` and `MANAGER_END`.

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
MANAGER_BEGIN = "<!-- accepted exceptions of the manager -->"
MANAGER_END = "<!-- end of accepted exceptions of the manager -->"
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


def read_accepted(page: Path, *, manager: bool = False) -> tuple[Accepted, ...]:
    """The rows of the table in `page`; with `manager`, those of its other table too. Raises BadTable."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    found = _table(page, text, BEGIN, END)
    return found + _table(page, text, MANAGER_BEGIN, MANAGER_END) if manager else found


def _table(page: Path, text: str, begin: str, end: str) -> tuple[Accepted, ...]:
    if text.count(begin) != 1 or text.count(end) != 1:
        raise BadTable(f"{page} has no table between '{begin}' and '{end}'")
    body = text.partition(begin)[2].partition(end)[0]
    rows = [line.strip() for line in body.splitlines() if line.strip().startswith("|")]
    return tuple(_row(page, line) for line in rows[2:])


def _row(page: Path, line: str) -> Accepted:
    match = re.fullmatch(r"\|\s*`([^`]+)`\s*\|\s*(\d+)\s*\|\s*(.*?\S)\s*\|", line)
    if match is None:
        raise BadTable(f"{page}: not a row of `node id` | cases | reason: {line}")
    return Accepted(match[1], int(match[2]), match[3])


def covered_by(accepted: Iterable[Accepted], node_id: str) -> Accepted | None:
    return next((row for row in accepted if row.covers(node_id)), None)
