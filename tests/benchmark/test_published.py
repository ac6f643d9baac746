"""benchmark/published.py: the published tables are those that their runs give."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest

from benchmark import published

FOLDERS = sorted(file.parent for file in published.RESULTS.glob("*/results.jsonl"))


def test_there_are_published_results() -> None:
    assert {folder.name for folder in FOLDERS} >= {
        "DIN-amazon_sports",
        "DIN-synthetic_context",
        "DIN-kuairand_pure",
        "all_encodings",
        "calibration",
    }


@pytest.mark.parametrize(
    "folder",
    [pytest.param(of, marks=[pytest.mark.slow] * (of.name != "DIN-synthetic_context"), id=of.name) for of in FOLDERS],
)
def test_the_published_tables_are_those_of_their_runs(folder: Path, tmp_path: Path) -> None:
    again = tmp_path / folder.name
    again.mkdir()
    shutil.copy(folder / "results.jsonl", again)
    if (folder / "users").exists():
        shutil.copytree(folder / "users", again / "users")
    published.main(tmp_path)
    for name in ["table", *(["suite"] if (folder / "suite.md").exists() else [])]:
        assert (again / f"{name}.md").read_text(encoding="utf-8") == (folder / f"{name}.md").read_text(encoding="utf-8")
        made, kept = (list(csv.reader((of / f"{name}.csv").open(encoding="utf-8"))) for of in (again, folder))
        assert made[0] == kept[0]
        for mine, theirs in zip(made[1:], kept[1:], strict=True):
            for one, other in zip(mine, theirs, strict=True):
                assert one == other or float(one) == pytest.approx(float(other), rel=1e-6, abs=1e-12)
