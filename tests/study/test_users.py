"""users/: enough for every interval without the scores, small, and never older than they are."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctr_pe.evaluation import evaluate
from ctr_pe.evaluation.metrics import METRICS
from ctr_pe.evaluation.users import Users, user_values
from ctr_pe.study.store import Store
from ctr_pe.study.users import STEPS, RunDistances, UserStatistics, save, user_statistics
from ctr_pe.utils.errors import UserError
from tests.support.fake_training import fill, jobs_of, result_of, rows_of_test, scores_of

DATA = "d" * 32


def test_values_are_those_of_the_scores_but_for_rounding(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store, jobs_of(seeds=3))
    user_statistics(store, DATA)
    found = user_statistics(store, DATA)  # read from the file
    labels, users = rows_of_test()
    clicked = labels == 1
    codes = np.unique(users, return_inverse=True)[1]
    np.testing.assert_array_equal(found.users, Users.of(clicked, codes, 40))
    assert found.values.keys() == {key.name for key in store.read()}
    for key in store.read():
        scores = scores_of(key.pe, key.seed).astype(np.float64)
        expected = user_values(clicked, scores, codes, 40)
        for metric in METRICS:
            step, _ = STEPS[metric]
            values = found.values[key.name][metric] * step
            np.testing.assert_allclose(values, expected[metric], atol=step / 2 + 1e-12)
            shares = found.users.shares[metric]
            assert values @ shares / shares.sum() == pytest.approx(evaluate(labels, scores, users)[metric], abs=0.001)


def test_the_file_is_small(tmp_path: Path) -> None:
    """About two bytes per user and run."""
    store, draw = Store(tmp_path), np.random.default_rng(0)
    users = np.repeat(np.arange(5000), 6)
    labels = draw.integers(0, 2, len(users))
    store.save_rows(DATA, labels, users)
    for job in jobs_of(["none"], seeds=10):
        scores = 1 / (1 + np.exp(-draw.normal(labels - 0.5)))
        store.append(result_of(job.key), scores)
    user_statistics(store, DATA)
    (file,) = (tmp_path / "users").iterdir()
    assert file.stat().st_size < 3 * 10 * 5000


def test_runs_are_added_and_newer_scores_replace_what_is_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    jobs = jobs_of(seeds=2)
    fill(store, jobs[:3])
    before = user_statistics(store, DATA)
    assert len(before.values) == 3
    for file in (tmp_path / "scores").glob("*-1-*"):  # those that are kept stay
        file.unlink()
    fill(store, jobs[3:])
    after = user_statistics(store, DATA)
    assert len(after.values) == 4
    again = jobs[2].key
    np.save(next((tmp_path / "scores").glob(f"{again.name}*")), scores_of("cape", 9))
    file = tmp_path / "users" / f"{DATA}.npz"
    os.utime(file, ns=(0, file.stat().st_mtime_ns - 10**9))
    newer = user_statistics(store, DATA)
    for key in (job.key for job in jobs):
        same = all((newer.values[key.name][metric] == after.values[key.name][metric]).all() for metric in METRICS)
        assert same == (key != again)


def test_the_logloss_of_the_click_rate_needs_no_scores(tmp_path: Path) -> None:
    store = Store(tmp_path)
    labels, users = rows_of_test()
    store.save_rows(DATA, labels, users, click_rate=0.4)
    fill(store, jobs_of())
    base = evaluate(labels, np.full(len(labels), 0.4), metrics="logloss")["logloss"]
    assert user_statistics(store, DATA).base_logloss == pytest.approx(base)
    for file in (tmp_path / "scores").iterdir():
        file.unlink()
    assert user_statistics(store, DATA).base_logloss == pytest.approx(base)
    assert np.isnan(UserStatistics().base_logloss)


def test_a_lost_or_broken_file_is_made_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert not user_statistics(store, DATA).values
    assert not (tmp_path / "users").exists()
    fill(store, jobs_of())
    whole = user_statistics(store, DATA)
    (file,) = (tmp_path / "users").iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert user_statistics(store, DATA).values.keys() == whole.values.keys()
    assert user_statistics(Store(tmp_path), "e" * 32).values == {}


@pytest.mark.parametrize("change", [None, {}, "runs", "gAUC", "rows", "positives", "click_rate"])
def test_a_broken_file_that_cannot_be_made_again_is_one_line(change: Any, tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store, jobs_of())
    user_statistics(store, DATA)
    shutil.rmtree(tmp_path / "scores")
    (file,) = (tmp_path / "users").iterdir()
    with np.load(file) as kept:
        content = dict(kept)
    if change is None:
        file.write_bytes(file.read_bytes()[:100])
    else:
        np.savez(file, **({**content, change: np.array([["x"]])} if change else {"x": np.zeros(1)}))
    with pytest.raises(UserError, match=r"\.npz: damaged \([^\n]{1,120}\): bring back a whole one, or remove it$"):
        user_statistics(store, DATA)
    if change:
        np.savez(file, **{name: of for name, of in content.items() if name != change})
        with pytest.raises(UserError, match="damaged"):
            user_statistics(store, DATA)


def test_distances_give_the_intervals_that_values_give(tmp_path: Path) -> None:
    """What is published: also for runs that are added to it, if all of them have values."""
    store = Store(tmp_path)
    fill(store, jobs_of(["none", "cape", "rope"], seeds=3))
    results = list(store.read().values())
    runs = {pe: {one.seed: one for one in results if one.pe == pe} for pe in ("none", "cape", "rope")}
    whole = user_statistics(store, DATA)
    names = [one.key.name for one in results]
    distances = {metric: whole.distances(names, metric) for metric in METRICS}
    file = tmp_path / "users" / f"{DATA}.npz"
    save(file, replace(whole, values={}, published=RunDistances(names, distances)))
    shutil.rmtree(tmp_path / "scores")
    kept = user_statistics(store, DATA)
    assert not kept.values
    assert file.stat().st_size < 10_000
    for metric in METRICS:
        for pe in ("cape", "rope"):
            expected = whole.difference(runs[pe], runs["none"], metric)
            assert kept.difference(runs[pe], runs["none"], metric) == pytest.approx(expected, nan_ok=True)
    fill(store, jobs_of(["none", "naive"], seeds=3))
    more = user_statistics(store, DATA)
    assert more.published.runs == names
    assert more.values.keys() == {key.name for key in store.read() if key.pe in ("none", "naive")}
    naive = {key.seed: one for key, one in store.read().items() if key.pe == "naive"}
    assert math.isfinite(more.difference(naive, runs["none"], "gAUC").low)
    assert math.isfinite(more.difference(runs["cape"], runs["none"], "gAUC").low)
    unknown = more.difference(naive, runs["cape"], "gAUC")  # a run with values and one with none
    assert math.isfinite(unknown.value)
    assert math.isnan(unknown.low)
    assert user_statistics(store, DATA).published.runs == names
    with np.load(file) as content:
        np.savez(file, **{**content, "gAUC_distances": content["gAUC_distances"][1:]})
    shutil.rmtree(tmp_path / "scores")
    with pytest.raises(UserError, match="damaged"):
        user_statistics(store, DATA)


@pytest.mark.parametrize("name", ["labels", "users"])
def test_labels_of_another_shape_are_none(name: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store, jobs_of())
    file = tmp_path / "scores" / f"rows-{DATA}.npz"
    with np.load(file) as kept:
        content = dict(kept)
    np.savez(file, **{**content, name: content[name][:-1]})
    assert store.rows(DATA) is None
    assert user_statistics(store, DATA).values == {}
