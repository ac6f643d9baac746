"""A training after which every row has the same score says so, and others do not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ctr_pe.training.collapse import collapse
from ctr_pe.training.loop import Epoch
from tests.support.models import Rows, build


def epochs(*aucs: float, metric: str = "AUC") -> list[Epoch]:
    return [Epoch(number, number, 0.69, {metric: auc}, 1.0) for number, auc in enumerate(aucs, 1)]


@pytest.mark.parametrize("metric", ["AUC", "gAUC"])
def test_the_epoch_since_which_scores_are_equal_is_told(metric: str) -> None:
    line = collapse(epochs(0.54, 0.5, 0.51, 0.5, 0.5, metric=metric))
    assert line is not None
    assert "since epoch 4 validation rows rank as by chance" in line
    assert "smaller learning_rate" in line
    assert "smaller embedding_regularizer" in line


@pytest.mark.parametrize("aucs", [(0.5, 0.6), (0.5, 0.5001), (0.5, 0.4999), (0.7,)])
def test_others_learned_something(aucs: tuple[float, ...]) -> None:
    assert collapse(epochs(*aucs)) is None


def test_equal_for_each_user_is_not_equal_for_all() -> None:
    """As with features of users alone."""
    assert collapse([Epoch(1, 1, 0.6, {"gAUC": 0.5, "AUC": 0.7}, 1.0)]) is None


@pytest.mark.parametrize("metrics", [{"logloss": 0.69}, {"NDCG@10": 0.5}])
def test_without_a_metric_that_tells_nobody_can(metrics: dict[str, float]) -> None:
    assert collapse([Epoch(1, 1, 0.69, metrics, 1.0)]) is None


@pytest.mark.parametrize("size", [1e-30, 0.01])
def test_a_training_without_effect_is_told_at_its_end(
    size: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Embeddings and steps of 1e-30 leave every score at one half."""
    model = build("DIN", tmp_path, embedding_init=size, learning_rate=size, early_stop_patience=99)
    with caplog.at_level(logging.WARNING):
        model.fit(Rows(), epochs=2, validation_data=Rows())
    assert ("learned nothing: since epoch 1" in caplog.text) == (size < 0.01)
