"""The generated set: reproducible, of the shape asked for, and with the documented effect."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from ctr_pe.data.synthetic.bursts import Clicks, click_probability, generate
from ctr_pe.utils.errors import UserError

SMALL: dict[str, Any] = {"users": 300, "valid_users": 40, "test_users": 60, "items": 200, "categories": 10}


def read(path: Path) -> Any:
    return pl.read_parquet(path)


def test_the_same_arguments_give_the_same_data(tmp_path: Path) -> None:
    first, again = generate(tmp_path / "a", **SMALL), generate(tmp_path / "b", **SMALL)
    assert first.data_hash == again.data_hash
    others = [generate(tmp_path / f"c{seed}", **SMALL, seed=seed).data_hash for seed in (1, 2)]
    assert len({first.data_hash, *others}) == 3


def planted(target: int, history: list[int]) -> float:
    """The formula of the documentation, item by item."""
    nearness = 0.0
    for i, category in enumerate(history):
        if category == target:
            nearness += 0.6 ** sum(later != target for later in history[i + 1 :])
    return 1 / (1 + math.exp(-(2.2 * min(nearness, 3.0) - 1.6)))


def test_the_probability_is_the_documented_formula() -> None:
    rng = np.random.default_rng(0)
    histories = [rng.integers(0, 4, n).tolist() for n in (1, 2, 5, 30)] + [[1] * 8 + [2]]  # the last reaches the cap
    starts = np.cumsum([0] + [len(history) for history in histories])
    flat = np.concatenate(histories)
    targets = np.vstack([rng.integers(0, 5, (4, 6)), np.ones((1, 6), int)])
    expected = [[planted(target, history) for target in row] for row, history in zip(targets, histories, strict=True)]
    np.testing.assert_allclose(click_probability(targets, Clicks(starts, flat, flat, flat)), expected, rtol=1e-12)


def test_labels_follow_the_formula(tmp_path: Path) -> None:
    rows = read(generate(tmp_path / "synthetic", **SMALL | {"users": 1500}).split("train"))
    probability = np.array(
        [planted(*row) for row in zip(rows["cate_id"].to_list(), rows["cate_history"].to_list(), strict=True)]
    )
    label = rows["label"].to_numpy()
    for low, high in ((0, 0.2), (0.2, 0.5), (0.5, 0.8), (0.8, 1)):
        chosen = (probability >= low) & (probability < high)
        error = math.sqrt(0.25 / chosen.sum())
        assert abs(label[chosen].mean() - probability[chosen].mean()) < 4 * error
    assert np.ptp(probability) > 0.7


def test_no_user_is_in_two_splits_and_requests_come_after_the_history(tmp_path: Path) -> None:
    data = generate(tmp_path / "synthetic", **SMALL, requests=3)
    splits = {name: read(data.split(name)) for name in data.rows}
    assert data.rows == {"train": 900, "valid": 120, "test": 180} == {n: len(rows) for n, rows in splits.items()}
    users = {name: set(rows["user_id"]) for name, rows in splits.items()}
    assert [len(users[name]) for name in ("train", "valid", "test")] == [300, 40, 60]
    assert len(set.union(*users.values())) == 400
    for rows in splits.values():
        for row in rows.iter_rows(named=True):
            ages = row["age_history"]
            assert len(ages) == len(row["item_history"]) == len(row["cate_history"])
            assert ages == sorted(ages, reverse=True)
            assert ages[-1] > 0


def test_ids_are_by_falling_frequency_in_the_train_rows(tmp_path: Path) -> None:
    data = generate(tmp_path / "synthetic", **SMALL | {"users": 12, "items": 1000})  # so few that test has unseen items
    train, test = read(data.split("train")), read(data.split("test"))
    counts = np.bincount([*train["item_id"], *train["item_history"].explode()])
    known = len(counts) - 1
    assert counts[0] == 0
    assert (np.diff(counts[1:].astype(np.int64)) <= 0).all()
    assert counts[-1] > 0
    features = {
        k: v for x in json.loads((data.path / "feature_map.json").read_text())["features"] for k, v in x.items()
    }
    assert features["item_id"]["oov_idx"] == known + 1 == features["item_history"]["vocab_size"] - 1
    assert max(test["item_id"].max(), test["item_history"].explode().max()) == known + 1
    vocab = json.loads((data.path / "feature_vocab.json").read_text())["item_id"]
    assert sorted(vocab.values()) == list(range(known + 2))
    # an item's number tells its category: item i is of category i mod 10
    original = {number: name for name, number in vocab.items()}
    category = {n: c for c, n in json.loads((data.path / "feature_vocab.json").read_text())["cate_id"].items()}
    for item, cate in zip(train["item_id"], train["cate_id"], strict=True):
        assert int(original[item]) % 10 == int(category[cate])


def test_shapes_follow_the_parameters(tmp_path: Path) -> None:
    data = generate(tmp_path / "synthetic", **SMALL, history_mean=40, max_len=60, favourites=2, switch=0.9)
    rows = read(data.split("train")).unique("user_id")
    lengths = rows["item_history"].list.len()
    assert data.max_len == 60 == lengths.max()
    assert 25 < lengths.mean() < 40
    assert rows["cate_history"].list.n_unique().max() == 2
    changes = np.mean([np.mean(np.diff(row) != 0) for row in rows["cate_history"].to_list()])
    assert abs(changes - 0.9) < 0.02
    assert set(read(data.split("train"))["item_id"]) <= set(range(1, 201))


def test_the_default_is_the_documented_set(tmp_path: Path) -> None:
    data = generate(tmp_path / "synthetic")
    assert data.dataset_id == "synthetic"
    assert data.rows == {"train": 48_000, "valid": 6_000, "test": 12_000}
    rows = read(data.split("train"))
    assert 0.3 < rows["label"].mean() < 0.6
    assert 12 < rows["item_history"].list.len().mean() < 15


@pytest.mark.parametrize("wrong", [{"users": 0}, {"categories": 300}, {"favourites": 1}, {"history_mean": 2}])
def test_impossible_shapes_are_one_line(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(wrong))} {next(iter(wrong.values()))}") as caught:
        generate(tmp_path / "synthetic", **SMALL | wrong)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("timed", [False, True])
def test_shuffled_histories_have_the_same_items_elsewhere(timed: bool, tmp_path: Path) -> None:
    sets = [generate(tmp_path / str(on), **SMALL, timed=timed, shuffled=on) for on in (False, True)]
    assert sets[0].data_hash != sets[1].data_hash
    assert sets[1].dataset_id == f"{sets[0].dataset_id}_shuffled"
    for split in ("train", "valid", "test"):
        ordered, mixed = (read(data.split(split)) for data in sets)
        kept = ["label", "user_id", "item_id", "cate_id", "age_history"]
        assert ordered.select(kept).equals(mixed.select(kept))
        for column in ("item_history", "cate_history"):
            moved = [a != b for a, b in zip(ordered[column].to_list(), mixed[column].to_list(), strict=True)]
            assert sum(moved) > len(moved) / 2
            assert ordered[column].list.sort().equals(mixed[column].list.sort())
        pairs = [
            {pair for row in zip(rows["item_history"].to_list(), rows["cate_history"].to_list(), strict=True)
             for pair in zip(*row, strict=True)}
            for rows in (ordered, mixed)
        ]  # fmt: skip
        assert pairs[0] == pairs[1]
    assert generate(tmp_path / "again", **SMALL, timed=timed, shuffled=True).data_hash == sets[1].data_hash
