"""In the built-in set order counts: an encoding does better than none, and than on the set with shuffled histories."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from ctr_pe.config.yaml import model_params, training_recipe
from ctr_pe.data.dataset import Dataset
from ctr_pe.data.synthetic.bursts import generate
from ctr_pe.pe import available_pes
from ctr_pe.training import Run, train

SHAPE: dict[str, Any] = {"users": 2000, "valid_users": 300, "test_users": 600, "items": 400, "categories": 20}
OVERRIDES = {
    "learning_rate": 0.015,
    "embedding_regularizer": 1e-4,
    "epochs": 4,
    "sinusoidal_scale": 0.3,
    "alibi_slope": 0.3,
}
"""Chosen for FuxiCTR's recipe, in which embeddings start small."""


OF_EACH_KIND = ("none", "naive", "rope", "alibi", "cape", "kernel", "likeness")
WITHOUT_ORDER = ("none", "likeness")
"""``likeness`` adds to an item's logit what depends on this item and the target alone: that tells nothing here."""


@pytest.fixture(scope="module")
def gauc(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., float]:
    """Of an encoding, on the set or on that with shuffled histories; each is trained once."""

    @cache
    def of_set(shuffled: bool) -> Dataset:
        return generate(tmp_path_factory.mktemp("data") / "synthetic", **SHAPE, shuffled=shuffled)

    @cache
    def of(encoding: str, shuffled: bool = False) -> float:
        params = model_params("DIN", "synthetic", {**training_recipe("fuxictr"), **OVERRIDES})
        params = {key: value for key, value in params.items() if key not in ("model", "dataset_id")}
        return train(Run("DIN", of_set(shuffled).path, encoding, 0, "heldout", params)).metrics["gAUC"]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("encoding", [pe for pe in available_pes() if pe not in WITHOUT_ORDER])
def test_every_encoding_beats_none(encoding: str, gauc: Callable[..., float]) -> None:
    """By .06 as a rule."""
    assert gauc(encoding) > gauc("none") + 0.03


@pytest.mark.slow
@pytest.mark.parametrize("encoding", OF_EACH_KIND)
def test_one_of_each_kind_beats_itself_with_shuffled_positions(encoding: str, gauc: Callable[..., float]) -> None:
    lead = gauc(encoding) - gauc(encoding, shuffled=True)
    assert abs(lead) < 0.01 if encoding in WITHOUT_ORDER else lead > 0.03
