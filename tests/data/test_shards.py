"""A data set in shards is the data set in one file per split: rows, order of an epoch, tables that read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml

from ctr_pe.data.dataset import Dataset, open_dataset
from ctr_pe.data.loader import BatchLoader
from ctr_pe.data.logs.log import build
from ctr_pe.data.logs.recipe import load_recipe
from ctr_pe.fuxictr.convert import convert
from ctr_pe.study.recommend import measure
from ctr_pe.training.source import DataSource, not_comparable
from ctr_pe.utils.errors import UserError


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[int | None, Dataset]:
    """Of one log, by rows of a shard."""
    folder, generator = tmp_path_factory.mktemp("shards"), np.random.default_rng(0)
    log = {"user_id": generator.integers(0, 20, 400), "item_id": generator.integers(0, 50, 400)}
    pl.DataFrame(log).with_columns(timestamp=pl.int_range(400)).write_parquet(folder / "log.parquet")
    recipe = load_recipe(None, {"interactions": folder / "log.parquet", "protocol": "din"})
    return {rows: build(recipe, folder / f"set{rows}", "set", shard_rows=rows) for rows in (None, 1000, 97, 60)}


def epochs(dataset: Dataset, split: str = "train", **given: Any) -> list[list[Any]]:
    source = DataSource.of(dataset)
    loader = BatchLoader(source.feature_map({}), source.files[split], split, 32, **given)
    return [[{name: one.tolist() for name, one in batch.items()} for batch in loader] for _ in range(2)]


@pytest.mark.parametrize("how", [{}, {"shuffle": True, "seed": 3}, {"shuffle": True, "like_length": 3}])
def test_the_order_of_an_epoch_does_not_depend_on_the_shards(sets: dict[int | None, Dataset], how: Any) -> None:
    expected = epochs(sets[None], **how)
    assert (expected[0] == expected[1]) is not how.get("shuffle", False)
    for rows in (1000, 97, 60):
        assert epochs(sets[rows], **how) == expected


def test_shards_are_full_but_the_last_and_listed(sets: dict[int | None, Dataset]) -> None:
    whole = sets[None]
    for rows in (1000, 97, 60):
        dataset = open_dataset(str(sets[rows].path))
        for split in whole.rows:
            files = sorted((dataset.path / split).glob("*.parquet"))
            assert [f"{split}/{number:06}.parquet" for number in range(len(files))] == [
                name for name in sorted(dataset.files) if name.startswith(f"{split}/")
            ]
            heights = [pl.read_parquet(file).height for file in files]
            assert heights[:-1] == [rows] * (len(files) - 1)
            assert 0 < heights[-1] <= rows
            assert dataset.scan(split).collect().equals(whole.scan(split).collect())
            assert dataset.rows == whole.rows
        config = yaml.safe_load((dataset.path / "dataset_config.yaml").read_text())["set"]
        assert Path(config["train_data"]).is_dir()


def test_all_that_reads_rows_reads_shards(sets: dict[int | None, Dataset], tmp_path: Path) -> None:
    """With the loader's columns beside them."""
    epochs(sets[60])
    one, many = sets[None], sets[60]
    assert measure(many) == measure(one)
    assert not_comparable(str(many.split("test")), "label", "user_id") is None
    for number, dataset in enumerate((one, many)):
        convert(dataset, tmp_path / str(number), "parquet")
    assert pl.read_parquet(tmp_path / "1/train.parquet").equals(pl.read_parquet(tmp_path / "0/train.parquet"))


def test_a_shard_that_is_gone_or_changed_is_named(sets: dict[int | None, Dataset]) -> None:
    file = sets[97].path / "train/000001.parquet"
    whole = file.read_bytes()
    try:
        file.write_bytes(whole[:-1])
        with pytest.raises(UserError, match=r"train/000001\.parquet: changed since it was built"):
            open_dataset(str(sets[97].path))
        file.unlink()
        with pytest.raises(UserError, match=r"train/000001\.parquet: missing"):
            open_dataset(str(sets[97].path))
    finally:
        file.write_bytes(whole)
