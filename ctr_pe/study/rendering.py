"""Tables as text for a terminal, as Markdown, CSV, LaTeX, HTML and JSON; spans of time as text.

The marks of a table, bold for the best figure and stars for p, are of what a paper or a page shows: ``FORMATS`` has
them, and the files beside a store are without them.
"""

from __future__ import annotations

import csv
import html
import io
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ctr_pe.utils.files import file_errors, json_text

DASH = "–"  # no number
FAILED = "✗"  # before the number of runs that failed
WORSE = "‡"  # after a logloss above that of a constant prediction
GAUC = "gAUC: AUC within users."
LATEX: dict[str, str | int | None] = {  # sign -> how LaTeX writes it
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "−": "$-$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "†": r"$^\dagger$",
    "‡": r"$^\ddagger$",
    "–": "--",
    "✗": r"$\times$",
    "→": r"$\rightarrow$",
}


class Mark(NamedTuple):
    """Of a cell: whether its figure is the best of its column, and the stars of its p."""

    best: bool
    stars: str


@dataclass(frozen=True)
class Table:
    """Rows twice: ``lines`` by the columns of the CSV file, with NaN for no number, and ``cells`` as text by the
    columns that are shown. None is no text; a column that has none in any row is not shown. ``marks``: of cells, by row
    and column; ``legend``: what they say."""

    title: str
    lines: list[dict[str, Any]]
    cells: list[dict[str, str | None]]
    notes: list[str]
    marks: Mapping[tuple[int, str], Mark] = field(default_factory=dict)
    legend: tuple[str, ...] = ()

    def shown(
        self, write: Callable[[str], str] = str, mark: Callable[[str, Mark], str] | None = None
    ) -> list[list[str]]:
        """The header, then the rows; ``write`` and ``mark``: how a format writes a text, and a written one with its
        mark."""
        header = [name for name in self.cells[0] if any(row[name] is not None for row in self.cells)]

        def cell(at: int, name: str) -> str:
            text = write(self.cells[at][name] or DASH)
            return mark(text, self.marks[at, name]) if mark and (at, name) in self.marks else text

        return [[*map(write, header)], *[[cell(at, name) for name in header] for at in range(len(self.cells))]]

    def _repr_html_(self) -> str:
        return as_html([self])


def as_text(table: Table, bold: bool = False) -> str:
    """For a terminal: columns side by side between rules, then the notes; ``bold``: with the best figures in bold."""
    lines = table.shown()
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = "─" * len("  ".join(cell.ljust(width) for cell, width in zip(lines[0], widths, strict=True)))
    if bold:
        lines = table.shown(mark=lambda text, mark: f"\x1b[1m{text}\x1b[0m" if mark.best else text)
    padded = [
        "  ".join(
            cell + " " * (width - len(plain)) for cell, plain, width in zip(line, of, widths, strict=True)
        ).rstrip()
        for line, of in zip(lines, table.shown(), strict=True)
    ]
    notes = [textwrap.fill(note, max(80, len(rule)), break_on_hyphens=False) for note in table.notes]
    return "\n".join([table.title, rule, *padded, rule, *notes])


def as_markdown(tables: Iterable[Table], marked: bool = False) -> str:
    """A section for each table: heading, table, notes."""
    sections = []
    for table in tables:
        header, *rows = table.shown(lambda text: text.replace("|", r"\|"), _markdown_mark if marked else None)
        lines = [f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *rows]]
        notes = [*table.notes, *(note.replace("*", r"\*") for note in table.legend if marked)]
        sections.append("\n".join([f"## {table.title}", "", *lines, "", *[f"- {note}" for note in notes]]))
    return "\n\n".join(sections) + "\n"


def _markdown_mark(text: str, mark: Mark) -> str:
    return (f"**{text}**" if mark.best else text) + mark.stars.replace("*", r"\*")


def as_csv(tables: Iterable[Table]) -> str:
    """All lines in one table, numbers at full precision; None and NaN are empty. Tables that have no lines give their
    cells."""
    tables = list(tables)
    lines = [line for table in tables for line in table.lines] or [row for table in tables for row in table.cells]
    stream = io.StringIO()
    names = dict.fromkeys(name for line in lines for name in line)
    writer = csv.DictWriter(stream, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: "" if value != value else value for name, value in line.items()} for line in lines)
    return stream.getvalue()


def as_latex(tables: Iterable[Table], marked: bool = False) -> str:
    """A table environment for each; ``\\input`` it after ``\\usepackage{booktabs}``."""
    parts = [r"% needs \usepackage{booktabs}"]
    for table in tables:
        shown = table.shown(escaped, _latex_mark if marked else None)
        header, *rows = [" & ".join(line) + r" \\" for line in shown]
        lines = [r"\begin{table}[t]", r"\centering", rf"\caption{{{escaped(table.title)}}}"]
        lines += [rf"\begin{{tabular}}{{l{'r' * (len(shown[0]) - 1)}}}", r"\toprule", header, r"\midrule"]
        lines += [*rows, r"\bottomrule", r"\end{tabular}"]
        notes = [*table.notes, *(table.legend if marked else ())]
        lines += [rf"\par\footnotesize {escaped(note)}" for note in notes]
        parts.append("\n".join([*lines, r"\end{table}"]))
    return "\n\n".join(parts) + "\n"


def _latex_mark(text: str, mark: Mark) -> str:
    return (rf"\textbf{{{text}}}" if mark.best else text) + (f"$^{{{mark.stars}}}$" if mark.stars else "")


def as_html(tables: Iterable[Table]) -> str:
    """A ``table`` element for each, without styles, and its notes."""
    parts = []
    for table in tables:
        header, *rows = table.shown(html.escape, _html_mark)
        lines = ["<table>", f"<caption>{html.escape(table.title)}</caption>"]
        lines += [f"<thead><tr>{''.join(f'<th>{name}</th>' for name in header)}</tr></thead>", "<tbody>"]
        lines += [f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows]
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in [*table.notes, *table.legend])
        parts.append("\n".join([*lines, "</tbody>", "</table>", f"<ul>{notes}</ul>"]))
    return "\n".join(parts) + "\n"


def _html_mark(text: str, mark: Mark) -> str:
    return (f"<b>{text}</b>" if mark.best else text) + (f"<sup>{mark.stars}</sup>" if mark.stars else "")


def as_json(tables: Iterable[Table]) -> str:
    """``title``, ``rows`` (numbers at full precision, null for none; of a table without numbers its texts) and
    ``notes`` of each."""
    found = [{"title": one.title, "rows": one.lines or one.cells, "notes": one.notes} for one in tables]
    return json_text(found)


FORMATS: dict[str, Callable[[Iterable[Table]], str]] = {
    "markdown": partial(as_markdown, marked=True),
    "latex": partial(as_latex, marked=True),
    "csv": as_csv,
    "html": as_html,
    "json": as_json,
}
"""Format -> tables as ``--format`` prints them; beside these there is ``text``."""


def show(tables: Sequence[Table], form: str = "text", lead: str = "\n") -> None:
    """Print tables: as text with ``lead`` before each, on a terminal with the best figures in bold, or in one of
    ``FORMATS``."""
    if form != "text":
        print(FORMATS[form](tables), end="", flush=True)
        return
    bold = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    for table in tables:
        print(f"{lead}{as_text(table, bold)}", flush=True)


def escaped(text: str) -> str:
    """Text as LaTeX shows it; a sign before a digit is a minus, not a hyphen."""
    return re.sub(r"(?<![^ \[(/])-(?=\d)", "−", text).translate(str.maketrans(LATEX))


def texts(tables: Sequence[Table], name: str = "table") -> dict[str, str]:
    """File name -> the tables as Markdown and as CSV."""
    return {f"{name}.md": as_markdown(tables), f"{name}.csv": as_csv(tables)}


def write_texts(folder: Path, files: Mapping[str, str]) -> list[str]:
    """Write them; their names. Raises UserError if one cannot be written."""
    for name, text in files.items():
        with file_errors(folder / name):
            (folder / name).write_text(text, encoding="utf-8")
    return list(files)


def number(value: float, form: str = ".4f") -> str:
    """A number in this format, or a dash for NaN."""
    return DASH if math.isnan(value) else format(value, form)


def p_text(p: float) -> str:
    """A p value, or a dash for NaN and for 1.000, which says nothing."""
    text = number(p, ".3f")
    return {"1.000": DASH, "0.000": "<0.001"}.get(text, text)


def base_rate_note(cells: Iterable[Mapping[str, str | None]], base: float) -> list[str]:
    """What the mark means, if a logloss has it."""
    marked = any((row["logloss"] or "").endswith(WORSE) for row in cells)
    note = f"{WORSE} worse than no model: to predict the click rate of the training rows for each row gives {base:.4f}."
    return [note] * marked


def between(low: float, high: float) -> str:
    """A span of time: ``20 s to 1 min``."""
    return " to ".join(dict.fromkeys([duration(low), duration(high)]))


def duration(seconds: float) -> str:
    """In its two largest units, rounded: ``7 s``, ``3 min``, ``1 h 20 min``, ``2 d 5 h``."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h" + f" {minutes} min" * (minutes > 0)
    days, hours = divmod(round(hours + minutes / 60), 24)
    return f"{days} d" + f" {hours} h" * (hours > 0)
