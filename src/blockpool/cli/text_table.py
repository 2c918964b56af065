"""Columns of text that are never cut off, whatever the width of the terminal."""

from collections.abc import Sequence
from itertools import zip_longest


def text_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of right-aligned columns under headings, a word of a heading per line."""
    words = [heading.split() for heading in headings]
    # Filled up from below, so that the last words stand together on the line above the rule.
    heading_lines = list(zip_longest(*(reversed(word) for word in words), fillvalue=""))[::-1]
    widths = [max(map(len, column)) for column in zip(*heading_lines, *rows, strict=True)]
    lines = [*heading_lines, ["-" * width for width in widths], *rows]
    return ["  ".join(map(str.rjust, line, widths)).rstrip() for line in lines]
