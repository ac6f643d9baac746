"""benchmark/shuffle.py: the same histories, their order alone is lost."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from benchmark import shuffle
from ctr_pe.config.field_groups import Group
from ctr_pe.data.dataset import open_dataset
from ctr_pe.data.synthetic.bursts import generate


@pytest.mark.parametrize("splits", ["test", "all"])
def test_histories_keep_their_items_and_lose_their_order(splits: str, tmp_path: Path) -> None:
    before = generate(tmp_path / "synthetic", users=60, valid_users=20, test_users=40)
    assert shuffle.main([str(before.path), "--splits", splits]) == 0
    after = open_dataset(str(tmp_path / f"synthetic_shuffled_{splits}"))
    (group,) = before.groups
    for split in before.rows:
        ours, theirs = (pl.read_parquet(one.split(split)) for one in (after, before))
        histories = list(group.history)
        assert ours.drop(histories).equals(theirs.drop(histories))
        pairs = [sorted(zip(*row, strict=True)) for row in ours.select(histories).rows()]
        assert pairs == [sorted(zip(*row, strict=True)) for row in theirs.select(histories).rows()]
        moved = [a != b for a, b in zip(ours[histories[0]].to_list(), theirs[histories[0]].to_list(), strict=True)]
        assert (sum(moved) > 0.5 * len(moved)) if split == "test" or splits == "all" else not any(moved)
        rows = list(zip(theirs.select(histories).rows(), ours.select(histories).rows(), strict=True))
        for (old, new), (next_old, next_new) in pairwise(rows):
            assert old != next_old or new == next_new  # rows of one request


def test_an_empty_history_stays_empty(tmp_path: Path) -> None:
    rows = pl.DataFrame({"h": [[], [3, 1, 2], [], [4]]}, schema={"h": pl.List(pl.UInt16)})
    found = shuffle._in_random_order(rows, Group(("i",), ("h",), None), np.random.default_rng(0))
    assert found["h"].dtype == rows["h"].dtype
    assert [sorted(row) for row in found["h"].to_list()] == [[], [1, 2, 3], [], [4]]
