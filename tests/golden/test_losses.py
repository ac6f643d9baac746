"""Trainings and data sets give what they gave at the revision in losses.json: losses, metrics, scores, hashes of rows.

The file was made by make_losses.py, with the torch and on the kind of processor that its "about" names. With others
sums come in another order. Losses stay equal but for the last digits. Scores do not: a bias before batch norm changes
no loss, so its gradient is rounding alone, of which Adam makes whole steps. In training batch norm takes them out, in
evaluation its running mean follows them late. Losses are compared coarsely then, scores more so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctr_pe.data.dataset import Dataset
from tests.support.golden_losses import BUILT_IN, CELLS, about, build, build_impressions, built_in, hashes, measure

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("losses.json").read_text())
EXACT = all(about("")[name] == GOLDEN["about"][name] for name in ("torch", "cpu", "vendor"))
LOSS, SCORE = (1e-6, 1e-6) if EXACT else (1e-3, 3e-2)


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return build(tmp_path_factory.mktemp("log"))


def assert_same_rows(dataset: Dataset, name: str) -> None:
    """Columns may be added; those that there were have the values that they had."""
    want, found = GOLDEN["rows"][name], hashes(dataset)
    assert found.keys() == want.keys()
    for split, rows in want.items():
        assert found[split]["rows"] == rows["rows"]
        for column, digests in rows["columns"].items():
            assert found[split]["columns"][column] == digests, (split, column)


def test_a_log_of_clicks_gives_the_same_rows(clicks: Dataset) -> None:
    assert_same_rows(clicks, "clicks")


def test_a_log_of_impressions_gives_the_same_rows(tmp_path: Path) -> None:
    assert_same_rows(build_impressions(tmp_path), "shown")


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_sets_have_the_same_rows(name: str, tmp_path: Path) -> None:
    assert_same_rows(built_in(name, tmp_path), name)


@pytest.mark.parametrize(("model", "encoding"), CELLS)
def test_trainings_have_the_same_losses_and_metrics(model: str, encoding: str, clicks: Dataset, tmp_path: Path) -> None:
    want, found = GOLDEN["cells"][f"{model} {encoding}"], measure(clicks, model, encoding, tmp_path)
    assert found.keys() == want.keys()
    for name, values in want.items():
        if not isinstance(values, dict):
            tolerance = LOSS if name == "losses" else SCORE
            np.testing.assert_allclose(found[name], values, rtol=tolerance, atol=tolerance, err_msg=name)
        elif EXACT:
            assert found[name] == pytest.approx(values, rel=SCORE, abs=SCORE), name
        else:  # AUC jumps where two rows change places
            assert found[name]["logloss"] == pytest.approx(values["logloss"], abs=SCORE), name
