"""Tables as text for a terminal, as Markdown, as CSV and as LaTeX; spans of time as text."""

from __future__ import annotations

import csv
import io
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctr_pe.utils.files import file_errors

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


@dataclass(frozen=True)
class Table:
    """Rows twice: ``lines`` by the columns of the CSV file, with NaN for no number, and ``cells`` as text by the
    columns that are shown. None is no text; a column that has none in any row is not shown."""

    title: str
    lines: list[dict[str, Any]]
    cells: list[dict[str, str | None]]
    notes: list[str]

    def shown(self) -> list[list[str]]:
        """The header, then the rows."""
        header = [name for name in self.cells[0] if any(row[name] is not None for row in self.cells)]
        return [header, *[[row[name] or DASH for name in header] for row in self.cells]]


def as_text(table: Table) -> str:
    """For a terminal: columns side by side between rules, then the notes."""
    lines = table.shown()
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    rule = "─" * len("  ".join(lines[0]))
    notes = [textwrap.fill(note, max(80, len(rule)), break_on_hyphens=False) for note in table.notes]
    return "\n".join([table.title, rule, *["  ".join(line).rstrip() for line in lines], rule, *notes])


def as_markdown(tables: Iterable[Table]) -> str:
    """A section for each table: heading, table, notes."""
    sections = []
    for table in tables:
        header, *rows = table.shown()
        lines = [f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *rows]]
        sections.append("\n".join([f"## {table.title}", "", *lines, "", *[f"- {note}" for note in table.notes]]))
    return "\n\n".join(sections) + "\n"


def as_csv(tables: Iterable[Table]) -> str:
    """All lines in one table, numbers at full precision; None and NaN are empty."""
    lines = [line for table in tables for line in table.lines]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, lines[0] if lines else (), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: "" if value != value else value for name, value in line.items()} for line in lines)
    return stream.getvalue()


def as_latex(tables: Iterable[Table]) -> str:
    """A table environment for each; ``\\input`` it after ``\\usepackage{booktabs}``."""
    parts = [r"% needs \usepackage{booktabs}"]
    for table in tables:
        header, *rows = [" & ".join(map(escaped, line)) + r" \\" for line in table.shown()]
        lines = [r"\begin{table}[t]", r"\centering", rf"\caption{{{escaped(table.title)}}}"]
        lines += [rf"\begin{{tabular}}{{l{'r' * (len(table.shown()[0]) - 1)}}}", r"\toprule", header, r"\midrule"]
        lines += [*rows, r"\bottomrule", r"\end{tabular}"]
        lines += [rf"\par\footnotesize {escaped(note)}" for note in table.notes]
        parts.append("\n".join([*lines, r"\end{table}"]))
    return "\n\n".join(parts) + "\n"


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
