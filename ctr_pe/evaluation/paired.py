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

U users, R runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ctr_pe.evaluation.metrics import METRICS, Floats, check_rows, group_codes
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


class Arm(NamedTuple):
    """The runs of one encoding in one metric."""

    runs: int
    mean: float
    seeds: float  # variance of the mean over other seeds; NaN for a single run
    influence: Floats  # (U,) what each user adds to the mean; 0 for users who have no share in the metric
    interaction: float  # variance of the mean because runs differ in the users they suit; NaN for a single run
    users: int  # who have a share


def arm(metrics: npt.ArrayLike, values: Floats, shares: Floats) -> Arm:
    """From the metric of each run (R,), each user's value in it (R, U) and the users' shares (U,), of
    :mod:`ctr_pe.evaluation.users`."""
    found = np.asarray(metrics, np.float64)
    runs = len(found)
    with np.errstate(invalid="ignore"):  # nobody has a share
        means = values @ shares / shares.sum()
    influences = shares * (values - means[:, None])
    influence = influences.mean(0)
    rest = influences - influence
    seeds, interaction = math.nan, math.nan
    if runs > 1:
        seeds = float(found.var(ddof=1)) / runs
        interaction = float(np.vdot(rest, rest)) / (runs - 1) / runs
    return Arm(runs, float(found.mean()), seeds, influence, interaction, int(np.count_nonzero(shares)))


def difference(ours: Arm, theirs: Arm) -> Difference:
    """Ours minus theirs, tested on the same users; ``p_holm`` is NaN, for :func:`compared` to fill in."""
    value, users = ours.mean - theirs.mean, ours.users
    factor = users / (users - 1) if users > 1 else math.nan
    gap = ours.influence - theirs.influence
    of_users = factor * float(gap @ gap)
    both = factor * (ours.interaction + theirs.interaction)
    any_runs = (max(of_users - both, 0.0), users - 1)
    low, high, p, detectable = _t_test(value, [(ours.seeds, ours.runs - 1), (theirs.seeds, theirs.runs - 1), any_runs])
    users_low, users_high, *_ = _t_test(value, [(of_users, users - 1)])
    *_, least_detectable = _t_test(value, [any_runs])
    return Difference(value, low, high, p, math.nan, detectable, users_low, users_high, least_detectable)


def compared(pairs: Mapping[Name, tuple[Arm, Arm]]) -> dict[Name, Difference]:
    """The difference of each pair, p corrected for their number."""
    found = {name: difference(*pair) for name, pair in pairs.items()}
    corrected = holm([one.p for one in found.values()])
    return {name: one._replace(p_holm=p) for (name, one), p in zip(found.items(), corrected, strict=True)}


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
    arms: dict[str, dict[str, Arm]] = {}
    for name, runs in scores.items():
        rows = [check_rows(labels, of_run) for of_run in runs.values()]
        values = [user_values(clicked, score, codes, count) for clicked, score in rows]
        shares = Users.of(rows[0][0], codes, count).shares
        arms[name] = {}
        for metric in METRICS:
            of_metric = np.stack([value[metric] for value in values])
            metrics = of_metric @ shares[metric] / shares[metric].sum()
            arms[name][metric] = arm(metrics, of_metric, shares[metric])
    others = [name for name in scores if name != baseline]
    by_metric = {
        metric: compared({name: (arms[name][metric], arms[baseline][metric]) for name in others}) for metric in METRICS
    }
    return {name: {metric: by_metric[metric][name] for metric in METRICS} for name in others}


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
