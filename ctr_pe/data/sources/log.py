"""Makes a data set from a log of interactions, by one of two protocols.

din           clicked items; every item from a user's second on is a target, paired with a sampled item never clicked
impressions   shown items with real labels

Two passes over blocks of users: the first checks and counts, because ids are sorted by frequency in the training rows;
the second writes. Only the catalogue of items stays in memory between blocks.

Legend: N items of the catalogue, E events, H events of a history list, T target rows of a block.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
from tqdm import tqdm

from ctr_pe.data.dataset import SPLITS, Dataset
from ctr_pe.data.recipe import Recipe
from ctr_pe.data.sources.events import BLOCK, Bools, Events, Ints, Log
from ctr_pe.data.specs import age_spec, feature_vocab, history_spec, target_spec
from ctr_pe.data.vocabulary import Vocabulary
from ctr_pe.data.writer import Content, DatasetWriter, make_dataset
from ctr_pe.errors import UserError
from ctr_pe.fields import Group

if TYPE_CHECKING:
    from collections.abc import Iterator

LABEL, USER = "label", "user_id"  # with item_id the columns of every data set
LIST_ITEMS = 4_000_000  # list items in memory while a row group is written
SECONDS = {"s": 1, "ms": 1000}


@dataclass(frozen=True)
class History:
    """One list of earlier events per target row: ``code[begin:end]``, oldest first."""

    name: str  # "history" or "neg_history"
    code: Ints  # (H,)
    time: Ints | None  # (H,)
    begin: Ints  # (T,)
    end: Ints  # (T,)
    truncated: Bools  # (T,) begin cuts off older events

    def rows(self, chosen: Ints | slice) -> History:
        return History(self.name, self.code, self.time, self.begin[chosen], self.end[chosen], self.truncated[chosen])


@dataclass(frozen=True)
class Targets:
    """The rows of a block, by user and order."""

    split: npt.NDArray[np.uint8]  # (T,) index into SPLITS
    label: npt.NDArray[np.uint8]  # (T,)
    user: Ints  # (T,) within the block
    code: Ints  # (T,)
    time: Ints | None  # (T,)
    histories: tuple[History, ...]

    def rows(self, chosen: Ints | slice) -> Targets:
        return Targets(
            self.split[chosen],
            self.label[chosen],
            self.user[chosen],
            self.code[chosen],
            None if self.time is None else self.time[chosen],
            tuple(history.rows(chosen) for history in self.histories),
        )


def din(events: Events, recipe: Recipe, items: int, seed: list[int]) -> Targets:
    """Rows in pairs: the clicked item and one that the user never clicked, from a catalogue of ``items``.

    A user's last target is test, the one before it valid, the others train. A user who clicked the whole catalogue has
    targets without negatives.
    """
    index = np.arange(len(events.user))
    target = index[index > events.first]
    last = np.append(events.user[1:] != events.user[:-1], True)
    from_end = np.flatnonzero(last)[events.user[target]] - target
    history = _history("history", events, events.positive, target, recipe.max_len)
    negative = _never_clicked(events, target, items, np.random.default_rng(seed))
    pair = np.repeat(np.arange(len(target)), 2)
    is_negative = np.arange(len(pair)) % 2 == 1
    pairs = Targets(
        split=np.array([2, 1, 0], np.uint8)[np.minimum(from_end, 2)][pair],
        label=(~is_negative).astype(np.uint8),
        user=events.user[target][pair],
        code=np.where(is_negative, negative[pair], events.code[target][pair]),
        time=None if events.time is None else events.time[target][pair],
        histories=(history.rows(pair),),
    )
    return pairs.rows(np.flatnonzero(pairs.code >= 0))


def impressions(events: Events, recipe: Recipe) -> Targets:
    """One row per impression with the user's earlier positives, and the earlier negatives if the recipe wants them."""
    target = np.arange(len(events.user))
    histories = [_history("history", events, events.positive, target, recipe.max_len)]
    if recipe.negatives:
        histories.append(_history("neg_history", events, ~events.positive, target, recipe.max_len))
    label = events.positive.astype(np.uint8)
    return Targets(events.split, label, events.user, events.code, events.time, tuple(histories))


def _history(name: str, events: Events, listed: Bools, target: Ints, max_len: int) -> History:
    """Per target, the listed events of the same user that are earlier than it, at most ``max_len``, the most recent."""
    before: Ints = np.cumsum(listed) - listed
    oldest: Ints = before[events.first[target]]
    end: Ints = before[events.tie[target]]
    begin = np.maximum(oldest, end - max_len)
    times = None if events.time is None else events.time[listed]
    return History(name, events.code[listed], times, begin, end, begin > oldest)


def _never_clicked(events: Events, target: Ints, items: int, generator: np.random.Generator) -> Ints:
    """(T,) per target, a uniform sample of the items that its user has no event with; -1 if there is none.

    The r-th item outside a user's sorted items c is r + #{i: c[i] - i <= r}: exact without rejection, so a user who
    clicked nearly everything costs no more than others.
    """
    clicked = np.sort(events.user * items + events.code)  # np.unique hashes, which takes ten times as long
    clicked = clicked[np.append(True, clicked[1:] != clicked[:-1])]
    user = clicked // items
    count = np.bincount(user)
    start = np.cumsum(count) - count
    gaps = clicked - (np.arange(len(clicked)) - start[user])  # user * items + c[i] - i, sorted
    owner = events.user[target]
    left = items - count[owner]
    rank = generator.integers(0, np.maximum(left, 1))
    skipped = np.searchsorted(gaps, owner * items + rank, side="right") - start[owner]
    return np.where(left > 0, rank + skipped, -1)


class _Columns:
    """The columns of an item's features and the ids of their values, sorted by frequency in the training rows (ties by
    value)."""

    def __init__(self, log: Log) -> None:
        self.values, self.every_item = log.catalogue, log.items
        self.names = tuple(self.values.columns)
        self.max_len = log.recipe.max_len
        self.lists = ("history", "neg_history") if log.recipe.negatives else ("history",)
        self.ages = tuple(f"age_{name}" for name in self.lists) if log.timed else ()
        self.groups = tuple(
            Group(self.names, tuple(f"{feature.removesuffix('_id')}_{name}" for feature in self.names), age)
            for name, age in zip_longest(self.lists, self.ages)
        )
        made = [LABEL, USER, *self.names, *self.ages, *(name for group in self.groups for name in group.history)]
        if twice := {name for name in made if made.count(name) > 1}:
            raise UserError(f"{log.recipe.items}: attributes would make the column '{min(twice)}' twice: rename one")

    def give_ids(self, items: Ints) -> None:
        """``items`` (N,): occurrences in the training rows. Sets ``ids[feature]`` (N,), ``vocabs``, ``features``,
        and ``items``: every item of the file of items, those that the log lacks too, with the ids of its values."""
        self.ids: dict[str, npt.NDArray[Any]] = {}
        self.vocabs: dict[str, dict[str, int]] = {}
        self.features: dict[str, dict[str, Any]] = {USER: {"type": "meta"}}
        known: dict[str, Vocabulary] = {}
        self.items = self.every_item
        for feature in self.names:
            column = self.values[feature]
            values = column.unique().sort()
            code = column.rank("dense").to_numpy().astype(np.int64) - 1
            count = np.bincount(code, items, len(values))
            known[feature] = Vocabulary.by_frequency(count)
            self.ids[feature] = known[feature].table(len(values))[code]
            in_order = values.gather(np.asarray(known[feature].originals))
            self.vocabs[feature] = feature_vocab(map(str, in_order))
            ids = pl.Series(f"{feature}:id", known[feature].table(len(values)))
            self.items = self.items.join(pl.DataFrame([values, ids]), on=feature, how="left", maintain_order="left")
            self.items = self.items.with_columns(pl.col(ids.name).fill_null(known[feature].unseen))
            self.features[feature] = target_spec(len(known[feature]))
        for listed, group in zip(self.lists, self.groups, strict=True):
            chosen = listed == "history"
            for feature, name in zip(group.target, group.history, strict=True):
                self.features[name] = history_spec(feature, len(known[feature]), self.max_len, chosen=chosen)
        self.features |= {age: age_spec(self.max_len) for age in self.ages}


class _Counter:
    """What the first pass over a log counts."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.items = np.zeros(log.catalogue.height, np.int64)
        self.splits = {split: Counter[str]() for split in SPLITS}
        self.users = self.total = self.users_without_rows = self.without_negative = 0
        self.tied = self.repeated = self.contradictions = 0

    def add(self, events: Events, rows: Targets) -> None:
        users = int(events.user[-1]) + 1
        self.users += users
        self.users_without_rows += users - int(np.count_nonzero(np.bincount(rows.user)))
        self.tied += int(events.tied.sum())
        self.repeated += events.repeated
        self.contradictions += events.contradictions
        self.total += len(rows.label)
        if self.log.recipe.protocol == "din":
            self.without_negative += 2 * int(rows.label.sum()) - len(rows.label)
        for number, split in enumerate(SPLITS):
            part = rows.rows(np.flatnonzero(rows.split == number))
            counts = self.splits[split]
            counts["rows"] += len(part.label)
            counts["positives"] += int(part.label.sum())
            for history in part.histories:
                length = history.end - history.begin
                counts[f"{history.name}_items"] += int(length.sum())
                counts[f"{history.name}_longest"] = max(counts[f"{history.name}_longest"], int(length.max(initial=0)))
                counts[f"{history.name}_empty"] += int((length == 0).sum())
                counts[f"{history.name}_truncated"] += int(history.truncated.sum())
        train = rows.rows(np.flatnonzero(rows.split == 0))
        self.items += np.bincount(train.code, minlength=len(self.items))
        for history in train.histories:
            # how many rows list each event: rows that begin at or before it minus rows that end there
            edges = np.bincount(history.begin, minlength=len(history.code) + 1)
            edges -= np.bincount(history.end, minlength=len(history.code) + 1)
            listed = np.cumsum(edges)[:-1]
            self.items += np.bincount(history.code, listed, len(self.items)).astype(np.int64)

    def check(self) -> None:
        """Raises UserError for mistakes that only the sorted log shows."""
        log, recipe = self.log, self.log.recipe
        keys = [recipe.user, *([] if recipe.protocol == "din" and log.ordered else [recipe.item])]
        keys += [str(recipe.order if log.ordered else recipe.time)]
        if self.repeated:
            raise UserError(
                f"{log.file}: {self.repeated:,} of {log.kept:,} rows repeat the {', '.join(keys)} of another row"
            )
        if self.contradictions:
            what = f"times in '{recipe.time}' contradict the order in '{recipe.order}'"
            raise UserError(
                f"{log.file}: {what}: {self.contradictions:,} of {log.kept:,} rows are older than the row before"
            )
        if not self.splits["train"]["rows"]:
            what = f"{self.users:,} users, {self.total:,} rows, none of them for training"
            raise UserError(f"{log.file}: {what}: protocol {recipe.protocol} needs users with more than 3 items")

    def report(self, unseen: dict[str, Counter[str]]) -> dict[str, Any]:
        log = self.log
        return {
            "log": {
                "rows": log.rows,
                "dropped": log.dropped,
                "users": self.users,
                "items": len(self.items),
                "users_without_rows": self.users_without_rows,
                "tied_in_time": self.tied if log.timed else None,
                "targets_without_negative": self.without_negative,
            },
            "splits": {
                split: {**self.splits[split], **self._means(split), "unseen": dict(unseen[split])} for split in SPLITS
            },
        }

    def _means(self, split: str) -> dict[str, float]:
        counts = self.splits[split]
        lengths = {key: count for key, count in counts.items() if key.endswith("_items")}
        return {key.replace("_items", "_mean"): round(n / max(counts["rows"], 1), 2) for key, n in lengths.items()}


class _Rows:
    """Writes the rows of the three splits, a row group at a time."""

    def __init__(self, writer: DatasetWriter, columns: _Columns, recipe: Recipe, users: int) -> None:
        self.writer, self.columns = writer, columns
        self.seconds = SECONDS[recipe.time_unit]
        self.group_rows = max(1, min(65_536, LIST_ITEMS // recipe.max_len))
        self.user = np.min_scalar_type(users)
        self.first_user = 0
        self.unseen = {split: Counter[str]() for split in SPLITS}
        fields = {LABEL: pa.uint8(), USER: pa.from_numpy_dtype(self.user)}
        fields |= {feature: pa.from_numpy_dtype(columns.ids[feature].dtype) for feature in columns.names}
        for group in columns.groups:
            pairs = zip(group.target, group.history, strict=True)
            fields |= {name: pa.list_(fields[feature]) for feature, name in pairs}
        fields |= {age: pa.list_(pa.int64()) for age in columns.ages}
        self.schema = pa.schema(fields)
        for split in SPLITS:
            # without dictionaries: ids are small integers already, and this halves size and time
            writer.open(split, self.schema, use_dictionary=False)

    def write(self, rows: Targets) -> None:
        """The rows of one block, whose users follow those of the blocks before."""
        for number, split in enumerate(SPLITS):
            index = np.flatnonzero(rows.split == number)
            for start in range(0, len(index), self.group_rows):
                part = rows.rows(index[start : start + self.group_rows])
                self.writer.add(split, self._table(part, self.unseen[split]))

    def _table(self, rows: Targets, unseen: Counter[str]) -> pa.Table:
        columns = self.columns
        arrays = {LABEL: pa.array(rows.label), USER: pa.array((rows.user + self.first_user).astype(self.user))}
        for feature in columns.names:
            arrays[feature] = pa.array(self._ids(feature, rows.code, feature, unseen))
        for history, group in zip(rows.histories, columns.groups, strict=True):
            length = history.end - history.begin
            offsets = np.concatenate([[0], np.cumsum(length)])
            index = np.arange(offsets[-1]) + np.repeat(history.begin - offsets[:-1], length)
            lists = {
                name: self._ids(feature, history.code[index], name, unseen)
                for feature, name in zip(group.target, group.history, strict=True)
            }
            if group.age is not None and rows.time is not None and history.time is not None:
                lists[group.age] = (np.repeat(rows.time, length) - history.time[index]) // self.seconds
            for name, values in lists.items():
                arrays[name] = pa.ListArray.from_arrays(offsets.astype(np.int32), pa.array(values))
        return pa.table([arrays[name] for name in self.schema.names], schema=self.schema)

    def _ids(self, feature: str, code: Ints, name: str, unseen: Counter[str]) -> npt.NDArray[Any]:
        ids = self.columns.ids[feature][code]
        unseen[name] += int(np.count_nonzero(ids == self.columns.features[feature]["oov_idx"]))
        return ids


def build(
    recipe: Recipe,
    out: Path,
    dataset_id: str | None = None,
    overwrite: bool = False,
    progress: bool = False,
    block_size: int = BLOCK,
) -> Dataset:
    """Build the data set that ``recipe`` describes into the directory ``out``; nothing is left there if that fails.

    ``block_size``: events in memory at once. Raises UserError, one line with counts, for bad input.
    """
    return make_dataset(lambda writer: _read(recipe, writer, progress, block_size), out, dataset_id, overwrite)


def _read(recipe: Recipe, writer: DatasetWriter, progress: bool, block_size: int) -> Content:
    began = time.perf_counter()
    log = Log(recipe)
    columns, counter = _Columns(log), _Counter(log)
    blocks = log.blocks(writer.scratch, block_size)

    def targets() -> Iterator[tuple[Events, Targets]]:
        for number, block in enumerate(blocks):
            events = log.events(block)
            if recipe.protocol == "impressions":
                yield events, impressions(events, recipe)
            else:
                yield events, din(events, recipe, len(counter.items), [recipe.seed, number])

    with tqdm(total=log.kept, unit=" events", desc="counting", disable=not progress, unit_scale=True) as bar:
        for events, rows in targets():
            counter.add(events, rows)
            bar.update(len(events.user))
    counter.check()
    columns.give_ids(counter.items)
    written = _Rows(writer, columns, recipe, counter.users)
    with tqdm(total=counter.total, unit=" rows", desc="writing", disable=not progress, unit_scale=True) as bar:
        for events, rows in targets():
            written.write(rows)
            written.first_user += int(events.user[-1]) + 1
            bar.update(len(rows.label))
    seconds = time.perf_counter() - began
    report = {
        "recipe": recipe.model_dump(mode="json"),
        **counter.report(written.unseen),
        "seconds": round(seconds, 3),
        "rows_per_second": round(counter.total / seconds),
    }
    return Content(LABEL, USER, columns.features, columns.groups, columns.vocabs, report, columns.items)


def summary(dataset: Dataset) -> str:
    """The report of a built set in a few lines."""
    report = json.loads((dataset.path / "report.json").read_text(encoding="utf-8"))
    log, splits = report["log"], report["splits"]
    rows = sum(dataset.rows.values())
    lines = [
        f"{dataset.path}: {rows:,} rows of {log['users']:,} users and {log['items']:,} items"
        f" in {report['seconds']:.1f} s ({report['rows_per_second']:,} rows/s)",
        f"log: {log['rows']:,} rows; dropped: "
        + (", ".join(f"{count:,} with {rule}" for rule, count in log["dropped"].items()) or "none")
        + f"; users without rows: {log['users_without_rows']:,}",
    ]
    if log["tied_in_time"] is not None:
        lines[-1] += f"; at the same time as the event before: {log['tied_in_time']:,}"
    if log["targets_without_negative"]:
        lines[-1] += f"; targets without a negative: {log['targets_without_negative']:,}"
    lines.append(f"{'':6}{'rows':>12}{'positive':>12}{'mean':>8}{'longest':>9}{'empty':>10}{'truncated':>11}  unseen")
    for split, counts in splits.items():
        unseen = ", ".join(f"{name} {count:,}" for name, count in counts["unseen"].items() if count)
        lines.append(
            f"{split:6}{counts['rows']:12,}{counts['positives']:12,}{counts['history_mean']:8.2f}"
            f"{counts['history_longest']:9,}{counts['history_empty']:10,}{counts['history_truncated']:11,}  "
            f"{unseen or 'none'}"
        )
    return "\n".join(lines)
