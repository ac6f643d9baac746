"""Makes a data set from a log of interactions, by one of four protocols.

din            clicked items; every item from a user's second on is a target, paired with a sampled item never clicked
impressions    shown items with real labels
leave-one-out  chosen items; which comes next? A user's last item is test, the one before it valid
temporal       the same; valid and test are the newest events of the log

Two passes over blocks of users: the first checks and counts, because ids are sorted by frequency in the training rows;
the second writes. Only the catalogue of items stays in memory between blocks.

Legend: N items of the catalogue; of a block E events, T rows.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
from tqdm.auto import tqdm

from ctr_pe.config.field_groups import Group, log_group
from ctr_pe.data.dataset import ID, ITEM, LABEL, SPLITS, USER, WEIGHT, Dataset
from ctr_pe.data.id_map import Array, Ints, missing, with_ids
from ctr_pe.data.logs.events import BLOCK, COLUMN, Bools, EventBlock, Log
from ctr_pe.data.logs.on_engine import BlockFiles, shuffled
from ctr_pe.data.logs.recipe import Recipe
from ctr_pe.data.logs.sequences import leave_one_out, sequence_rows
from ctr_pe.data.requests import EncodedRequests, RequestHistories
from ctr_pe.data.root import REPORT
from ctr_pe.data.timeline import Timeline
from ctr_pe.data.value_maps import Buckets, normalizers_of, value_maps, vocabularies_of
from ctr_pe.data.vectors import file_of
from ctr_pe.data.writer import Content, DatasetWriter, item_specs, make_dataset
from ctr_pe.utils.engines import Engine, open_engine
from ctr_pe.utils.errors import UserError, counted, hyper_parameter, option

if TYPE_CHECKING:
    from collections.abc import Iterator

POLARS = "polars"  # the engine that is no cluster
LIST_ITEMS = 4_000_000  # list items in memory while a row group is written
FIRST_ROWS, EXAMPLES = 1000, 5  # rows of the log among which examples are looked for, and how many there are
CODE, EVENT = "code", "event"  # the item's row in the catalogue and the event's in its block, in place of all ids


@dataclass(frozen=True)
class BlockIds:
    """By target field the ids of a block. ``item`` (N,): of an item of the catalogue; ``event`` (E,): of an event;
    ``user`` (E,): of an event's user, and numbers that only targets have; all with a further axis where a value has
    several ids. ``afterwards``: fields of ``event`` that only histories have -> the id that a target has in their
    place."""

    item: Mapping[str, Array]
    event: Mapping[str, Array]
    user: Mapping[str, Array]
    afterwards: Mapping[str, int]

    def of_target(self, name: str, code: Ints, event: Ints) -> Array:
        """(T, …) of targets: their items and events."""
        if name in self.afterwards:
            return missing(self.afterwards[name], len(event), self.event[name])
        return self.item[name][code] if name in self.item else {**self.event, **self.user}[name][event]

    def of_history(self, name: str, line: Timeline) -> Array:
        """(E', …) of the events of a timeline."""
        return self.item[name][line.ids[CODE]] if name in self.item else self.event[name][line.ids[EVENT]]


@dataclass(frozen=True)
class LabelledRequests:
    """The rows of a block, by user and order: requests with a label."""

    block: EventBlock
    timelines: tuple[Timeline, ...]  # of the chosen items, and of the others if the recipe wants them
    event: Ints  # (T,) the event that the row is about
    code: Ints  # (T,) the event's item, or the one sampled in its place
    label: npt.NDArray[np.uint8]  # (T,)
    split: npt.NDArray[np.uint8]  # (T,) index into SPLITS
    by_place: bool = False  # a history has every event that is sorted before the row's, else those of earlier times

    def user(self) -> Ints:
        """(T,)"""
        return self.block.column("user")[self.event]

    def select(self, chosen: Bools) -> LabelledRequests:
        """Those of the rows."""
        return replace(self, **{name: getattr(self, name)[chosen] for name in ("event", "code", "label", "split")})

    def histories(self, max_len: int) -> list[tuple[Ints, Ints]]:
        """Per timeline where the history of each row begins and ends (T,)."""
        user, events = self.block.column("user"), self.block.events
        if self.by_place:
            (line,) = self.timelines  # of all events, so that places in it are those in the block
            return [(np.maximum(line.first[user[self.event]], self.event - max_len), self.event)]
        by_order = "order" in events.columns
        at = self.block.column("order" if by_order else "time")
        return [
            (begin[self.event], end[self.event])
            for begin, end in (line.newest(user, at, max_len, by_order) for line in self.timelines)
        ]

    def encoded(self, ids: BlockIds, groups: Sequence[Group], max_len: int) -> EncodedRequests:
        """The rows with the ids of their items, events and users."""
        lists = [
            RequestHistories(
                {name: ids.of_history(target, line) for target, name in zip(group.target, group.history, strict=True)},
                begin,
                end,
                group.age,
                line.time,
            )
            for line, group, (begin, end) in zip(self.timelines, groups, self.histories(max_len), strict=True)
        ]
        now = self.block.column("time")[self.event] if "time" in self.block.events.columns else None
        names = dict.fromkeys([*groups[0].target, *ids.user])
        scalars = {name: ids.of_target(name, self.code, self.event) for name in names}
        return EncodedRequests(len(self.label), scalars, lists, now, Counter())


def timelines(block: EventBlock, recipe: Recipe) -> tuple[Timeline, ...]:
    """One of each history."""
    code = recipe.behaviours.code() if recipe.behaviours else {}
    return tuple(
        block.timeline(CODE, EVENT, listed.chosen, None if listed.behaviour is None else code[listed.behaviour])
        for listed in recipe.histories
    )


def din(block: EventBlock, items: int, seed: list[int], recipe: Recipe) -> LabelledRequests:
    """Rows in pairs: the clicked item and one that the user never clicked, from a catalogue of ``items``.

    Targets are all events but a user's first, of the first behaviour where the recipe lists some. A user's last target
    is test, the one before it valid, the others train. A user who clicked the whole catalogue has targets without
    negatives.
    """
    user, item = block.column("user"), block.column("tie")
    wanted = ~block.is_first
    if recipe.behaviours:
        wanted &= block.column("behaviour") == 0
    target = np.flatnonzero(wanted)
    split = leave_one_out(user[target])
    negative = never_clicked(user, item, target, items, np.random.default_rng(seed))
    code = np.stack([item[target], negative], axis=1).reshape(-1)
    label = np.tile(np.array([1, 0], np.uint8), len(target))
    rows = LabelledRequests(block, timelines(block, recipe), np.repeat(target, 2), code, label, np.repeat(split, 2))
    return rows.select(code >= 0)


def impressions(block: EventBlock, recipe: Recipe) -> LabelledRequests:
    """One row per impression with the user's earlier positives, by behaviour if the recipe lists some, and the earlier
    negatives if it wants them."""
    label = block.column("positive").astype(np.uint8)
    return LabelledRequests(
        block, timelines(block, recipe), np.arange(len(label)), block.column("tie"), label, block.column("split")
    )


def next_item(block: EventBlock, recipe: Recipe) -> LabelledRequests:
    """Rows of protocols leave-one-out and temporal (:mod:`ctr_pe.data.logs.sequences`); all labels are 1."""
    user = block.column("user")
    split = block.column("split") if recipe.protocol == "temporal" else leave_one_out(user)
    event = sequence_rows(user, split, recipe.max_len, recipe.windows == "all")
    label = np.ones(len(event), np.uint8)
    return LabelledRequests(
        block, timelines(block, recipe), event, block.column("tie")[event], label, split[event], by_place=True
    )


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
    names, others = [*log.catalogue.columns, *log.recipe.of_history()], log.recipe.of_rows()
    groups = tuple(log_group(names, log.timed, listed.name) for listed in log.recipe.histories)
    made: dict[str, list[str]] = {LABEL: ["the label"], USER: ["the users"]}
    made |= {WEIGHT: ["the weights"]} if log.recipe.weight else {}
    for name in (*names, *others):
        made.setdefault(name, []).append(f"'{name}'")
    for group in groups:
        for name, history in zip(group.target, group.history, strict=True):
            made.setdefault(history, []).append(f"the history of '{name}'")
        if group.age:
            made.setdefault(group.age, []).append("the age of events")
    for column, makers in made.items():
        if len(makers) > 1:
            raise UserError(f"{log.file}: {' and '.join(makers)} would make the column '{column}': rename one")
    return groups


class _Counter:
    """What the first pass over a log counts. ``items`` (N,): occurrences of each item in the training rows; ``events``
    (N,): of each item in the log; ``values``: declared column of the log -> tables of its values and how often they
    occur in the training rows; ``users``: training rows of each user in the table of users; ``splits``: rows of each
    of a next-item data set."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.items = np.zeros(log.catalogue.height, np.int64)
        self.events = np.zeros(log.catalogue.height, np.int64)
        self.users = np.zeros(0 if log.users is None else log.users.height + 1, np.int64)
        self.values: dict[str, list[pl.DataFrame]] = {}
        self.counts = Counter[str]()
        self.splits = np.zeros(len(SPLITS), np.int64)

    def add(self, rows: LabelledRequests) -> None:
        block, recipe = rows.block, self.log.recipe
        self.counts.update(block.counts, users=block.users, rows=len(rows.label))
        self.events += np.bincount(block.column("tie"), minlength=len(self.events))
        self.counts["users_without_rows"] += block.users - int(np.count_nonzero(np.bincount(rows.user())))
        if recipe.protocol == "din":
            self.counts["without_negative"] += 2 * int(rows.label.sum()) - len(rows.label)
        if recipe.next_item:
            self.splits += np.bincount(rows.split, minlength=len(SPLITS))
            if recipe.protocol == "temporal":
                self.counts["first_events"] += int((block.column("split")[block.is_first] > 0).sum())
        train = rows.select(rows.split == 0)
        self.items += np.bincount(train.code, minlength=len(self.items))
        targets = np.bincount(train.event, minlength=len(block.is_first))  # rows that are about each event
        listed = np.zeros_like(targets)  # rows whose history has it
        for line, (begin, end) in zip(train.timelines, train.histories(recipe.max_len), strict=True):
            # how many rows list each event: rows that begin at or before it minus rows that end there
            code = line.ids[CODE]
            edges = np.bincount(begin, minlength=len(code) + 1) - np.bincount(end, minlength=len(code) + 1)
            rows_with = np.cumsum(edges)[:-1]
            self.items += np.bincount(code, rows_with, len(self.items)).astype(np.int64)
            listed[line.ids[EVENT]] += rows_with
        if len(self.users):
            owner = block.column("owner") % len(self.users)  # -1, a user without a row in the table, is the last
            self.users += np.bincount(owner, targets, len(self.users)).astype(np.int64)
        for name in filter(lambda name: name.startswith(COLUMN), block.events.columns):
            column = recipe.columns[name.removeprefix(COLUMN)]
            in_history = column.source == "event" and column.normalizer is None
            seen = targets * (column.known == "before") + listed * in_history
            table = pl.DataFrame({"value": block.events[name], "count": seen}).filter(pl.col("count") > 0)
            self.values.setdefault(name.removeprefix(COLUMN), []).append(table.group_by("value").sum())

    def packed(self) -> dict[str, Any]:
        """What has been counted, without zeros, for :meth:`merge`."""
        arrays = {name: getattr(self, name) for name in ("items", "events", "users")}
        counts = {name: (at := np.flatnonzero(of), of[at]) for name, of in arrays.items()}
        return {**counts, "values": self.values, "counts": self.counts, "splits": self.splits}

    def merge(self, packed: Mapping[str, Any]) -> None:
        """Add what another has counted in further blocks of the log."""
        for name in ("items", "events", "users"):
            at, counts = packed[name]
            getattr(self, name)[at] += counts
        for name, tables in packed["values"].items():
            self.values.setdefault(name, []).extend(tables)
        self.counts.update(packed["counts"])
        self.splits += packed["splits"]

    def problems(self) -> Iterator[str]:
        """Mistakes that only the sorted log shows."""
        log, recipe = self.log, self.log.recipe
        keys = [recipe.user, *([] if recipe.chosen_only and log.ordered else [recipe.item])]
        keys += [str(recipe.order if log.ordered else recipe.time)]
        if (repeated := self.counts["repeated"]) and recipe.keep is None:
            problem = (
                f"{repeated:,} of {log.kept:,} rows repeat the {', '.join(keys)} of another row, the first is row "
            )
            how = f"{option('keep', 'first')}, last or all says which of them count"
            yield f"{log.file}: {problem}{log.first_repeated()}: {how}"
        if older := self.counts["contradictions"]:
            problem = f"times in '{recipe.time}' contradict the order in '{recipe.order}': "
            problem += f"{older:,} of {log.kept:,} rows are older than the row before; "
            yield f"{log.file}: {problem}{option('order', None)} leaves it out"
        if log.before is None and self.users.any() and not self.users[:-1].any():
            yield f"{recipe.users}: no user of the training rows has a row here"
        if not self.items.any():
            problem = f"{self.counts['users']:,} users, {self.counts['rows']:,} rows, none of them for training: "
            yield f"{log.file}: {problem}protocol {recipe.protocol} needs users with more than 3 items"
        elif recipe.next_item and not self.splits.all():
            empty = " and ".join(split for split, rows in zip(SPLITS, self.splits, strict=True) if not rows)
            yield f"{log.file}: no rows for {empty}: no user has an event there and one before it"

    def report(self) -> dict[str, Any]:
        dropped, keep = self.log.dropped, self.log.recipe.keep
        if keep in ("first", "last"):
            dropped = dropped | {f"repeated events (keep {keep})": self.counts["left out"]}
        return {
            "rows": self.log.rows,
            "dropped": dropped,
            "users": self.counts["users"],
            "items": len(self.items),
            "items_by_events": by_frequency(self.events),
            "users_without_rows": self.counts["users_without_rows"],
            "tied_in_time": self.counts["tied"] if self.log.timed else None,
            "targets_without_negative": self.counts["without_negative"],
            **({"first_events": self.counts["first_events"]} if self.log.recipe.protocol == "temporal" else {}),
        } | ({"repeated": self.counts["repeated"]} if keep else {})


class _Rows:
    """The second pass: numbers the values of each feature by frequency in the training rows, and writes the rows."""

    def __init__(self, writer: DatasetWriter, log: Log, groups: tuple[Group, ...], counter: _Counter) -> None:
        self.log, self.groups, self.max_len = log, groups, log.recipe.max_len
        self.writer: DatasetWriter | BlockFiles = writer
        self.group_rows = max(1, min(65_536, LIST_ITEMS // self.max_len))
        self.block_users = pl.Series("user", [])  # of the first block, by their numbers
        self.examples: list[tuple[str, str]] = []
        self.on_worker = False
        self.first_user, self.user = 0, np.min_scalar_type(counter.counts["users"])
        self.counts = {split: Counter[str]() for split in SPLITS}
        self.unseen = {split: Counter[str]() for split in SPLITS}
        columns = log.recipe.columns
        given = {column.name: (column, counter.items) for column in log.catalogue}
        for name in log.vectors:  # items that the log lacks have theirs too
            there, more = log.catalogue[name], log.items[name]
            given[name] = pl.concat([there, more]), np.concatenate([counter.items, np.zeros(len(more), np.int64)])
        if log.users is not None:
            given |= {name: (log.users[name], counter.users[:-1]) for name in log.users.columns[1:]}
        for name, tables in counter.values.items():
            table = pl.concat(tables)
            given[name] = table["value"], table["count"].to_numpy()
        self.maps = value_maps(columns, given)
        if log.before is not None:
            log.before.check(self.maps)
            self.maps = {name: log.before.maps[name].grow(list(ids.stored)) for name, ids in self.maps.items()}
        self.of_items = {name: self.maps[name].ids(log.catalogue[name]) for name in log.catalogue.columns}  # (N,)
        self.items = with_ids(log.items, {name: self.maps[name] for name in log.items.columns})
        self.users = (
            None
            if log.users is None
            else with_ids(log.users, {name: self.maps[name] for name in log.users.columns[1:]})
        )
        dims = {name: vectors.dim for name, vectors in log.vectors.items()}
        weighted = log.recipe.weight is not None
        self.features = item_specs(self.maps, groups, self.max_len, columns, weighted, dims, log.recipe.histories)
        for name, vectors in log.vectors.items():
            vectors.write(writer.path / file_of(name))
        self.afterwards = {
            name: self.maps[name].unseen for name, column in columns.items() if column.known == "afterwards"
        }

    def _ids(self, block: EventBlock) -> BlockIds:
        """Those of a block's fields."""
        events, of_user = block.events, {}
        of_event = {
            name: self.maps[name].ids(events[COLUMN + name]) for name in self.maps if COLUMN + name in events.columns
        }
        if self.users is not None:
            owner = block.column("owner")
            for name in self.users.columns:
                if name.endswith(ID):
                    ids, feature = self.users[name].to_numpy(), name.removesuffix(ID)
                    of_user[feature] = np.concatenate([ids, missing(self.maps[feature].unseen, 1, ids)])[owner]
        of_user |= {name: of_event.pop(name) for name in self.log.recipe.of_rows() if name in of_event}
        return BlockIds(self.of_items, of_event, of_user, self.afterwards)

    def for_workers(self) -> _Rows:
        """What other machines need of this to write the rows of blocks."""
        lean = copy(self)
        lean.on_worker = True
        lean.log, lean.items, lean.block_users = self.log.for_workers(), pl.DataFrame(), pl.Series("user", [])
        del lean.writer
        return lean

    def write_block(self, rows: LabelledRequests, first_user: int, into: BlockFiles) -> None:
        """Write a block of which nothing is known but its first user's number; counts are those of this block."""
        self.writer, self.first_user = into, first_user
        self.counts, self.unseen = ({split: Counter[str]() for split in SPLITS} for _ in range(2))
        self.write(rows)
        into.finish()

    def merge(self, counts: Mapping[str, Counter[str]], unseen: Mapping[str, Counter[str]]) -> None:
        """Add what another has counted in further blocks."""
        for split in SPLITS:
            self.unseen[split].update(unseen[split])
            for key, count in counts[split].items():
                here = self.counts[split]
                here[key] = max(here[key], count) if key.endswith("_longest") else here[key] + count

    def write(self, rows: LabelledRequests) -> None:
        """The rows of one block, whose users follow those of the blocks before, a row group at a time."""
        encoded = rows.encoded(self._ids(rows.block), self.groups, self.max_len)
        user = (rows.user() + self.first_user).astype(self.user)
        weight = rows.block.column("weight")[rows.event] if self.log.recipe.weight else None
        for number, split in enumerate(SPLITS):
            part = np.flatnonzero(rows.split == number)
            self._count(rows, encoded, part, self.counts[split])
            for start in range(0, max(len(part), 1), self.group_rows):
                chosen = part[start : start + self.group_rows]
                columns = {LABEL: rows.label[chosen], USER: user[chosen]}
                columns |= {} if weight is None else {WEIGHT: weight[chosen]}
                table = pa.table(columns | self._features(encoded, chosen, self.unseen[split]))
                # without dictionaries: ids are small integers already, and this halves size and time
                self.writer.add(split, table, use_dictionary=False)
        if self.first_user == 0 and not self.on_worker:
            self.examples = self._examples(rows, encoded)
        self.first_user += rows.block.users

    def give_examples(self, rows: LabelledRequests) -> None:
        """Examples of a block that others have written."""
        self.examples = self._examples(rows, rows.encoded(self._ids(rows.block), self.groups, self.max_len))

    def _examples(self, rows: LabelledRequests, encoded: EncodedRequests) -> list[tuple[str, str]]:
        """Some of the log's first rows as they were read, and the same as they were written, ids back to raw values."""
        block, log = rows.block, self.log
        read, by_role = log.first_rows(FIRST_ROWS)
        clocks = [name for name in ("time", "order") if name in by_role.columns]
        own = np.flatnonzero(rows.code == block.column("tie")[rows.event])  # those that are not sampled
        written = {
            "user": self.block_users.gather(rows.user()[own]),
            "item": log.catalogue[ITEM].gather(rows.code[own]),
        }
        written |= {name: block.events[name].gather(rows.event[own]) for name in clocks}
        keys = ["user", "item", *clocks]
        table = by_role.select(keys).with_row_index("row")
        same = table.join(pl.DataFrame(written).with_columns(at=own), on=keys, maintain_order="left")
        same = same.unique("row", keep="first", maintain_order=True).head(EXAMPLES)
        unread = set(log.unread["event"])
        used = [name for name in read.columns if name not in unread]
        shown = read.select(used)[same["row"]].rows()
        as_read = [" ".join(f"{name}={value!r}" for name, value in zip(used, row, strict=True)) for row in shown]
        return list(zip(as_read, self._as_written(rows, encoded, same["at"].to_numpy()), strict=True))

    def _as_written(self, rows: LabelledRequests, encoded: EncodedRequests, chosen: Ints) -> list[str]:
        target = {name: self._raw(name, ids[chosen]) for name, ids in encoded.scalars.items() if name in self.maps}
        lists, name = encoded.lists[0], self.groups[0].history[0]
        spans = [(int(lists.begin[at]), int(lists.end[at])) for at in chosen]
        shown = [np.arange(max(begin, end - EXAMPLES), end) for begin, end in spans]
        items, texts = iter(self._raw(ITEM, lists.ids[name][np.concatenate([[], *shown]).astype(np.int64)])), []
        for row, (at, (begin, end), newest) in enumerate(zip(chosen, spans, shown, strict=True)):
            more = "… " if end - begin > EXAMPLES else ""
            history = f"{more}{' '.join(islice(items, len(newest)))} ({end - begin})" if end > begin else "empty"
            words = " ".join(f"{name}={values[row]}" for name, values in target.items())
            texts.append(f"{SPLITS[rows.split[at]]}: label={rows.label[at]} {words} history: {history}")
        return texts

    def _raw(self, name: str, ids: Array) -> list[str]:
        """The raw value of each of (n,) ids, or of (n, M) of several values."""
        if not np.issubdtype(ids.dtype, np.integer):
            return [np.array2string(np.asarray(one), threshold=3, precision=3) for one in ids]
        upper, wanted = "≤" if isinstance(self.maps[name], Buckets) else "", set(ids.reshape(-1).tolist())
        values = {number: upper + text for text, number in self.maps[name].stored.items() if number in wanted}
        values[self.maps[name].unseen] = "unknown"
        rows = ([number for number in np.atleast_1d(one).tolist() if number] for one in ids)
        return ["|".join(values.get(number, f"bucket {number}") for number in row) or "none" for row in rows]

    def _count(self, rows: LabelledRequests, encoded: EncodedRequests, part: Ints, counts: Counter[str]) -> None:
        counts["rows"] += len(part)
        counts["positives"] += int(rows.label[part].sum())
        user = rows.user()[part]
        of_user = [np.bincount(user[rows.label[part] == label], minlength=rows.block.users) for label in (0, 1)]
        counts["users"] += int(np.count_nonzero(of_user[0] + of_user[1]))
        counts["users_of_both_labels"] += int(np.count_nonzero(of_user[0] * of_user[1]))
        for listed, line, lists in zip(self.log.recipe.histories, rows.timelines, encoded.lists, strict=True):
            name = listed.name
            begin, length = lists.begin[part], (lists.end - lists.begin)[part]
            counts[f"{name}_items"] += int(length.sum())
            counts[f"{name}_longest"] = max(counts[f"{name}_longest"], int(length.max(initial=0)))
            counts[f"{name}_empty"] += int((length == 0).sum())
            counts[f"{name}_truncated"] += int((begin > line.first[user]).sum())

    def _features(self, encoded: EncodedRequests, chosen: Ints, unseen: Counter[str]) -> dict[str, Any]:
        """Columns of these rows: ids, histories, and after them ages."""
        flat = {name: values[chosen] for name, values in encoded.scalars.items()}
        columns: dict[str, Any] = {name: _arrow(values) for name, values in flat.items()}
        ages: dict[str, Any] = {}
        for lists in encoded.lists:
            lengths, values = lists.gather(chosen, encoded.now)
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            for name, of_items in values.items():
                into = ages if name == lists.age_field else columns
                into[name] = pa.ListArray.from_arrays(offsets, _arrow(of_items))
            flat |= {name: values[name] for name in lists.ids}
        for name, ids in flat.items():
            if "oov_idx" in self.features[name]:
                unseen[name] += int(np.count_nonzero(ids == self.features[name]["oov_idx"]))
        return columns | ages

    def report(self) -> dict[str, dict[str, Any]]:
        found = {}
        for split, counts in self.counts.items():
            lists = [key.removesuffix("_items") for key in counts if key.endswith("_items")]
            means = {f"{name}_mean": round(counts[f"{name}_items"] / max(counts["rows"], 1), 2) for name in lists}
            found[split] = {**counts, **means, "unseen": dict(self.unseen[split])}
        return found


def _arrow(ids: Array) -> pa.Array:
    """(n,) or (n, M) ids as a column, the latter of lists of M."""
    flat = pa.array(ids.reshape(-1))
    return flat if ids.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, ids.shape[1])


def build(
    recipe: Recipe,
    out: Path,
    dataset_id: str | None = None,
    overwrite: bool = False,
    progress: bool = False,
    block_size: int = BLOCK,
    shard_rows: int | None = None,
    engine: str = POLARS,
) -> Dataset:
    """Build the data set that ``recipe`` describes into the directory ``out``; nothing is left there if that fails.

    ``block_size``: events in memory at once; ``shard_rows``: rows of a file, at most, where a split is to have several;
    ``engine``: ``polars`` in this process, or as of :func:`ctr_pe.utils.engines.open_engine`, which gives the same
    files.
    Raises UserError, one line with counts, for bad input.
    """
    return make_dataset(
        lambda writer: _read(recipe, writer, progress, block_size, engine), out, dataset_id, overwrite, shard_rows
    )


def read_sample(recipe: Recipe, rows: int, problems: list[str]) -> tuple[Log | None, EventBlock | None]:
    """At most ``rows`` rows of a log, and its events, as far as a build could read them; ``problems`` gets every error
    that the build would end with, of which some end this reading, too."""
    log = block = None
    try:
        log = Log(recipe, rows, problems)
        _groups(log)
        block = log.events(log.blocks(Path(), log.kept)[0])
        counter = _Counter(log)
        if recipe.protocol != "impressions":
            counter.add(_labelled(block, log, 0))
        elif "split" in block.events.columns:
            counter.add(impressions(block, recipe))
        else:  # one of the problems
            counter.add(
                impressions(replace(block, events=block.events.with_columns(split=pl.lit(0, pl.UInt8))), recipe)
            )
        problems += counter.problems()
    except UserError as error:
        problems += [] if str(error) in problems else [str(error)]
    return log, block


def _labelled(block: EventBlock, log: Log, number: int) -> LabelledRequests:
    """The rows of the block of this number, by the recipe's protocol."""
    recipe = log.recipe
    if recipe.protocol == "impressions":
        return impressions(block, recipe)
    if recipe.next_item:
        return next_item(block, recipe)
    return din(block, log.catalogue.height, [recipe.seed, number], recipe)


def by_frequency(counts: Ints) -> str:
    """How many ids occur how often, ``counts`` (n,): ``1: 40 (20 %), 2-5: …``."""
    edges = {"1": (1, 1), "2-5": (2, 5), "6-20": (6, 20), ">20": (21, np.inf)}
    found = {name: int(((counts >= low) & (counts <= high)).sum()) for name, (low, high) in edges.items()}
    whole = max(sum(found.values()), 1)
    return ", ".join(f"{name}: {count:,} ({count / whole:.0%})" for name, count in found.items() if count)


class _InProcess:
    """The two passes over a log's blocks, in this process."""

    def __init__(self, log: Log, scratch: Path, size: int, progress: bool) -> None:
        self.log, self.progress = log, progress
        self.blocks = log.blocks(scratch, size)

    def rows(self, number: int) -> LabelledRequests:
        """Those of a block."""
        return _labelled(self.log.events(self.blocks[number]), self.log, number)

    def count(self, counter: _Counter) -> None:
        for rows in self._all("counting"):
            counter.add(rows)

    def write(self, written: _Rows) -> None:
        for rows in self._all("writing"):
            written.write(rows)

    def _all(self, doing: str) -> Iterator[LabelledRequests]:
        with self.bar(doing) as bar:
            for number in range(len(self.blocks)):
                rows = self.rows(number)
                yield rows
                bar.update(len(rows.block.is_first))

    def bar(self, doing: str) -> Any:
        return tqdm(total=self.log.kept, unit=" events", desc=doing, disable=not self.progress, unit_scale=True)


class _OnCluster(_InProcess):
    """The same by an engine: workers take blocks; what they count is merged here, and rows are put together here."""

    def __init__(self, engine: Engine, log: Log, scratch: Path, size: int, progress: bool) -> None:
        self.engine, self.log, self.scratch, self.progress = engine, log, scratch, progress
        self.files = shuffled(engine, log, scratch / "blocks", size)
        self.blocks = [pl.scan_parquet(file) for file in self.files]

    def count(self, counter: _Counter) -> None:
        found: dict[int, dict[str, Any]] = {}
        with self.bar("counting") as bar:
            for number, packed, events in self.engine.map(
                partial(_count_block, self.log.for_workers(), self.files), range(len(self.files))
            ):
                found[number] = packed
                bar.update(events)
        users = [found[number]["counts"]["users"] for number in sorted(found)]
        self.first_users = np.cumsum([0, *users])[:-1].tolist()
        for number in sorted(found):
            counter.merge(found.pop(number))

    def write(self, written: _Rows) -> None:
        into = self.scratch / "rows"
        found: dict[int, Any] = {}
        call = partial(_write_block, written.for_workers(), self.files, into)
        with self.bar("writing") as bar:
            for number, counts, unseen, events in self.engine.map(call, list(enumerate(self.first_users))):
                found[number] = counts, unseen
                bar.update(events)
        for number in sorted(found):
            written.merge(*found[number])
            for split, table in BlockFiles.read(into, number):
                written.writer.add(split, table, use_dictionary=False)
        written.give_examples(self.rows(0))


def _count_block(log: Log, files: Sequence[Path], number: int) -> tuple[int, dict[str, Any], int]:
    """What a worker counts in a block, and how many events it has."""
    counter = _Counter(log)
    rows = _labelled(log.events(pl.scan_parquet(files[number])), log, number)
    counter.add(rows)
    return number, counter.packed(), len(rows.block.is_first)


def _write_block(
    written: _Rows, files: Sequence[Path], into: Path, block: tuple[int, int]
) -> tuple[int, dict[str, Counter[str]], dict[str, Counter[str]], int]:
    """A worker writes the rows of a block; ``block``: its number, and that of its first user."""
    number, first_user = block
    rows = _labelled(written.log.events(pl.scan_parquet(files[number])), written.log, number)
    written.write_block(rows, first_user, BlockFiles(into, number))
    return number, written.counts, written.unseen, len(rows.block.is_first)


def _read(recipe: Recipe, writer: DatasetWriter, progress: bool, block_size: int, engine: str) -> Content:
    began = time.perf_counter()
    with ExitStack() as stack:
        cluster = None if engine == POLARS else stack.enter_context(closing(open_engine(engine)))
        log = Log(recipe)
        groups, counter = _groups(log), _Counter(log)
        how = log, writer.scratch, block_size, progress
        passes = _InProcess(*how) if cluster is None else _OnCluster(cluster, *how)
        passes.count(counter)
        for problem in counter.problems():
            raise UserError(problem)
        written = _Rows(writer, log, groups, counter)
        written.block_users = passes.blocks[0].select(pl.col("user").unique().sort()).collect()["user"]
        passes.write(written)
    seconds = time.perf_counter() - began
    report = {
        "recipe": recipe.model_dump(mode="json") | ({} if log.ordered else {"order": None}),
        "log": counter.report(),
        "read_as": log.read_as,
        "zoned": log.times and log.times.zoned,
        "items_without": log.without,
        "missing": log.missing,
        **normalizers_of(written.maps),
        "unlisted_behaviours": log.unlisted,
        "unread": log.unread,
        "examples": written.examples,
        "splits": written.report(),
        "seconds": round(seconds, 3),
        "rows_per_second": round(counter.counts["rows"] / seconds),
    }
    if log.before is not None:
        report["append_to"] = log.before.report(written.maps)
    vocabs = vocabularies_of(written.maps, recipe.columns)
    task: Literal["click", "next-item"] = "next-item" if recipe.next_item else "click"
    return Content(LABEL, USER, written.features, groups, vocabs, report, written.items, written.users, task)


def summary(dataset: Dataset) -> str:
    """The report of a built set in a few lines."""
    report = json.loads((dataset.path / REPORT).read_text(encoding="utf-8"))
    log = report["log"]
    dropped = ", ".join(f"{count:,} with {rule}" for rule, count in log["dropped"].items()) or "none"
    events = f"log: {log['rows']:,} rows; dropped: {dropped}; users without rows: {log['users_without_rows']:,}"
    if log["tied_in_time"] is not None:
        events += f"; at the same time as the event before: {log['tied_in_time']:,}"
    if report["items_without"]:
        events += f"; items without {', '.join(f'{name}: {n:,}' for name, n in report['items_without'].items())}"
    if report["missing"]:
        events += f"; rows without {', '.join(f'{name}: {n:,}' for name, n in report['missing'].items())}"
    events += "".join(f"\n{line}" for line in not_read(report["unread"]))
    if "append_to" in report:
        new = ", ".join(f"{feature} {count:,}" for feature, count in report["append_to"]["new_ids"].items())
        events += f"; new ids: {new}"
    if log["targets_without_negative"]:
        events += f"; targets without a negative: {log['targets_without_negative']:,}"
    if log.get("first_events"):
        events += f"; valid and test events without one before them, in no row: {log['first_events']:,}"
    events += f"\nitems by events: {log['items_by_events']}" if "items_by_events" in log else ""
    found = " · ".join(f"{column}: {what}" for column, what in report["read_as"].items())
    lines = [
        f"{dataset.path}: {counted(sum(dataset.rows.values()), 'row')} of {counted(log['users'], 'user')}"
        f" and {counted(log['items'], 'item')}"
        f" in {report['seconds']:.1f} s ({report['rows_per_second']:,} rows/s)",
        f"read as: {found}",
        events,
        f"{'':6}{'rows':>12}{'positive':>12}{'mean':>8}{'longest':>9}{'empty':>10}{'truncated':>11}  unseen",
    ]
    for split, counts in report["splits"].items():
        first = next(key for key in counts if key.endswith("_mean")).removesuffix("_mean")
        unseen = ", ".join(f"{name} {count:,}" for name, count in counts["unseen"].items() if count)
        lines.append(
            f"{split:6}{counts['rows']:12,}{counts['positives']:12,}{counts[f'{first}_mean']:8.2f}"
            f"{counts[f'{first}_longest']:9,}{counts[f'{first}_empty']:10,}{counts[f'{first}_truncated']:11,}  "
            f"{unseen or 'none'}"
        )
    if dataset.task == "next-item":
        first = next(key for key in report["splits"]["train"] if key.endswith("_items"))
        lines.append(f"training answers, one for each item of a history: {report['splits']['train'][first]:,}")
        return "\n".join([*lines, *_examples_of(report)])
    if alone := [split for split in ("valid", "test") if not report["splits"][split]["users_of_both_labels"]]:
        users = " and ".join(f"{counted(report['splits'][split]['users'], 'user')} of {split}" for split in alone)
        how = hyper_parameter("monitor", "AUC")
        lines.append(f"gAUC cannot be computed: none of {users} has rows of both labels: train by AUC, {how}")
    return "\n".join([*lines, *_examples_of(report)])


def not_read(unread: Mapping[str, Sequence[str]]) -> list[str]:
    """A line for each table that has columns which nothing reads, and how to declare one."""
    of = {"event": "", "item": " of the items", "user": " of the users"}
    return [
        f"not read{of[source]}: {', '.join(names)}: {option('column', f'{names[0]}={source}')} reads the first one"
        for source, names in unread.items()
        if names
    ]


def _examples_of(report: Mapping[str, Any]) -> list[str]:
    shown = [f"  {read} → {written}" for read, written in report.get("examples", ())]
    return ["rows as read → as written, ids back to raw values:", *shown] if shown else []
