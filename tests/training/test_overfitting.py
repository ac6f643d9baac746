"""A training that overfits says so, and others do not."""

from __future__ import annotations

import pytest

from ctr_pe.training.loop import Epoch
from ctr_pe.training.overfitting import overfitting


def epochs(*pairs: tuple[float, float]) -> list[Epoch]:
    """Of training loss and validation logloss."""
    return [Epoch(number, number, loss, {"logloss": of_valid, "AUC": 0.5}, 1.0)
            for number, (loss, of_valid) in enumerate(pairs, 1)]  # fmt: skip


def test_a_rising_validation_loss_is_told_with_what_helps() -> None:
    history = epochs((0.6, 0.55), (0.5, 0.56), (0.4, 0.6), (0.3, 0.7))
    line = overfitting(history, history[0])
    assert line is not None
    assert "the best epoch is 1 of 4" in line
    assert "from 0.6000 to 0.3000" in line
    assert "from 0.5500 to 0.7000" in line
    assert "embedding_regularizer" in line
    assert "epochs 2" in line


@pytest.mark.parametrize(
    ("pairs", "best"),
    [
        ([(0.6, 0.55), (0.5, 0.54), (0.4, 0.53)], 2),  # it still learns
        ([(0.6, 0.55), (0.5, 0.55), (0.4, 0.551)], 0),  # within a fiftieth
        ([(0.6, 0.55), (0.6, 0.7), (0.6, 0.7)], 0),  # the training loss does not fall: it diverges
        ([(0.6, 0.55)], 0),
    ],
)
def test_others_do_not_overfit(pairs: list[tuple[float, float]], best: int) -> None:
    history = epochs(*pairs)
    assert overfitting(history, history[best]) is None


def test_without_a_validation_logloss_nobody_can_tell() -> None:
    history = [Epoch(number, number, 1.0 / number, {"AUC": 0.5}, 1.0) for number in (1, 2, 3)]
    assert overfitting(history, history[0]) is None
