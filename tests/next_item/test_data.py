"""Next-item data sets: which events are rows, and what each sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from ctr_pe.data.dataset import Dataset
from ctr_pe.data.logs.log import summary
from ctr_pe.training import source
from ctr_pe.training.source import DataSource
from ctr_pe.utils.errors import UserError
from tests.support.next_item import categories, dataset, events, random_histories


def rows_of(data: Dataset, split: str) -> list[tuple[list[int], int]]:
    """History and target of each row, as raw items."""
    raw = dict(pl.read_parquet(data.path / "items.parquet").select("item_id:id", "item_id").iter_rows())
    table = pl.read_parquet(data.split(split))
    found = zip(table["item_history"].to_list(), table["item_id"].to_list(), strict=True)
    return [([raw[item] for item in history], raw[target]) for history, target in found]


def test_leave_one_out(tmp_path: Path) -> None:
    data = dataset(tmp_path, events({1: [1, 2, 3, 1, 4], 2: [4, 3, 2, 1], 3: [2, 1, 4], 4: [3, 4], 5: [1]}))
    assert rows_of(data, "train") == [([1, 2], 3), ([4], 3)]
    assert rows_of(data, "valid") == [([1, 2, 3], 1), ([4, 3], 2), ([2], 1)]
    assert rows_of(data, "test") == [([1, 2, 3, 1], 4), ([4, 3, 2], 1), ([2, 1], 4), ([3], 4)]
    assert data.task == "next-item"
    assert "users without rows: 1" in summary(data)
    assert "training answers, one for each item of a history: 3" in summary(data)


@pytest.mark.parametrize("windows", ["all", "newest"])
def test_every_training_event_but_the_first_is_an_answer_once(tmp_path: Path, windows: str) -> None:
    history = [*range(1, 24)]
    data = dataset(tmp_path, events({1: history, 2: history[::-1]}), max_len=4, windows=windows)
    answers = [[*items[1:], target] for items, target in rows_of(data, "train")]
    if windows == "newest":
        assert answers == [history[17:21], history[::-1][17:21]]
    else:
        assert sorted(item for some in answers for item in some) == sorted(history[1:21] + history[::-1][1:21])
        assert rows_of(data, "test")[0] == (history[18:22], 23)


def test_times_that_tie_are_in_order_of_items(tmp_path: Path) -> None:
    known = [5, 6, 7, 8]  # whose training row has 5 and 6: the others' last two items are in no row of their own
    data = dataset(tmp_path, events({1: [5, 4, 3, 2, 1, 6], 2: [1, 2, 3, 4, 5, 6], 3: known}, step=0))
    assert rows_of(data, "test")[:2] == [([1, 2, 3, 4, 5], 6)] * 2


def test_temporal_split_with_successive_evaluation(tmp_path: Path) -> None:
    log = events({1: [1, 2, 3, 4, 5, 6], 2: [2, 3], 3: [6, 5, 4]})
    late = events({2: [4, 5, 1], 4: [1, 2]}).with_columns(pl.col("timestamp") + 86_400)
    data = dataset(tmp_path, pl.concat([log, late]), protocol="temporal", valid_fraction=0.2, test_fraction=0.2)
    assert rows_of(data, "train") == [([1, 2, 3, 4], 5), ([2], 3), ([6, 5], 4)]
    assert rows_of(data, "valid") == [([1, 2, 3, 4, 5], 6), ([2, 3], 4)]
    assert rows_of(data, "test") == [([2, 3, 4], 5), ([2, 3, 4, 5], 1), ([1], 2)]
    assert "valid and test events without one before them, in no row: 1" in summary(data)


def test_fractions_of_a_temporal_split_are_those_of_the_kernel_paper(tmp_path: Path) -> None:
    log = events(random_histories(200)).with_columns(timestamp=1_577_836_800 + pl.int_range(pl.len()) * 60)
    data = dataset(tmp_path, log, protocol="temporal")
    shares = {split: data.rows[split] for split in ("valid", "test")}
    assert 0.01 * log.height < shares["valid"] < 0.02 * log.height + 2
    assert 0.02 * log.height < shares["test"] < 0.03 * log.height + 2


def test_attributes_of_items_are_in_rows_and_catalogue(tmp_path: Path) -> None:
    data = dataset(tmp_path, events(random_histories()), categories())
    assert data.groups[0].target == ("item_id", "cate_id")
    assert pl.read_parquet(data.path / "items.parquet").columns == ["item_id", "cate_id", "item_id:id", "cate_id:id"]


def test_rows_are_ranked_in_larger_batches_than_those_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = DataSource.of(dataset(tmp_path, events(random_histories())))
    features = data.feature_map({})  # histories of 5 items
    assert data.batches(features, ["train"], {"batch_size": 8}, train=True).batch_size == 8
    assert data.batches(features, ["valid"], {"batch_size": 8}).batch_size == source.RANKED
    assert data.batches(features, ["test"], {"batch_size": 4096}).batch_size == 4096
    monkeypatch.setattr(source, "ITEMS", 60)
    for max_len, size in [(None, 12), (4, 15), (50, 12)]:
        assert data.batches(features, ["valid"], {"batch_size": 8, "max_len": max_len}).batch_size == size


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"behaviours": {"item_id": ["1", "2"]}}, "'behaviours' belongs to protocol din and impressions"),
        ({"negatives": True}, "'negatives' belongs to protocol impressions, not to leave-one-out"),
        ({"test_fraction": 0.1}, "'test_fraction' belongs to protocol impressions and temporal"),
        ({"protocol": "din", "windows": "all"}, "'windows' belongs to protocol leave-one-out and temporal, not to din"),
    ],
)
def test_keys_of_other_protocols(tmp_path: Path, recipe: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataset(tmp_path, events(random_histories()), **recipe)


def test_a_log_that_leaves_a_split_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="none of them for training: protocol leave-one-out needs users with more than 3"
    ):
        dataset(tmp_path, events({1: [1, 2, 3], 2: [1, 2]}))
    log = pl.concat([events({1: [1, 2, 3, 4]}), events({2: [1], 3: [2]}).with_columns(pl.col("timestamp") + 86_400)])
    log = log.with_columns(pl.col("timestamp") + pl.col("user_id"))
    with pytest.raises(UserError, match="no rows for valid and test: no user has an event there and one before it"):
        dataset(tmp_path / "temporal", log, protocol="temporal", valid_fraction=0.2, test_fraction=0.2)
