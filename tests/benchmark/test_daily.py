"""benchmark/daily.py: periods that do not overlap, questions that no model has the answers to, one table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from benchmark import daily


def write_log(folder: Path) -> pl.DataFrame:
    draw = np.random.default_rng(3)
    rows = 1200
    events = pl.DataFrame(
        {
            "user_id": draw.integers(0, 40, rows),
            "item_id": draw.integers(0, 30, rows) + np.arange(rows) // 200,
            "timestamp": np.sort(draw.integers(0, 500, rows)) * 3600,
            "label": draw.integers(0, 2, rows),
        }
    )
    events = events.with_columns(date=pl.col("timestamp") // 86_400, position=pl.int_range(pl.len()).over("user_id"))
    folder.mkdir(parents=True)
    events.write_parquet(folder / "interactions.parquet")
    items = pl.DataFrame({"item_id": range(50), "cate_id": [i % 4 for i in range(50)]})
    items.write_parquet(folder / "items.parquet")
    return events


PARAMS = {"embedding_dim": 8, "batch_size": 128, "dnn_hidden_units": [8]}


@pytest.mark.slow
@pytest.mark.parametrize("clicks", [True, False])
def test_three_models_and_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], clicks: bool
) -> None:
    events = write_log(tmp_path / "small")
    columns = {"order": "position"} | ({"protocol": "din"} if clicks else {"label": "label"})
    log = daily.Log(columns, 1, PARAMS, 0.05 if clicks else None)
    monkeypatch.setattr(daily, "LOGS", {"small": log})
    assert daily.main([str(tmp_path), "--seeds", "1", "--json", str(tmp_path / "daily.json")]) == 0
    results = json.loads((tmp_path / "daily.json").read_text())
    before, updated, anew = results
    assert [row["model"] for row in results] == ["yesterday's", "updated", "trained anew"]
    assert before["events"] + updated["events"] == anew["events"] < events.height
    assert capsys.readouterr().out.count("\n| small |") == 3
    assert daily.main([str(tmp_path), "--only", "other"]) == 2


def test_periods_and_questions(tmp_path: Path) -> None:
    whole = write_log(tmp_path / "small")
    by_day, _ = daily.read(tmp_path / "small", daily.Log({"order": "position", "label": "label"}, 1, {}))
    assert (
        by_day.group_by("period")
        .agg(pl.col("timestamp") // 86_400)
        .filter(pl.col("period") > 0)
        .select(pl.col("timestamp").list.n_unique())["timestamp"]
        .to_list()
        == [1] * 6
    )
    log = daily.Log({"order": "position", "protocol": "din"}, 1, {}, 0.05)
    events, _ = daily.read(tmp_path / "small", log)
    assert events.height == whole.height
    spans = events.group_by("period").agg(pl.min("timestamp").alias("from"), pl.max("timestamp").alias("to"), pl.len())
    spans = spans.sort("period")
    assert (spans["from"][1:] > spans["to"][:-1]).all()
    assert spans["len"][1:].is_between(40, 80).all()
    last = events.filter(pl.col("period") == 6).drop("period")
    asked = daily.requests(events.drop("period"), last, log)
    clicked, sampled = (asked.filter(pl.col("label") == label) for label in (1, 0))
    assert clicked.drop("label", "item_id").equals(sampled.drop("label", "item_id"))
    key = ["user_id", "item_id"]
    assert clicked.join(last, on=[*key, "position"], how="anti").is_empty()
    assert sampled.join(events, on=key, how="semi").is_empty()
    assert set(sampled["item_id"]) <= set(events.filter(pl.col("period") < 6)["item_id"])
