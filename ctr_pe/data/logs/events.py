"""Reading a log of interactions: lazily, checked, in blocks of whole users that fit into memory."""

from __future__ import annotations

from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import polars as pl

from ctr_pe.config.columns import Behaviours, declared
from ctr_pe.data.dataset import ITEM, ITEMS, SPLITS
from ctr_pe.data.id_map import TEXTS
from ctr_pe.data.logs.append import Before
from ctr_pe.data.logs.labels import check_label, threshold
from ctr_pe.data.logs.roles import (
    Moments,
    ask_label,
    first_row,
    id_column,
    label_like,
    number_column,
    order_column,
    times,
)
from ctr_pe.data.logs.tables import broken_line, readable, scan
from ctr_pe.data.timeline import Timeline, sorted_events
from ctr_pe.data.value_maps import readable_as
from ctr_pe.data.vectors import ItemVectorTable, item_vectors
from ctr_pe.utils.errors import UserError, nearest, option

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ctr_pe.data.logs.recipe import Recipe

BLOCK = 500_000  # events read at once
PART = 4_000_000  # events partitioned into blocks at once; polars may hold all of them
ROW = "row in the file"
COLUMN = "column "  # what the names of declared columns begin with in tables of events
ANY = declared({"category": "event"})["category"]
BINS = 1 << 20  # resolution of a split by time, of the log's time span

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class EventBlock:
    """E events of the users of one block, sorted by user, then order, time, item.

    ``events``: columns ``user`` (0, 1, …, without gaps), ``tie`` (the item's row in the catalogue), ``time`` and
    ``order`` as far as the log has them, ``positive``, ``behaviour`` (place in the recipe's list, or -1), and ``split``
    (index into SPLITS) if the log determines it.
    """

    events: pl.DataFrame
    is_first: Bools  # (E,) of its user
    counts: dict[str, int]
    """Of events "tied" in time with the event before, "repeated" ones, of which "left out", and "contradictions": a
    time before that of an event with a smaller order."""

    def column(self, name: str) -> npt.NDArray[Any]:
        return self.events[name].to_numpy()

    @property
    def users(self) -> int:
        return int(self.is_first.sum())

    def timeline(self, code: str, event: str, chosen: bool = True, behaviour: int | None = None) -> Timeline:
        """Of the events with a positive label, or of the others, and of one behaviour or of all; ``code``: field of the
        item's row in the catalogue, ``event``: of the event's row in ``events``."""
        wanted = pl.col("positive") == chosen
        if behaviour is not None:
            wanted &= pl.col("behaviour") == behaviour
        listed = self.events.with_row_index(event).filter(wanted)
        return Timeline.of(listed, self.users, {code: "tie", event: event})


class Log:
    """A checked log. Raises UserError, one line with counts, for any mistake in it.

    Attributes: ``catalogue`` one row per item of the log, sorted by ``item_id``, with its attributes; ``items`` the
    same for every item that is known, nulls where an attribute is missing; ``before`` the data set whose ids stay, or
    None; ``rows`` read, ``dropped`` by rule and ``kept``; ``timed`` and ``ordered`` whether it has the column;
    ``read_as`` what was found in each column that is used, in words; ``without`` per attribute how many items
    of the log lack it, which have the id of values out of vocabulary; ``vectors`` of each column of vectors, in
    whose place the catalogue has their keys; ``users`` the table of users with their columns, or None;
    ``unlisted`` per behaviour that the recipe does not list its rows; ``missing`` per declared column of the log or of
    the users how many rows of the table lack it; ``unread``: columns that nothing reads, of the log ("event"), of the
    items ("item") and of the users ("user"); ``step``: of time in nanoseconds, which no two times differ by less than.

    ``rows``: of a sample, None for all. ``problems``: gets what would be raised, as far as reading can go on.
    """

    def __init__(self, recipe: Recipe, rows: int | None = None, problems: list[str] | None = None) -> None:
        self.recipe, self.file, self.problems = recipe, recipe.interactions, problems
        self.before = Before(recipe.append_to) if recipe.append_to else None
        with readable(self.file, recipe.separator):
            raw = scan(self.file, recipe.separator, rows)
            schema = raw.collect_schema()
            if raw.head(1).collect().is_empty():
                raise UserError(f"{self.file}: an empty log: no rows, columns {', '.join(schema)}")
            unlabelled = recipe.label is not None and recipe.label not in schema and not recipe.demanded("label")
            if unlabelled and {recipe.user, recipe.item} <= set(schema):  # else the file has other columns altogether
                roles = [recipe.user, recipe.item, recipe.time, recipe.order, recipe.weight]
                roles += [recipe.split.column] if recipe.split else []
                used = {*roles, *recipe.columns, *recipe.drop}
                ask_label(self.file, label_like(raw, [name for name in schema if name not in used]))
            self.times: Moments | None = None
            self._index: pl.Expr | None = None  # of a row's split
            columns = self._columns(raw)
            self.timed, self.ordered = "time" in columns, "order" in columns
            if not (self.timed or self.ordered):
                raise UserError(
                    f"{self.file}: neither a time nor an order column: {option('time')} or {option('order')}: "
                    f"{nearest('time', schema)}"
                )
            read = {name for column in columns.values() for name in column.meta.root_names()}
            self.unread = {"event": [name for name in schema if name not in read], "item": [], "user": []}
            self.read_as: dict[str, str] = {}
            self.without: dict[str, int] = {}
            self.vectors: dict[str, ItemVectorTable] = {}
            self.unlisted: dict[str, int] = {}
            self._events = self._checked(raw, columns)
            ids = self._events.select(pl.col("item").alias(ITEM)).unique().sort(ITEM).collect(engine="streaming")
            self.catalogue, self.items, self.users = ids, ids, None
            with self._going_on():
                self.catalogue, self.items = self._catalogue(ids)
            with self._going_on():
                self.users = self._users()
            with self._going_on():
                if recipe.strict and (lacking := self.missing | self.without):
                    found = ", ".join(f"{name}: {count:,}" for name, count in lacking.items())
                    raise UserError(f"{self.file}: missing values, which {option('strict', True)} refuses: {found}")
            if self.problems and self.timed and recipe.time not in self.read_as:
                raise UserError(self.problems[-1])  # wrong times seem to repeat, and cannot be split
            if recipe.protocol in ("impressions", "temporal"):
                with self._going_on():
                    self._events = self._split()

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """An error within is one of the problems, where these are wanted."""
        try:
            yield
        except UserError as error:
            if self.problems is None:
                raise
            self.problems.append(str(error))

    def count(self, size: int) -> int:
        """How many blocks of about ``size`` events there are, at most."""
        return int(-(-self.kept // size))

    def part(self, first: int, rows: int) -> pl.LazyFrame:
        """The events among ``rows`` rows of the file from row ``first`` on, as blocks have them."""
        return self._coded(self._shaped(self._read[0].slice(first, rows), first))

    def for_workers(self, reading: bool = False) -> Log:
        """What other machines need of this to read parts, or else to take the rows of blocks."""
        lean = copy(self)
        lean.items, lean.before, lean.vectors, lean.times = self.catalogue.head(0), None, {}, None
        lean._events = pl.LazyFrame()
        if not reading:
            lean._read = pl.LazyFrame(), pl.lit(True), {}
        return lean

    def _coded(self, events: pl.LazyFrame) -> pl.LazyFrame:
        """With the numbers of their items, and of their users where these have a table; in the order of the rows."""
        codes = self.catalogue.lazy().select(item=ITEM, tie=pl.int_range(pl.len(), dtype=pl.Int64))
        if self.users is not None:
            owners = self.users.lazy().select("user", owner=pl.int_range(pl.len(), dtype=pl.Int64))
            events = events.join(owners, on="user", how="left", maintain_order="left")
            events = events.with_columns(pl.col("owner").fill_null(-1))
        return events.join(codes, on="item", how="left", maintain_order="left").drop("item")

    def _shaped(self, raw: pl.LazyFrame, first: int = 0) -> pl.LazyFrame:
        """The kept events of the log's rows, of which ``raw`` has those from row ``first`` on."""
        _, keep, columns = self._read
        if self.recipe.keep:
            numbered = raw.with_row_index(ROW, first).filter(keep)
            events = numbered.select(pl.col(ROW).cast(pl.Int64), **columns)
        else:
            events = raw.filter(keep).select(**columns)
        events = events.drop("label", strict=False) if self.recipe.chosen_only else events
        return events if self._index is None else events.with_columns(split=self._index)

    def blocks(self, folder: Path, size: int = BLOCK) -> list[pl.LazyFrame]:
        """The events in blocks of whole users, about ``size`` events each; several are files below ``folder``."""
        count = self.count(size)
        if count == 1:
            with readable(self.file, self.recipe.separator):
                return [self._coded(self._events).collect(engine="streaming").lazy()]
        block = pl.col("user").hash(seed=0) % count
        for start in range(0, self.kept, PART):
            into = pl.PartitionBy(folder / str(start), key={"block": block}, include_key=False)
            self._coded(self._events.slice(start, PART)).sink_parquet(into, mkdir=True)
        names = sorted({path.name for path in folder.glob("*/*")})
        return [pl.scan_parquet(sorted(folder.glob(f"*/{name}"))) for name in names]

    def events(self, block: pl.LazyFrame) -> EventBlock:
        """One block, sorted, whatever the order of the rows in the log."""
        din, columns = self.recipe.chosen_only, block.collect_schema().names()
        positive = pl.lit(True) if din else pl.col("label") == 1
        user = pl.col("user").rle_id().cast(pl.Int64)
        found, rows = block, 0
        if ROW in columns:
            keep = self.recipe.keep
            keys = [name for name in ("user", "tie", "order", "time", "behaviour") if name in columns]
            rows = int(block.select(pl.len()).collect().item())
            found = block.sort(ROW)
            found = found if keep == "all" else found.unique(keys, keep=keep or "any", maintain_order=True)
        events = sorted_events(found, columns).with_columns(user=user, positive=positive).collect()
        clock = "order" if self.ordered else "time"
        new_user, new_item, later = (_changes(events[name]) for name in ("user", "tie", clock))
        new_time = _changes(events["time"]) if self.timed else np.ones(len(new_user), bool)
        earlier = events["time"].diff().to_numpy()[1:] < 0 if self.timed else np.zeros(len(new_user) - 1, bool)
        repeated = ~(new_user | later)
        if not (din and self.ordered):  # else a user cannot have clicked two items at the same order
            repeated &= ~new_item & (~new_time | (not self.timed))
        if self.recipe.behaviours:  # of two behaviours at once neither repeats the other
            of_event: list[str] = ["user", *(() if din and self.ordered else ("tie", "time")), clock, "behaviour"]
            of_event = [name for name in dict.fromkeys(of_event) if name in events.columns]
            again = ~pl.struct(of_event).is_first_distinct() & (pl.col("behaviour") >= 0)
            repeated = events.select(again).to_series().to_numpy()
        counted = {"tied": ~(new_user | new_time), "repeated": repeated, "contradictions": ~new_user[1:] & earlier}
        counts = {name: int(of.sum()) for name, of in counted.items()}
        return EventBlock(events, new_user, counts | {"left out": max(rows - len(new_user), 0)})

    def first_repeated(self) -> int:
        """The first row of the file that is the event of an earlier row."""
        raw, keep, columns = self._read
        keys = [name for name in ("user", "item", "order", "time", "behaviour") if name in columns]
        if self.recipe.chosen_only and self.ordered:
            keys = [name for name in keys if name not in ("item", "time")]
        rows = raw.with_row_index(ROW).filter(keep).select(ROW, **{name: columns[name] for name in keys})
        groups = rows.group_by(keys).agg(pl.col(ROW).sort().get(1, null_on_oob=True))
        return 1 + int(groups.select(pl.col(ROW).min()).collect(engine="streaming").item())

    def first_rows(self, count: int) -> tuple[pl.DataFrame, pl.DataFrame]:
        """The first kept rows as the file has them, and their columns by role."""
        raw, keep, columns = self._read
        with readable(self.file, self.recipe.separator):
            rows = raw.filter(keep).head(count).collect()
        return rows, rows.lazy().select(**columns).collect()

    def _columns(self, raw: pl.LazyFrame) -> dict[str, pl.Expr]:
        """The columns of the log that are used, by role, cast to their types."""
        recipe, columns, schema = self.recipe, {}, raw.collect_schema()
        needed = {"user", "item"} if recipe.chosen_only else {"user", "item", "label"}
        if "label" in needed and recipe.label is None:
            raise UserError(
                f"{self.file}: protocol impressions needs a label column: {option('label')}: {nearest('label', schema)}"
            )
        check_label(recipe.label, schema)
        self.threshold = None if recipe.label is None else threshold(recipe.label, schema)
        for role in ("user", "item", "time", "order", "label", "weight"):
            name = self.threshold.column if role == "label" and self.threshold else getattr(recipe, role)
            if name is not None and (name in schema or role in needed or recipe.demanded(role)):
                with self._going_on():
                    columns[role] = self._typed(role, name, raw)
        if recipe.behaviours:
            with self._going_on():
                text = readable_as(self.file, raw, recipe.behaviours.column, ANY)
                columns["behaviour"] = text.replace_strict(recipe.behaviours.code(), default=-1, return_dtype=pl.Int8)
        if self.threshold and "label" in columns:
            columns["label"] = self.threshold.holds(columns["label"])
        if recipe.split:
            columns["split"] = pl.col(recipe.split.column)
        of_log = recipe.of("event") | ({} if recipe.users else recipe.of("user"))
        for name, column in of_log.items():
            with self._going_on():
                columns[COLUMN + name] = readable_as(self.file, raw, name, column)
        used: list[tuple[str, str, Any]] = [("drop", name, value) for name, value in recipe.drop.items()]
        used += [("split", recipe.split.column, [recipe.split.test, recipe.split.valid])] if recipe.split else []
        for key, name, values in used:
            if name not in schema:
                raise UserError(f"{self.file}: no column '{name}' for '{key}': {nearest(name, schema)}")
            for value in values if isinstance(values, list) else [values]:
                if isinstance(value, str) != (schema[name] in TEXTS):
                    raise UserError(f"{self.file}: '{key}': column '{name}' holds {schema[name]}, so never {value!r}")
        if not columns.keys() & {"time", "order"} and recipe.time in schema:
            needed |= {"time"}
        if self.problems and not needed <= columns.keys():
            raise UserError(self.problems[-1])  # without these there is nothing to go on with
        return columns

    def _checked(self, raw: pl.LazyFrame, columns: dict[str, pl.Expr]) -> pl.LazyFrame:
        """The kept events; counts what is dropped and raises errors for nulls and bad labels."""
        rules = {
            f"{name} = {value}": pl.col(name).is_in(value if isinstance(value, list) else [value])
            for name, value in self.recipe.drop.items()
        }
        din = self.recipe.chosen_only
        if din and "label" in columns:
            rule = f"not {self.recipe.label}" if self.threshold else f"{self.recipe.label} = 0"
            rules[rule] = columns["label"] == 0  # a log of impressions: positives only
        keep, hits = pl.lit(True), {}
        for rule, expression in rules.items():
            hit = expression.fill_null(False)
            hits[rule] = (keep & hit).sum()  # a row counts for the first rule that matches it
            keep = keep & ~hit
        counts = raw.select(pl.len().alias("rows"), **hits).collect(engine="streaming").row(0, named=True)
        self.rows = counts.pop("rows")
        self.dropped: dict[str, int] = counts
        self.kept = self.rows - sum(counts.values())
        if not self.kept:
            dropped = ", ".join(f"{count:,} with {rule}" for rule, count in counts.items() if count) or "none"
            raise UserError(f"{self.file}: no rows to build from: {self.rows:,} read; dropped: {dropped}")
        self._read = raw, keep, columns
        events = raw.filter(keep).select(**columns)
        nulls = events.null_count().collect(engine="streaming").row(0, named=True)
        names = {role: column.meta.root_names()[0] for role, column in columns.items()}
        lacking = {name: nulls.pop(name) for name in list(nulls) if name.startswith(COLUMN)}
        self.missing = {name.removeprefix(COLUMN): count for name, count in lacking.items() if count}
        with self._going_on():
            if found := ", ".join(f"{names[role]}: {count:,}" for role, count in nulls.items() if count):
                row = first_row(raw, keep & pl.any_horizontal(columns[role].is_null() for role in nulls))
                problem = f"{self.file}: null values: {found} of {self.rows:,} rows, the first in row {row}"
                raise UserError(
                    broken_line(self.file, self.recipe.separator) or f"{problem}; drop them or name another column"
                )
        if self.problems:
            events = events.drop_nulls(list(nulls))
            if events.head(1).collect().is_empty():
                raise UserError(self.problems[-1])
        for role in ("user", "item"):
            self.read_as[names[role]] = _kind(events.collect_schema()[role])
        self.read_as |= {name: recipe_column.type for name, recipe_column in self.recipe.columns.items()}
        if self.recipe.behaviours and "behaviour" in columns:
            with self._going_on():
                self._count_behaviours(self.recipe.behaviours, raw.filter(keep))
        self.step = 1
        if self.times is not None:
            name = names["time"]
            with self._going_on():
                self.read_as[name], self.step = self.times.check(self.file, name, raw.filter(keep))
        if "weight" in columns:
            with self._going_on():
                self._check_weights(raw.select(keep=keep, weight=columns["weight"]))
        if "label" in columns:
            with self._going_on():
                self._check_labels(events)
        if not self.problems:
            return self._shaped(raw)
        return events.drop("label", strict=False) if din else events

    def _typed(self, role: str, name: str, raw: pl.LazyFrame) -> pl.Expr:
        """The column of a role: int64, string (ids), 0 and 1 (labels) or float64 (weights)."""
        if role in ("user", "item"):
            return id_column(self.file, role, name, raw)
        if role == "time":
            self.times = times(self.file, name, raw, self.recipe.time_unit, self.recipe.time_format)
            return self.times.at
        if role == "order":
            return order_column(self.file, name, raw)
        compared = f"the numbers that '{self.recipe.label}' compares" if self.threshold else "0 and 1"
        wanted = {"label": compared, "weight": "numbers of 0 or more"}[role]
        return number_column(self.file, role, name, raw, wanted)

    def _count_behaviours(self, behaviours: Behaviours, rows: pl.LazyFrame) -> None:
        value = readable_as(self.file, rows, behaviours.column, ANY).fill_null("missing")
        counts = dict(rows.group_by(value=value).len().sort("len", "value", descending=True).collect().iter_rows())
        for text in behaviours.texts:
            if text not in counts and self.before is None:
                where = f"column '{behaviours.column}' has no row with '{text}'"
                raise UserError(f"{self.file}: behaviours: {where}: {nearest(text, counts)}")
        self.unlisted = {text: count for text, count in counts.items() if text not in behaviours.texts}
        listed = ", ".join(f"{text} {counts.get(text, 0):,}" for text in behaviours.texts)
        others = ", ".join(f"{text} {count:,}" for text, count in [*self.unlisted.items()][:10])
        self.read_as[behaviours.column] = f"behaviours {listed}" + (f"; in no history: {others}" if others else "")

    def _check_weights(self, rows: pl.LazyFrame) -> None:
        where, weight = f"{self.file}: weight column '{self.recipe.weight}'", pl.col("weight")
        if row := first_row(rows, pl.col("keep") & ~weight.is_between(0, float("inf"), closed="left")):
            found = rows.slice(row - 1, 1).collect()["weight"].item()
            raise UserError(f"{where} holds {found:g} in row {row}: a weight is 0 or more")
        kept = rows.filter("keep").select(low=weight.min(), high=weight.max(), none=(weight == 0).sum())
        low, high, none = kept.collect(engine="streaming").row(0)
        if high == 0:
            raise UserError(f"{where} holds 0 in all rows: no row would count")
        self.read_as[str(self.recipe.weight)] = f"weights from {low:g} to {high:g}, {none:,} are 0"

    def _check_labels(self, events: pl.LazyFrame) -> None:
        values = events.group_by("label").len().sort("len", descending=True).head(5).collect(engine="streaming")
        found = dict(values.iter_rows())
        counts = ", ".join(f"{value}: {count:,}" for value, count in found.items())
        where = f"{self.file}: label column '{self.recipe.label}'"
        if self.threshold:
            rows = sum(found.values()) + self.dropped.get(f"not {self.recipe.label}", 0)
            said = f"label 1 where {self.recipe.label}, in {found.get(1, 0):,} of {rows:,} rows"
            self.read_as[self.threshold.column] = said
        if strange := [value for value in found if value not in (0, 1)]:
            row = first_row(events, pl.col("label") == strange[0])
            raise UserError(f"{where} holds {strange[0]}, not only 0 and 1 ({counts}), the first in row {row}")
        if self.recipe.protocol == "impressions" and len(found) == 1:
            raise UserError(f"{where} is of one class only ({counts})")

    def _catalogue(self, catalogue: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
        """The items of the log with their attributes, and all items that are known."""
        recipe, file, items = self.recipe, self.recipe.items, self._items()
        if self.before is not None:
            wanted = [ITEM, *(recipe.attributes or ()), *recipe.of("item")]
            items, file = self.before.all_items(items, wanted, file), file or self.before.folder / ITEMS
            for name, earlier in self.before.vectors.items():
                self.vectors[name] = self.vectors[name].over(earlier) if name in self.vectors else earlier
        if items is None or file is None:
            if needed := [*(recipe.attributes or () if recipe.demanded("attributes") else ()), *recipe.of("item")]:
                raise UserError(f"{', '.join(needed)}: columns of items need a file of items: {option('items')}")
            return catalogue, catalogue
        if items[ITEM].dtype != catalogue[ITEM].dtype:
            types = f"{items[ITEM].dtype} in {file}, {catalogue[ITEM].dtype} in {self.file}"
            raise UserError(f"item column '{recipe.item}': different types: {types}")
        whole = catalogue.join(items, on=ITEM, how="left", maintain_order="left")
        without = whole.join(items, on=ITEM, how="anti")
        if without.height == whole.height:
            some = ", ".join(map(str, without[ITEM].head(3)))
            raise UserError(
                f"{file}: {without.height:,} ({some}) of {whole.height:,} items of the log have no row here"
            )
        for name in items.columns[1:]:
            if nulls := whole[name].null_count():
                self.without[name] = nulls
        return whole, pl.concat([items, without]).sort(ITEM)

    def _items(self) -> pl.DataFrame | None:
        """The file of items: their ids and attributes."""
        recipe, file = self.recipe, self.recipe.items
        if file is None:
            return None
        with readable(file, recipe.separator):
            frame = scan(file, recipe.separator)
            schema = frame.collect_schema()
            columns = {ITEM: id_column(file, "item", recipe.item, frame)}
            demanded = recipe.demanded("attributes")
            names = [name for name in recipe.attributes or () if name in schema or demanded]
            declared = recipe.of("item")
            names = [name for name in names if name not in declared]
            columns |= {name: id_column(file, "attribute", name, frame) for name in names}
            vectors = {name: column for name, column in declared.items() if column.type == "embedding"}
            for name, column in declared.items():
                if column.pretrained_emb is None:
                    columns[name] = readable_as(file, frame, name, column)
            items = frame.select(one.alias(name) for name, one in columns.items()).collect()
            self.unread["item"] = [name for name in schema if name not in {recipe.item, *names, *declared}]
            for name, column in vectors.items():
                self.vectors[name] = item_vectors(name, column, items, recipe.item, str(file))
                if not self.vectors[name].dim and self.before is None:
                    raise UserError(f"{file}: embedding column '{name}': no item has a vector of finite numbers")
                items = items.with_columns(self.vectors[name].found(items[ITEM]).alias(name))
        self.read_as |= {name: _kind(items.schema[name]) for name in names}
        if nulls := items[ITEM].null_count():
            row = first_row(items.lazy(), pl.col(ITEM).is_null())
            problem = f"{file}: null values: {recipe.item}: {nulls:,} of {items.height:,} rows, the first in row {row}"
            raise UserError(broken_line(file, recipe.separator) or problem)
        if repeated := items.height - items[ITEM].n_unique():
            raise UserError(f"{file}: {repeated:,} of {items.height:,} rows repeat another row's {recipe.item}")
        return items

    def _users(self) -> pl.DataFrame | None:
        """The file of users: their ids in the column ``user``, and the declared columns."""
        recipe, file, declared = self.recipe, self.recipe.users, self.recipe.of("user")
        if file is None:
            return None
        with readable(file, recipe.separator):
            frame = scan(file, recipe.separator)
            self.unread["user"] = [name for name in frame.collect_schema() if name not in {recipe.user, *declared}]
            if not declared:
                return None
            columns = {"user": id_column(file, "user", recipe.user, frame)}
            columns |= {name: readable_as(file, frame, name, column) for name, column in declared.items()}
            users = frame.select(one.alias(name) for name, one in columns.items()).collect()
        here, there = users.schema["user"], self._events.collect_schema()["user"]
        if here != there:
            raise UserError(f"user column '{recipe.user}': different types: {here} in {file}, {there} in {self.file}")
        if nulls := users["user"].null_count():
            raise UserError(f"{file}: null values: {recipe.user}: {nulls:,} of {users.height:,} rows")
        if repeated := users.height - users["user"].n_unique():
            raise UserError(f"{file}: {repeated:,} of {users.height:,} rows repeat another row's {recipe.user}")
        self.missing |= {name: nulls for name in declared if (nulls := users[name].null_count())}
        return users

    def _split(self) -> pl.LazyFrame:
        """The events with their column ``split``, index into SPLITS, by the recipe's column or by time."""
        if split := self.recipe.split:
            is_test, is_valid = pl.col("split") == split.test, pl.col("split") == split.valid
        elif self.timed:
            valid, test = self._cut_times()
            is_test, is_valid = pl.col("time") >= test, pl.col("time") >= valid
        else:
            raise UserError(f"{self.file}: no time column to split by: {option('time')}, or 'split' in a recipe")
        index = pl.when(is_test).then(2).when(is_valid).then(1).otherwise(0).cast(pl.UInt8)
        self._index = index
        events = self._events.with_columns(split=index)
        if self.recipe.next_item:
            return events
        classes = events.group_by("split").agg(rows=pl.len(), ones=(pl.col("label") == 1).sum()).collect()
        counts = {number: (rows, ones) for number, rows, ones in classes.iter_rows()}
        for number, name in enumerate(SPLITS):
            rows, ones = counts.get(number, (0, 0))
            if ones in (0, rows):
                fractions = " and ".join(map(option, ("valid_fraction", "test_fraction")))
                raise UserError(
                    f"{self.file}: split '{name}' needs labels of both classes: {ones:,} of {rows:,} rows are 1"
                    + f": other {fractions} (now {self.recipe.valid_fraction}, {self.recipe.test_fraction})"
                    * (split is None)
                )
        return events

    def _cut_times(self) -> tuple[int, int]:
        """The times at which valid and test begin: fractions of the rows, to within one bin; no time is split."""
        low, high = self._events.select(low=pl.col("time").min(), high=pl.col("time").max()).collect().row(0)
        width = ((high - low) // self.step // BINS + 1) * self.step
        bins = self._events.group_by(bin=(pl.col("time") - low) // width).agg(rows=pl.len()).sort("bin").collect()
        starts, rows = bins["bin"].to_numpy() * width + low, bins["rows"].to_numpy()
        if len(starts) < len(SPLITS):
            raise UserError(f"{self.file}: {len(starts)} distinct times, too few for train, valid and test")
        newest = np.cumsum(rows[::-1])[::-1] / rows.sum()  # fraction of the rows from each bin on
        test = 2 + int(np.abs(newest[2:] - self.recipe.test_fraction).argmin())
        wanted = self.recipe.test_fraction + self.recipe.valid_fraction
        valid = 1 + int(np.abs(newest[1:test] - wanted).argmin())
        return int(starts[valid]), int(starts[test])


def _kind(dtype: pl.DataType) -> str:
    return "whole numbers" if dtype.is_integer() else "text"


def _changes(column: pl.Series) -> Bools:
    """(E,) True where a value differs from the one before it, and at the first."""
    values = column.to_numpy()
    return np.concatenate([[True], values[1:] != values[:-1]])
