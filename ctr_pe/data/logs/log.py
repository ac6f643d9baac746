"""Makes a data set from a log of interactions, by one of two protocols.

din           clicked items; every item from a user's second on is a target, paired with a sampled item never clicked
impressions   shown items with real labels

Two passes over blocks of users: the first checks and counts, because ids are sorted by frequency in the training rows;
the second writes. Only the catalogue of items stays in memory between blocks.

Legend: N items of the catalogue; of a block E events, T rows, H events that a history may hold.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
from tqdm import tqdm

from ctr_pe.config.field_groups import Group
from ctr_pe.data.dataset import REPORT, SPLITS, Dataset
from ctr_pe.data.id_map import UNSEEN, Vocabulary, ids_of
from ctr_pe.data.logs.clock import SECONDS
from ctr_pe.data.logs.events import BLOCK, Bools, Events, Ints, Log
from ctr_pe.data.logs.recipe import Recipe
from ctr_pe.data.writer import Content, DatasetWriter, make_dataset
from ctr_pe.fuxictr.feature_specs import age_spec, history_spec, target_spec
from ctr_pe.utils.errors import UserError, option

if TYPE_CHECKING:
    from collections.abc import Iterator

LABEL, USER = "label", "user_id"  # with item_id the columns of every data set
LIST_ITEMS = 4_000_000  # list items in memory while a row group is written


@dataclass(frozen=True)
class History:
    """One list of earlier events per event of a block: ``code[begin:end]``, oldest first."""

    name: str  # "history" or "neg_history"
    code: Ints  # (H,)
    time: Ints | None  # (H,)
    begin: Ints  # (E,)
    end: Ints  # (E,)
    truncated: Bools  # (E,) begin cuts off older events


@dataclass(frozen=True)
class Targets:
    """The rows of a block, by user and order."""

    events: Events
    histories: tuple[History, ...]
    event: Ints  # (T,) the event that the row is about
    code: Ints  # (T,) the event's item, or the one sampled in its place
    label: npt.NDArray[np.uint8]  # (T,)
    split: npt.NDArray[np.uint8]  # (T,) index into SPLITS

    def rows(self, chosen: Ints | Bools | slice) -> Targets:
        event, code, label, split = self.event[chosen], self.code[chosen], self.label[chosen], self.split[chosen]
        return replace(self, event=event, code=code, label=label, split=split)


def din(events: Events, recipe: Recipe, items: int, seed: list[int]) -> Targets:
    """Rows in pairs: the clicked item and one that the user never clicked, from a catalogue of ``items``.

    A user's last target is test, the one before it valid, the others train. A user who clicked the whole catalogue has
    targets without negatives.
    """
    target = np.flatnonzero(np.arange(len(events.user)) > events.first)
    last = np.flatnonzero(np.append(events.user[1:] != events.user[:-1], True))
    from_end = last[events.user[target]] - target
    split = np.array([2, 1, 0], np.uint8)[np.minimum(from_end, 2)]
    negative = never_clicked(events.user, events.code, target, items, np.random.default_rng(seed))
    code = np.stack([events.code[target], negative], axis=1).reshape(-1)
    label = np.tile(np.array([1, 0], np.uint8), len(target))
    history = _history("history", events, events.positive, recipe.max_len)
    return Targets(events, (history,), np.repeat(target, 2), code, label, np.repeat(split, 2)).rows(code >= 0)


def impressions(events: Events, recipe: Recipe) -> Targets:
    """One row per impression with the user's earlier positives, and the earlier negatives if the recipe wants them."""
    histories = [_history("history", events, events.positive, recipe.max_len)]
    if recipe.negatives:
        histories.append(_history("neg_history", events, ~events.positive, recipe.max_len))
    label = events.positive.astype(np.uint8)
    return Targets(events, tuple(histories), np.arange(len(label)), events.code, label, events.split)


def _history(name: str, events: Events, listed: Bools, max_len: int) -> History:
    """Per event, the listed events of the same user that are earlier than it, at most ``max_len``, the most recent."""
    before: Ints = np.cumsum(listed) - listed
    oldest: Ints = before[events.first]
    end: Ints = before[events.tie]
    begin = np.maximum(oldest, end - max_len)
    times = None if events.time is None else events.time[listed]
    return History(name, events.code[listed], times, begin, end, begin > oldest)


def never_clicked(user: Ints, code: Ints, target: Ints, items: int, generator: np.random.Generator) -> Ints:
    """(T,) per target, a uniform sample of the ``items`` that its user has no event with; -1 if there is none.

    ``user``, ``code`` (E,): of all events, numbers without gaps and 0 … items - 1; ``target`` (T,): the events.

    The r-th item outside a user's sorted items c is r + #{i: c[i] - i <= r}: exact without rejection, so a user who
    clicked nearly everything costs no more than others.
    """
    clicked = np.sort(user * items + code)  # np.unique hashes, which takes ten times as long
    clicked = clicked[np.append(True, clicked[1:] != clicked[:-1])]
    whose = clicked // items
    count = np.bincount(whose)
    start = np.cumsum(count) - count
    gaps = clicked - (np.arange(len(clicked)) - start[whose])  # user * items + c[i] - i, sorted
    owner = user[target]
    left = items - count[owner]
    rank = generator.integers(0, np.maximum(left, 1))
    skipped = np.searchsorted(gaps, owner * items + rank, side="right") - start[owner]
    return np.where(left > 0, rank + skipped, -1)


def _groups(log: Log) -> tuple[Group, ...]:
    """The item's features, and the columns of each list of earlier items."""
    names = tuple(log.catalogue.columns)
    groups = tuple(
        Group(
            names, tuple(f"{name.removesuffix('_id')}_{lists}" for name in names), f"age_{lists}" if log.timed else None
        )
        for lists in ("history", "neg_history")[: 1 + log.recipe.negatives]
    )
    made = [LABEL, USER, *names, *(name for group in groups for name in (*group.history, group.age) if name)]
    if twice := {name for name in made if made.count(name) > 1}:
        raise UserError(f"{log.recipe.items}: attributes would make the column '{min(twice)}' twice: rename one")
    return groups


class _Counter:
    """What the first pass over a log counts. ``items`` (N,): occurrences of each item in the training rows."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.items = np.zeros(log.catalogue.height, np.int64)
        self.users = self.rows = self.users_without_rows = self.without_negative = 0
        self.tied = self.repeated = self.contradictions = 0

    def add(self, rows: Targets) -> None:
        events = rows.events
        users = int(events.user[-1]) + 1
        self.users += users
        self.users_without_rows += users - int(np.count_nonzero(np.bincount(events.user[rows.event])))
        self.tied += events.tied
        self.repeated += events.repeated
        self.contradictions += events.contradictions
        self.rows += len(rows.label)
        if self.log.recipe.protocol == "din":
            self.without_negative += 2 * int(rows.label.sum()) - len(rows.label)
        train = rows.rows(rows.split == 0)
        self.items += np.bincount(train.code, minlength=len(self.items))
        for history in rows.histories:
            # how many rows list each event: rows that begin at or before it minus rows that end there
            edges = np.bincount(history.begin[train.event], minlength=len(history.code) + 1)
            edges -= np.bincount(history.end[train.event], minlength=len(history.code) + 1)
            listed = np.cumsum(edges)[:-1]
            self.items += np.bincount(history.code, listed, len(self.items)).astype(np.int64)

    def check(self) -> None:
        """Raises UserError for mistakes that only the sorted log shows."""
        log, recipe = self.log, self.log.recipe
        keys = [recipe.user, *([] if recipe.protocol == "din" and log.ordered else [recipe.item])]
        keys += [str(recipe.order if log.ordered else recipe.time)]
        if self.repeated:
            problem = f"{self.repeated:,} of {log.kept:,} rows repeat the {', '.join(keys)} of another row"
        elif self.contradictions:
            problem = f"times in '{recipe.time}' contradict the order in '{recipe.order}': "
            problem += f"{self.contradictions:,} of {log.kept:,} rows are older than the row before; "
            problem += f"{option('order', None)} leaves it out"
        elif not self.items.any():
            problem = f"{self.users:,} users, {self.rows:,} rows, none of them for training: "
            problem += f"protocol {recipe.protocol} needs users with more than 3 items"
        else:
            return
        raise UserError(f"{log.file}: {problem}")

    def report(self) -> dict[str, Any]:
        return {
            "rows": self.log.rows,
            "dropped": self.log.dropped,
            "users": self.users,
            "items": len(self.items),
            "users_without_rows": self.users_without_rows,
            "tied_in_time": self.tied if self.log.timed else None,
            "targets_without_negative": self.without_negative,
        }


class _Rows:
    """The second pass: numbers the values of each feature by frequency in the training rows, and writes the rows."""

    def __init__(self, writer: DatasetWriter, log: Log, groups: tuple[Group, ...], counter: _Counter) -> None:
        self.writer, self.groups = writer, groups
        self.seconds = SECONDS[log.recipe.time_unit]
        max_len = log.recipe.max_len
        self.group_rows = max(1, min(65_536, LIST_ITEMS // max_len))
        self.first_user, self.user = 0, np.min_scalar_type(counter.users)
        self.counts = {split: Counter[str]() for split in SPLITS}
        self.unseen = {split: Counter[str]() for split in SPLITS}
        self.ids: dict[str, npt.NDArray[Any]] = {}  # (N,) of each item
        self.vocabs: dict[str, dict[str, int]] = {}
        self.features: dict[str, dict[str, Any]] = {USER: {"type": "meta"}}
        self.items = log.items  # every item that is known, with the ids of its values
        sizes: dict[str, tuple[int, int]] = {}
        if log.before is not None:
            log.before.check(log.catalogue.columns)
        for column in log.catalogue:  # ties go by value
            feature, values = column.name, column.unique().sort()
            value = column.rank("dense").to_numpy().astype(np.int64) - 1
            vocabulary = Vocabulary.by_frequency(np.bincount(value, counter.items, len(values)))
            stored = Vocabulary(values.gather(np.asarray(vocabulary.originals)).to_list()).stored()
            if log.before is not None:
                stored = log.before.grown(feature, stored)
            self.vocabs[feature] = stored
            self.ids[feature] = ids_of(values, stored)[value]
            self.items = self.items.with_columns(pl.Series(f"{feature}:id", ids_of(self.items[feature], stored)))
            known, unseen = sizes[feature] = max(stored.values()) - 1, stored[UNSEEN]
            self.features[feature] = target_spec(known, unseen=unseen)
        for group, chosen in zip(groups, (True, False), strict=False):
            for feature, name in zip(group.target, group.history, strict=True):
                known, unseen = sizes[feature]
                self.features[name] = history_spec(feature, known, max_len, chosen=chosen, unseen=unseen)
        self.features |= {group.age: age_spec(max_len) for group in groups if group.age}

    def write(self, rows: Targets) -> None:
        """The rows of one block, whose users follow those of the blocks before, a row group at a time."""
        for number, split in enumerate(SPLITS):
            part = rows.rows(rows.split == number)
            self._count(part, self.counts[split])
            for start in range(0, max(len(part.label), 1), self.group_rows):
                table = self._table(part.rows(slice(start, start + self.group_rows)), self.unseen[split])
                # without dictionaries: ids are small integers already, and this halves size and time
                self.writer.add(split, table, use_dictionary=False)
        self.first_user += int(rows.events.user[-1]) + 1

    def _count(self, part: Targets, counts: Counter[str]) -> None:
        counts["rows"] += len(part.label)
        counts["positives"] += int(part.label.sum())
        for history in part.histories:
            length = (history.end - history.begin)[part.event]
            counts[f"{history.name}_items"] += int(length.sum())
            counts[f"{history.name}_longest"] = max(counts[f"{history.name}_longest"], int(length.max(initial=0)))
            counts[f"{history.name}_empty"] += int((length == 0).sum())
            counts[f"{history.name}_truncated"] += int(history.truncated[part.event].sum())

    def _table(self, part: Targets, unseen: Counter[str]) -> pa.Table:
        events = part.events
        columns = {LABEL: part.label, USER: (events.user[part.event] + self.first_user).astype(self.user)}
        for feature in self.ids:
            columns[feature] = self._ids(feature, part.code, feature, unseen)
        ages = {}
        for history, group in zip(part.histories, self.groups, strict=True):
            begin = history.begin[part.event]
            length = history.end[part.event] - begin
            offsets = np.concatenate([[0], np.cumsum(length)])
            index = np.arange(offsets[-1]) + np.repeat(begin - offsets[:-1], length)
            offsets = offsets.astype(np.int32)
            for feature, name in zip(group.target, group.history, strict=True):
                ids = self._ids(feature, history.code[index], name, unseen)
                columns[name] = pa.ListArray.from_arrays(offsets, pa.array(ids))
            if events.time is not None and history.time is not None:
                age = (np.repeat(events.time[part.event], length) - history.time[index]) // self.seconds
                ages[group.age] = pa.ListArray.from_arrays(offsets, pa.array(age))
        return pa.table(columns | ages)

    def _ids(self, feature: str, code: Ints, name: str, unseen: Counter[str]) -> npt.NDArray[Any]:
        ids = self.ids[feature][code]
        unseen[name] += int(np.count_nonzero(ids == self.features[feature]["oov_idx"]))
        return ids

    def report(self) -> dict[str, dict[str, Any]]:
        found = {}
        for split, counts in self.counts.items():
            items = {key: count for key, count in counts.items() if key.endswith("_items")}
            means = {key.replace("_items", "_mean"): n / max(counts["rows"], 1) for key, n in items.items()}
            means = {key: round(mean, 2) for key, mean in means.items()}
            found[split] = {**counts, **means, "unseen": dict(self.unseen[split])}
        return found


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
    groups, counter = _groups(log), _Counter(log)
    blocks = log.blocks(writer.scratch, block_size)

    def targets(doing: str) -> Iterator[Targets]:
        with tqdm(total=log.kept, unit=" events", desc=doing, disable=not progress, unit_scale=True) as bar:
            for number, block in enumerate(blocks):
                events = log.events(block)
                if recipe.protocol == "impressions":
                    yield impressions(events, recipe)
                else:
                    yield din(events, recipe, len(counter.items), [recipe.seed, number])
                bar.update(len(events.user))

    for rows in targets("counting"):
        counter.add(rows)
    counter.check()
    written = _Rows(writer, log, groups, counter)
    for rows in targets("writing"):
        written.write(rows)
    seconds = time.perf_counter() - began
    report = {
        "recipe": recipe.model_dump(mode="json"),
        "log": counter.report(),
        "read_as": log.read_as,
        "splits": written.report(),
        "seconds": round(seconds, 3),
        "rows_per_second": round(counter.rows / seconds),
    }
    if log.before is not None:
        report["append_to"] = log.before.report(written.vocabs)
    return Content(LABEL, USER, written.features, groups, written.vocabs, report, written.items)


def summary(dataset: Dataset) -> str:
    """The report of a built set in a few lines."""
    report = json.loads((dataset.path / REPORT).read_text(encoding="utf-8"))
    log = report["log"]
    dropped = ", ".join(f"{count:,} with {rule}" for rule, count in log["dropped"].items()) or "none"
    events = f"log: {log['rows']:,} rows; dropped: {dropped}; users without rows: {log['users_without_rows']:,}"
    if log["tied_in_time"] is not None:
        events += f"; at the same time as the event before: {log['tied_in_time']:,}"
    if "append_to" in report:
        new = ", ".join(f"{feature} {count:,}" for feature, count in report["append_to"]["new_ids"].items())
        events += f"; new ids: {new}"
    if log["targets_without_negative"]:
        events += f"; targets without a negative: {log['targets_without_negative']:,}"
    found = " · ".join(f"{column}: {what}" for column, what in report["read_as"].items())
    lines = [
        f"{dataset.path}: {sum(dataset.rows.values()):,} rows of {log['users']:,} users and {log['items']:,} items"
        f" in {report['seconds']:.1f} s ({report['rows_per_second']:,} rows/s)",
        f"read as: {found}",
        events,
        f"{'':6}{'rows':>12}{'positive':>12}{'mean':>8}{'longest':>9}{'empty':>10}{'truncated':>11}  unseen",
    ]
    for split, counts in report["splits"].items():
        unseen = ", ".join(f"{name} {count:,}" for name, count in counts["unseen"].items() if count)
        lines.append(
            f"{split:6}{counts['rows']:12,}{counts['positives']:12,}{counts['history_mean']:8.2f}"
            f"{counts['history_longest']:9,}{counts['history_empty']:10,}{counts['history_truncated']:11,}  "
            f"{unseen or 'none'}"
        )
    return "\n".join(lines)
