"""What readers of results are told of a data set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from ctr_pe.data.description import description
from ctr_pe.data.synthetic.bursts import generate
from tests.data.logs.test_columns import COLUMNS, built, tables


def test_declared_columns_weights_and_behaviours_of_a_log(tmp_path: Path) -> None:
    given, draw = tables(), np.random.default_rng(0)
    actions = pl.Series(draw.choice(["click", "buy"], 600).tolist())
    given["interactions"] = given["interactions"].with_columns(action=actions, w=pl.Series(draw.random(600)))
    kinds = {"action": ["click", "buy"]}
    found = description(built(tmp_path, "impressions", given, weight="w", behaviours=kinds))
    assert found["facts"] == {
        "rows": "train 480, valid 60, test 60",
        "histories": "the newest 100 items: item_click_history, item_buy_history",
        "label": "label",
        "protocol": "impressions",
        "weights of rows": "w",
        "behaviours": "action: click, buy, each with a history of its own",
    }
    columns = {one.pop("name"): one for one in found["columns"]}
    assert columns.keys() == {"item_id", "cate_id", *COLUMNS}
    whole = "target and histories"
    for name, wanted in {
        "cate_id": ("item", "categorical", whole, 7, None),
        "tags": ("item", "sequence, max_len 2", whole, 4, 5),
        "watch_time": ("event", "numeric, num_buckets 4", "histories alone: known afterwards", 6, None),
        "age": ("user", "numeric, normalizer StandardScaler", "target", None, 1),
        "likes": ("user", "categorical, share_embedding cate_id", "target", 7, None),
        "seen": ("event", "sequence, share_embedding cate_id", whole, 7, 150),
    }.items():
        assert columns[name] == dict(zip(("of", "type", "in", "ids", "without"), wanted, strict=True)), name


def test_a_set_that_is_of_no_log_has_what_its_feature_map_says(tmp_path: Path) -> None:
    found = description(generate(tmp_path / "s", users=20, valid_users=10, test_users=10, items=100, categories=10))
    assert {"protocol", "weights of rows", "behaviours"}.isdisjoint(found["facts"])
    assert [(one["name"], one["in"]) for one in found["columns"]] == [
        ("item_id", "target and histories"),
        ("cate_id", "target and histories"),
    ]
