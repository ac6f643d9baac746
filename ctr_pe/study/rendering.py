"""A table as text for a terminal and as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

Cells = tuple[list[str], list[list[str]]]
"""Header, rows."""


def text_table(title: str, cells: Cells, notes: Sequence[str]) -> str:
    """Columns side by side between rules, then the notes."""
    header, rows = cells
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in [header, *rows]]
    rule = "─" * len(lines[0])
    wrapped = [textwrap.fill(note, max(80, len(rule))) for note in notes]
    return "\n".join([title, rule, *[line.rstrip() for line in lines], rule, *wrapped])


def markdown_table(title: str, cells: Cells, notes: Sequence[str]) -> str:
    """A section: heading, table, notes."""
    header, rows = cells
    lines = [f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *rows]]
    return "\n".join([f"## {title}", "", *lines, "", *[f"- {note}" for note in notes]])
