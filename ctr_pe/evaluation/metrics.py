"""gAUC, AUC and logloss, the three metrics of CTR papers, without a loop over groups.

gAUC is the one of Deep Interest Network (Zhou et al., KDD 2018) as FuxiCTR computes it: the AUC inside each group
(user), averaged with the group's number of rows as weight; groups with clicked rows only, or none, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ctr_pe.utils.errors import UserError, nearest, shown

METRICS = ("gAUC", "AUC", "logloss")
LOSSES = {"logloss"}  # less is better

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def evaluate(
    labels: npt.ArrayLike,
    scores: npt.ArrayLike,
    group_id: npt.ArrayLike | None = None,
    metrics: Sequence[str] = METRICS,
) -> dict[str, float]:
    """Metrics of predicted click probabilities.

    Args:
        labels: (N,) 0 or 1; a numpy array, a torch tensor or anything numpy can read.
        scores: (N,) finite; for logloss probabilities between 0 and 1.
        group_id: (N,) integers or strings, the user of each row; only gAUC needs it.
        metrics: any of ``gAUC``, ``AUC``, ``logloss``; the result has them in this order.

    Returns:
        Metric name to value. AUC is NaN when all labels are equal, gAUC when that holds inside every group.
        Ties count one half. logloss clips probabilities at float64's epsilon as scikit-learn does.

    Raises:
        UserError: unknown metric, gAUC without ``group_id``, no rows, different lengths, labels other than 0 and 1,
            scores that are not finite, or not probabilities where logloss is asked for.
    """
    names = (metrics,) if isinstance(metrics, str) else tuple(metrics)
    for name in names:
        if name not in METRICS:
            raise UserError(f"unknown metric '{name}': {nearest(name, METRICS)}")
    clicked, score = check_rows(labels, scores)
    values: dict[str, float] = {}
    for name in names:
        if name == "AUC":
            values[name] = float(group_auc(clicked, score, np.zeros(len(score), np.int64), 1)[0])
        elif name == "logloss":
            values[name] = float(row_loss(clicked, score).mean())
        else:
            if group_id is None:
                raise UserError("gAUC needs group_id, the user of each row")
            codes, count = group_codes(group_id, len(score))
            auc = group_auc(clicked, score, codes, count)
            weight = np.where(np.isnan(auc), 0, np.bincount(codes, minlength=count))
            total = weight.sum()
            values[name] = float(weight @ np.nan_to_num(auc) / total) if total else float("nan")
    return values


def check_rows(labels: npt.ArrayLike, scores: npt.ArrayLike) -> tuple[Bools, Floats]:
    """Labels as booleans and scores as float64, or a UserError that says what is wrong with them."""
    label, score = _column(labels, "labels"), _column(scores, "scores")
    if len(label) != len(score):
        raise UserError(f"labels have {len(label)} rows, scores {len(score)}")
    if not len(label):
        raise UserError("labels and scores are empty")
    for name, column in (("labels", label), ("scores", score)):
        if column.dtype.kind not in "biuf":
            raise UserError(f"{name} must be numbers, not {column.dtype}")
    outside = (label != 0) & (label != 1)  # NaN is outside too
    if outside.any():
        raise UserError(f"labels must be 0 or 1: {outside.sum()} of {len(label)} rows are not ({label[outside][0]})")
    score = score.astype(np.float64)
    strange = ~np.isfinite(score)
    if strange.any():
        raise UserError(f"scores must be finite: {strange.sum()} of {len(score)} are NaN or infinite")
    return label.astype(bool), score


def group_codes(group_id: npt.ArrayLike, rows: int) -> tuple[Ints, int]:
    """Group of each row as 0 … n-1 and n."""
    groups = _column(group_id, "group_id")
    if len(groups) != rows:
        raise UserError(f"group_id has {len(groups)} rows, labels {rows}")
    if groups.dtype.kind not in "biuUSO":
        raise UserError(f"group_id must be integers or strings, not {groups.dtype}")
    try:
        unique, codes = np.unique(groups, return_inverse=True)
    except TypeError:  # an object column with missing or mixed values has no order
        raise UserError("group_id must be all integers or all strings, without missing values") from None
    return codes.astype(np.int64, copy=False), len(unique)


def group_auc(clicked: Bools, scores: Floats, codes: Ints, count: int) -> Floats:
    """AUC of every group at once, a tie counting one half; NaN where all labels are equal. Counts the pairs (clicked,
    other) in the right order."""
    order = np.lexsort((scores, codes)) if count > 1 else np.argsort(scores)
    code, score, positive = codes[order], scores[order], clicked[order]
    first = np.ones(len(order), bool)
    first[1:] = (code[1:] != code[:-1]) | (score[1:] != score[:-1])
    blocks = np.flatnonzero(first)  # a block: rows of one group with the same score
    block_positives = np.add.reduceat(positive, blocks, dtype=np.int64)
    block_negatives = np.diff(blocks, append=len(order)) - block_positives
    positives = np.bincount(codes, weights=clicked, minlength=count).astype(np.int64)
    negatives = np.bincount(codes, minlength=count) - positives
    below = np.cumsum(block_negatives) - block_negatives - (np.cumsum(negatives) - negatives)[code[blocks]]
    won = np.bincount(code[blocks], weights=block_positives * (below + block_negatives / 2), minlength=count)
    with np.errstate(invalid="ignore"):
        return np.asarray(won / (positives * negatives), np.float64)


def row_loss(clicked: Bools, scores: Floats) -> Floats:
    """Cross-entropy of each row in nats; scores are probabilities, clipped at float64's epsilon."""
    outside = (scores < 0) | (scores > 1)
    if outside.any():
        raise UserError(f"logloss needs probabilities: {outside.sum()} of {len(scores)} scores lie outside 0 to 1")
    chance = np.where(clicked, scores, 1 - scores)
    epsilon = np.finfo(np.float64).eps
    return np.asarray(-np.log(np.clip(chance, epsilon, 1 - epsilon)))


def monitor_mode(monitor: str | Mapping[str, float], given: Any = None) -> Literal["max", "min"]:
    """``min`` where less of the monitor is better, a metric or a weighted sum of metrics, else ``max``: FuxiCTR takes
    the worst epoch if it is told the wrong one.

    Raises:
        UserError: ``given``, the key of a config, contradicts it; or parts of the sum contradict each other.
    """
    weights = {monitor: 1.0} if isinstance(monitor, str) else monitor
    less = {(name in LOSSES) == (weight > 0) for name, weight in weights.items() if weight}
    if len(less) != 1:
        better = "less is better of one part, more of another"
        raise UserError(f"monitor {shown(monitor)}: {better}: write such as {{AUC: 1, logloss: -1}}")
    mode: Literal["max", "min"] = "min" if less.pop() else "max"
    if given not in (None, mode):
        raise UserError(f"monitor_mode '{given}' contradicts monitor {shown(monitor)}: leave it out, or write {mode}")
    return mode


def monitored(monitor: str | Mapping[str, float], metrics: Mapping[str, float]) -> float:
    """The monitor's value: a metric, or a weighted sum of metrics."""
    weights = {monitor: 1.0} if isinstance(monitor, str) else monitor
    return sum(weight * metrics[name] for name, weight in weights.items())


def _column(values: Any, name: str) -> npt.NDArray[Any]:
    """One-dimensional numpy array of a column; a torch tensor comes from any device and precision."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = (values.double() if values.is_floating_point() else values).numpy()
    try:
        array = np.asarray(values)
    except ValueError:
        raise UserError(f"{name} must be one column of values") from None
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise UserError(f"{name} must have one dimension, not shape {array.shape}")
    return array
