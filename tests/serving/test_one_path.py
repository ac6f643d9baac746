"""A training row is a request with a label: what a model saw in training is what it sees of that request in service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from ctr_pe import CTRRanker
from ctr_pe.config.field_groups import Group
from ctr_pe.data.dataset import LABEL, SPLITS, USER, Dataset
from ctr_pe.data.logs.log import build
from ctr_pe.data.logs.recipe import load_recipe
from ctr_pe.data.timeline import Timeline
from ctr_pe.fuxictr.csv import build_csv
from ctr_pe.serving.encoder import Encoder
from ctr_pe.serving.model_folder import scorer_of
from ctr_pe.training import DataSource, Outcome, Run, build_model
from tests.support.fuzz.small_log import SMALL


def random_log(seed: int) -> pl.DataFrame:
    """Users of one event and of many; ties in time; items that one row has."""
    draw, rows = np.random.default_rng(seed), []
    for user in range(30):
        events = int(draw.choice([1, 2, 5, 20]))
        times = 50 * np.cumsum(draw.integers(0, 3, events)) + int(draw.integers(1000))
        for place, time in enumerate(times):
            item = int(draw.integers(12)) if draw.random() < 0.7 else 1000 * (user + 1) + place
            rows.append((user, item, int(time), place, int(draw.random() < 0.5), int(draw.integers(3))))
    columns = ["user_id", "item_id", "timestamp", "position", "label", "period"]
    log = pl.DataFrame(rows, columns, orient="row")
    return log.unique(["user_id", "item_id", "timestamp"], maintain_order=True)


def as_ms(log: pl.DataFrame) -> pl.DataFrame:
    return log.with_columns(pl.col("timestamp") * 1000)


def as_texts(log: pl.DataFrame) -> pl.DataFrame:
    names = ["user_id", "item_id"]
    return log.with_columns(pl.format("é{}", pl.col(name)).alias(name) for name in names)


def as_nanoseconds() -> pl.Expr:
    """Of times that are thousands of seconds apart: 100 ms."""
    return (pl.col("timestamp") // 1000) * 10**8 + 1_700_000_000 * 10**9 + pl.col("timestamp") % 1000 * 10**10


def as_moments(log: pl.DataFrame, zone: str | None = None) -> pl.DataFrame:
    """Of different precision, or in a zone."""
    log = log.drop("position").with_columns(as_nanoseconds().cast(pl.Datetime("ns")))
    return (
        log
        if zone is None
        else log.with_columns(pl.col("timestamp").dt.cast_time_unit("ms").dt.replace_time_zone(zone))
    )


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "times": (lambda log: log.drop("position"), {}),
    "order": (lambda log: log, {}),
    "order alone": (lambda log: log.drop("timestamp"), {}),
    "milliseconds": (lambda log: as_ms(log.drop("position")), {"time_unit": "ms"}),
    "dates": (lambda log: log.drop("position").with_columns(pl.from_epoch("timestamp") + pl.duration(days=20_000)), {}),
    "subseconds": (lambda log: as_moments(log), {}),
    "zones": (lambda log: as_moments(log, "Asia/Kolkata"), {}),
    "nanoseconds": (lambda log: log.drop("position").with_columns(as_nanoseconds()), {"time_unit": "ns"}),
    "fractions": (lambda log: log.drop("position").with_columns(as_nanoseconds() / 1e9), {}),
    "ISO 8601": (lambda log: as_moments(log).with_columns(pl.col("timestamp").dt.to_string("iso")), {}),
    "whole floats": (lambda log: log.drop("position").with_columns(pl.col("user_id", "item_id").cast(float)), {}),
    "texts": (lambda log: as_texts(log.drop("position")), {}),
}


def items_of(log: pl.DataFrame) -> pl.DataFrame:
    """Attributes: a category, a brand that few items share. Some items lack one of them, or both, or have no row."""
    number = pl.int_range(pl.len())
    items = log.select("item_id").unique().sort("item_id")
    items = items.with_columns(cate_id=number * 7 % 5, brand=pl.format("brand {}", number // 2), number=number)
    return items.select(
        "item_id",
        pl.when(pl.col("number") % 7 != 2).then("cate_id").alias("cate_id"),
        pl.when(pl.col("number") % 6 != 1).then("brand").otherwise(pl.lit("NULL")).alias("brand"),
    ).filter(items["number"] % 11 != 3)


def encoder_of(dataset: Dataset, folder: Path, timed: bool = True) -> Encoder:
    run = Run("DIN", dataset.path, "time_bias" if timed else "cape", 0, params={"embedding_dim": 4})
    model = build_model(run, dataset, str(folder))
    return scorer_of(model, run, DataSource.of(dataset), Outcome({}, 1, 0.0, np.zeros(0, np.float32), 1)).encoder


def as_lists(encoder: Encoder, requests: pl.DataFrame, history: pl.DataFrame | None) -> dict[str, list[Any]]:
    """Every field of the encoded requests; histories as a list per row."""
    events = None if history is None else encoder.events(history)
    encoded = encoder.requests(requests, events)
    fields: dict[str, list[Any]] = {name: values.tolist() for name, values in encoded.scalars.items()}
    rows = np.arange(encoded.rows)
    for lists in encoded.lists:
        lengths, values = lists.gather(rows, encoded.now)
        for name, flat in values.items():
            fields[name] = [part.tolist() for part in np.split(flat, np.cumsum(lengths)[:-1])]
    return fields


def rows_of(dataset: Dataset) -> pl.DataFrame:
    return pl.concat([pl.read_parquet(dataset.split(split)) for split in SPLITS])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_a_training_row_is_what_a_request_is_encoded_as(kind: str, seed: int, tmp_path: Path) -> None:
    """Every impression of a log, field by field: ids, both histories, ages."""
    change, given = KINDS[kind]
    log = change(random_log(seed))
    log.sample(fraction=1.0, shuffle=True, seed=seed).write_parquet(tmp_path / "log.parquet")
    items_of(log).write_parquet(tmp_path / "items.parquet")
    recipe = {
        "interactions": tmp_path / "log.parquet",
        "items": tmp_path / "items.parquet",
        "protocol": "impressions",
        "attributes": ("cate_id", "brand"),
        "negatives": True,
        "max_len": 1 + 3 * seed,
        "split": {"column": "period", "valid": 1, "test": 2},
    }
    dataset = build(load_recipe(None, recipe | given), tmp_path / "set")
    encoder = encoder_of(dataset, tmp_path, timed="timestamp" in log.columns)
    by = ["user_id", "position" if "position" in log.columns else "timestamp", "item_id"]
    rows = rows_of(dataset).sort(USER, maintain_order=True)  # of a user by split, then by order
    requests = log.sort("user_id", "period", *by[1:])
    shuffled = log.sample(fraction=1.0, shuffle=True, seed=9)
    found = as_lists(encoder, requests.drop("period"), shuffled)
    assert rows["label"].to_list() == requests["label"].to_list()
    assert set(found) == set(rows.columns) - {LABEL, USER}
    for name, values in found.items():
        assert values == rows[name].to_list(), name
    assert encoder.unseen("item_id") in found["item_id"]
    assert [] in found["item_history"]


def test_a_column_that_the_log_lacked_does_not_order_the_events_of_requests(tmp_path: Path) -> None:
    """The default name of an order column, which a later table has for something else."""
    log = random_log(0).drop("position", "period")
    log.write_parquet(tmp_path / "log.parquet")
    recipe = {"interactions": tmp_path / "log.parquet", "protocol": "impressions"}
    encoder = encoder_of(build(load_recipe(None, recipe), tmp_path / "set"), tmp_path)
    reverse = log.with_columns(position=-pl.col("timestamp"))
    assert as_lists(encoder, reverse, reverse) == as_lists(encoder, log, log)


@pytest.mark.parametrize("given", [{}, {"order": "place"}])
def test_the_estimator_orders_events_as_the_builder_does(given: dict[str, Any], tmp_path: Path) -> None:
    """Several events of a user at one time, in the default column or a named one; then an update, and a first one."""
    log = random_log(1).drop("period", "label").with_columns(timestamp=pl.lit(1000))
    log = log.rename({"position": given.get("order", "position")})
    ranker = CTRRanker("DIN", "cape", max_len=4, **SMALL, **given).fit(log)
    log.write_parquet(tmp_path / "log.parquet")
    recipe = {"interactions": tmp_path / "log.parquet", "protocol": "din", "max_len": 4, **given}
    rows = rows_of(build(load_recipe(None, recipe), tmp_path / "set")).filter(pl.col(LABEL) == 1)
    requests = log.sort("user_id", given.get("order", "position"))
    found = as_lists(ranker.scorer_.encoder, requests.filter(pl.int_range(pl.len()).over("user_id") > 0), log)
    rows = rows.sort(USER, maintain_order=True)
    assert found["item_history"] == rows["item_history"].to_list()
    assert max(map(len, found["item_history"])) == 4
    for again in (ranker, CTRRanker("DIN", "cape", max_len=4, **SMALL, **given)):
        assert np.isfinite(again.partial_fit(log).predict_proba(requests)).all()


@pytest.mark.parametrize("seed", range(3))
def test_a_clicked_item_is_what_a_request_is_encoded_as(seed: int, tmp_path: Path) -> None:
    """Protocol din: the positive rows are the clicks but each user's first."""
    log = random_log(seed).drop("label", "period")
    log.write_parquet(tmp_path / "log.parquet")
    items_of(log).write_parquet(tmp_path / "items.parquet")
    recipe = {"interactions": tmp_path / "log.parquet", "items": tmp_path / "items.parquet", "protocol": "din"}
    dataset = build(load_recipe(None, {**recipe, "max_len": 4, "attributes": ("brand",)}), tmp_path / "set")
    rows = rows_of(dataset).sort(USER, maintain_order=True)
    requests = log.sort("user_id", "position").filter(pl.col("user_id").is_duplicated())
    requests = requests.filter(pl.int_range(pl.len()).over("user_id") > 0)
    found = as_lists(encoder_of(dataset, tmp_path), requests, log)
    clicked = rows.filter(pl.col(LABEL) == 1)
    for name, values in found.items():
        assert values == clicked[name].to_list(), name


@pytest.mark.parametrize("seed", range(3))
def test_a_row_of_fuxictrs_files_is_what_a_request_is_encoded_as(seed: int, tmp_path: Path) -> None:
    """Minimum counts, items of a history without a category, categories of test rows alone, histories cut."""
    draw = np.random.default_rng(seed)

    def table(rows: int, last: int) -> pl.DataFrame:
        lists = [draw.integers(0, last, draw.integers(0, 9)) for _ in range(rows)]
        return pl.DataFrame(
            {
                "label": draw.integers(0, 2, rows),
                "user_id": draw.integers(0, 9, rows),
                "item_id": draw.integers(0, last, rows),
                "cate_id": [f"c{k}" for k in draw.integers(0, last // 3, rows)],
                "hour": draw.integers(0, 24, rows),
                "price": draw.random(rows),
                "item_history": ["^".join(map(str, one)) for one in lists],
                "cate_history": ["^".join(f"c{k // 3}" if k % 4 else "" for k in one) for one in lists],
            }
        )

    made = {split: table(150, 30 if split == "train" else 36) for split in SPLITS}
    for split, frame in made.items():
        frame.write_csv(tmp_path / f"{split}.csv")
    history = {"type": "sequence", "dtype": "str", "max_len": 5, "feature_encoder": None}
    columns = [
        {"name": "user_id", "type": "meta", "dtype": "int"},
        {"name": "item_id", "type": "categorical", "dtype": "int", "min_categr_count": 6},
        {"name": "cate_id", "type": "categorical", "dtype": "str"},
        {"name": "hour", "type": "categorical", "dtype": "int"},
        {"name": "price", "type": "numeric", "dtype": "float", "normalizer": "StandardScaler"},
        {"name": "item_history", "share_embedding": "item_id", "min_categr_count": 6, **history},
        {"name": "cate_history", "share_embedding": "cate_id", **history},
    ]
    params = {
        "data_root": str(tmp_path / "data"),
        "dataset_id": "set",
        "feature_cols": columns,
        "label_col": {"name": "label", "dtype": "float"},
        "min_categr_count": 7,
        **{f"{split}_data": str(tmp_path / f"{split}.csv") for split in SPLITS},
    }
    dataset = build_csv(params, [Group(("item_id", "cate_id"), ("item_history", "cate_history"))])
    several = [pl.col(name).str.split("^").alias(name) for name in ("item_history", "cate_history")]
    empty = pl.col("item_history") == ""
    lists = [pl.when(empty).then([]).otherwise(of).alias(of.meta.output_name()) for of in several]
    requests = pl.concat(made.values()).with_columns(lists)
    found = as_lists(encoder_of(dataset, tmp_path, timed=False), requests, None)
    rows = rows_of(dataset)
    assert set(found) == set(rows.columns) - {LABEL, USER}
    for name, values in found.items():
        if name == "price":
            np.testing.assert_allclose(values, rows[name], rtol=1e-6)
        else:
            assert values == rows[name].to_list(), name
    assert any(0 in ids for ids in found["cate_history"])
    assert {json.loads((dataset.path / "feature_vocab.json").read_text())["item_id"]["__OOV__"]} <= set(
        found["item_id"]
    )


@pytest.mark.parametrize("seed", range(5))
def test_many_and_few_requests_have_the_same_histories(seed: int) -> None:
    """A search over all events and one per request find the same."""
    draw = np.random.default_rng(seed)
    events = pl.DataFrame(
        {
            "user": draw.integers(0, 20, 300),
            "time": draw.integers(-50, 50, 300) * 10**seed,
            "order": draw.integers(0, 40, 300),
            "x": np.arange(300),
        }
    ).sort("user", "order", "time")
    line = Timeline.of(events, 22, {"x": "x"})
    user, at = draw.integers(-1, 22, 500), draw.integers(-60, 60, 500) * 10**seed
    for by_order in (False, True):
        begin, end = line.newest(user, at, 6, by_order)
        alone = [line.newest(user[i : i + 1], at[i : i + 1], 6, by_order) for i in range(500)]
        assert begin.tolist() == [int(one[0][0]) for one in alone]
        assert end.tolist() == [int(one[1][0]) for one in alone]
        for row in range(500):
            mine = events.filter(pl.col("user") == int(user[row]))
            seen = pl.col("order") if by_order else pl.col("time").cum_max()
            assert line.ids["x"][begin[row] : end[row]].tolist() == mine.filter(seen < at[row])["x"].tail(6).to_list()
