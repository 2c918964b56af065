"""Figures by row and variant, round by round, and what is made of them: medians, ratios, tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from bench_variant import OURS, VLLM

TIMES = "\N{MULTIPLICATION SIGN}"
DASH = "\N{EN DASH}"
#: Sections that list methods. In their tables what took less than a hundredth of the longest is left out.
BY_METHOD = "by method"
#: Units in which more is better; in all others less is.
RATES = frozenset({"M tokens/s"})
#: What the code causes is there each time, what the machine causes is not: the least of the rounds counts.
LEAST = "ms, least"
#: Time beyond that without the thing: it can be nothing, or less.
DIFFERENCE = "ms more"
#: Units of which no ratio is made.
UNCOMPARED = frozenset({"%", DIFFERENCE})


@dataclass(frozen=True)
class Row:
    """Medians over the rounds; the ratio says how many times better ours is: median and quartiles of the rounds'.

    In the unit `LEAST` the least of the rounds in place of the median, and the ratio of the two.
    """

    section: str
    name: str
    unit: str
    vllm: float | None
    ours: float | None
    ratio: float | None
    low: float | None
    high: float | None


class Figures:
    def __init__(self) -> None:
        self._values: dict[tuple[str, str, str], dict[str, list[float]]] = {}

    def add(self, section: str, name: str, unit: str, variant: str, value: float) -> None:
        self._values.setdefault((section, name, unit), {VLLM: [], OURS: []})[variant].append(value)

    def rows(self) -> list[Row]:
        return [row_of(*key, values[VLLM], values[OURS]) for key, values in self._values.items()]

    def sections(self) -> Iterator[tuple[str, list[Row]]]:
        rows = self.rows()
        for section in dict.fromkeys(row.section for row in rows):
            mine = [row for row in rows if row.section == section]
            if BY_METHOD in section:
                least = max(weight(row) for row in mine) / 100
                mine = sorted((row for row in mine if weight(row) >= least), key=weight, reverse=True)
            yield section, mine

    def as_json(self) -> list[dict[str, Any]]:
        return [{**asdict(row), "rounds": self._values[row.section, row.name, row.unit]} for row in self.rows()]


def row_of(section: str, name: str, unit: str, theirs: list[float], ours: list[float]) -> Row:
    if unit == LEAST and theirs and ours:
        return Row(section, name, unit, min(theirs), min(ours), min(theirs) / min(ours), None, None)
    pairs = [(them, us) for them, us in zip(theirs, ours, strict=False) if them > 0 and us > 0]
    ratios = [us / them if unit in RATES else them / us for them, us in pairs]
    low = ratio = high = None
    if ratios and unit not in UNCOMPARED:
        low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Row(
        section,
        name,
        unit,
        statistics.median(theirs) if theirs else None,
        statistics.median(ours) if ours else None,
        ratio,
        low,
        high,
    )


def weight(row: Row) -> float:
    return max(row.vllm or 0.0, row.ours or 0.0)


def cells(row: Row) -> list[str]:
    ratio = DASH if row.ratio is None else f"{row.ratio:.2f}{TIMES}"
    spread = DASH if row.low is None or row.high is None else f"{row.low:.2f}{DASH}{row.high:.2f}"
    return [row.name, row.unit, number(row.vllm), number(row.ours), ratio, spread]


def number(value: float | None) -> str:
    """Three significant digits, and no more than the whole number above a hundred."""
    if value is None:
        return DASH
    if value >= 99.95:
        return f"{value:,.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}"


HEADER = ["", "unit", "vLLM 0.33", "blockpool", "ratio", "quartiles"]


def as_text(figures: Figures) -> str:
    lines = []
    for section, rows in figures.sections():
        table = [HEADER, *(cells(row) for row in rows)]
        widths = [max(len(line[column]) for line in table) for column in range(len(HEADER))]
        lines += ["", section]
        for line in table:
            left = [line[0].ljust(widths[0]), line[1].ljust(widths[1])]
            right = [cell.rjust(width) for cell, width in zip(line[2:], widths[2:], strict=True)]
            lines.append("  " + "  ".join([*left, *right]).rstrip())
    return "\n".join(lines)


def as_markdown(figures: Figures) -> str:
    """The tables for a document, without those by method."""
    lines = []
    rule = "| --- | --- | ---: | ---: | ---: | ---: |"
    for section, rows in figures.sections():
        if BY_METHOD not in section:
            lines += ["", f"### {section}", "", "| " + " | ".join(HEADER) + " |", rule]
            lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"
