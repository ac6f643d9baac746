"""Labels made of a column of numbers with a threshold, from a log to the estimator and its updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from ctr_pe import CTRRanker
from ctr_pe.cli import main
from ctr_pe.config.yaml import load_json
from ctr_pe.data.dataset import open_dataset
from ctr_pe.data.logs.labels import SIGNS, Threshold, threshold
from ctr_pe.data.logs.log import build
from ctr_pe.data.logs.recipe import load_recipe
from ctr_pe.serving.tables import labels as labels_of
from ctr_pe.utils.errors import UserError
from tests.data.logs.test_columns import tables

QUICK: dict[str, Any] = {"epochs": 1, "embedding_dim": 8, "batch_size": 256}


def ratings() -> pl.DataFrame:
    draw = np.random.default_rng(5)
    log = tables()["interactions"].select("user_id", "item_id", "timestamp")
    return log.with_columns(rating=pl.Series(draw.integers(1, 6, log.height)))


def labelled(log: pl.DataFrame) -> pl.DataFrame:
    return log.with_columns(label=(pl.col("rating") >= 4).cast(pl.Int8)).drop("rating")


def scores(ranker: CTRRanker) -> np.ndarray[Any, Any]:
    return ranker.predict_proba(ratings().select("user_id", "item_id", "timestamp"))[:, 1]


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("number", ["4", "3.5", "-1e-3"])
def test_a_threshold_is_a_column_a_sign_and_a_number(sign: str, number: str) -> None:
    for written in (f"rating {sign} {number}", f" rating{sign}{number} "):
        assert threshold(written, ["rating"]) == Threshold("rating", sign, float(number))
    assert threshold("rating >= 4", ["rating >= 4"]) is None  # the name of a column
    values = pl.Series("rating", [1.0, 4.0, 5.0, float("nan"), None])
    held = Threshold("rating", sign, float(number)).holds(values).to_list()
    assert held == [*(int(SIGNS[sign](value, float(number))) for value in (1.0, 4.0, 5.0)), None, None]


@pytest.mark.parametrize("protocol", [None, "din"])
def test_a_threshold_gives_the_model_of_the_label_it_makes(protocol: str | None, tmp_path: Path) -> None:
    log, made = ratings(), labelled(ratings())
    plain = CTRRanker("DIN", "cape", protocol=protocol, **QUICK).fit(made)
    ranker = CTRRanker("DIN", "cape", protocol=protocol, label="rating >= 4", **QUICK).fit(log)
    assert np.array_equal(scores(ranker), scores(plain))
    ranker.save(tmp_path / "model")
    again = CTRRanker.load(tmp_path / "model").set_params(protocol=protocol)
    assert again.label == "rating >= 4"
    pairs = [one.evaluate(table, table) for one, table in ((again, log), (plain, made))]
    assert pairs[0] == pairs[1]
    again.partial_fit(log.tail(100))
    assert np.array_equal(scores(again), scores(plain.partial_fit(made.tail(100))))
    new = CTRRanker("DIN", "cape", label="rating >= 4", **QUICK).partial_fit(log)
    assert np.array_equal(scores(new), scores(CTRRanker("DIN", "cape", **QUICK).partial_fit(made)))


def test_what_the_label_is_made_of_may_be_in_histories(tmp_path: Path) -> None:
    """Afterwards alone: before, it would be the label."""
    how = {"label": "rating >= 4", **QUICK}
    ranker = CTRRanker("DIN", "cape", columns={"rating": "event, afterwards"}, **how).fit(ratings())
    assert "rating_history" in ranker.scorer_.encoder.features
    with pytest.raises(UserError, match="'rating' is the name of another column"):
        CTRRanker("DIN", "cape", columns={"rating": "event"}, **how).fit(ratings())


def test_flags_and_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    log, made = ratings(), labelled(ratings())
    log.write_csv("log.csv")
    build = ["data", "build", "--interactions", "log.csv", "--label", "rating >= 4"]
    assert main([*build, "--protocol", "impressions", "--out", "data/shown"]) == 0
    ones = int(made["label"].sum())
    assert f"rating: label 1 where rating >= 4, in {ones:,} of 600 rows" in capsys.readouterr().out
    assert main([*build, "--protocol", "din", "--out", "data/chosen"]) == 0
    report = load_json(open_dataset("chosen").path / "report.json")
    assert report["log"]["dropped"] == {"not rating >= 4": 600 - ones}
    assert report["read_as"]["rating"] == f"label 1 where rating >= 4, in {ones:,} of 600 rows"
    for label in ("rating,item_id", "rating >= 4,item_id"):
        assert main([*build[:-1], label, "--protocol", "impressions", "--out", "data/both"]) == 2
        assert "several labels are several runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (["rating", "item_id"], "several labels are several runs: name one of rating, item_id"),
        ("rating >= four", "no label column 'rating >= four'"),
        ("ratings >= 4", "no label column 'ratings': did you mean 'rating'?"),
        ("rating >= 6", "is of one class only"),
    ],
)
def test_a_mistake_is_one_line(label: Any, message: str) -> None:
    with pytest.raises(UserError) as found:
        CTRRanker("DIN", "cape", label=label, protocol="impressions", **QUICK).fit(ratings())
    assert message in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("protocol", ["impressions", "din"])
def test_a_rating_that_is_no_number_is_named(protocol: str) -> None:
    log = ratings().cast({"rating": pl.String})
    log[7, "rating"] = "five"
    how = {"label": "rating >= 4", "protocol": protocol, **QUICK}
    with pytest.raises(UserError, match=r"not the numbers that 'rating >= 4' compares.*'five' in row 8"):
        CTRRanker("DIN", "cape", **how).fit(log)


def test_a_missing_rating_is_named() -> None:
    log = ratings().with_columns(rating=pl.when(pl.int_range(pl.len()) == 7).then(float("nan")).otherwise("rating"))
    with pytest.raises(UserError, match="null values: rating: 1 of 600 rows, the first in row 8"):
        CTRRanker("DIN", "cape", label="rating >= 4", **QUICK).fit(log)


def test_a_threshold_of_decimals_is_that_of_floats(tmp_path: Path) -> None:
    """In a log and in tables of a request."""
    place = np.arange(200)
    log = pl.DataFrame({"user_id": place % 9, "item_id": place % 7, "timestamp": 1_600_000_000 + place})
    reports, labels = [], []
    for dtype in (pl.Float64, pl.Decimal(4, 1)):
        table = log.with_columns(rating=pl.Series(place % 11 / 2).cast(dtype))
        table.write_parquet(tmp_path / "log.parquet")
        given = {"interactions": tmp_path / "log.parquet", "protocol": "impressions", "label": "rating >= 2.5"}
        dataset = build(load_recipe(None, given), tmp_path / "set", overwrite=True)
        reports.append(pl.read_parquet(dataset.path / "train.parquet"))
        labels.append(labels_of(table, "rating >= 2.5", "log").tolist())
    assert reports[0].equals(reports[1])
    assert labels[0] == labels[1] == [one % 11 / 2 >= 2.5 for one in place]
