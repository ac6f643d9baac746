"""Does a training overfit: the loss of its rows still falls while that of the validation rows rises?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctr_pe.training.loop import Epoch

RISE = 0.02
"""By which share of itself the validation logloss has to rise."""


def overfitting(history: Sequence[Epoch], best: Epoch) -> str | None:
    """One line about a training whose ``best`` epoch is in the first half and whose validation logloss has risen since
    it was lowest, with the settings most likely to help; None for other trainings, and without a validation logloss."""
    last = history[-1]
    if not all("logloss" in epoch.metrics for epoch in history) or 2 * best.number > last.number:
        return None
    lowest = min(history, key=lambda epoch: epoch.metrics["logloss"])
    before, now = lowest.metrics["logloss"], last.metrics["logloss"]
    if now < (1 + RISE) * before or last.loss >= lowest.loss:
        return None
    return (
        f"overfits: the best epoch is {best.number} of {last.number}; since epoch {lowest.number} the training loss "
        f"fell from {lowest.loss:.4f} to {last.loss:.4f} and the validation logloss rose from {before:.4f} to "
        f"{now:.4f}. Most likely to help: a larger embedding_regularizer, and epochs {best.number + 1}"
    )
