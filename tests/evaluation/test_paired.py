"""Differences between trained runs: their parts equal to plain loops, and honest about what is chance."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from ctr_pe.evaluation import evaluate
from ctr_pe.evaluation.metrics import METRICS
from ctr_pe.evaluation.paired import compare, holm, mean_sd
from ctr_pe.evaluation.users import Users, user_values
from ctr_pe.utils.errors import UserError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Scores = dict[str, dict[int, Floats]]


def table(seed: int, users: int = 40, rows: int = 6) -> tuple[Ints, Ints, Scores]:
    """Runs of three encodings with ties; 'good' orders the rows better than the others, which differ by chance only."""
    random = np.random.default_rng(seed)
    owner = np.repeat(np.arange(users), random.integers(1, 2 * rows, users))
    labels = random.integers(0, 2, len(owner))
    signal = {"none": 0.4, "same": 0.4, "good": 3.0}
    shared = random.normal(size=len(owner))
    scores: Scores = {
        name: {
            s: (1 / (1 + np.exp(-(strength * labels + shared + 0.5 * random.normal(size=len(owner)))))).round(2)
            for s in range(3)
        }
        for name, strength in signal.items()
    }
    return labels, owner, scores


def metric_of(labels: Ints, scores: Floats, users: Ints, weight: Floats, metric: str) -> float:
    """By loops over users and pairs of rows; a user of weight w counts as w users."""
    known = {user: (labels[users == user], scores[users == user]) for user in np.unique(users)}

    def pairs(first: int, second: int) -> tuple[float, int]:
        """Won pairs of a clicked row of the first and another row of the second user, and how many pairs there are."""
        clicked, other = known[first][1][known[first][0] == 1], known[second][1][known[second][0] == 0]
        return sum((c > o) + (c == o) / 2 for c in clicked for o in other), len(clicked) * len(other)

    if metric == "AUC":
        both = [(weight[u] * weight[v], *pairs(u, v)) for u in known for v in known]
        return sum(w * won for w, won, _ in both) / sum(w * of for w, _, of in both)
    if metric == "gAUC":
        own = {user: pairs(user, user) for user in known}
        values = {user: (weight[user] * len(known[user][0]), won / of) for user, (won, of) in own.items() if of}
    else:
        values = {
            user: (weight[user] * len(y), float(np.mean(-np.log(np.where(y == 1, p, 1 - p)))))
            for user, (y, p) in known.items()
        }
    return float(np.average([value for _, value in values.values()], weights=[w for w, _ in values.values()]))


@pytest.mark.parametrize("metric", METRICS)
def test_a_users_influence_is_the_derivative_of_the_metric_by_its_weight(metric: str) -> None:
    labels, users, scores = table(0, users=12)
    score = scores["good"][0].clip(0.01, 0.99)
    shares, values = Users.of(labels == 1, users, 12).shares[metric], user_values(labels == 1, score, users, 12)[metric]
    mean = shares @ values / shares.sum()
    assert mean == pytest.approx(evaluate(labels, score, users)[metric], abs=1e-12)
    assert mean == pytest.approx(metric_of(labels, score, users, np.ones(12), metric), abs=1e-12)
    for user in range(12):
        ends = [metric_of(labels, score, users, np.ones(12) + by * np.eye(12)[user], metric) for by in (1e-4, -1e-4)]
        assert shares[user] * (values[user] - mean) == pytest.approx((ends[0] - ends[1]) / 2e-4, abs=1e-6)


@pytest.mark.parametrize("metric", METRICS)
def test_the_part_of_the_users_is_that_of_a_bootstrap(metric: str) -> None:
    """Users drawn with replacement, with all of their rows; a user drawn twice is two users."""
    labels, users, scores = table(1, users=150, rows=4)
    draw = np.random.default_rng(2)
    rows_of = [np.flatnonzero(users == user) for user in range(150)]
    resampled = []
    for _ in range(300):
        drawn = [rows_of[user] for user in draw.integers(0, 150, 150)]
        rows, group = np.concatenate(drawn), np.repeat(np.arange(150), [len(own) for own in drawn])
        means = {
            pe: np.mean([evaluate(labels[rows], of[rows], group, metric)[metric] for of in scores[pe].values()])
            for pe in ("none", "good")
        }
        resampled.append(means["good"] - means["none"])
    found = compare(labels, users, scores)["good"][metric]
    error = (found.users_high - found.users_low) / 2 / stats.t.ppf(0.975, 149)
    assert error == pytest.approx(np.std(resampled, ddof=1), rel=0.12)


@pytest.mark.parametrize("metric", METRICS)
def test_seeds_and_users_add_up(metric: str) -> None:
    """By loops over runs and users, with unequal numbers of runs; Welch and Satterthwaite as textbooks have them."""
    labels, users, scores = table(3)
    del scores["good"][1]
    shares = Users.of(labels == 1, users, 40).shares[metric]
    runs = {}
    for pe, of in scores.items():
        values = np.array([user_values(labels == 1, one, users, 40)[metric] for one in of.values()])
        runs[pe] = (
            [evaluate(labels, one, users)[metric] for one in of.values()],
            shares * (values - (values @ shares / shares.sum())[:, None]),
        )
    (ours, added), (theirs, taken) = runs["good"], runs["none"]
    several = (shares > 0).sum()
    of_users = several / (several - 1) * sum((a - b) ** 2 for a, b in zip(added.mean(0), taken.mean(0), strict=True))
    twice = several / (several - 1) * sum(run.var(ddof=1) / len(run) for side in (added, taken) for run in side.T)
    assert 0 < twice < of_users
    parts = [(np.var(ours, ddof=1) / 2, 1), (np.var(theirs, ddof=1) / 3, 2), (of_users - twice, several - 1)]
    error = math.sqrt(sum(part for part, _ in parts))
    freedom = error**4 / sum(part**2 / degrees for part, degrees in parts)
    difference = np.mean(ours) - np.mean(theirs)
    edge = stats.t.ppf(0.975, freedom)
    expected = (
        difference,
        difference - edge * error,
        difference + edge * error,
        2 * stats.t.sf(abs(difference) / error, freedom),
    )
    found = compare(labels, users, scores)["good"][metric]
    assert found[:4] == pytest.approx(expected, rel=1e-9)
    assert found.detectable == pytest.approx((edge + stats.t.ppf(0.8, freedom)) * error)
    edges = stats.t.ppf(0.975, several - 1) + stats.t.ppf(0.8, several - 1)
    assert found.least_detectable == pytest.approx(edges * math.sqrt(of_users - twice))
    p_values = [of[metric].p for of in compare(labels, users, scores).values()]
    assert [of[metric].p_holm for of in compare(labels, users, scores).values()] == holm(p_values)


def test_seeds_may_have_any_names_and_users_too() -> None:
    labels, users, scores = table(4)
    renamed = {pe: {-seed: of for seed, of in runs.items()} for pe, runs in scores.items()}
    names = np.array([f"user {user}" for user in users])
    order = np.random.default_rng(0).permutation(len(labels))
    mixed = {pe: {seed: of[order] for seed, of in runs.items()} for pe, runs in renamed.items()}
    expected = compare(labels, users, scores)
    for pe, metrics in compare(labels[order], names[order], mixed).items():
        for metric, one in metrics.items():
            assert one == pytest.approx(expected[pe][metric], abs=1e-12)


def test_identical_runs_do_not_differ() -> None:
    labels, users, scores = table(2)
    for one in compare(labels, users, {"none": scores["good"], "copy": scores["good"]})["copy"].values():
        assert (one.value, one.p, one.p_holm) == (0, 1, 1)
        assert one.low < 0 < one.high
        assert (one.users_low, one.users_high) == (0, 0)
    same = dict.fromkeys(range(3), scores["good"][0])
    for one in compare(labels, users, {"none": same, "copy": same})["copy"].values():
        assert one == (0, 0, 0, 1, 1, 0, 0, 0, 0)


def new_study(seed: int, gain: float = 0.0, runs: int = 4) -> tuple[Ints, Ints, Scores]:
    """New users and newly trained runs of two encodings: seeds move a whole run, users suit one encoding or one run."""
    random = np.random.default_rng(seed)
    users, per_user = 80, 6
    owner = np.repeat(np.arange(users), per_user)
    labels = random.integers(0, 2, len(owner))
    row = 1.5 * random.normal(size=len(owner))
    scores: Scores = {}
    for pe in ("none", "cape"):
        suits = 0.5 * random.normal(size=users)
        scores[pe] = {}
        for run in range(runs):
            strength = 0.8 + gain * (pe == "cape") + 0.25 * random.normal() + suits + 0.5 * random.normal(size=users)
            scores[pe][run] = 1 / (1 + np.exp(-(strength[owner] * (labels - 0.5) * 2 + row)))
    return labels, owner, scores


@pytest.mark.slow
def test_chance_is_called_significant_one_time_in_twenty_and_the_detectable_difference_four_times_in_five() -> None:
    """Not so for the users alone."""
    found = [compare(*new_study(seed))["cape"] for seed in range(300)]
    for metric in METRICS:
        assert 5 <= sum(one[metric].p < 0.05 for one in found) <= 27  # 15 expected, standard deviation 3.8
        assert sum(not one[metric].users_low < 0 < one[metric].users_high for one in found) > 60
    shifted = [compare(*new_study(seed, gain=0.65))["cape"]["gAUC"] for seed in range(300)]
    true = np.mean([one.value for one in shifted])
    assert true == pytest.approx(np.mean([one.detectable for one in shifted]), rel=0.15)
    assert 0.7 < np.mean([one.p < 0.05 for one in shifted]) < 0.9


@pytest.mark.slow
def test_what_any_number_of_runs_would_show_is_what_very_many_do() -> None:
    """But for the seeds' part of 100 runs, which is 4 / 100 of that of 4."""
    few = [compare(*new_study(seed))["cape"] for seed in range(100)]
    many = [compare(*new_study(seed, runs=100))["cape"] for seed in range(8)]
    for metric in METRICS:
        limit = np.mean([one[metric].least_detectable ** 2 for one in few])
        of_four, of_hundred = (np.mean([one[metric].detectable ** 2 for one in found]) for found in (few, many))
        assert limit + (of_four - limit) * 4 / 100 == pytest.approx(of_hundred, rel=0.1)
        assert limit < 0.2 * of_four


def test_a_planted_difference_is_found() -> None:
    found = compare(*table(3))["good"]
    assert found["gAUC"].low > 0.1
    assert found["AUC"].low > 0.1
    assert found["gAUC"].p < 1e-4
    assert found["gAUC"].p_holm == 2 * found["gAUC"].p


def test_a_single_run_says_nothing_of_newly_trained_ones() -> None:
    labels, users, scores = table(5)
    for pe in ("none", "good"):
        fewer = {**scores, pe: {0: scores[pe][0]}}
        for one in compare(labels, users, fewer)["good"].values():
            assert math.isfinite(one.value)
            assert one.users_low < one.value < one.users_high
            assert all(math.isnan(value) for value in (*one[1:6], one.least_detectable))
    assert not math.isnan(compare(labels, users, fewer)["same"]["gAUC"].p)


def test_users_with_one_class_have_no_gauc() -> None:
    labels, _, scores = table(4)
    found = compare(labels, np.arange(len(labels)), scores)["good"]
    assert all(math.isnan(value) for value in found["gAUC"])
    assert found["AUC"].low > 0
    assert all(math.isnan(value) for value in compare(labels * 0, labels, scores)["good"]["AUC"])


def test_refuses_without_a_baseline() -> None:
    labels, users, scores = table(5)
    for given in (scores, {**scores, "rope": {}}):
        with pytest.raises(UserError, match="no runs of 'rope'"):
            compare(labels, users, given, baseline="rope")
    assert compare(labels, users, {"none": scores["none"], "good": {}}) == {}


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, float("nan"), 0.02])[::2] == pytest.approx([0.9, 0.04])
    assert holm([]) == []


def test_mean_and_sd() -> None:
    assert mean_sd([1.0, 2.0, 3.0]) == (2.0, 1.0)
    assert math.isnan(mean_sd([1.0])[1])
