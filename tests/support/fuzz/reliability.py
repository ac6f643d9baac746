"""Writes docs/reliability.md by trying everything: ``python -m tests.support.fuzz.reliability >
docs/reliability.md``."""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from ctr_pe import load
from tests.support.fuzz import broken_tables, folders
from tests.support.fuzz.attempts import answer, files, prepared, tried
from tests.support.fuzz.configs import every_broken
from tests.support.fuzz.data_files import REFUSED, cases, run
from tests.support.fuzz.hostile import hostile, placed

PAGE = """# Reliability

What was tried against the package, and what happened. `python -m tests.support.fuzz.reliability > docs/reliability.md`
tries everything again and writes this page; `pytest -m slow tests/fuzz` fails where a file is not refused.

Refused means: exit code 2, and nothing written.
"""


def configs(folder: Path) -> Mapping[str, tuple[int, int]]:
    """Per kind of broken config: tried, and refused in lines that name file and key."""
    every = every_broken()
    refused, _ = tried(every, folder)
    return {kind: (count, refused[kind]) for kind, count in Counter(case.kind for case in every).items()}


def logs(folder: Path) -> Mapping[str, tuple[int, int]]:
    """Per kind of broken log: tried, and refused."""
    return {kind: (of.total(), of[REFUSED]) for kind, of in sorted(run(cases(300, seed=1), folder).items())}


def attacks(folder: Path) -> Mapping[str, tuple[int, int]]:
    """Per kind of hostile file: tried, and refused."""
    placed(folder)
    found, refused = Counter[str](), Counter[str]()
    for case in hostile():
        (folder / case.file).write_text(case.text)
        before = files(folder.parent)
        code, _ = answer(case.command)
        found[case.wants] += 1
        refused[case.wants] += code == 2 and files(folder.parent) == before
        placed(folder)
    return {wants: (count, refused[wants]) for wants, count in found.items()}


def tables(folder: Path) -> Mapping[str, tuple[int, int]]:
    """Per method and table: tried, and refused."""
    sound = folders.made(folder / "model")
    found, _ = broken_tables.outcomes(load(sound), sound)
    return {what: (of.total(), of[broken_tables.REFUSED]) for what, of in found.items()}


def model_folders(folder: Path) -> Mapping[str, tuple[int, int]]:
    """Per kind of change: tried, and refused."""
    (folder / "here").mkdir()
    found, wrong = folders.outcomes(folders.made(folder.parent / "sound"), folder / "here")
    assert not wrong, wrong
    return {what: (of.total(), of["refused"]) for what, of in found.items()}


SECTIONS: dict[str, tuple[Callable[[Path], Mapping[str, tuple[int, int]]], str]] = {
    "Broken configs": (
        configs,
        "One mistake each: a value of another type or out of range, a typing error, something that is missing.\n"
        "Refused in lines of at most 200 characters that name the file and the key.",
    ),
    "Broken logs": (
        logs,
        "`ctr-pe data build` from CSV and parquet files with one fault each, drawn from a seed.\n"
        "Refused in one line that says what and where.",
    ),
    "Hostile files": (
        attacks,
        "They want code to run, files outside their folder, or more time and memory than is there.",
    ),
    "Broken tables": (
        tables,
        "For `CTRRanker` and `ctr-pe predict`: no tables, missing columns, values of another type, nulls, NaN, times\n"
        "that cannot be, damaged files. Refused in one line. The rest is read: users below 0 and requests of no rows\n"
        "are no mistakes, and what a model does not know has its reserved id.",
    ),
    "Model folders": (
        model_folders,
        "One place is not as it was written: a value of a JSON file gone, of another type, out of range, a path or\n"
        "code; tables and weights that are cut or changed. Refused in one line by `ctr_pe.load`, by the hashes in\n"
        "`model.json`; a value of `model.json` itself that is of its type is read, most of them only for people.\n"
        "None ran, none wrote, none gave a raw error.",
    ),
}
"""Title -> what is tried in an empty folder, and what is said about it."""


def section(title: str, counts: Mapping[str, tuple[int, int]], about: str) -> str:
    rows = [f"| {what} | {tried:,} | {refused:,} |" for what, (tried, refused) in counts.items()]
    total, refused = (sum(numbers) for numbers in zip(*counts.values(), strict=True))
    head = ["| what | tried | refused |", "|---|---:|---:|"]
    return "\n".join([f"\n## {title}\n", f"{about}\n", *head, *rows, f"| **all** | **{total:,}** | **{refused:,}** |"])


def main() -> None:
    found = [PAGE.rstrip()]
    for title, (attempt, about) in SECTIONS.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "here"
            folder.mkdir()
            os.chdir(folder)
            prepared(folder)
            found.append(section(title, attempt(folder), about))
            os.chdir("/")
    sys.stdout.write("\n".join(found) + "\n")


if __name__ == "__main__":
    main()
