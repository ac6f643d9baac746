"""Runs commands on files of one kind after another, in this process, and counts what they answer."""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml

from ctr_pe.cli import main
from ctr_pe.data.synthetic.bursts import generate
from tests.support.fuzz.configs import MODEL, Broken

LONGEST = 200


def prepared(folder: Path) -> None:
    """A data set and a config, for a working directory."""
    generate(folder / "data" / "mine", users=10, valid_users=5, test_users=5)
    (folder / "config").mkdir()
    (folder / "config" / "model_config.yaml").write_text(yaml.safe_dump({"X": MODEL}))


def answer(command: Sequence[str]) -> tuple[int, str]:
    """Exit code and stderr."""
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(command)
        except SystemExit as error:
            code = int(error.code or 0)
    return code, shown.getvalue()


def tried(cases: Iterable[Broken], here: Path) -> tuple[Counter[str], list[str]]:
    """How many broken configs of each kind got the right answer, and the answers to the others.

    Right: exit code 2, lines of at most ``LONGEST`` characters of which one names the key, the first names the file,
    and no file or directory that was not there before.
    """
    refused, wrong = Counter[str](), []
    file = here / "given.yaml"
    for case in cases:
        file.write_text(case.text, encoding="utf-8")
        before = files(here)
        command = ["validate", file.name]
        if case.kind == "--set":
            command = ["benchmark", "--dataset", "mine", "--jobs", "1", "--out", "out", "--set", case.text]
        code, shown = answer(command)
        lines = shown.splitlines()
        name = "" if case.kind == "--set" else file.name
        asked = "grids" if case.kind.startswith("grid") else case.key.removesuffix("z")
        told = code == 2 and lines and name in lines[0] and any(asked in line for line in lines)
        if told and all(len(line) <= LONGEST for line in lines) and files(here) == before:
            refused[case.kind] += 1
        else:
            wrong.append(f"{case.kind}: {case.key}: {case.text[-60:]!r}: {code}: {shown[:300]}")
    return refused, wrong


def files(folder: Path) -> set[str]:
    """Everything below a folder."""
    return {str(path) for path in folder.rglob("*")}
