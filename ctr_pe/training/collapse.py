"""Has a training ended with one score for all rows, because regularisation was stronger than what it had learned?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctr_pe.training.loop import Epoch

RANKED_BY = ("gAUC", "AUC")
"""Metrics that are one half where all rows have the same score, and hardly ever else."""


def collapse(history: Sequence[Epoch]) -> str | None:
    """One line about a training after which rows rank as if all had the same score, with the settings most likely to
    help; None for other trainings, and where none of the metrics tells."""
    since = None
    for epoch in reversed(history):
        found = [epoch.metrics[name] for name in RANKED_BY if name in epoch.metrics]
        if not found or any(abs(value - 0.5) > 1e-6 for value in found):
            break
        since = epoch.number
    if since is None:
        return None
    return (
        f"learned nothing: since epoch {since} validation rows rank as by chance to the last digit, as they do where "
        "all have the same score. Most likely to help: a smaller learning_rate, or a smaller embedding_regularizer"
    )
