"""Tables as text for a terminal, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Protocol

DASH = "–"  # no number
Cells = tuple[list[str], list[list[str]]]
"""Header, rows."""


class Printable(Protocol):
    """A table with a title and notes."""

    @property
    def title(self) -> str: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    def cells(self) -> Cells: ...


def as_text(table: Printable) -> str:
    """For a terminal: columns side by side between rules, then the notes."""
    header, rows = table.cells()
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in [header, *rows]]
    rule = "─" * len(lines[0])
    wrapped = [textwrap.fill(note, max(80, len(rule))) for note in table.notes]
    return "\n".join([table.title, rule, *[line.rstrip() for line in lines], rule, *wrapped])


def as_markdown(tables: Sequence[Printable]) -> str:
    """A section for each table: heading, table, notes."""
    sections = []
    for table in tables:
        header, rows = table.cells()
        lines = [f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *rows]]
        sections.append("\n".join([f"## {table.title}", "", *lines, "", *[f"- {note}" for note in table.notes]]))
    return "\n\n".join(sections) + "\n"


def csv_text(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Numbers at full precision; None and NaN are empty."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([["" if value != value else value for value in row] for row in rows])
    return stream.getvalue()


def mean_text(mean: float, sd: float) -> str:
    """Mean ± standard deviation, which is NaN for a single value."""
    if math.isnan(mean):
        return DASH
    return f"{mean:.4f}" if math.isnan(sd) else f"{mean:.4f} ± {sd:.4f}"
