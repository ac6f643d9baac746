"""Hostile files: none runs, none leaves its folder."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.fuzz.attempts import answer, files, prepared
from tests.support.fuzz.configs import DATASET, MODEL, RECIPE, SUITE
from tests.support.fuzz.hostile import FEATURE_MAP, Hostile, hostile, placed, with_texts


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    prepared(folder)
    placed(folder)
    return folder


def refused(cases: Iterator[Hostile], here: Path) -> Counter[str]:
    found = Counter[str]()
    for case in cases:
        (here / case.file).write_text(case.text)
        outside = files(here.parents[1])
        code, shown = answer(case.command)
        assert code == 2, (case.wants, case.text[:200], shown)
        assert files(here.parents[1]) == outside, case
        found[case.wants.partition(":")[0]] += 1
        placed(here)
    return found


def test_some_hostile_files_are_refused(here: Path) -> None:
    assert refused(iter(list(hostile())[::12]), here).keys() == {"code", "a path outside"}


@pytest.mark.slow
def test_all_hostile_files_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = refused(hostile(), here)
    with capsys.disabled():
        print(json.dumps(found))
    assert found.total() >= 50


def test_without_the_hostile_key_the_feature_map_is_right(here: Path) -> None:
    assert answer(["validate", "theirs.yaml"]) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model config", "dataset config", "suite", "recipe", "tuner config", "feature map"])
def test_no_text_at_any_place_is_run(kind: str, here: Path) -> None:
    tuner = {"base_config": "config", "base_expid": "X", "tuner_space": {"position_encoding": ["cape"]}}
    right: dict[str, Any] = {
        "model config": {
            "X": {**MODEL, "metrics": ["AUC"], "optimizer": "adam", "loss": "bce", "net_regularizer": "l2(1)"}
        },
        "dataset config": {"mine": DATASET},
        "suite": {**SUITE, "published": "x", "protocol": "heldout"},
        "recipe": RECIPE,
        "tuner config": {**tuner, "dataset_id": "mine"},
        "feature map": FEATURE_MAP,
    }
    for changed in with_texts(right[kind]):
        is_map = kind == "feature map"
        (here / ("data/theirs/feature_map.json" if is_map else "given.yaml")).write_text(
            json.dumps(changed) if is_map else yaml.safe_dump(changed)
        )
        answer(["validate", "theirs.yaml" if is_map else "given.yaml"])
        assert not (here / "CANARY").exists(), changed
