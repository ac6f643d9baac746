"""Is one encoding better than another? Paired statistics over seeded runs that were tested on the same rows.

At one seed every encoding starts from the same backbone weights and sees the same batches, and all of them are tested
on the same users, so differences are taken run by run and user by user: most of the noise of a single run is common to
both and cancels. The bootstrap resamples users, not rows, because the rows of one user are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctr_pe.errors import UserError
from ctr_pe.evaluation.metrics import METRICS, Bools, Floats, Ints, check_rows, count_pairs, group_codes, row_loss

LOWER_IS_BETTER = frozenset({"logloss"})
CELLS = 4_000_000  # resampled user counts held at once (float64)


class Difference(NamedTuple):
    """Encoding minus baseline, averaged over the seeds both have."""

    value: float
    low: float  # 95 % interval
    high: float
    p: float  # two-sided
    p_holm: float  # corrected for the number of encodings compared


def mean_sd(values: Iterable[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (n - 1) over seeds; NaN for no value, and the latter for a single one."""
    array = np.asarray(list(values), np.float64)
    mean = float(array.mean()) if len(array) else math.nan
    return mean, float(array.std(ddof=1)) if len(array) > 1 else math.nan


def seeds_won(ours: Mapping[int, float], theirs: Mapping[int, float], metric: str) -> tuple[int, int]:
    """At how many of the common seeds ``ours`` is strictly better, and how many common seeds there are."""
    common = sorted(ours.keys() & theirs.keys())
    sign = -1 if metric in LOWER_IS_BETTER else 1
    return sum(sign * (ours[seed] - theirs[seed]) > 0 for seed in common), len(common)


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


def compare(
    labels: npt.ArrayLike,
    users: npt.ArrayLike,
    scores: Mapping[str, Mapping[int, npt.ArrayLike]],
    baseline: str = "none",
    resamples: int = 1000,
    seed: int = 0,
) -> dict[str, dict[str, Difference]]:
    """Compares every encoding with the baseline by a user-level paired bootstrap within seeds.

    Let N be the test rows and U their users. One resample draws U users with replacement, each with all of its rows;
    the same draw serves both encodings, every seed and every metric. On it the metric of each run is recomputed (a user
    drawn twice is two users), the difference to the baseline is taken within each seed both have, and these are
    averaged. The interval holds the middle 95 % of the resampled differences d. The p value is twice the smaller share
    of them on one side of zero, zero included and one added: 2 (1 + min(#{d ≤ 0}, #{d ≥ 0})) / (resamples + 1), at most
    1; so its smallest value is 2 / (resamples + 1). It is corrected by Holm over the encodings compared, separately for
    each metric.

    What it covers: other users from the same population, for these trained runs. Seeds are not resampled, five are too
    few; the standard deviation over seeds and the seeds won show how much depends on them.

    Args:
        labels: (N,) 0 or 1.
        users: (N,) integers or strings; also the groups of gAUC.
        scores: encoding -> seed -> (N,) predicted probabilities, all for the same rows in the same order.
        baseline: the encoding the others are compared with.
        resamples: number of resamples.
        seed: of the resampling.

    Returns:
        encoding -> metric (gAUC, AUC, logloss) -> Difference, for every encoding that shares a seed with the baseline.
        A resample on which a metric is undefined (all its labels equal) is left out; if all are, the numbers are NaN.

    Raises:
        UserError: baseline missing, or labels, users or scores that ``evaluate`` refuses.
    """
    if baseline not in scores:
        raise UserError(f"no runs of '{baseline}' to compare with")
    seeds = {name: sorted(runs.keys() & scores[baseline].keys()) for name, runs in scores.items() if name != baseline}
    seeds = {name: common for name, common in seeds.items() if common}
    if not seeds:
        return {}
    codes, count = group_codes(users, len(np.asarray(labels)))
    needed = {(name, s) for name, common in seeds.items() for s in common}
    needed |= {(baseline, s) for common in seeds.values() for s in common}
    runs = {(name, s): _Run(*check_rows(labels, scores[name][s]), codes, count) for name, s in needed}

    def contrast(name: str, values: Mapping[tuple[str, int], Floats]) -> Floats:
        """Encoding minus baseline within each common seed, averaged over the seeds."""
        differences = [values[name, s] - values[baseline, s] for s in seeds[name]]
        return np.asarray(np.mean(differences, axis=0))

    # gAUC and logloss are ratios of sums over users whose denominators do not depend on the run, so differences can be
    # averaged per user before resampling. AUC pairs rows of different users and is recomputed on every resample.
    any_run = next(iter(runs.values()))
    rows, mixed_rows = any_run.rows, any_run.mixed_rows
    gauc = np.stack([contrast(n, {k: r.weighted_auc for k, r in runs.items()}) for n in seeds], 1)
    loss = np.stack([contrast(n, {k: r.loss for k, r in runs.items()}) for n in seeds], 1)
    positives = any_run.positives

    def differences(counts: Floats) -> dict[str, Floats]:
        """metric -> (resamples, encodings) for (resamples, users) counts."""
        with np.errstate(invalid="ignore", divide="ignore"):  # an undefined metric is NaN
            drawn_positives = counts @ positives
            pairs = drawn_positives * (counts @ rows - drawn_positives)
            auc = {key: run.won_pairs(counts) / pairs for key, run in runs.items()}
            return {
                "gAUC": (counts @ gauc) / (counts @ mixed_rows)[:, None],
                "AUC": np.stack([contrast(name, auc) for name in seeds], 1),
                "logloss": (counts @ loss) / (counts @ rows)[:, None],
            }

    observed = differences(np.ones((1, count)))
    chunks = [differences(counts) for counts in draw_users(count, resamples, seed)]
    result: dict[str, dict[str, Difference]] = {name: {} for name in seeds}
    for metric in METRICS:
        resampled = np.concatenate([chunk[metric] for chunk in chunks])
        single = [_difference(value, column) for value, column in zip(observed[metric][0], resampled.T, strict=True)]
        corrected = holm([difference.p for difference in single])
        for name, difference, p_holm in zip(seeds, single, corrected, strict=True):
            result[name][metric] = difference._replace(p_holm=p_holm)
    return result


def draw_users(users: int, resamples: int, seed: int) -> Iterator[Floats]:
    """Chunks (resamples, users) of how often each user was drawn; each resample draws ``users`` of them."""
    generator = np.random.default_rng(seed)
    size = max(1, CELLS // users)
    for start in range(0, resamples, size):
        draws = (generator.integers(0, users, users) for _ in range(min(size, resamples - start)))
        yield np.stack([np.bincount(draw, minlength=users) for draw in draws]).astype(np.float64)


class _Run:
    """What the resampling needs of one run: sums per user, and its rows in the order of their scores."""

    def __init__(self, clicked: Bools, scores: Floats, codes: Ints, count: int) -> None:
        groups = count_pairs(clicked, scores, codes, count)
        rows = groups.positives + groups.negatives
        self.positives = groups.positives.astype(np.float64)
        self.rows = rows.astype(np.float64)
        self.mixed_rows = self.rows * groups.mixed
        self.weighted_auc = self.mixed_rows * groups.auc
        self.loss = np.bincount(codes, weights=row_loss(clicked, scores), minlength=count).astype(np.float64)
        order = np.argsort(scores)
        ordered, positive = scores[order], clicked[order]
        self.positive_users, self.negative_users = codes[order][positive], codes[order][~positive]
        negative_scores, positive_scores = ordered[~positive], ordered[positive]
        self.below = np.searchsorted(negative_scores, positive_scores, "left")  # negatives with a lower score
        self.not_above = np.searchsorted(negative_scores, positive_scores, "right")

    def won_pairs(self, counts: Floats) -> Floats:
        """Correctly ordered pairs of a clicked and another row, ties one half: (resamples,) for (resamples, users)."""
        won = np.empty(len(counts))
        negatives = np.zeros(len(self.negative_users) + 1, np.int64)
        for i, count in enumerate(counts.astype(np.int64)):  # integers: exact, and a cumulative sum twice as fast
            np.cumsum(count.take(self.negative_users), out=negatives[1:])
            below = negatives.take(self.below) + negatives.take(self.not_above)
            won[i] = (count.take(self.positive_users) @ below) / 2
        return won


def _difference(value: float, resampled: Floats) -> Difference:
    """Interval and p value of one difference from its resampled values."""
    finite = resampled[np.isfinite(resampled)]
    if not len(finite) or not np.isfinite(value):
        return Difference(float(value), *[math.nan] * 4)
    low, high = np.quantile(finite, (0.025, 0.975))
    side = min((finite <= 0).sum(), (finite >= 0).sum())
    p = min(1.0, 2 * (1 + int(side)) / (len(finite) + 1))
    return Difference(float(value), float(low), float(high), p, math.nan)
