"""In the built-in set order counts: an encoding does better on it than on the same set with shuffled histories."""

from __future__ import annotations

from typing import Any

import pytest

from ctr_pe.config.yaml import model_params, training_recipe
from ctr_pe.data.dataset import Dataset
from ctr_pe.data.synthetic.bursts import generate
from ctr_pe.pe import available_pes
from ctr_pe.training import Run, train

SHAPE: dict[str, Any] = {"users": 2000, "valid_users": 300, "test_users": 600, "items": 400, "categories": 20}
OVERRIDES = {
    "learning_rate": 0.01,
    "embedding_regularizer": 1e-4,
    "epochs": 6,
    "sinusoidal_scale": 0.3,
    "alibi_slope": 0.3,
}
"""Chosen for FuxiCTR's recipe, in which embeddings start small."""


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[Dataset]:
    return [
        generate(tmp_path_factory.mktemp("data") / "synthetic", **SHAPE, shuffled=shuffled)
        for shuffled in (False, True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("encoding", available_pes())
def test_every_encoding_beats_itself_with_shuffled_positions(encoding: str, sets: list[Dataset]) -> None:
    params = model_params("DIN", "synthetic", {**training_recipe("fuxictr"), **OVERRIDES})
    params = {key: value for key, value in params.items() if key not in ("model", "dataset_id")}
    ordered, shuffled = (train(Run("DIN", data.path, encoding, 0, "heldout", params)).metrics["gAUC"] for data in sets)
    if encoding == "none":
        assert abs(ordered - shuffled) < 0.01
    else:
        assert ordered > shuffled + 0.03
