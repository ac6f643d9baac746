"""The generated set in which context counts: its documented effect, and that nothing but context tells the label."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest

from ctr_pe.data.dataset import Dataset
from ctr_pe.data.synthetic.context import generate
from ctr_pe.evaluation import evaluate
from ctr_pe.utils.errors import UserError

SMALL: dict[str, Any] = {"users": 60, "valid_users": 20, "test_users": 30}
SCORES = ("unlike_since", "distance", "length", "like", "unlike", "age", "newest_age", "popularity")
Floats = npt.NDArray[np.float64]


class Known(NamedTuple):
    """Of the rows of a split, from its columns alone: what a score may use."""

    label: npt.NDArray[Any]
    user: npt.NDArray[Any]
    of: dict[str, npt.NDArray[Any]]


def known(data: Dataset, split: str) -> Known:
    rows = pl.read_parquet(data.split(split))
    of: dict[str, list[float]] = {name: [] for name in SCORES}
    for row in rows.iter_rows(named=True):
        like = np.array(row["cate_history"]) == row["cate_id"]
        relevant = row["item_history"].index(row["item_id"])
        of["unlike_since"].append(np.sum(~like[relevant + 1 :]))
        of["distance"].append(len(like) - 1 - relevant)
        of["length"].append(len(like))
        of["like"].append(np.sum(like))
        of["unlike"].append(np.sum(~like))
        of["age"].append(row["age_history"][relevant])
        of["newest_age"].append(row["age_history"][-1])
        of["popularity"].append(row["item_id"])
    arrays = {name: np.array(values) for name, values in of.items()}
    return Known(rows["label"].to_numpy(), rows["user_id"].to_numpy(), arrays)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The set that ``ctr-pe benchmark`` takes."""
    return generate(tmp_path_factory.mktemp("data") / "synthetic_context")


@pytest.fixture(scope="module")
def train(full: Dataset) -> Known:
    return known(full, "train")


def expected_auc(score: Any) -> float:
    """Of a score of (u, l), over all pairs of a clicked and another request: of every user's AUC, too."""
    cells = [(u, since, 0.9 if u <= 3 else 0.1) for u in range(11) for since in range(21)]
    ranked = total = 0.0
    for (u, since, clicked), (v, other, also) in itertools.product(cells, cells):
        pair = clicked * (1 - also)
        total += pair
        ranked += pair * (np.sign(score(u, since) - score(v, other)) + 1) / 2
    return ranked / total


def gauc_of(found: Known, score: npt.NDArray[Any]) -> tuple[float, float]:
    """gAUC, and its standard error over users."""
    values, sizes = [], []
    for user in np.unique(found.user):
        own = found.user == user
        label, of_user = found.label[own], score[own]
        if 0 < label.sum() < len(label):
            ranks = np.sign(of_user[label == 1][:, None] - of_user[label == 0]) + 1
            values.append(ranks.mean() / 2)
            sizes.append(len(label))
    weights = np.array(sizes) / sum(sizes)
    mean = float(weights @ np.array(values))
    assert mean == pytest.approx(evaluate(found.label, score.astype(float), found.user, metrics="gAUC")["gAUC"])
    return mean, float(np.sqrt(np.sum(weights**2 * (np.array(values) - mean) ** 2)))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCORES)
def test_what_scores_reach_is_what_the_documentation_says(name: str, train: Known) -> None:
    """The labels depend on u alone: of the other things only the distance, which is u + l, tells some of it."""
    expected = {"unlike_since": expected_auc(lambda u, _: -u), "distance": expected_auc(lambda u, since: -u - since)}
    found, error = gauc_of(train, -train.of[name])
    assert error < 0.004
    assert abs(found - expected.get(name, 0.5)) < 4 * error
    documented = {"unlike_since": 0.889, "distance": 0.672}
    assert expected.get(name, 0.5) == pytest.approx(documented.get(name, 0.5), abs=5e-4)


def test_labels_follow_the_number_of_unlike_items(train: Known) -> None:
    for u in range(11):
        chosen = train.of["unlike_since"] == u
        assert abs(chosen.mean() - 1 / 11) < 4 * math.sqrt(1 / 11 / len(chosen))
        assert abs(train.label[chosen].mean() - (0.9 if u <= 3 else 0.1)) < 4 * 0.3 / math.sqrt(chosen.sum())


def test_the_number_of_unlike_items_is_independent_of_all_but_the_distance(train: Known) -> None:
    """Not only the order of scores: u is uncorrelated with any power of them, and with the like items since."""
    u = train.of["unlike_since"] - 5.0
    others = {name: train.of[name] for name in SCORES[2:]} | {"like_since": train.of["distance"] - u}
    for name, values in others.items():
        for power in (1, 2):
            centred = (values - values.mean()) ** power
            correlation = np.corrcoef(u, centred)[0, 1]
            assert abs(correlation) < 4 / math.sqrt(len(u)), (name, power)
    assert np.ptp(others["like_since"]) == 20


def test_histories_hold_what_the_documentation_says(full: Dataset) -> None:
    rows = pl.read_parquet(full.split("valid"))
    like_since, extra = [], []
    for row in rows.iter_rows(named=True):
        items, categories, ages = (np.array(row[f"{name}_history"]) for name in ("item", "cate", "age"))
        like = categories == row["cate_id"]
        assert (items == row["item_id"]).sum() == 1
        assert like.sum() >= 21
        assert (~like).sum() >= 10
        extra.append(len(items) - 31)
        assert (np.diff(ages) < 0).all()
        assert 86_400 <= ages[-1] <= 30 * 86_400
        assert ages[0] - ages[-1] < 3 * 3600
        relevant = row["item_history"].index(row["item_id"])
        like_since.append(like[relevant + 1 :].sum())
        assert like_since[-1] <= 20
        assert (~like[relevant + 1 :]).sum() <= 10
    assert set(extra) == set(range(9))
    assert set(like_since) == set(range(21))
    assert rows["cate_history"].explode(empty_as_null=False).n_unique() == 20
    vocab = json.loads((full.path / "feature_vocab.json").read_text())
    assert (len(vocab["item_id"]), len(vocab["cate_id"])) == (102, 22)
    category = {number: int(name) for name, number in vocab["cate_id"].items() if name.isdigit()}
    original = {number: int(name) for name, number in vocab["item_id"].items() if name.isdigit()}
    pairs = rows.select(pl.col("item_history", "cate_history").explode(empty_as_null=False)).unique()
    assert all(original[item] % 20 == category[cate] for item, cate in pairs.rows())


@pytest.mark.slow
def test_later_items_are_in_random_order(full: Dataset) -> None:
    """Where among the items since the relevant one the unlike ones are says nothing."""
    places: list[float] = []
    for row in pl.read_parquet(full.split("train")).iter_rows(named=True):
        like = np.array(row["cate_history"][row["item_history"].index(row["item_id"]) + 1 :]) == row["cate_id"]
        if 0 < like.sum() < len(like):
            places.append(np.flatnonzero(~like).mean() / (len(like) - 1))
    assert abs(np.mean(places) - 0.5) < 4 * np.std(places) / math.sqrt(len(places))


def test_the_default_is_the_documented_set(full: Dataset) -> None:
    assert full.dataset_id == "synthetic_context"
    assert full.rows == {"train": 40_000, "valid": 6_000, "test": 12_000}
    assert full.max_len == 39
    label = pl.read_parquet(full.split("test"))["label"]
    assert abs(label.mean() - (4 * 0.9 + 7 * 0.1) / 11) < 4 * 0.5 / math.sqrt(len(label))  # type: ignore[operator]


def test_users_have_several_requests_of_both_classes_and_no_user_is_in_two_splits(full: Dataset) -> None:
    users: list[set[int]] = []
    for split in full.rows:
        rows = pl.read_parquet(full.split(split))
        counts = rows.group_by("user_id").agg(pl.len(), both=pl.col("label").n_unique() == 2)
        assert set(counts["len"]) == {8}
        assert counts["both"].mean() > 0.9  # type: ignore[operator]
        assert rows["item_history"].n_unique() == len(rows)  # each request has its own
        users.append(set(rows["user_id"]))
    assert [len(of_split) for of_split in users] == [5000, 750, 1500]
    assert len(set.union(*users)) == 7250


def test_the_same_arguments_give_the_same_data(tmp_path: Path) -> None:
    first, again = generate(tmp_path / "a", **SMALL), generate(tmp_path / "b", **SMALL)
    assert first.data_hash == again.data_hash
    others = [generate(tmp_path / f"c{seed}", **SMALL, seed=seed).data_hash for seed in (1, 2)]
    assert len({first.data_hash, *others}) == 3


def test_ids_are_of_the_train_rows_by_falling_frequency(tmp_path: Path) -> None:
    few = {"users": 2, "requests": 2, "valid_users": 30, "test_users": 30, "items": 400, "categories": 40}
    data = generate(tmp_path / "few", **few)
    train, test = (pl.read_parquet(data.split(split)) for split in ("train", "test"))
    for name in ("item", "cate"):
        counts = np.bincount([*train[f"{name}_id"], *train[f"{name}_history"].explode(empty_as_null=False)])
        assert counts[0] == 0
        assert (np.diff(counts[1:].astype(np.int64)) <= 0).all()
        assert counts[-1] > 0
        ids = [*test[f"{name}_id"], *test[f"{name}_history"].explode(empty_as_null=False)]
        assert max(ids) == len(counts)  # unseen


@pytest.mark.slow
def test_order_tells_nothing_in_the_shuffled_control(tmp_path: Path) -> None:
    shuffled = generate(tmp_path / "shuffled", users=1500, shuffled=True)
    found = known(shuffled, "train")
    for name in SCORES:
        reached, error = gauc_of(found, -found.of[name])
        assert abs(reached - 0.5) < 4 * error, name


def test_shuffled_histories_have_the_same_items_elsewhere(tmp_path: Path) -> None:
    ordered, mixed = (generate(tmp_path / str(on), **SMALL, shuffled=on) for on in (False, True))
    for split in ordered.rows:
        first, second = pl.read_parquet(ordered.split(split)), pl.read_parquet(mixed.split(split))
        kept = ["label", "user_id", "item_id", "cate_id", "age_history"]
        assert first.select(kept).equals(second.select(kept))
        pairs = [
            rows.select(
                pl.concat_list(pl.col("item_history").cast(pl.List(pl.Int64)) * 1000 + pl.col("cate_history"))
                .alias("pairs")
            )["pairs"]
            for rows in (first, second)
        ]  # fmt: skip
        assert pairs[0].list.sort().equals(pairs[1].list.sort())
        assert (pairs[0] != pairs[1]).mean() > 0.99  # type: ignore[operator]
    again = generate(tmp_path / "again", **SMALL, shuffled=True)
    assert again.data_hash == mixed.data_hash


def test_shapes_follow_the_parameters(tmp_path: Path) -> None:
    shape = {"items": 31, "categories": 10, "requests": 3, "like": 4, "unlike": 6, "near": 0, "older": 0}
    data = generate(tmp_path / "shaped", **SMALL | {"users": 700}, **shape)
    found = known(data, "train")
    assert data.rows == {"train": 2100, "valid": 60, "test": 90}
    assert data.max_len == 11
    for name, value in {"length": 11, "like": 5, "unlike": 6}.items():
        assert set(found.of[name]) == {value}
    clicked = [found.label[found.of["unlike_since"] == u].mean() for u in (0, 1, 6)]
    np.testing.assert_allclose(clicked, [0.9, 0.1, 0.1], atol=0.08)
    assert set(pl.read_parquet(data.split("train"))["item_id"]) == set(range(1, 32))


@pytest.mark.parametrize(
    "wrong",
    [{"users": 0}, {"requests": 0}, {"like": 0}, {"near": 10}, {"older": -1}, {"categories": 1}, {"items": 39}],
)
def test_impossible_shapes_are_one_line(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(wrong))} {next(iter(wrong.values()))}") as caught:
        generate(tmp_path / "synthetic_context", **SMALL | wrong)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
