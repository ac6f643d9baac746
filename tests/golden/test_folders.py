"""Model folders of the revision in their scores.json are read and answer what they answered there.

make_folders.py says what each folder is. What must stay for it: the files of a model folder and their formats
(``model.json`` with format 1, ``model.safetensors`` with the names of weights, ``feature_map.json``,
``feature_vocab.json``, ``columns.json``, ``items.parquet``, ``histories.parquet``), or a reader of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tests.support.golden_folders import FOLDERS, NAMES, answers, events_of, of_service
from tests.support.golden_losses import command, one_thread

EXACT = {"rel": 1e-6, "abs": 1e-6}
RANK: list[dict[str, Any]] = json.loads((FOLDERS / "rank.json").read_text())


def golden(name: str) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((FOLDERS / name / "scores.json").read_text())
    return kept


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_gives_the_scores_that_it_gave(name: str) -> None:
    want = golden(name)
    del want["revision"]
    with one_thread():
        found = answers(name)
    assert found.keys() == want.keys()
    for part, values in want.items():
        if part.startswith("scores"):
            np.testing.assert_allclose(found[part], values, rtol=1e-6, atol=1e-6, err_msg=part)
        elif part == "ranked":
            assert found[part].pop("score") == pytest.approx(values.pop("score"), **EXACT)
            assert found[part] == values
        else:
            assert found[part] == values, part


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_requests_gets_the_same_scores(name: str, tmp_path: Path) -> None:
    events, file = events_of(name), FOLDERS / name / "requests.parquet"
    given = [] if events is None else ["--events", events]
    out = tmp_path / "scores.parquet"
    with one_thread():
        command("predict", "--model", FOLDERS / name / "model", "--input", file, "--output", out, *given)
    np.testing.assert_allclose(pl.read_parquet(out)["score"], golden(name)["scores"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("asked", RANK, ids=[f"{place} {one['folder']}" for place, one in enumerate(RANK)])
def test_the_service_gives_the_answers_that_it_gave(asked: dict[str, Any]) -> None:
    pytest.importorskip("fastapi")
    found, want = of_service(asked["folder"], asked["body"]), asked["answer"]
    assert found["status"] == asked["status"]
    if "ranked" in want:
        scores = [[one.pop("score") for one in answer["ranked"]] for answer in (found["answer"], want)]
        assert scores[0] == pytest.approx(scores[1], **EXACT)
    assert found["answer"] == want
