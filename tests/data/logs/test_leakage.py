"""No row of a data set knows what comes after it: shown from the raw log, with a few lines of the test's own.

A built row does not say which event it is of. So the rows of each user that the log must give are written down, split,
label, item, history and ages, and looked for among the users of the data set: all are found, and nothing is left.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pytest

from ctr_pe.config.yaml import packaged_yaml
from ctr_pe.data.dataset import SPLITS, Dataset
from ctr_pe.data.logs.log import build
from ctr_pe.data.logs.recipe import Recipe, load_recipe

RESERVED = {"__PAD__", "__OOV__"}
NEXT_ITEM = ("_next", "_temporal")
"""Recipes of another form, whose rows are in ``tests/next_item/test_data.py``."""


class Event(NamedTuple):
    """``at``: decides which of two events is earlier; where it is equal, neither is."""

    at: int
    time: int
    item: Any
    label: int
    split: str


class Row(NamedTuple):
    """In the log's own items, None for those that the vocabulary does not have."""

    split: str
    label: int
    item: str | None
    history: tuple[str | None, ...]
    ages: tuple[int, ...]


def events_of(recipe: Recipe) -> list[list[Event]]:
    """Of every user the events, the oldest first, from the raw file."""
    log = pl.read_parquet(recipe.interactions)
    for column, value in recipe.drop.items():
        log = log.filter(pl.col(column).ne_missing(value))
    time, order = (name if name in log.columns else None for name in (recipe.time, recipe.order))
    found = defaultdict(list)
    for row in log.iter_rows(named=True):
        split = "train"
        if recipe.split:
            named = {recipe.split.test: "test", recipe.split.valid: "valid"}
            split = named.get(row[recipe.split.column], "train")
        label = 1 if recipe.protocol == "din" else int(row[str(recipe.label)])
        at = row[str(order or time)]
        found[row[recipe.user]].append(Event(at, row[time] if time else 0, row[recipe.item], label, split))
    return [sorted(events) for events in found.values()]


def rows_of(events: Sequence[Event], recipe: Recipe) -> Iterator[tuple[Event, str, list[Event]]]:
    """The rows that a user's events must give: event, split and history, by split."""
    made, listed, earlier = [], [], 0
    for place, event in enumerate(events):
        while events[earlier].at < event.at:
            listed += [events[earlier]] * events[earlier].label
            earlier += 1
        # din: the last event is test, the one before it valid, and the first has no row
        split = {1: "test", 2: "valid"}.get(len(events) - place, "train") if recipe.protocol == "din" else event.split
        made.append((event, split, listed[-recipe.max_len :]))
    yield from sorted(made[recipe.protocol == "din" :], key=lambda row: SPLITS.index(row[1]))


def built_rows(dataset: Dataset, names: dict[int, str | None]) -> Iterator[tuple[int, Row]]:
    """User's number and row, in file order."""
    for split in SPLITS:
        for part in pl.read_parquet(dataset.split(split)).iter_slices(20_000):
            for row in part.iter_rows(named=True):
                history = tuple(map(names.__getitem__, row["item_history"]))
                ages = tuple(row.get("age_history", ()))
                yield row["user_id"], Row(split, row["label"], names[row["item_id"]], history, ages)


def check(dataset: Dataset, recipe: Recipe) -> int:
    """Show it of every row; how many."""
    stored = json.loads((dataset.path / "feature_vocab.json").read_text())["item_id"]
    known = stored.keys() - RESERVED
    timed = dataset.groups[0].age is not None
    rows: dict[int, list[int]] = defaultdict(list)  # hashes, because all rows of a large log do not fit into memory
    sampled: dict[int, list[Row]] = defaultdict(list)
    for user, row in built_rows(dataset, {number: text if text in known else None for text, number in stored.items()}):
        if row.label or recipe.protocol == "impressions":
            rows[user].append(hash(row))
        else:
            sampled[user].append(row._replace(history=(), ages=()))
    users = defaultdict(list)
    for user, of_user in rows.items():
        users[tuple(of_user)].append(user)
    in_training, checked = set(), 0
    for events in events_of(recipe):
        expected = []
        for event, split, past in rows_of(events, recipe):
            shown = tuple(text if (text := str(other.item)) in known else None for other in past)
            item = text if (text := str(event.item)) in known else None
            ages = tuple((event.time - other.time) // (1000 if recipe.time_unit == "ms" else 1) for other in past)
            expected.append(hash(Row(split, event.label, item, shown, ages if timed else ())))
            if split == "train":
                in_training.update(str(other.item) for other in (event, *past))
        if not expected:
            continue
        assert users[tuple(expected)], f"no user of the data set has the rows that {events} must give"
        user = users[tuple(expected)].pop()
        chosen = {str(event.item) for event in events}
        assert not [row for row in sampled[user] if row.item in chosen]
        in_training.update(str(row.item) for row in sampled[user] if row.split == "train")
        checked += len(expected) + len(sampled[user])
    assert not any(users.values())  # no row but these: an event is in one split
    assert in_training == known
    assert checked == sum(dataset.rows.values())
    return checked


def generated(folder: Path, seed: int, users: int = 60, items: int = 40) -> dict[str, Path]:
    """A log with many ties, shuffled; many items occur once."""
    draw, rows = np.random.default_rng(seed), []
    for user in range(users):
        length = int(draw.integers(1, 15))
        times = 1_600_000_000 + np.cumsum(draw.integers(0, 3, length)) * 60 + int(draw.integers(3000))
        for place, (item, time) in enumerate(zip(draw.choice(items, length, replace=False), times, strict=True)):
            item = item if draw.random() < 0.6 else 1000 * (user + 1) + place
            rows.append((user, int(item), int(time), place, int(draw.integers(2)), int(draw.integers(3))))
    log = pl.DataFrame(rows, ["user_id", "item_id", "timestamp", "position", "label", "period"], orient="row")
    log.sample(fraction=1.0, shuffle=True, seed=seed).write_parquet(folder / "log.parquet")
    return {"interactions": folder / "log.parquet"}


@pytest.mark.parametrize("order", ["position", None])
@pytest.mark.parametrize("protocol", ["din", "impressions"])
def test_nothing_of_a_generated_log_leaks(tmp_path: Path, protocol: str, order: str | None) -> None:
    rules: dict[str, Any] = {"protocol": protocol, "order": order, "max_len": 4, "attributes": None}
    rules |= {"label": None} if protocol == "din" else {"split": {"column": "period", "valid": 1, "test": 2}}
    recipe = load_recipe(None, generated(tmp_path, 7) | rules)
    assert check(build(recipe, tmp_path / "set", block_size=120), recipe) > 300


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in packaged_yaml("recipe") if not name.endswith(NEXT_ITEM)])
def test_nothing_of_a_real_log_leaks(shared_data: Path, tmp_path: Path, name: str) -> None:
    """Of a large log every second, third, … user, with about 200 thousand events."""
    files = {key: shared_data / name / f"{key}.parquet" for key in ("interactions", "items")}
    recipe = load_recipe(name, files)
    log = pl.read_parquet(recipe.interactions)
    users = pl.col(recipe.user).rank("dense") % max(1, log.height // 200_000) == 0
    log.filter(users).write_parquet(tmp_path / "log.parquet")
    recipe = load_recipe(name, files | {"interactions": tmp_path / "log.parquet"})
    assert check(build(recipe, tmp_path / name), recipe) > 10**5
