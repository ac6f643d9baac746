"""Do predictions mean what they say: as many clicks as predicted?"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BINS = 10


class Reliability(NamedTuple):
    """Bins of predictions, from low to high: the mean prediction of each, the share of clicks, the rows; and ``error``:
    the mean of the distance between the first two, weighted by rows."""

    predicted: list[float]
    observed: list[float]
    rows: list[int]
    error: float


def reliability(labels: npt.ArrayLike, scores: npt.ArrayLike) -> Reliability:
    """Of labels (N,) and predicted click probabilities (N,), in bins of about equally many rows. Equal predictions are
    in the same bin, so there may be fewer than ``BINS``."""
    clicked, score = np.asarray(labels, np.float64), np.asarray(scores, np.float64)
    edges = np.unique(np.quantile(score, np.linspace(0, 1, BINS + 1)[1:-1]))
    bins = np.searchsorted(edges, score, "left")
    rows, *sums = (np.bincount(bins, values) for values in (None, score, clicked))
    filled = rows > 0
    rows, predicted, observed = rows[filled], *(each[filled] / rows[filled] for each in sums)
    error = float(np.abs(predicted - observed) @ rows / len(score))
    return Reliability(predicted.tolist(), observed.tolist(), rows.tolist(), error)
