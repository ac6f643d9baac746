"""The generated set in which elapsed time counts: its documented effect, and that encodings by time see it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from ctr_pe.config.yaml import model_params
from ctr_pe.data.dataset import Dataset
from ctr_pe.data.synthetic import bursts
from ctr_pe.data.synthetic.bursts import Clicks, Requests, click_probability, generate
from ctr_pe.training import Run, train

DAY = 86_400
SMALL: dict[str, Any] = {"users": 1500, "valid_users": 40, "test_users": 60, "items": 200, "categories": 10}


def planted(target: int, history: list[int], ages: list[int]) -> float:
    """The formula of the documentation, item by item."""
    nearness = sum(0.5 ** (age / (DAY / 2)) for category, age in zip(history, ages, strict=True) if category == target)
    return 1 / (1 + math.exp(-(2.2 * min(nearness, 3.0) - 1.6)))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return generate(tmp_path_factory.mktemp("data") / "synthetic_time", **SMALL, timed=True)


@pytest.fixture(scope="module")
def rows(data: Dataset) -> pl.DataFrame:
    return pl.read_parquet(data.split("train"))


def test_the_probability_is_the_documented_formula() -> None:
    rng = np.random.default_rng(0)
    histories = [rng.integers(0, 4, n) for n in (1, 2, 5, 30)] + [np.ones(8, int)]  # the last reaches the cap
    starts, flat = np.cumsum([0] + [len(history) for history in histories]), np.concatenate(histories)
    clicked = np.cumsum(rng.integers(0, DAY // 3, len(flat)))
    asked = clicked[starts[1:] - 1][:, None] + rng.integers(0, DAY, (5, 6)).cumsum(1)
    targets = np.vstack([rng.integers(0, 5, (4, 6)), np.ones((1, 6), int)])
    expected = [
        [
            planted(target, history.tolist(), (at - clicked[starts[user] : starts[user + 1]]).tolist())
            for target, at in zip(targets[user], asked[user], strict=True)
        ]
        for user, history in enumerate(histories)
    ]
    got = click_probability(targets, Clicks(starts, flat, flat, clicked), asked)
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_labels_follow_the_formula(rows: pl.DataFrame) -> None:
    columns = (rows[name].to_list() for name in ("cate_id", "cate_history", "age_history"))
    probability = np.array([planted(*row) for row in zip(*columns, strict=True)])
    label = rows["label"].to_numpy()
    for low, high in ((0, 0.2), (0.2, 0.5), (0.5, 0.8), (0.8, 1)):
        chosen = (probability >= low) & (probability < high)
        error = math.sqrt(0.25 / chosen.sum())
        assert abs(label[chosen].mean() - probability[chosen].mean()) < 4 * error
    assert np.ptp(probability) > 0.7
    assert 0.3 < label.mean() < 0.6


def test_pauses_depend_on_the_user_and_on_nothing_that_order_shows(rows: pl.DataFrame) -> None:
    users = rows.unique("user_id", maintain_order=True)
    gaps = [-np.diff(ages) for ages in users["age_history"].to_list()]
    changes = np.concatenate([np.diff(categories) != 0 for categories in users["cate_history"].to_list()])
    paused = np.concatenate(gaps) > DAY
    assert abs(paused[changes].mean() - paused[~changes].mean()) < 0.02
    assert abs(paused.mean() - 0.275) < 0.02
    often = [np.mean(gap > DAY) for gap in gaps if len(gap) > 30]
    assert min(often) < 0.15
    assert max(often) > 0.4
    assert np.median(np.concatenate(gaps)[~paused]) < 600


def test_it_is_a_set_of_its_own(data: Dataset, tmp_path: Path) -> None:
    assert data.dataset_id == "synthetic_time"
    assert generate(tmp_path / "again", **SMALL, timed=True).data_hash == data.data_hash
    assert generate(tmp_path / "synthetic", **SMALL).data_hash != data.data_hash


def shuffled_pauses(users: slice, clicks: Clicks, asked: Requests, rows: Any = bursts._rows) -> Any:
    """The same clicks and labels, all pauses between clicks in another order: ages tell nothing about the labels that
    order does not."""
    pauses = np.random.default_rng(0).permutation(np.diff(clicks.at, prepend=0))
    shift = np.cumsum(pauses) - clicks.at
    waited = asked.at + shift[clicks.starts[1:] - 1][:, None]
    return rows(users, replace(clicks, at=clicks.at + shift), replace(asked, at=waited))


SHAPE = {"users": 2000, "valid_users": 200, "test_users": 800, "items": 120, "categories": 12, "timed": True}


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return generate(tmp_path_factory.mktemp("data") / "timed", **SHAPE)


@cache
def auc(data: Path, seed: int, encoding: str) -> float:
    params = model_params("DIN", "synthetic_time", {"embedding_dim": 8, "learning_rate": 0.01})
    return train(Run("DIN", data, encoding, seed, "heldout", params, -1, 1)).metrics["AUC"]


@pytest.mark.slow
def test_encodings_by_time_lead_where_time_counts(
    timed: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By .02 AUC or more at every seed (.03 to .04 as a rule); with shuffled times the lead is gone."""
    best_by_order = max(auc(timed.path, 1, encoding) for encoding in ("rope", "cape"))
    by_time = ("time_bias", "cape_time")
    assert min(auc(timed.path, 1, encoding) for encoding in by_time) > best_by_order + 0.02

    monkeypatch.setattr(bursts, "_rows", shuffled_pauses)  # the order stays, and so what was seen of it
    shuffled = generate(tmp_path / "shuffled", **SHAPE)
    assert max(auc(shuffled.path, 1, encoding) for encoding in by_time) < best_by_order + 0.015


@pytest.mark.slow
def test_turning_by_time_leads_turning_by_order(timed: Dataset) -> None:
    """By .03 AUC on the mean of three seeds; single ones are from .02 to .045 apart."""
    leads = [auc(timed.path, seed, "time_rope") - auc(timed.path, seed, "rope") for seed in (1, 2, 3)]
    assert np.mean(leads) > 0.03
