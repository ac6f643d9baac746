"""Broken configs: exit code 2, one line that names file, key and what is right; never a traceback, never accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.support.fuzz.attempts import answer, prepared, tried
from tests.support.fuzz.configs import DATASET, MODEL, RECIPE, SUITE, broken, every_broken


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, so that names in errors are short."""
    monkeypatch.chdir(tmp_path)
    prepared(tmp_path)
    return tmp_path


def test_some_broken_configs_are_refused(here: Path) -> None:
    refused, wrong = tried(broken(40), here)
    assert not wrong, "\n".join(wrong)
    assert refused.total() == 40


@pytest.mark.slow
def test_every_broken_config_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused, wrong = tried(every_broken(), here)
    with capsys.disabled():
        print(json.dumps(refused))
    assert not wrong, "\n".join(wrong)
    assert refused.total() >= 1000


def test_what_they_are_made_from_is_right(here: Path) -> None:
    tuner = {"base_config": "config", "base_expid": "X", "tuner_space": {"embedding_dim": [8, 16]}}
    for content in ({"X": MODEL}, {"mine": DATASET}, SUITE, RECIPE, tuner):
        (here / "given.yaml").write_text(yaml.safe_dump(content))
        assert answer(["validate", "given.yaml"]) == (0, "")
