"""Metrics of click models under FuxiCTR's names and definitions, without a loop over groups.

``gAUC``, ``AUC`` and ``logloss`` are those of CTR papers, and the default. gAUC is the one of Deep Interest Network
(Zhou et al., KDD 2018): the AUC inside each group (user), averaged with the group's number of rows as weight; groups
with clicked rows only, or none, are left out. ``avgAUC`` is the same mean with every group's weight 1.
``binary_crossentropy`` is logloss.

``MRR`` and ``NDCG@k`` (FuxiCTR's ``NDCG(k=5)``; ``NDCG()`` is that of k = 1) rank the rows of each group by score and
are means over all groups, of which one without a clicked row counts 0. With r the ranks, from 1, of a group's p clicked
rows:

MRR      mean of 1 / r over the clicked rows
MRR@k    the same, where a clicked row below rank k counts 0
NDCG@k   Σ 1 / log2(1 + r) over r <= k, divided by its largest value, that of ranks 1 … p
HR@k     hit rate, 1 if a clicked row has r <= k (FuxiCTR has none)

Equal scores are ranked as in FuxiCTR: in the order of ``np.argsort``, which is not stable, reversed. It depends on the
order of the rows and on the processor, so metrics of ranks say little about scores with many ties; gAUC, avgAUC and AUC
count a tie one half.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ctr_pe.utils.errors import UserError, nearest, shown

METRICS = ("gAUC", "AUC", "logloss")
"""The default."""
LOSSES = ("logloss", "binary_crossentropy")
"""Metrics of which less is better."""
NAMES = ("gAUC", "avgAUC", "AUC", *LOSSES, "MRR")
CUT = re.compile(r"(MRR|NDCG|HR|HitRate)(?:@([1-9]\d{0,8})|\((?:k *= *)?([1-9]\d{0,8})\))|NDCG\(\)")
"""Metrics of the first k of each group, in either spelling."""
TINY = 1e-12
"""What FuxiCTR adds to what it divides by."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def is_metric(name: object) -> bool:
    return name in NAMES or CUT.fullmatch(str(name)) is not None


def like_metric(name: object) -> str:
    """The end of the error line about an unknown metric: the nearest one, with the same k."""
    k = re.sub(r"\D", "", str(name))[:9].lstrip("0") or "10"
    return nearest(name, [*NAMES, *(f"{cut}@{k}" for cut in ("MRR", "NDCG", "HR"))])


def is_grouped(name: str) -> bool:
    """Whether the metric compares the rows of a group with each other."""
    return name not in ("AUC", *LOSSES)


def evaluate(
    labels: npt.ArrayLike,
    scores: npt.ArrayLike,
    group_id: npt.ArrayLike | None = None,
    metrics: Sequence[str] = METRICS,
    weights: npt.ArrayLike | None = None,
) -> dict[str, float]:
    """Metrics of predicted click probabilities.

    Args:
        labels: (N,) 0 or 1; a numpy array, a torch tensor or anything numpy can read.
        scores: (N,) finite; for logloss probabilities between 0 and 1.
        group_id: (N,) integers or strings, the user of each row, which all metrics but AUC and logloss need.
        metrics: names, see :mod:`ctr_pe.evaluation.metrics`; the result has them in this order.
        weights: (N,) of the rows, 0 or more. A pair of rows counts the product of theirs, as in scikit-learn, a group
            in gAUC the sum of its rows'; metrics of ranks have no such form.

    Returns:
        Metric name, as given, to value. AUC is NaN when all labels are equal, gAUC and avgAUC when that holds inside
        every group. logloss clips probabilities at float64's epsilon as scikit-learn does.

    Raises:
        UserError: unknown metric, no ``group_id`` for one that needs it, no rows, different lengths, labels other than
            0 and 1, scores that are not finite, or not probabilities where logloss is asked for; weights that are no
            weights, or of metrics of ranks.
    """
    names = (metrics,) if isinstance(metrics, str) else tuple(metrics)
    for name in names:
        if not is_metric(name):
            raise UserError(f"unknown metric '{name}': {like_metric(name)}")
    clicked, score = check_rows(labels, scores)
    weight = None if weights is None else check_weights(weights, len(score))
    grouped = [name for name in names if is_grouped(name)]
    codes, count = np.zeros(len(score), np.int64), 1
    if grouped:
        if group_id is None:
            raise UserError(f"{grouped[0]} needs group_id, the user of each row")
        codes, count = group_codes(group_id, len(score))
    values: dict[str, float] = {}
    if {"gAUC", "avgAUC"}.intersection(names):
        auc = group_auc(clicked, score, codes, count, weight)
        for name, of_group in {"gAUC": np.bincount(codes, weight, count), "avgAUC": np.ones(count)}.items():
            counted = np.where(np.isnan(auc), 0, of_group)
            total = counted.sum()
            values[name] = float(counted @ np.nan_to_num(auc) / total) if total else float("nan")
    if "AUC" in names:
        values["AUC"] = float(group_auc(clicked, score, np.zeros(len(score), np.int64), 1, weight)[0])
    if set(LOSSES).intersection(names):
        values |= dict.fromkeys(LOSSES, float(np.average(row_loss(clicked, score), weights=weight)))
    if ranked := [name for name in grouped if name not in values]:
        if weight is not None:
            raise UserError(f"{ranked[0]}: a metric of ranks has no form with weights: gAUC, avgAUC, AUC, logloss do")
        values |= rank_metrics(ranked, clicked, score, codes, count)
    return {name: values[name] for name in names}


def rank_metrics(names: Sequence[str], clicked: Bools, scores: Floats, codes: Ints, count: int) -> dict[str, float]:
    """MRR, MRR@k, NDCG@k and HR@k: means over the ``count`` groups, ranked size by size of group."""
    sizes = np.bincount(codes, minlength=count)
    rows, start = np.lexsort((codes, sizes[codes])), 0
    totals = dict.fromkeys(names, 0.0)
    for size, many in zip(*np.unique(sizes, return_counts=True), strict=True):
        block = rows[start : start + size * many].reshape(many, size)
        start += size * many
        ranking = np.argsort(scores[block], axis=1)[:, ::-1]  # as FuxiCTR's of one group, ties included
        hits = np.take_along_axis(clicked[block], ranking, axis=1)
        for name in names:
            totals[name] += float(_of_groups(name, hits).sum())
    return {name: total / count for name, total in totals.items()}


def _of_groups(name: str, hits: Bools) -> npt.NDArray[Any]:
    """A metric of each group (G,) from whether its rows (G, n) were clicked, the highest score first."""
    cut = CUT.fullmatch(name)
    kind, k = (cut[1] or "NDCG", int(cut[2] or cut[3] or 1)) if cut else (name, hits.shape[1])
    first, positives = hits[:, :k], hits.sum(1)
    rank = np.arange(1, first.shape[1] + 1)
    if kind == "MRR":
        return np.asarray(first @ (1 / rank) / (positives + TINY))
    if kind == "NDCG":
        gains = 1 / np.log2(1 + rank)
        best = np.append(0, gains.cumsum())[np.minimum(positives, len(gains))]
        return np.asarray(first @ gains / (best + TINY))
    return np.asarray(first.any(1))


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


def check_weights(weights: npt.ArrayLike, rows: int) -> Floats:
    """Weights of rows as float64, or a UserError that says what is wrong with them."""
    found = _column(weights, "weights")
    if found.dtype.kind not in "biuf":
        raise UserError(f"weights must be numbers, not {found.dtype}")
    if len(found) != rows:
        raise UserError(f"weights have {len(found)} rows, labels {rows}")
    found = found.astype(np.float64)
    strange = ~((found >= 0) & np.isfinite(found))
    if strange.any():
        raise UserError(f"weights must be 0 or more: {strange.sum()} of {rows} are not ({found[strange][0]})")
    if not found.any():
        raise UserError("weights are all 0: no row counts")
    return found


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


def group_auc(clicked: Bools, scores: Floats, codes: Ints, count: int, weights: Floats | None = None) -> Floats:
    """AUC of every group at once, a tie counting one half; NaN where all labels are equal. Counts the pairs (clicked,
    other) in the right order, each by the product of their ``weights``."""
    order = np.lexsort((scores, codes)) if count > 1 else np.argsort(scores)
    code, score = codes[order], scores[order]
    weight = np.ones(len(order), np.int64) if weights is None else weights[order]
    positive = np.where(clicked[order], weight, 0)
    first = np.ones(len(order), bool)
    first[1:] = (code[1:] != code[:-1]) | (score[1:] != score[:-1])
    blocks = np.flatnonzero(first)  # a block: rows of one group with the same score
    block_positives = np.add.reduceat(positive, blocks)
    block_negatives = np.add.reduceat(weight - positive, blocks)
    positives = np.bincount(code, positive, count).astype(weight.dtype)
    negatives = np.bincount(code, weight - positive, count).astype(weight.dtype)
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


def without_groups(params: Mapping[str, Any]) -> Iterator[str]:
    """What an experiment cannot measure without a ``group_id``, a line each; gAUC among ``metrics`` is left out."""
    monitor = params.get("monitor", "AUC")
    named = {"monitor": [monitor] if isinstance(monitor, str) else [*monitor], "metrics": params.get("metrics") or []}
    for key, names in named.items():
        if found := [name for name in names if is_grouped(name) and (key, name) != ("metrics", "gAUC")]:
            yield f"{key} {found[0]} needs a group_id: the column whose rows are compared with each other"


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
