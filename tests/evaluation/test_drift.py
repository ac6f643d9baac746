"""Drift: the index of a column's shift and what chance makes of it, bins, calibration, intervals over users."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from ctr_pe.evaluation.calibration import reliability
from ctr_pe.evaluation.drift import LEVEL, equal_bins, psi, psi_by_chance, quantile_edges
from ctr_pe.evaluation.metrics import evaluate
from ctr_pe.evaluation.paired import over_users
from ctr_pe.evaluation.users import Users, user_values


def test_the_index_is_the_symmetrised_divergence_of_the_shares() -> None:
    p, q = np.array([300.5, 700.5]), np.array([500.5, 500.5])
    p, q = p / p.sum(), q / q.sum()
    assert psi([300, 700], [500, 500]) == pytest.approx(stats.entropy(p, q) + stats.entropy(q, p))
    assert psi([3, 7], [30, 70]) == pytest.approx(0, abs=1e-2)
    assert psi([5, 5], [5, 5]) == 0
    assert np.isfinite(psi([10, 0], [0, 10]))
    assert np.isnan(psi([0, 0], [1, 2]))


def test_chance_exceeds_its_limit_as_rarely_as_it_says() -> None:
    draw = np.random.default_rng(0)
    shares, trained, new = draw.dirichlet(np.full(10, 20.0)), 20_000, 3_000
    found = [psi(draw.multinomial(trained, shares), draw.multinomial(new, shares)) for _ in range(4000)]
    above = np.mean(np.array(found) > psi_by_chance(10, trained, new))
    assert above < 4 * LEVEL
    assert np.mean(found) == pytest.approx(9 * (1 / trained + 1 / new), rel=0.05)
    assert psi_by_chance(1, 10, 10) == 0


def test_bins_hold_equally_many_rows() -> None:
    counts = np.random.default_rng(0).integers(1, 50, 500)
    bins = equal_bins(counts)
    assert (np.diff(bins) >= 0).all()
    assert set(bins) == set(range(10))
    assert np.ptp(np.bincount(bins, counts)) < 100
    assert equal_bins([900, 50, 50]).tolist() == [0, 1, 1]
    values = np.repeat([0.0, 1.0, 2.0], [50, 30, 20])
    assert quantile_edges(values, 10).tolist() == [0, 1, 2, np.inf]


def test_an_interval_over_users_is_that_of_their_mean_where_each_has_a_row() -> None:
    values = np.random.default_rng(0).normal(size=40)
    found = over_users(values, np.full(40, 1 / 40))
    low, high = stats.t.interval(0.95, 39, values.mean(), stats.sem(values))
    assert found == pytest.approx((values.mean(), low, high))


def test_metrics_of_users_have_the_value_of_the_metric() -> None:
    draw = np.random.default_rng(0)
    clicked, scores, users = draw.random(900) < 0.3, draw.random(900), draw.integers(0, 70, 900)
    shares = Users.of(clicked, users, 70).shares
    for name, values in user_values(clicked, scores, users, 70).items():
        found = over_users(values, shares[name])
        assert found.value == pytest.approx(evaluate(clicked, scores, users)[name])
        assert found.low < found.value < found.high
    alone = np.zeros(5, np.int64)
    nobody = Users.of(np.ones(5, bool), alone, 1).shares["gAUC"]
    assert np.isnan(over_users(np.zeros(1), nobody)).all()
    assert np.isnan(over_users(np.ones(1), np.ones(1))[1:]).all()  # one user says nothing about others


def test_reliability_has_all_rows_and_their_means() -> None:
    draw = np.random.default_rng(0)
    scores = np.round(draw.random(1000), 2)
    clicked = draw.random(1000) < scores
    found = reliability(clicked, scores)
    assert sum(found.rows) == 1000
    assert np.average(found.predicted, weights=found.rows) == pytest.approx(scores.mean())
    assert np.average(found.observed, weights=found.rows) == pytest.approx(clicked.mean())
    assert found.error < 0.08
    assert len(reliability([0, 1], [0.5, 0.5]).rows) == 1
