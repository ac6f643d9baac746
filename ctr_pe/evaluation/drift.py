"""How far a column of new rows is from the same column of the rows a model was trained on.

The population stability index of B bins with shares p (trained) and q (new) is Σ (q − p) ln(q / p): the symmetrised
Kullback-Leibler divergence, 0 for equal shares. By convention above 0.1 it is a small shift and above 0.2 a large one.
Rows of one distribution have about (1/n + 1/m) χ² with B − 1 degrees of freedom (Yurdakul, 2018), which tells a shift
from few rows. Shares are of counts plus one half, so that an empty bin is no infinite one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ctr_pe.evaluation.metrics import Floats, Ints

BINS = 10
LEVEL = 0.001
"""How often :func:`psi_by_chance` is exceeded without a shift."""


def psi(trained: npt.ArrayLike, new: npt.ArrayLike) -> float:
    """Population stability index of counts per bin, (B,) both; NaN without rows on one side."""
    counts = np.stack([np.asarray(one, np.float64) for one in (trained, new)])
    if not counts.sum(1).all():
        return float("nan")
    p, q = (counts + 0.5) / (counts + 0.5).sum(1, keepdims=True)
    return float((q - p) @ np.log(q / p))


def psi_by_chance(bins: int, trained: float, new: float) -> float:
    """The index that n and m rows of one distribution exceed with probability ``LEVEL``; 0 for one bin."""
    from scipy.special import chdtri

    return float(chdtri(bins - 1, LEVEL) * (1 / trained + 1 / new)) if bins > 1 else 0.0


def equal_bins(counts: npt.ArrayLike, most: int = BINS) -> Ints:
    """(V,) the bin of each of V values, in their order, from how many rows have each: at most ``most`` bins, with about
    equally many rows."""
    rows = np.asarray(counts, np.float64)
    begins = np.floor((np.cumsum(rows) - rows) / max(rows.sum(), 1.0) * most)
    return np.unique(begins, return_inverse=True)[1].astype(np.int64)


def quantile_edges(values: npt.ArrayLike, bins: int) -> Floats:
    """The upper edges, included, of at most ``bins`` intervals with about equally many of the values (n,); the last is
    infinite."""
    found = np.asarray(values, np.float64)
    if not len(found):
        return np.array([np.inf])
    inner = np.quantile(found, np.linspace(0, 1, bins + 1)[1:-1], method="inverted_cdf")
    return np.append(np.unique(inner), np.inf)
