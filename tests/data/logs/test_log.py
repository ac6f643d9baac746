"""Any log becomes the rows that the two protocols define: a slow reference made of loops says which."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pytest

from ctr_pe.cli import main
from ctr_pe.config.yaml import packaged_yaml
from ctr_pe.data.dataset import SPLITS, Dataset, open_dataset
from ctr_pe.data.logs.log import build, summary
from ctr_pe.data.logs.recipe import load_recipe
from ctr_pe.utils.errors import UserError

Log = dict[str, list[Any]]


class Row(NamedTuple):
    """A row in the log's own ids; users are told apart by their rows only, so they are left out."""

    split: str
    label: int
    item: Any
    cate: Any
    history: tuple[tuple[Any, Any, int | None], ...]  # (item, category, age), oldest first
    negatives: tuple[tuple[Any, Any, int | None], ...] = ()


# --- helpers: write a log, build it, read it back in the log's own ids ----------------------------------------------


def random_log(seed: int, users: int = 40, items: int = 30, longest: int = 12, ties: bool = True) -> Log:
    rng = np.random.default_rng(seed)
    log: Log = {"user_id": [], "item_id": [], "timestamp": [], "position": [], "label": []}
    for user in rng.permutation(users) * 7 + 3:
        length = int(rng.integers(1, longest))
        steps = rng.integers(0 if ties else 1, 3, length) * 1000
        log["user_id"] += [int(user)] * length
        log["item_id"] += (rng.choice(items, length, replace=False) * 11 + 100).tolist()
        log["timestamp"] += (rng.integers(10_000) + np.cumsum(steps)).tolist()
        log["position"] += list(range(length))
        log["label"] += rng.integers(0, 2, length).tolist()
    return log


def category(item: Any) -> str:
    return f"c{int(item) % 5}"


def options(folder: Path, log: Log, **recipe: Any) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    pl.DataFrame(log).write_parquet(folder / "log.parquet")
    ids = sorted(set(log["item_id"]))
    items = pl.DataFrame({"item_id": ids, "cate_id": [category(item) for item in ids]})
    items.write_parquet(folder / "items.parquet")
    return {"interactions": folder / "log.parquet", "items": folder / "items.parquet", **recipe}


def build_log(folder: Path, log: Log, block_size: int = 500_000, **recipe: Any) -> Dataset:
    given = options(folder, log, **recipe)
    return build(load_recipe(None, given), folder / "set", block_size=block_size, overwrite=True)


def din(folder: Path, log: Log, **recipe: Any) -> Dataset:
    return build_log(folder, log, protocol="din", label=None, **recipe)


def impressions(folder: Path, log: Log, **recipe: Any) -> Dataset:
    return build_log(folder, log, protocol="impressions", **recipe)


def rows_of(dataset: Dataset, split: str, with_negatives: bool = False) -> list[Row]:
    """The rows of a split in file order; an id without a value is '?'."""
    vocabs = json.loads((dataset.path / "feature_vocab.json").read_text())
    names = {feature: {i: value for value, i in vocab.items()} for feature, vocab in vocabs.items()}
    names = {feature: {**of, max(of): "?"} for feature, of in names.items()}
    rows = []
    for row in pl.read_parquet(dataset.split(split)).iter_rows(named=True):
        lists = []
        for name in ("history", "neg_history")[: 1 + with_negatives]:
            ages = row.get(f"age_{name}") if f"age_{name}" in row else [None] * len(row[f"item_{name}"])
            events = zip(row[f"item_{name}"], row[f"cate_{name}"], ages, strict=True)
            lists.append(tuple((names["item_id"][i], names["cate_id"][c], age) for i, c, age in events))
        rows.append(
            Row(split, row["label"], names["item_id"][row["item_id"]], names["cate_id"][row["cate_id"]], *lists)
        )
    return rows


def all_rows(dataset: Dataset, with_negatives: bool = False) -> list[Row]:
    return [row for split in SPLITS for row in rows_of(dataset, split, with_negatives)]


def report_of(dataset: Dataset) -> dict[str, Any]:
    return dict(json.loads((dataset.path / "report.json").read_text()))


# --- the reference ---


def by_user(log: Log) -> list[list[dict[str, Any]]]:
    events = [dict(zip(log, values, strict=True)) for values in zip(*log.values(), strict=True)]
    users = defaultdict(list)
    for event in events:
        users[event["user_id"]].append(event)
    return list(users.values())


def history(
    events: list[dict[str, Any]], target: dict[str, Any], key: str, max_len: int, label: int | None, timed: bool
):
    listed = []
    for event in sorted(events, key=lambda event: (event[key], event.get("timestamp", 0), event["item_id"])):
        if event[key] < target[key] and (label is None or event["label"] == label):
            age = target["timestamp"] - event["timestamp"] if timed else None
            listed.append((str(event["item_id"]), category(event["item_id"]), age))
    return tuple(listed[-max_len:])


def reference_din(log: Log, key: str, max_len: int, timed: bool) -> list[Row]:
    """Only the positive rows: which items the negatives are is not for the reference to say."""
    rows = []
    for events in by_user(log):
        ordered = sorted(events, key=lambda event: (event[key], event.get("timestamp", 0), event["item_id"]))
        for place, target in enumerate(ordered):
            if place == 0:
                continue
            split = "test" if place == len(ordered) - 1 else "valid" if place == len(ordered) - 2 else "train"
            item = target["item_id"]
            past = history(events, target, key, max_len, None, timed)
            rows.append(Row(split, 1, str(item), category(item), past))
    return rows


def reference_impressions(log: Log, key: str, max_len: int, split_of: Any) -> list[Row]:
    rows = []
    for events in by_user(log):
        for target in events:
            item = target["item_id"]
            past = [history(events, target, key, max_len, label, True) for label in (1, 0)]
            rows.append(Row(split_of(target), target["label"], str(item), category(item), *past))
    return rows


def with_unseen(rows: list[Row]) -> list[Row]:
    """As the data set has to show them: ids that no training row holds are '?'."""
    train = [row for row in rows if row.split == "train"]
    items = {row.item for row in train} | {item for row in train for item, _, _ in row.history + row.negatives}
    cates = {row.cate for row in train} | {cate for row in train for _, cate, _ in row.history + row.negatives}

    def known(events: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple((i if i in items else "?", c if c in cates else "?", age) for i, c, age in events)

    return [
        Row(
            row.split,
            row.label,
            row.item if row.item in items else "?",
            row.cate if row.cate in cates else "?",
            known(row.history),
            known(row.negatives),
        )
        for row in rows
    ]


# --- equal to the reference ---


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("use", ["order and time", "order", "time"])
@pytest.mark.parametrize("block_size", [500_000, 60])
def test_din_equals_the_reference(tmp_path: Path, seed: int, use: str, block_size: int) -> None:
    log = random_log(seed)
    columns = {"time": "timestamp" if "time" in use else None, "order": "position" if "order" in use else None}
    dataset = din(tmp_path, log, max_len=4, block_size=block_size, **columns)
    built = all_rows(dataset)
    if "order" not in use:
        del log["position"]
    expected = reference_din(log, "position" if "order" in use else "timestamp", 4, "time" in use)
    # sampled items make more ids known than the reference can know: compare under the ids the set has
    seen = {row.item for row in built if row.label == 0} | {row.item for row in expected if row.split == "train"}
    seen |= {item for row in expected if row.split == "train" for item, _, _ in row.history}
    assert all(row.item in seen or row.item == "?" for row in built)
    hidden = [row._replace(item="?", history=()) for row in expected]
    assert sorted(row._replace(item="?", history=()) for row in built if row.label == 1) == sorted(hidden)
    known = set(json.loads((dataset.path / "feature_vocab.json").read_text())["item_id"])

    def shown(item: str) -> str:
        return item if item in known else "?"

    expected = [
        row._replace(item=shown(row.item), history=tuple((shown(i), c, a) for i, c, a in row.history))
        for row in expected
    ]
    key = str
    assert sorted((row for row in built if row.label == 1), key=key) == sorted(expected, key=key)
    users = {user for split in SPLITS for user in pl.read_parquet(dataset.split(split))["user_id"]}
    assert len(users) == len({user for user in log["user_id"] if log["user_id"].count(user) > 1})
    # a positive row and its negative have all but the item in common
    for split in SPLITS:
        rows = rows_of(dataset, split)
        for positive, negative in zip(rows[::2], rows[1::2], strict=True):
            assert (positive.label, negative.label) == (1, 0)
            assert positive.history == negative.history


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("block_size", [500_000, 60])
def test_impressions_equal_the_reference(tmp_path: Path, seed: int, block_size: int) -> None:
    log = random_log(seed)
    times = np.array(log["timestamp"])
    cuts = np.quantile(times, [0.6, 0.8])
    log["period"] = np.digitize(times, cuts).tolist()
    split = {"column": "period", "valid": 1, "test": 2}
    recipe = {"split": split, "negatives": True, "max_len": 3, "block_size": block_size}
    dataset = impressions(tmp_path, log, **recipe)
    expected = with_unseen(reference_impressions(log, "position", 3, lambda event: SPLITS[event["period"]]))
    assert sorted(all_rows(dataset, True), key=str) == sorted(expected, key=str)
    del log["position"]
    dataset = impressions(tmp_path, log, **recipe)
    expected = with_unseen(reference_impressions(log, "timestamp", 3, lambda event: SPLITS[event["period"]]))
    assert sorted(all_rows(dataset, True), key=str) == sorted(expected, key=str)
    assert [group.history for group in dataset.groups] == [
        ("item_history", "cate_history"),
        ("item_neg_history", "cate_neg_history"),
    ]
    assert [group.age for group in dataset.groups] == ["age_history", "age_neg_history"]
    features = dataset.feature_map(4).features
    chosen = [[features[name].get("chosen", True) for name in group.history] for group in dataset.groups]
    assert chosen == [[True, True], [False, False]]


def test_impressions_are_split_by_time_and_no_time_is_split(tmp_path: Path) -> None:
    log = random_log(5, users=200)
    del log["position"]
    dataset = impressions(tmp_path, log, valid_fraction=0.2, test_fraction=0.1)
    total = sum(dataset.rows.values())
    assert dataset.rows["test"] / total == pytest.approx(0.1, abs=0.02)
    assert dataset.rows["valid"] / total == pytest.approx(0.2, abs=0.02)
    times = sorted(log["timestamp"])
    newest = dataset.rows["test"], dataset.rows["test"] + dataset.rows["valid"]
    assert all(times[-count - 1] < times[-count] for count in newest)
    expected = reference_impressions(
        log,
        "timestamp",
        100,
        lambda e: SPLITS[(e["timestamp"] >= times[-newest[1]]) + (e["timestamp"] >= times[-newest[0]])],
    )
    expected = with_unseen([row._replace(negatives=()) for row in expected])
    assert sorted(all_rows(dataset), key=str) == sorted(expected, key=str)


# --- real logs ---


def shipped(name: str, shared_data: Path, tmp_path: Path) -> Dataset:
    files = {key: shared_data / name / f"{key}.parquet" for key in ("interactions", "items")}
    return build(load_recipe(name, files), tmp_path / name)


@pytest.mark.parametrize(
    ("name", "train_and_valid", "test"),
    [pytest.param("amazon_sports", 450_282, 71_196, marks=pytest.mark.slow), ("amazon_beauty", 307_552, 44_726)],
)
def test_amazon_has_the_published_counts(
    shared_data: Path, tmp_path: Path, name: str, train_and_valid: int, test: int
) -> None:
    dataset = shipped(name, shared_data, tmp_path)
    assert dataset.rows["train"] + dataset.rows["valid"] == train_and_valid
    assert dataset.rows["test"] == test
    log = pl.read_parquet(shared_data / name / "interactions.parquet")
    assert pl.read_parquet(dataset.split("test"))["user_id"].n_unique() == log["user_id"].n_unique()
    ages = pl.read_parquet(dataset.split("test"))["age_history"]
    assert ages.list.eval(pl.element().diff().drop_nulls() <= 0).list.all().all()  # the nearest event comes last
    assert ages.list.min().min() >= 0


@pytest.mark.slow
def test_kuairand_has_real_labels_and_no_outcome_among_its_columns(shared_data: Path, tmp_path: Path) -> None:
    dataset = shipped("kuairand_pure", shared_data, tmp_path)
    log = pl.read_parquet(shared_data / "kuairand_pure" / "interactions.parquet")
    kept = log.filter(pl.col("dup") != 1)
    for split, period in (("train", -1), ("valid", 0), ("test", 1)):
        of_period = kept.filter(pl.col("period") == period)
        built = pl.read_parquet(dataset.split(split))
        assert (built.height, built["label"].sum()) == (of_period.height, of_period["long_view"].sum())
        assert set(built.columns) == {"label", "user_id", "item_id", "cate_id", "item_history", "cate_history"}
    assert report_of(dataset)["log"]["dropped"] == {"dup = 1": log.height - kept.height}
    # the last test row of a user has all his earlier long views behind it, up to 100
    views = kept.group_by("user_id").agg(pl.col("long_view").sort_by("position").slice(0, pl.len() - 1).sum())
    longest = pl.concat([pl.read_parquet(dataset.split(split)) for split in SPLITS])
    longest = longest.group_by("user_id").agg(pl.col("item_history").list.len().max())
    assert longest["item_history"].max() <= 100
    assert longest["item_history"].sum() == views["long_view"].clip(upper_bound=100).sum()


def test_every_shipped_recipe_builds(shared_data: Path) -> None:
    for name in packaged_yaml("recipe"):
        log = name.removesuffix("_next").removesuffix("_temporal")  # several recipes for one log
        files = {key: shared_data / log / f"{key}.parquet" for key in ("interactions", "items")}
        recipe = load_recipe(name, files)
        schema = pl.read_parquet_schema(recipe.interactions)
        named = {getattr(recipe, role) for role in ("user", "item", "time", "order") if recipe.demanded(role)}
        assert named <= set(schema)


@pytest.mark.parametrize("protocol", [din, impressions])
def test_ages_are_whole_seconds_whenever_the_clock_began(protocol: Any, tmp_path: Path) -> None:
    """10⁹ seconds later the same rows, ages and all; a float32 would have lost the seconds."""
    log = random_log(3)
    later = log | {"timestamp": [at + 10**9 for at in log["timestamp"]]}
    first, second = protocol(tmp_path / "a", log), protocol(tmp_path / "b", later)
    for split in SPLITS:
        assert first.split(split).read_bytes() == second.split(split).read_bytes()


# --- leakage ---


@pytest.mark.parametrize("protocol", ["din", "impressions"])
@pytest.mark.parametrize("block_size", [500_000, 60])
def test_the_order_of_the_rows_in_the_log_does_not_matter(tmp_path: Path, protocol: str, block_size: int) -> None:
    log = random_log(1)
    frame = pl.DataFrame(log).sample(fraction=1.0, shuffle=True, seed=4)
    drop = {"label": None} if protocol == "din" else {}
    hashes = {
        build_log(tmp_path, rows, protocol=protocol, block_size=block_size, **drop).data_hash
        for rows in (log, frame.to_dict(as_series=False), frame[::-1].to_dict(as_series=False))
    }
    assert len(hashes) == 1


def test_later_events_do_not_change_earlier_rows(tmp_path: Path) -> None:
    log = random_log(2, users=60)
    other = {name: list(values) for name, values in log.items()}
    cut = int(np.quantile(log["timestamp"], 0.7))
    log["period"] = other["period"] = [int(time > cut) * (1 + place % 2) for place, time in enumerate(log["timestamp"])]
    rng = np.random.default_rng(0)
    late = [place for place, time in enumerate(log["timestamp"]) if time > cut]
    for place in late:
        other["label"][place] = 1 - log["label"][place]
        other["item_id"][place] = int(rng.choice(log["item_id"]))
    split = {"column": "period", "valid": 1, "test": 2}
    before, after = (
        impressions(tmp_path / name, changed, split=split, negatives=True)
        for name, changed in (("a", log), ("b", other))
    )
    assert rows_of(before, "train", True) == rows_of(after, "train", True)
    assert rows_of(before, "test", True) != rows_of(after, "test", True)


def test_a_negative_was_never_chosen_by_its_user_before_or_after(tmp_path: Path) -> None:
    log = random_log(3, users=300, items=14, longest=14)
    dataset = din(tmp_path, log, block_size=400)
    chosen = defaultdict(set)
    for row in pl.concat([pl.read_parquet(dataset.split(split)) for split in SPLITS]).iter_rows(named=True):
        chosen[row["user_id"]] |= {*row["item_history"], *([row["item_id"]] if row["label"] else [])}
    for split in SPLITS:
        for row in pl.read_parquet(dataset.split(split)).iter_rows(named=True):
            assert row["label"] == 1 or row["item_id"] not in chosen[row["user_id"]]


def test_negatives_are_uniform_over_what_is_left_and_depend_on_the_seed(tmp_path: Path) -> None:
    users, items = 400, 8
    log: Log = {"user_id": [], "item_id": [], "position": []}
    for user in range(users):
        log["user_id"] += [user] * 5
        log["item_id"] += [(user + step) % items for step in range(5)]  # three of eight are left
        log["position"] += range(5)
    one, same, other = (din(tmp_path / str(n), log, seed=seed) for n, seed in enumerate((0, 0, 1)))
    assert one.data_hash == same.data_hash != other.data_hash
    left = defaultdict(int)
    for row in pl.read_parquet(one.split("train")).iter_rows(named=True):
        left[row["item_id"]] += row["label"] == 0
    assert sum(left.values()) == users * 2
    assert min(left.values()) > 70  # of 100 expected
    assert max(left.values()) < 130


def test_who_chose_nearly_all_or_all_of_the_catalogue(tmp_path: Path) -> None:
    log: Log = {"user_id": [1] * 9 + [2] * 10, "item_id": [*range(9), *range(10)], "position": [*range(9), *range(10)]}
    dataset = din(tmp_path, log)
    rows = all_rows(dataset)
    assert {row.item for row in rows if row.label == 0} == {"9"}  # the one item that user 1 has left
    assert sum(row.label == 0 for row in rows) == 8
    assert sum(row.label == 1 for row in rows) == 8 + 9
    assert report_of(dataset)["log"]["targets_without_negative"] == 9


# --- counted, not silent ---


def test_the_report_counts(tmp_path: Path) -> None:
    log: Log = {
        "user_id": [1, 1, 1, 1, 1, 2, 3, 3],
        "item_id": [10, 11, 12, 13, 14, 10, 11, 99],
        "timestamp": [5, 5, 6, 7, 9, 1, 4, 4],
        "position": [0, 1, 2, 3, 4, 0, 0, 1],
        "robot": [None, 0, 0, 0, 0, 0, 0, 0],  # null is not 1: kept
    }
    log = {name: [*values, values[0]] for name, values in log.items()}
    log["robot"][-1] = 1
    dataset = din(tmp_path, log, max_len=3, drop={"robot": 1})
    report = report_of(dataset)
    assert report["log"] == {
        "rows": 9,
        "dropped": {"robot = 1": 1},
        "users": 3,
        "items": 6,
        "users_without_rows": 1,
        "tied_in_time": 2,
        "targets_without_negative": 0,
        "items_by_events": "1: 4 (67%), 2-5: 2 (33%)",
    }
    assert dataset.rows == {"train": 4, "valid": 2, "test": 4}
    test = report["splits"]["test"]
    assert (test["positives"], test["history_longest"], test["history_mean"], test["history_truncated"]) == (2, 3, 2, 2)
    built = pl.read_parquet(dataset.split("test"))
    for name in ("item_id", "cate_id", "item_history"):
        unseen = dataset.feature_map(4).features[name]["oov_idx"]
        values = built[name].explode() if name == "item_history" else built[name]
        assert test["unseen"][name] == (values == unseen).sum()
    assert test["unseen"]["item_id"] >= 1  # item 14, chosen once, as the last
    text = summary(dataset)
    assert "1 with robot = 1" in text
    assert "users without rows: 1" in text


def test_empty_and_truncated_histories_are_kept_and_counted(tmp_path: Path) -> None:
    log = random_log(6)
    del log["position"]
    dataset = din(tmp_path, log, max_len=2)
    rows = all_rows(dataset)
    splits = report_of(dataset)["splits"].values()
    assert sum(split["history_empty"] for split in splits) == sum(not row.history for row in rows) > 0
    expected = reference_din(log, "timestamp", 100, True)
    assert sum(split["history_truncated"] for split in splits) == 2 * sum(len(row.history) > 2 for row in expected) > 0
    assert dataset.max_len == 2


def test_ids_go_by_frequency_in_the_training_rows(tmp_path: Path) -> None:
    dataset = impressions(tmp_path, random_log(7, users=80), max_len=3)
    train = pl.read_parquet(dataset.split("train"))
    for target, listed in (("item_id", "item_history"), ("cate_id", "cate_history")):
        values = np.concatenate(
            [train[target].to_numpy(), train[listed].list.explode(keep_nulls=False, empty_as_null=False).to_numpy()]
        )
        counts = np.bincount(values)
        assert counts[0] == 0
        assert (np.diff(counts[1:].astype(int)) <= 0).all()
        assert counts[1:].all()
        vocab = json.loads((dataset.path / "feature_vocab.json").read_text())[target]
        assert dataset.feature_map(4).features[target]["oov_idx"] == vocab["__OOV__"] == len(counts)
        tied = [value for value in vocab if not value.startswith("__")]
        ranks = [(-counts[vocab[value]], int(value.removeprefix("c"))) for value in tied]
        assert ranks == sorted(ranks)


def test_rows_count_in_milliseconds_or_dates_become_seconds(tmp_path: Path) -> None:
    log = random_log(8)
    seconds = all_rows(din(tmp_path / "s", log))
    log["timestamp"] = [time * 1000 + 999 for time in log["timestamp"]]
    assert all_rows(din(tmp_path / "ms", log, time_unit="ms")) == seconds
    log["timestamp"] = pl.Series(log["timestamp"]).cast(pl.Datetime("ms")).to_list()
    dated = din(tmp_path / "date", log)
    assert all_rows(dated) == seconds
    ages = pl.read_parquet(dated.split("train"))["age_history"].explode(empty_as_null=False)
    assert 0 < ages.max() <= (max(log["timestamp"]) - min(log["timestamp"])).total_seconds()


def test_a_log_of_impressions_under_din_gives_its_positives(tmp_path: Path) -> None:
    log = random_log(9)
    chosen = {
        name: [value for value, one in zip(values, log["label"], strict=True) if one] for name, values in log.items()
    }
    labelled = build_log(tmp_path / "a", log, protocol="din")
    assert report_of(labelled)["log"]["dropped"] == {"label = 0": log["label"].count(0)}
    assert all_rows(labelled) == all_rows(din(tmp_path / "b", chosen))


def test_strings_as_ids_and_other_column_names(tmp_path: Path) -> None:
    log = random_log(10)
    plain = all_rows(din(tmp_path / "a", log))
    frame = pl.DataFrame(log).select(
        pl.format("u{}", "user_id").alias("who"),
        (pl.col("item_id") + 1000).cast(pl.String).alias("video"),
        pl.col("timestamp").alias("when"),
        pl.col("position").alias("nth"),
    )
    frame.write_parquet(tmp_path / "log.parquet")
    videos = frame["video"].unique()
    pl.DataFrame({"video": videos, "kind": [category(int(v) - 1000) for v in videos]}).write_parquet(
        tmp_path / "items.parquet"
    )
    names = {"user": "who", "item": "video", "time": "when", "order": "nth", "attributes": ["kind"], "label": None}
    files = {"interactions": tmp_path / "log.parquet", "items": tmp_path / "items.parquet"}
    dataset = build(load_recipe(None, {"protocol": "din", **files, **names}), tmp_path / "set")
    assert dataset.groups[0].target == ("item_id", "kind")
    assert dataset.groups[0].history == ("item_history", "kind_history")
    assert sum(dataset.rows.values()) == len(plain)


def test_csv_gives_the_same_set_as_parquet(tmp_path: Path) -> None:
    log = random_log(11)
    given = options(tmp_path, log, protocol="din", label=None)
    parquet = build(load_recipe(None, given), tmp_path / "set")
    for key, ending, separator in (("interactions", "csv", ","), ("interactions", "tsv", "\t"), ("items", "csv", ",")):
        text = tmp_path / f"{key}.{ending}"
        pl.read_parquet(given[key]).write_csv(text, separator=separator)
        same = build(load_recipe(None, {**given, key: text}), tmp_path / "set", overwrite=True)
        assert same.data_hash == parquet.data_hash


# --- one clear line for what is wrong ---


def put(column: str, place: int, value: Any) -> Any:
    def change(log: Log) -> None:
        log[column][place] = value

    return change


def rename(old: str, new: str) -> Any:
    def change(log: Log) -> None:
        log[new] = log.pop(old)

    return change


def empty(log: Log) -> None:
    for values in log.values():
        values.clear()


def repeat_first(log: Log) -> None:
    for values in log.values():
        values.append(values[0])


def lists(log: Log) -> None:
    log["user_id"] = [[user] for user in log["user_id"]]


def at(**values: Any) -> Any:
    def change(log: Log) -> None:
        log.update({name: [value] * len(log["user_id"]) for name, value in values.items()})

    return change


def backwards(log: Log) -> None:
    log["timestamp"] = [-time * 10 for time in log["position"]]


BAD_LOGS = [
    (rename("item_id", "item"), {}, r"no item column 'item_id': did you mean 'item'\?"),
    (rename("label", "labels"), {"protocol": "impressions"}, r"label: which of labels\? label='labels', or label=None"),
    (rename("timestamp", "time"), {"time": "timestamp"}, "no time column 'timestamp'"),
    (lambda log: None, {"time": None, "order": None}, "neither a time nor an order column"),
    (lambda log: None, {"drop": {"dupe": 1}}, "no column 'dupe' for 'drop'"),
    (put("user_id", 3, None), {}, r"null values: user_id: 1 of \d+ rows"),
    (put("timestamp", 3, None), {}, r"null values: timestamp: 1 of \d+ rows"),
    (put("label", 3, None), {"protocol": "impressions", "order": None}, r"null values: label: 1 of \d+"),
    (put("label", 3, 2), {"protocol": "impressions"}, r"label column 'label' holds 2, not only 0 and 1 \(.*2: 1"),
    (put("label", 3, 2), {"label": "label"}, r"label column 'label' holds 2, not only 0 and 1"),
    (at(label=1), {"protocol": "impressions"}, r"one class only \(1: \d+\)"),
    (at(label=0), {"label": "label"}, r"no rows to build from: (\d+) read; dropped: \1 with label = 0"),
    (repeat_first, {}, r"1 of \d+ rows repeat the user_id, position of another row"),
    (repeat_first, {"protocol": "impressions"}, r"1 of \d+ rows repeat the user_id, item_id, position of another"),
    (repeat_first, {"order": None}, r"1 of \d+ rows repeat the user_id, item_id, timestamp of another row"),
    (backwards, {}, r"times in 'timestamp' contradict the order in 'position': \d+ of \d+ rows"),
    (empty, {}, "an empty log: no rows, columns user_id, item_id"),
    (lists, {}, "user column 'user_id' holds List"),
    (at(timestamp=True), {}, "time column 'timestamp' holds Boolean, not numbers or dates"),
    (at(timestamp=7), {"protocol": "impressions"}, "1 distinct times, too few for train, valid and test"),
    (at(user_id=1, position=0, timestamp=0), {"protocol": "impressions", "time": None}, "no time column to split by"),
    (
        at(period=0),
        {"protocol": "impressions", "split": {"column": "period", "valid": 1, "test": 2}},
        r"split 'valid' needs labels of both classes: 0 of 0 rows are 1",
    ),
    (
        lambda log: None,
        {"protocol": "impressions", "split": {"column": "perriod", "valid": 1, "test": 2}},
        "no column 'perriod' for 'split'",
    ),
    (lambda log: None, {"attributes": ["cate"]}, "no attribute column 'cate': did you mean 'cate_id'"),
    (lambda log: None, {"items": None, "attributes": ["cate_id"]}, "need a file of items"),
]


@pytest.mark.parametrize(("change", "recipe", "message"), BAD_LOGS, ids=[message[:40] for _, _, message in BAD_LOGS])
def test_a_bad_log_gives_one_line_and_leaves_nothing(tmp_path: Path, change: Any, recipe: Any, message: str) -> None:
    log = random_log(12)
    given = options(
        tmp_path, log, **{"protocol": "din", **({} if recipe.get("protocol") else {"label": None}), **recipe}
    )
    change(log)
    pl.DataFrame(log).write_parquet(tmp_path / "log.parquet")
    with pytest.raises(UserError, match=message) as error:
        build(load_recipe(None, given), tmp_path / "set")
    assert "\n" not in str(error.value)
    assert {path.name for path in tmp_path.iterdir()} == {"log.parquet", "items.parquet"}


BAD_ITEMS = [
    (
        lambda items: items.with_columns(pl.col("item_id") + 1),
        r"(\d+) \(100, 111, 122\) of \1 items of the log have no",
    ),
    (lambda items: pl.concat([items, items[:1]]), r"1 of \d+ rows repeat another row's item_id"),
    (lambda items: items.with_columns(cate_id=pl.concat_list("cate_id")), r"'cate_id' holds List\(String\), not one"),
    (lambda items: items.with_columns(pl.col("item_id").cast(pl.String)), r"different types: String in .*, Int64 in"),
    (lambda items: items.rename({"item_id": "items"}), r"no item column 'item_id': did you mean"),
    (lambda items: items.rename({"cate_id": "item"}), r"would make the column 'item_history'"),
]


@pytest.mark.parametrize(("change", "message"), BAD_ITEMS, ids=[message[:40] for _, message in BAD_ITEMS])
def test_bad_items_give_one_line(tmp_path: Path, change: Any, message: str) -> None:
    given = options(tmp_path, random_log(12, users=200), protocol="din", label=None)
    items = change(pl.read_parquet(given["items"]))
    items.write_parquet(given["items"])
    given["attributes"] = [name for name in items.columns if name not in ("item_id", "items")]
    with pytest.raises(UserError, match=message) as error:
        build(load_recipe(None, given), tmp_path / "set")
    assert "\n" not in str(error.value)


def test_items_without_an_attribute_have_the_reserved_id_and_are_counted(tmp_path: Path) -> None:
    """Items without a row, and with a null or what programs write for it."""
    given = options(tmp_path, random_log(12, users=200), protocol="din", label=None)
    items = pl.read_parquet(given["items"])
    row, cate = pl.int_range(pl.len()), pl.col("cate_id")
    missing = pl.when(row == 3).then(None).when(row == 4).then(pl.lit("NULL")).otherwise(cate)
    items.with_columns(cate_id=missing)[2:].write_parquet(given["items"])
    dataset = build(load_recipe(None, given), tmp_path / "set")
    assert report_of(dataset)["items_without"] == {"cate_id": 4}
    assert "items without cate_id: 4" in summary(dataset)
    catalogue = pl.read_parquet(dataset.path / "items.parquet")
    assert catalogue["item_id"].to_list() == items["item_id"].to_list()
    unseen = dataset.feature_map(4).features["cate_id"]["oov_idx"]
    without = catalogue.filter(pl.col("cate_id:id") == unseen)
    assert without["cate_id"].to_list() == [None] * 4
    assert without["item_id"].to_list() == items["item_id"].gather([0, 1, 3, 4]).to_list()
    vocabulary = json.loads((dataset.path / "feature_vocab.json").read_text())["cate_id"]
    assert set(vocabulary) == {"__PAD__", "__OOV__", *(f"c{k}" for k in range(5))}


@pytest.mark.parametrize("name", ["log.parquet", "log.csv", "log.json", "gone.parquet"])
def test_an_unreadable_file_gives_one_line(tmp_path: Path, name: str) -> None:
    given = options(tmp_path, random_log(13), protocol="din")
    if name != "gone.parquet":
        content = b"" if name == "log.csv" else (tmp_path / "log.parquet").read_bytes()[:-9]
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}: (cannot be read|no such file|a log is)") as error:
        build(load_recipe(None, {**given, "interactions": tmp_path / name}), tmp_path / "set")
    assert "\n" not in str(error.value)


def test_users_with_fewer_than_four_items_do_not_train(tmp_path: Path) -> None:
    log = {"user_id": [1, 1, 1, 2], "item_id": [1, 2, 3, 4], "position": [0, 1, 2, 0]}
    with pytest.raises(UserError, match="none of them for training"):
        din(tmp_path, log)


def test_an_interrupted_build_leaves_nothing_that_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ctr_pe.data.logs.log import _Rows

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_Rows, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        din(tmp_path, random_log(14), block_size=60)
    assert {path.name for path in tmp_path.iterdir()} == {"log.parquet", "items.parquet"}
    with pytest.raises(UserError, match="no data set"):
        open_dataset("set", tmp_path)


# --- recipes ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("protocol: din\nuzer: x", "key 'uzer' is unknown: did you mean 'user'"),
        ("protocol: dim", "'protocol': input should be 'din', 'impressions', 'leave-one-out' or 'temporal'"),
        ("max_len: 5", "'protocol' is missing: protocol="),
        ("protocol: din\nmax_len: 0", "'max_len': .*greater than or equal to 1"),
        ("protocol: din\nnegatives: true", "'negatives' belongs to protocol impressions"),
        ("protocol: impressions\nsplit: {colum: period, valid: 0, test: 1}", "split"),
        ("protocol: [", "recipe.yaml"),
        ("- protocol", "mapping of keys"),
    ],
)
def test_a_bad_recipe_gives_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(UserError, match=message) as error:
        load_recipe(str(tmp_path / "recipe.yaml"), {"interactions": "log.parquet"})
    assert "\n" not in str(error.value)


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'amazon_sports'"):
        load_recipe("amazon_sport", {})
    with pytest.raises(UserError, match="no such recipe file"):
        load_recipe("mine.yaml", {})


def test_the_command_takes_flags_over_the_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = options(tmp_path, random_log(15))
    (tmp_path / "mine.yaml").write_text("protocol: din\nmax_len: 7\nlabel: null\ninteractions: log.parquet\n")
    asked = f"--recipe {tmp_path}/mine.yaml --items {given['items']} --out {tmp_path}/set --max-len 3 --time none"
    assert main(["data", "build", *asked.split(), "--attributes", "cate_id"]) == 0
    output = capsys.readouterr()
    assert "rows/s" in output.out
    assert "writing" in output.err
    dataset = open_dataset("set", tmp_path)
    assert dataset.max_len == 3
    assert dataset.groups[0].age is None
    recipe = report_of(dataset)["recipe"]
    assert (recipe["max_len"], recipe["time"], recipe["attributes"]) == (3, None, ["cate_id"])
