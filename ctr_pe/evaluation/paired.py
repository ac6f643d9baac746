"""Is one encoding better than another? The difference between their trained runs, with its standard error.

The users of the test rows and the seeds of the runs are both drawn at random, so the squared standard error has a part
of each:

seeds  s²/n of both encodings, s² the variance of the metric over an encoding's n runs (Welch, Biometrika 1947). Runs of
       one seed start from the same weights and see the same batches, but after training have hardly more in common than
       others, so they are not paired.
users  the variance over users of what each adds to the difference, averaged over the runs: users are paired, because
       both encodings are tested on the same ones.

That runs differ in the users they suit is in both parts, once too often, and is taken off the second: runs × users is a
two-way layout (Cornfield and Tukey, Annals of Mathematical Statistics 1956). The t distribution has the degrees of
freedom of Satterthwaite (Biometrics Bulletin 1946).

Both parts of the users follow from the squared distances between the runs' influences: what each user adds to the
metric of a run is a vector over users, and the variance of a mean is a mean of distances.

U users, R runs of one encoding, Q of the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import variance
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ctr_pe.evaluation.metrics import Floats, check_rows, group_codes
from ctr_pe.evaluation.users import Users, user_values
from ctr_pe.utils.errors import UserError

LEVEL = 0.05
POWER = 0.8
Name = TypeVar("Name")


class Difference(NamedTuple):
    """Encoding minus baseline in one metric: of the means over their runs. NaN: not known."""

    value: float
    low: float  # 95 % interval for new users and newly trained runs
    high: float
    p: float  # two-sided, for the same
    p_holm: float  # corrected for the number of comparisons
    detectable: float  # smallest true difference that is found (p < 0.05) with 80 % power
    users_low: float  # 95 % interval for new users and these very runs
    users_high: float
    least_detectable: float  # what ``detectable`` would be with any number of runs: the test users set it


class UserSpread(NamedTuple):
    """What the users add to the variance of the difference between two encodings, in one metric."""

    gap: float  # squared distance between the mean influences of the two encodings
    interaction: float  # variance of both means because runs differ in the users they suit; NaN for a single run
    users: int  # who have a share in the metric

    @classmethod
    def of(cls, distances: Floats, runs: int, users: int) -> UserSpread:
        """From the squared distances between influences (R + Q, R + Q), of which ``runs`` are the first encoding's."""
        ours, theirs = distances[:runs, :runs], distances[runs:, runs:]
        gap = distances[:runs, runs:].mean() - (ours.mean() + theirs.mean()) / 2
        several = min(len(ours), len(theirs)) > 1
        interaction = sum(own.mean() / 2 / (len(own) - 1) for own in (ours, theirs)) if several else math.nan
        return cls(float(np.maximum(gap, 0.0)), float(interaction), users)


def influences(values: Floats, shares: Floats) -> Floats:
    """What each user adds to the metric of each run (R, U), from the users' values in the runs (R, U) and their shares
    (U,), of :mod:`ctr_pe.evaluation.users`; 0 for users who have no share in the metric."""
    with np.errstate(invalid="ignore"):  # nobody has a share
        means = (values * shares).sum(1) / shares.sum()  # equal for equal runs, as a matrix product need not be
    return np.asarray(shares * (values - means[:, None]))


class MetricInterval(NamedTuple):
    """A metric of one trained model, with its 95 % interval for new users; NaN: not known."""

    value: float
    low: float
    high: float


def over_users(values: Floats, shares: Floats) -> MetricInterval:
    """The mean of what users have, (U,), weighted by their shares (U,): the rows of a user are not independent, users
    are. NaN where nobody has a share."""
    users = int(np.count_nonzero(shares))
    if not np.isfinite(shares).all() or not users:
        return MetricInterval(math.nan, math.nan, math.nan)
    added = influences(values[None], shares)[0]
    variance_of_mean = users / (users - 1) * float(added @ added) if users > 1 else math.nan
    value = float(values @ shares / shares.sum())
    return MetricInterval(value, *_t_test(value, [(variance_of_mean, users - 1)])[:2])


def squared_distances(vectors: Floats) -> Floats:
    """Between the rows of (R, U): (R, R), exactly 0 for equal ones."""
    from scipy.spatial.distance import pdist, squareform

    return np.asarray(squareform(pdist(vectors, "sqeuclidean"), checks=False))


def difference(ours: Sequence[float], theirs: Sequence[float], spread: UserSpread) -> Difference:
    """Ours minus theirs, from the metric of each run, (R,) and (Q,), tested on the same users; ``p_holm`` is NaN, for
    :func:`corrected` to fill in."""
    value, users = float(np.mean(ours) - np.mean(theirs)), spread.users
    seeds = [(variance(of) / len(of) if len(of) > 1 else math.nan, len(of) - 1) for of in (ours, theirs)]
    factor = users / (users - 1) if users > 1 else math.nan
    of_users = factor * spread.gap
    any_runs = (max(of_users - factor * spread.interaction, 0.0), users - 1)
    low, high, p, detectable = _t_test(value, [*seeds, any_runs])
    users_low, users_high, *_ = _t_test(value, [(of_users, users - 1)])
    *_, least_detectable = _t_test(value, [any_runs])
    return Difference(value, low, high, p, math.nan, detectable, users_low, users_high, least_detectable)


def corrected(found: Mapping[Name, Difference]) -> dict[Name, Difference]:
    """The differences with p corrected for their number."""
    p_values = holm([one.p for one in found.values()])
    return {name: one._replace(p_holm=p) for (name, one), p in zip(found.items(), p_values, strict=True)}


def compare(
    labels: npt.ArrayLike,
    users: npt.ArrayLike,
    scores: Mapping[str, Mapping[int, npt.ArrayLike]],
    baseline: str = "none",
) -> dict[str, dict[str, Difference]]:
    """Compares every encoding with the baseline, for new users and newly trained runs.

    The difference is that of the means over the runs, of which two encodings may have different numbers; with a single
    run, how much depends on the seed is not known, and of the intervals only that of new users is there. p is corrected
    by Holm over the encodings, separately for each metric. How: :mod:`ctr_pe.evaluation.paired`.

    Args:
        labels: (N,) 0 or 1.
        users: (N,) integers or strings; also the groups of gAUC.
        scores: encoding -> seed -> (N,) predicted probabilities, all for the same rows in the same order.
        baseline: the encoding the others are compared with.

    Returns:
        encoding -> metric (gAUC, AUC, logloss) -> Difference, for every other encoding.

    Raises:
        UserError: baseline missing, or labels, users or scores that ``evaluate`` refuses.
    """
    scores = {name: runs for name, runs in scores.items() if runs}
    if baseline not in scores:
        raise UserError(f"no runs of '{baseline}' to compare with")
    codes, count = group_codes(users, len(np.asarray(labels)))
    values: dict[str, list[dict[str, Floats]]] = {}
    for name, runs in scores.items():
        rows = [check_rows(labels, of_run) for of_run in runs.values()]
        values[name] = [user_values(clicked, score, codes, count) for clicked, score in rows]
        shares = Users.of(rows[0][0], codes, count).shares
    found: dict[str, dict[str, Difference]] = {name: {} for name in scores if name != baseline}
    for metric, share in shares.items():
        added = {name: influences(np.stack([one[metric] for one in of]), share) for name, of in values.items()}
        metrics = {name: [float(one[metric] @ share / share.sum()) for one in of] for name, of in values.items()}
        of_metric = {}
        for name in found:
            distances = squared_distances(np.concatenate([added[name], added[baseline]]))
            spread = UserSpread.of(distances, len(added[name]), int(np.count_nonzero(share)))
            of_metric[name] = difference(metrics[name], metrics[baseline], spread)
        for name, one in corrected(of_metric).items():
            found[name][metric] = one
    return found


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction (1979): the family-wise error of all comparisons stays below the level.

    The i-th smallest of m values is multiplied by m - i + 1; results are kept monotone and at most 1. NaN, a comparison
    that could not be made, stays NaN and does not count.
    """
    p = np.asarray(p_values, np.float64)
    corrected = np.full(len(p), np.nan)
    order = np.argsort(p)[: np.isfinite(p).sum()]  # NaN sorts last
    steps = p[order] * np.arange(len(order), 0, -1)
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1)
    return [float(value) for value in corrected]


def mean_sd(values: Iterable[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (n - 1) over seeds; NaN for no value, and the latter for a single one."""
    array = np.asarray(list(values), np.float64)
    mean = float(array.mean()) if len(array) else math.nan
    return mean, float(array.std(ddof=1)) if len(array) > 1 else math.nan


def _t_test(value: float, parts: Sequence[tuple[float, int]]) -> tuple[float, float, float, float]:
    """95 % interval, two-sided p, and the smallest true difference found with 80 % power. ``parts``: of the squared
    standard error, each with its degrees of freedom."""
    from scipy.special import stdtr, stdtrit

    square = sum(part for part, _ in parts)
    if not math.isfinite(square):
        return math.nan, math.nan, math.nan, math.nan
    if square == 0:  # runs that are all the same
        return value, value, float(value == 0), 0.0
    freedom = square**2 / sum(part**2 / degrees for part, degrees in parts if part)
    error, edge = math.sqrt(square), float(stdtrit(freedom, 1 - LEVEL / 2))
    p = 2 * float(stdtr(freedom, -abs(value) / error))
    return value - edge * error, value + edge * error, p, (edge + float(stdtrit(freedom, POWER))) * error
