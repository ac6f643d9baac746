"""benchmark/where.py: users by what their histories are like, and the same differences as in the tables."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from benchmark import published, where
from ctr_pe.data.dataset import Dataset, open_dataset
from ctr_pe.data.synthetic.bursts import generate
from ctr_pe.study.benchmark import keep_rows
from ctr_pe.study.differences import settings
from ctr_pe.study.store import Result, Store


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    out = tmp_path_factory.mktemp("data") / "synthetic"
    generate(out, users=150, valid_users=20, test_users=60)
    return open_dataset(str(out))


@pytest.fixture
def store(dataset: Dataset, tmp_path: Path) -> Store:
    """Two runs each of none, and of naive, which knows the labels of users with long histories."""
    store = Store(tmp_path)
    keep_rows(store, dataset)
    about, draw = store.about(dataset.data_hash), np.random.default_rng(0)
    for pe in ("none", "naive"):
        for seed in range(2):
            known = (about["lengths"] > np.median(about["lengths"])) & (pe == "naive")
            scores = draw.uniform(0.1, 0.9, len(known)) + 5 * known * (about["labels"] - 0.5)
            store.append(_result(dataset, pe, seed), (1 / (1 + np.exp(-scores))).astype(np.float32))
    return store


def _result(dataset: Dataset, pe: str, seed: int) -> Result:
    metrics = {"gAUC": 0.5, "AUC": 0.5, "logloss": 0.7}
    run = ("DIN", dataset.dataset_id, pe, seed, "heldout", metrics, 1, "c" * 16, dataset.data_hash)
    return Result(*run, revision=None, versions={}, seconds=1.0, threads=1, parameters=1, finished="2026-01-01")


def test_facts_are_those_of_the_rows(dataset: Dataset) -> None:
    rows = pl.read_parquet(dataset.split("test")).to_dicts()
    (group,) = dataset.groups
    facts = where.of_users(dataset)
    assert facts["user_id"].to_list() == sorted({row["user_id"] for row in rows})
    for fact in facts.to_dicts():
        clicked = [row for row in rows if row["user_id"] == fact["user_id"] and row["label"]]
        histories = [[item for item in row[group.history[-1]] if item] for row in clicked]
        unlike = [
            next((n for n, item in enumerate(reversed(items)) if item == row[group.target[-1]]), np.inf)
            for row, items in zip(clicked, histories, strict=True)
        ]
        expected = (np.mean([len(items) for items in histories]), np.mean(unlike)) if clicked else (None, None)
        assert (fact["length"], fact["unlike"]) == pytest.approx(expected)


def test_an_item_without_a_category_counts_in_its_history(dataset: Dataset, tmp_path: Path) -> None:
    (group,) = dataset.groups
    category, column = group.target[-1], group.history[-1]
    rows = pl.read_parquet(dataset.split("test"))
    missing = pl.when(pl.element().cum_count() == 1).then(0).otherwise(pl.element())
    rows.with_columns(pl.col(column).list.eval(missing)).write_parquet(tmp_path / "test.parquet")
    before, after = (where.of_users(one) for one in (dataset, dataset.model_copy(update={"path": tmp_path})))
    for fact in ("length", "age", "tied"):
        assert after[fact].equals(before[fact])
    assert not after["unlike"].equals(before["unlike"])
    rows.with_columns(pl.lit(0).cast(rows[category].dtype).alias(category)).write_parquet(tmp_path / "test.parquet")
    assert where.of_users(dataset.model_copy(update={"path": tmp_path}))["unlike"].drop_nulls().is_infinite().all()


def test_bins_of_a_fact_have_every_user_once(dataset: Dataset) -> None:
    facts = where.of_users(dataset)
    found = list(where.bins(facts))
    for fact in ("length", "unlike", "age"):
        members = sum(some.users.astype(int) for some in found if some.fact == fact)
        assert (members == facts[fact].is_not_null().to_numpy()).all()
    (tied, differ) = (some.users for some in found if some.fact == "tied")
    assert not (tied & differ).any()


def test_a_difference_is_found_where_it_is(store: Store, dataset: Dataset) -> None:
    (setting,) = settings(store)
    found = {some.name: some for some in where.bins(where.of_users(dataset))}
    lengths = [some for some in found.values() if some.fact == "length"]
    short, long = (where.among(setting, lengths[at]).gain("naive") for at in (0, -1))
    assert short.low < 0 < short.high < long.value
    assert long.users_low > 0
    whole = where.among(setting, found["all users"]).gain("naive")
    table = setting.differences("none")["naive"]["gAUC"]
    assert whole.users_high - whole.users_low == pytest.approx(table.users_high - table.users_low, rel=1e-6)


def test_what_is_published_says_the_same(store: Store, dataset: Dataset) -> None:
    (live,) = settings(store)
    before = where.bins_of(store, live, dataset.path.parent)
    published.publish(store)
    shutil.rmtree(store.path / "scores")
    assert {file.name for file in (store.path / "users").iterdir()} == {f"{dataset.data_hash}.npz", where.PUBLISHED}
    (setting,) = settings(store)
    assert not setting.statistics.values
    for metric, one in live.differences("none")["naive"].items():
        assert setting.differences("none")["naive"][metric] == pytest.approx(one)
    after = where.bins_of(store, setting)
    assert [(some.name, some.users) for some in after] == [(some.name, some.users) for some in before]
    for live_bin, kept in zip(before, after, strict=True):
        assert kept.gain("naive") == pytest.approx(live_bin.gain("naive"), nan_ok=True)


@pytest.mark.slow
def test_the_command_writes_tables_and_figures(
    store: Store, dataset: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    assert where.main([str(store.path), "--data-root", str(dataset.path.parent)]) == 0
    assert "over" in capsys.readouterr().out
    assert "all users" in (store.path / "where.md").read_text(encoding="utf-8")
    assert (store.path / "where-DIN-synthetic.png").stat().st_size > 10_000


def test_other_data_are_refused(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate(tmp_path / "data" / "synthetic", users=150, valid_users=20, test_users=50)
    assert where.main([str(store.path), "--data-root", str(tmp_path / "data")]) == 2
    assert "is not the data that the runs were tested on" in capsys.readouterr().err
