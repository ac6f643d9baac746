"""Declared columns of users, items and events, from a log to the rows of its data set."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from ctr_pe.config.yaml import load_json
from ctr_pe.data.dataset import Dataset
from ctr_pe.data.id_map import UNSEEN
from ctr_pe.data.logs.check import check
from ctr_pe.data.logs.log import build, summary
from ctr_pe.data.logs.recipe import load_recipe
from ctr_pe.fuxictr.feature_specs import FEATURES, read_feature_map
from ctr_pe.utils.errors import UserError

COLUMNS = {
    "hour": "event",
    "price": "event, numeric, num_buckets=4",
    "watch_time": "event, numeric, num_buckets=4, afterwards",
    "tags": "item, sequence, max_len=2",
    "cost": "item, numeric, num_buckets=3",
    "group": "user",
    "mood": "item, sequence, pooling=attention",
    "image": "item, embedding",
    "sound": "item, embedding, freeze_emb=false, embedding_dim=4",
    "age": "user, numeric, normalizer=StandardScaler",
    "size": "event, numeric, normalizer=MinMaxScaler",
    "likes": "user, share=cate_id",
    "seen": "event, sequence, share=cate_id",
}
PROTOCOLS = ("din", "impressions")


def tables() -> dict[str, pl.DataFrame]:
    draw, rows = np.random.default_rng(0), 600
    prices = [None if place % 7 == 0 else float(price) for place, price in enumerate(draw.random(rows))]
    events = pl.DataFrame({
        "user_id": draw.integers(0, 30, rows), "item_id": draw.integers(0, 20, rows),
        "timestamp": 1_600_000_000 + 60 * np.arange(rows), "label": draw.integers(0, 2, rows),
        "hour": draw.integers(0, 24, rows), "price": prices, "watch_time": draw.random(rows), "spare": 0,
        "size": [None if place % 9 == 0 else 3.0 + place % 5 for place in range(rows)],
        "seen": ["|".join("012"[: place % 4]) for place in range(rows)],
    })  # fmt: skip
    items = pl.DataFrame({"item_id": range(20), "cate_id": [item % 3 for item in range(20)]})
    items = items.with_columns(
        tags=pl.Series(["|".join("abcd"[: item % 4]) for item in range(20)]),
        cost=pl.col("item_id") * 1.5,
        mood=pl.Series(["xyz"[: item % 3] for item in range(20)]).str.split(""),
        image=pl.Series([None if item == 5 else [float(item), 1.0, -2.0] for item in range(20)]),
        sound=pl.Series([[item / 9, float("nan") if item == 6 else 0.5] for item in range(20)]),
    )
    users = pl.DataFrame({"user_id": range(25), "group": [f"g{user % 4}" for user in range(25)]})
    users = users.with_columns(
        age=pl.when(pl.col("user_id") != 3).then(20.0 + pl.col("user_id")), likes=pl.col("user_id") % 5
    )
    return {"interactions": events, "items": items, "users": users}


def built(folder: Path, protocol: str, given: dict[str, pl.DataFrame] | None = None, **options: Any) -> Dataset:
    files = {}
    for name, table in (given or tables()).items():
        files[name] = folder / f"{name}.parquet"
        table.write_parquet(files[name])
    recipe = load_recipe(None, {**files, "protocol": protocol, "columns": COLUMNS, **options})
    return build(recipe, folder / f"set_{protocol}", overwrite=True)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_row_has_the_fields_of_its_event_item_and_user(protocol: str, tmp_path: Path) -> None:
    given, dataset = tables(), built(tmp_path, protocol)
    vocabulary = load_json(dataset.path / "feature_vocab.json")
    rows = pl.concat([pl.read_parquet(dataset.split(split)) for split in dataset.rows])
    raw = {name: {number: text for text, number in ids.items()} for name, ids in vocabulary.items()}
    hours = {
        (user, int(item)): set(of["hour"].to_list())
        for (user, item), of in given["interactions"].filter(pl.col("label") == 1).group_by("user_id", "item_id")
    }
    groups = dict(given["users"].select("user_id", "group").iter_rows())
    tags = dict(given["items"].select("item_id", "tags").iter_rows())
    assert rows.height > 100
    owners = sorted(set(given["interactions"].filter((pl.col("label") == 1) | (protocol == "impressions"))["user_id"]))
    for row in rows.iter_rows(named=True):
        user = owners[row["user_id"]]
        assert raw["group"][row["group"]] == groups.get(user, UNSEEN)
        texts = [raw["tags"][number] for number in row["tags"] if number]
        assert texts == (tags[int(raw["item_id"][row["item_id"]])].split("|")[:2] if texts != [UNSEEN] else [UNSEEN])
        for item, hour in zip(row["item_history"], row["hour_history"], strict=True):
            assert int(raw["hour"][hour]) in hours[user, int(raw["item_id"][item])]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_is_known_afterwards_cannot_enter_the_target(protocol: str, tmp_path: Path) -> None:
    """A planted leak: the watch time is the label. The target's column has one value, and histories have true ones."""
    given = tables()
    given["interactions"] = given["interactions"].with_columns(watch_time=pl.col("label") + pl.col("watch_time") / 10)
    dataset = built(tmp_path, protocol, given)
    ids = load_json(dataset.path / "feature_vocab.json")["watch_time"]
    for split in dataset.rows:
        rows = pl.read_parquet(dataset.split(split))
        assert rows["watch_time"].unique().to_list() == [ids[UNSEEN]]
    assert rows["watch_time_history"].explode(empty_as_null=False).n_unique() > 1


def test_what_is_missing_or_not_read_is_counted(tmp_path: Path) -> None:
    dataset = built(tmp_path, "impressions")
    report = load_json(dataset.path / "report.json")
    assert report["missing"] == {"price": 86, "size": 67, "seen": 150, "age": 1}
    assert report["unread"] == {"event": ["spare"], "item": [], "user": []}
    assert report["items_without"] == {"tags": 5, "mood": 7, "image": 1, "sound": 1}
    assert "not read: spare" in summary(dataset)
    specs = read_feature_map(dataset.path / FEATURES).features
    assert specs["watch_time"]["known"] == "afterwards"


def test_ids_stay_when_a_log_grows(tmp_path: Path) -> None:
    first = built(tmp_path, "impressions")
    before = load_json(first.path / "feature_vocab.json")
    given = tables()
    given["interactions"] = given["interactions"].with_columns(hour=pl.col("hour") + 100)
    (tmp_path / "more").mkdir()
    more = built(tmp_path / "more", "impressions", given, append_to=first.path)
    after = load_json(more.path / "feature_vocab.json")
    for name, ids in before.items():
        assert {text: after[name][text] for text in ids} == ids
    assert after["price"] == before["price"]
    assert len(after["hour"]) > len(before["hour"])


def test_a_normalised_number_enters_the_target_alone(tmp_path: Path) -> None:
    given, dataset = tables(), built(tmp_path, "impressions")
    rows = {split: pl.read_parquet(dataset.split(split)) for split in dataset.rows}
    assert "size_history" not in rows["train"].columns
    owners = given["interactions"]["user_id"].unique().sort()
    ages = dict(given["users"].select("user_id", "age").iter_rows())
    wanted = [ages.get(owners[user]) for user in rows["train"]["user_id"]]
    known = np.array([age for age in wanted if age is not None])
    scaled = [0.0 if age is None else (age - known.mean()) / known.std() for age in wanted]
    np.testing.assert_allclose(rows["train"]["age"], scaled, atol=1e-5)
    assert set(rows["train"]["size"].unique()) == {0.0, 0.25, 0.5, 0.75, 1.0}
    assert load_json(dataset.path / "report.json")["normalizers"]["size"] == [3.0, 4.0]


def test_columns_that_share_a_table_have_the_same_ids(tmp_path: Path) -> None:
    dataset = built(tmp_path, "impressions")
    vocabulary = load_json(dataset.path / "feature_vocab.json")
    assert not {"likes", "seen"} & vocabulary.keys()
    rows = pl.read_parquet(dataset.split("train"))
    names = {number: text for text, number in vocabulary["cate_id"].items()}
    assert {names[number] for number in rows["likes"].unique()} == {"0", "1", "2", "3", "4", UNSEEN}
    assert {names[number] for number in rows["seen"].explode(empty_as_null=False) if number} == {"0", "1", "2", UNSEEN}
    specs = read_feature_map(dataset.path / FEATURES).features
    assert {specs[name]["vocab_size"] for name in ("cate_id", "likes", "seen", "seen_history")} == {7}


@pytest.mark.parametrize("kind", ["column", "npz", "npy", "parquet", "keyed.parquet"])
def test_vectors_come_from_a_column_or_from_a_file(kind: str, tmp_path: Path) -> None:
    given, columns, file = tables(), dict(COLUMNS), tmp_path / f"vectors.{kind}"
    vectors = given["items"]["image"].to_list()
    if kind != "column":
        given["items"] = given["items"].drop("image")
        columns["image"] = f"item, embedding, pretrained_emb={file}"
        keys = [item for item in range(20) if vectors[item]]
        table = pl.DataFrame({"item_id": range(20), "image": vectors})
        if kind == "npz":
            np.savez(file, key=keys, value=[vectors[item] for item in keys])
        elif kind == "npy":
            np.save(file, np.array([vector or [np.nan] * 3 for vector in vectors], np.float32))
        else:
            table = table if kind == "parquet" else table.rename({"item_id": "key", "image": "value"}).drop_nulls()
            table.write_parquet(file)
    dataset = built(tmp_path, "din", given, columns=columns)
    with np.load(dataset.path / "pretrained_image.npz") as content:
        written = dict(zip(content["key"].tolist(), content["value"].tolist(), strict=True))
    assert written == {str(item): vectors[item] for item in range(20) if item != 5} | {UNSEEN: [0.0, 0.0, 0.0]}
    assert load_json(dataset.path / "report.json")["items_without"]["image"] == 1
    vocabulary = load_json(dataset.path / "feature_vocab.json")
    items = pl.read_parquet(dataset.path / "items.parquet")
    by_item = dict(items.select("item_id", "image:id").iter_rows())
    assert by_item == {item: vocabulary["image"][str(item) if item != 5 else UNSEEN] for item in range(20)}


def test_vectors_stay_when_a_log_grows(tmp_path: Path) -> None:
    first, given = built(tmp_path, "impressions"), tables()
    given["items"] = given["items"].with_columns(item_id=pl.col("item_id") + 1, image=pl.lit([7.0, 8.0, 9.0]))
    (tmp_path / "more").mkdir()
    more = built(tmp_path / "more", "impressions", given, append_to=first.path)
    with np.load(more.path / "pretrained_image.npz") as content:
        written = dict(zip(content["key"].tolist(), content["value"].tolist(), strict=True))
    assert len(written) == 22
    assert written["0"] == [0.0, 1.0, -2.0]
    assert written["1"] == written["20"] == [7.0, 8.0, 9.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": {"imag": "item, embedding"}}, "items.parquet: no item column 'imag': did you mean 'image'?"),
        ({"columns": {"cate_id": "item, embedding"}}, "embedding column 'cate_id' holds no lists of numbers"),
        ({"columns": {"mood": "item, embedding"}}, "embedding column 'mood' holds no lists of numbers"),
        ({"columns": {"likes": "user, share=cate"}}, "share_embedding 'cate' is not read: did you mean 'cate_id'?"),
        ({"columns": {"likes": "user, share=image", "image": "item, embedding"}}, "'image' has no categories"),
        ({"columns": {"likes": "user, share=likes"}}, "in a circle: likes → likes"),
        ({"columns": {"huor": "event"}}, "interactions.parquet: no event column 'huor': did you mean 'hour'?"),
        ({"columns": {"tagz": "item"}}, "items.parquet: no item column 'tagz': did you mean 'tags'?"),
        ({"columns": {"grp": "user"}}, "users.parquet: no user column 'grp': did you mean 'group'?"),
        ({"columns": {"timestamp": "event"}}, "'timestamp' is the name of another column"),
        ({"columns": {"tags": "item"}, "items": None}, "tags: columns of items need a file of items"),
        ({"columns": {"group": "user, numeric"}}, "numeric column 'group' holds 'g0' in row 1, no number"),
    ],
)
def test_a_mistake_is_one_line(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as found:
        built(tmp_path, "impressions", **options)
    assert message in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("users", pl.col("user_id") + 1000, "users.parquet: no user of the training rows has a row here"),
        ("users", None, "users.parquet: no user of the training rows has a row here"),
        ("items", pl.lit([float("nan")]).alias("image"), "column 'image': no item has a vector of finite numbers"),
        ("items", pl.lit([], pl.List(pl.Float64)).alias("image"), "column 'image': no item has a vector"),
        ("items", pl.lit(None).alias("image"), "column 'image': no item has a vector"),
    ],
)
def test_a_table_that_says_nothing_is_refused(name: str, change: pl.Expr | None, message: str, tmp_path: Path) -> None:
    """By a check and by a build, before anything is written."""
    given = tables()
    given[name] = given[name].clear() if change is None else given[name].with_columns(change)
    columns = {"image": "item, embedding", "age": "user, numeric"}
    with pytest.raises(UserError) as found:
        built(tmp_path, "impressions", given, columns=columns)
    assert message in str(found.value)
    assert not (tmp_path / "set_impressions").exists()
    files = {key: tmp_path / f"{key}.parquet" for key in given}
    assert check(load_recipe(None, {**files, "protocol": "impressions", "columns": columns})).problems == [
        str(found.value)
    ]


def test_a_check_counts_users_without_a_row_and_names_a_table_that_is_not_read(tmp_path: Path) -> None:
    given = tables()
    built(tmp_path, "impressions", given)
    files = {key: tmp_path / f"{key}.parquet" for key in given}
    users = set(given["interactions"]["user_id"]) - set(given["users"]["user_id"])
    rule = {**files, "protocol": "impressions"}
    lines = check(load_recipe(None, {**rule, "columns": {"age": "user, numeric"}})).lines
    assert f"users without a row in {files['users']}: {len(users)}" in lines
    lines = check(load_recipe(None, rule)).lines
    assert any(line.startswith("not read of the users: group, age, likes: ") for line in lines)


def test_hashed_values_are_shown_as_their_buckets(tmp_path: Path) -> None:
    """Of one category and of several: a hash has no way back to the text."""
    columns = {"hour": "event, hash_buckets=5", "seen": "event, sequence, hash_buckets=4"}
    text = summary(built(tmp_path, "impressions", columns=columns))
    shown = [line for line in text.splitlines() if " → train: " in line]
    assert shown
    assert all(re.search(r" hour=bucket [1-5] ", line) for line in shown)
    assert any(re.search(r" seen=bucket [1-4](\|bucket [1-4])*", line) for line in shown)
