"""Broken configs: exit code 2, one line that names file, key and what is right; never a traceback, never accepted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml
from configs import MODEL, Broken, broken, every_broken

from ctr_pe.cli import main
from ctr_pe.data.synthetic import generate

LONGEST = 200


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a data set and a config, so that names in errors are short."""
    monkeypatch.chdir(tmp_path)
    generate(tmp_path / "data" / "mine", users=10, valid_users=5, test_users=5)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "model_config.yaml").write_text(yaml.safe_dump({"X": MODEL}))
    return tmp_path


def tried(cases: Iterable[Broken], here: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Counter[str], list[str]]:
    """How many of each kind were refused, and what is wrong with the answers to others."""
    refused, wrong = Counter[str](), []
    file = here / "given.yaml"
    for case in cases:
        file.write_text(case.text, encoding="utf-8")
        before = _files(here)
        command = ["validate", file.name]
        if case.kind == "--set":
            command = ["benchmark", "--dataset", "mine", "--jobs", "1", "--out", "out", "--set", case.text]
        code = main(command)
        shown = capsys.readouterr()
        lines = shown.err.splitlines()
        name = "" if case.kind == "--set" else file.name
        asked = "grids" if case.kind.startswith("grid") else case.key.rstrip("z")
        told = code == 2 and lines and name in lines[0] and any(asked[:60] in line for line in lines)
        if told and all(len(line) <= LONGEST for line in lines) and _files(here) == before:
            refused[case.kind] += 1
        else:
            wrong.append(f"{case.kind}: {case.key}: {case.text[-60:]!r}: {code}: {shown.err[:300]}")
    return refused, wrong


def _files(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


def test_some_broken_configs_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused, wrong = tried(broken(40), here, capsys)
    assert not wrong, "\n".join(wrong)
    assert refused.total() == 40


@pytest.mark.slow
def test_a_thousand_broken_configs_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = every_broken()
    cases += broken(max(0, 1000 - len(cases)))
    refused, wrong = tried(cases, here, capsys)
    with capsys.disabled():
        print(json.dumps(refused))
    assert not wrong, "\n".join(wrong)
    assert refused.total() >= 1000


def test_what_they_are_made_from_is_right(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from configs import DATASET, RECIPE, SUITE

    tuner = {"base_config": "config", "base_expid": "X", "tuner_space": {"embedding_dim": [8, 16]}}
    for content in ({"X": MODEL}, {"mine": DATASET}, SUITE, RECIPE, tuner):
        (here / "given.yaml").write_text(yaml.safe_dump(content))
        assert main(["validate", "given.yaml"]) == 0, capsys.readouterr().err
