"""Paired statistics: equal to plain loops, and honest about what is chance."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from ctr_pe.errors import UserError
from ctr_pe.evaluation import evaluate
from ctr_pe.evaluation.metrics import METRICS
from ctr_pe.evaluation.paired import compare, draw_users, holm, mean_sd, seeds_won

Scores = dict[str, dict[int, npt.NDArray[np.float64]]]


def table(seed: int, users: int = 40, rows: int = 6) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Scores]:
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


def test_equal_to_a_loop_that_copies_the_rows() -> None:
    labels, users, scores = table(0, users=15)
    del scores["good"][1]  # an encoding with fewer seeds is compared on those it has
    found = compare(labels, users * 3 + 7, scores, resamples=30, seed=5)
    counts = np.concatenate(list(draw_users(15, 30, 5))).astype(int)
    assert (counts.sum(1) == 15).all()
    for name in ("same", "good"):
        for metric in METRICS:
            resampled = []
            for count in counts:
                copies = [(user, copy) for user in range(15) for copy in range(count[user])]
                rows = np.concatenate([np.flatnonzero(users == user) for user, _ in copies])
                group = np.concatenate([np.full((users == user).sum(), i) for i, (user, _) in enumerate(copies)])
                resampled.append(
                    np.mean(
                        [
                            evaluate(labels[rows], scores[name][s][rows], group)[metric]
                            - evaluate(labels[rows], scores["none"][s][rows], group)[metric]
                            for s in scores[name]
                        ]
                    )
                )
            d = np.array(resampled)
            low, high = np.percentile(d, [2.5, 97.5])
            p = min(1, 2 * (1 + min((d <= 0).sum(), (d >= 0).sum())) / 31)
            observed = np.mean(
                [
                    evaluate(labels, scores[name][s], users)[metric]
                    - evaluate(labels, scores["none"][s], users)[metric]
                    for s in scores[name]
                ]
            )
            assert found[name][metric][:4] == pytest.approx((observed, low, high, p), abs=1e-12)
    for metric in METRICS:
        raw = [found[name][metric].p for name in found]
        assert [found[name][metric].p_holm for name in found] == holm(raw)


def test_result_does_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    labels, users, scores = table(1)
    whole = compare(labels, users, scores, resamples=50)
    monkeypatch.setattr("ctr_pe.evaluation.paired.CELLS", 300)
    for name, metrics in compare(labels, users, scores, resamples=50).items():
        for metric, difference in metrics.items():
            assert difference == pytest.approx(whole[name][metric], abs=1e-12)


def test_identical_runs_differ_by_exactly_nothing() -> None:
    labels, users, scores = table(2)
    for difference in compare(labels, users, {"none": scores["good"], "copy": scores["good"]})["copy"].values():
        assert difference == (0, 0, 0, 1, 1)


def test_a_planted_difference_is_found() -> None:
    labels, users, scores = table(3)
    found = compare(labels, users, scores)["good"]
    assert found["gAUC"].low > 0.1
    assert found["AUC"].low > 0.1
    assert found["gAUC"].p == pytest.approx(2 / 1001)
    assert found["gAUC"].p_holm == pytest.approx(4 / 1001)


def test_chance_is_called_significant_about_one_time_in_twenty() -> None:
    tables = [table(seed, users=60) for seed in range(100, 260)]
    p = [compare(y, u, {"none": s["none"], "same": s["same"]}, resamples=200)["same"] for y, u, s in tables]
    for metric in ("gAUC", "AUC"):
        assert 0 < sum(found[metric].p < 0.05 for found in p) <= 20  # 8 expected; P(> 20) < 1e-4


def test_single_rows_make_the_bootstrap_resample_rows() -> None:
    labels, _, scores = table(4)
    found = compare(labels, np.arange(len(labels)), scores, resamples=20)["good"]
    assert all(math.isnan(value) for value in found["gAUC"])
    assert found["AUC"].low > 0


def test_refuses_without_a_baseline() -> None:
    labels, users, scores = table(5)
    with pytest.raises(UserError, match="no runs of 'rope'"):
        compare(labels, users, scores, baseline="rope")
    assert compare(labels, users, {"none": scores["none"], "good": {9: scores["good"][0]}}) == {}


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, float("nan"), 0.02])[::2] == pytest.approx([0.9, 0.04])
    assert holm([]) == []


def test_mean_sd_and_seeds_won() -> None:
    assert mean_sd([1.0, 2.0, 3.0]) == (2.0, 1.0)
    assert math.isnan(mean_sd([1.0])[1])
    assert seeds_won({1: 0.5, 2: 0.7, 4: 1.0}, {1: 0.5, 2: 0.6, 3: 0.0}, "gAUC") == (1, 2)
    assert seeds_won({1: 0.5, 2: 0.7, 3: 0.5}, {1: 0.6, 2: 0.6, 3: 0.6}, "logloss") == (2, 3)
