"""Where a build cuts: rows at the very time of a cut, and users of different blocks."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from ctr_pe.data.logs.log import build
from ctr_pe.data.logs.recipe import load_recipe


@pytest.mark.parametrize("step", [1, 1_000, 10_000_019])
def test_a_row_at_the_time_of_a_cut_is_of_the_later_split(tmp_path: Path, step: int) -> None:
    """Of eight times with four rows each, the last is test, the two before it valid. (From the third step on, the log
    is longer than the resolution at which cuts are looked for.)"""
    at = [time * step for time in range(8) for _ in range(4)]
    log = {"user_id": list(range(32)), "item_id": [time // step for time in at], "timestamp": at, "label": [0, 1] * 16}
    pl.DataFrame(log).write_parquet(tmp_path / "log.parquet")
    given = {"interactions": tmp_path / "log.parquet", "protocol": "impressions"}
    dataset = build(load_recipe(None, given | {"valid_fraction": 0.25, "test_fraction": 0.125}), tmp_path / "set")
    assert dict(dataset.rows) == {"train": 20, "valid": 8, "test": 4}


def test_users_of_different_blocks_get_negatives_of_their_own(tmp_path: Path) -> None:
    """Sixty users who chose the same four items; were each block to draw alike, its first users would share theirs."""
    users, same, others = 60, 4, 2_000
    log = {
        "user_id": [user for user in range(users) for _ in range(same)] + [users] * others,
        "item_id": list(range(same)) * users + list(range(same, same + others)),
        "timestamp": list(range(same)) * users + list(range(others)),
    }
    pl.DataFrame(log).write_parquet(tmp_path / "log.parquet")
    recipe = load_recipe(None, {"interactions": tmp_path / "log.parquet", "protocol": "din", "label": None})
    dataset = build(recipe, tmp_path / "set", block_size=100)
    rows = pl.read_parquet(dataset.split("train"))
    first = rows.filter(label=0).group_by("user_id").agg(pl.len(), pl.col("item_id").first()).filter(len=1)
    assert first.height == users
    assert first["item_id"].n_unique() > users - 10
