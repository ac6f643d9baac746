"""Raw events and requests -> what a model takes, from the content of a model folder alone.

Legend: n requests, E events of all histories, B rows of a batch, L history slots.

An item's fields come from the catalogue, by its raw id; what the catalogue lacks comes from the table's own columns, by
the vocabulary of each; what is nowhere takes the reserved id of unseen values. Models of data sets without a catalogue
(published sets, FuxiCTR's CSV) take every column by its vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from torch import Tensor

from ctr_pe.data.logs.clock import implausible
from ctr_pe.data.logs.events import ITEM
from ctr_pe.pe.base import PositionEncoding
from ctr_pe.serving.tables import Index, Ints, Unit, column, keys, labels, seconds, times
from ctr_pe.serving.timeline import Codes, Events, timelines
from ctr_pe.utils.errors import UserError, nearest

if TYPE_CHECKING:
    from ctr_pe.models.groups import SizedGroup

ID = ":id"  # in items.parquet the column ``cate_id:id`` has the ids of the column ``cate_id``
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Columns:
    """How the columns of raw tables are called, and what they mean.

    ``time`` in ``time_unit``; ``order``: a column that decides what is earlier where the history has it; ``label``: of
    events, 0 for an item that was shown and not chosen; ``raw``: the column that a feature is read from, where it is
    called otherwise; ``normalizers``: of a numeric feature, what is subtracted and divided by.
    """

    user: str = "user_id"
    item: str = "item_id"
    time: str | None = "timestamp"
    order: str | None = None
    label: str | None = "label"
    time_unit: Unit = "s"
    raw: Mapping[str, str] = field(default_factory=dict)
    normalizers: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Lists:
    """Histories of n requests: that of request i is ``begin[i]:end[i]`` of the flat columns, oldest first.

    ``ids``: history field -> (E,). Of ``time`` (E,), in the log's unit, and ``age`` (E,), in seconds, one or, where no
    encoding needs ages, none.
    """

    ids: Mapping[str, Codes]
    begin: Ints
    end: Ints
    age_field: str | None = None
    time: Ints | None = None
    age: Ints | None = None


@dataclass(frozen=True)
class Encoded:
    """n requests as a model takes them.

    ``scalars``: field -> (n,); ``lists``: per field group, then pooled sequences; ``now`` (n,) in the log's unit;
    ``per_second``: of that unit; ``counts``: what was looked up, and of it unknown.
    """

    rows: int
    scalars: Mapping[str, Array]
    lists: Sequence[Lists]
    now: Ints | None
    per_second: int
    counts: Counter[str]

    def batch(self, rows: Ints) -> dict[str, Tensor]:
        """The requests of these numbers as a batch of FuxiCTR's form: (B,), and histories (B, L) padded after the
        newest item."""
        return self.fields(rows) | self.histories(rows)

    def fields(self, rows: Ints) -> dict[str, Tensor]:
        """All but the histories, in the shape of ``rows``."""
        return {name: torch.from_numpy(values[rows]) for name, values in self.scalars.items()}

    def histories(self, rows: Ints) -> dict[str, Tensor]:
        """Histories and ages (B, L) of these requests."""
        batch = {}
        for lists in self.lists:
            begin, length = lists.begin[rows], lists.end[rows] - lists.begin[rows]
            width, total = max(1, int(length.max(initial=0))), int(length.sum())
            shift = np.arange(total) - np.repeat(np.cumsum(length) - length, length)
            source = shift + np.repeat(begin, length)
            target = shift + np.repeat(np.arange(len(rows)) * width, length)
            flat = {name: ids[source] for name, ids in lists.ids.items()}
            if lists.age_field is not None:
                if lists.age is not None:
                    flat[lists.age_field] = lists.age[source]
                elif lists.time is not None and self.now is not None:
                    flat[lists.age_field] = (np.repeat(self.now[rows], length) - lists.time[source]) // self.per_second
                else:
                    flat[lists.age_field] = np.zeros(total, np.int64)
            for name, values in flat.items():
                padded = np.zeros(len(rows) * width, np.int64)
                padded[target] = values
                batch[name] = torch.from_numpy(padded.reshape(len(rows), width))
        return batch

    def batches(self, rows: Ints, size: int, items: int) -> list[Ints]:
        """``rows`` (n,) in parts of ``size`` at most, each with about ``items`` of their histories at most, so that
        none takes much more memory than the others."""
        length = np.zeros(len(rows), np.int64)
        for lists in self.lists:
            length += lists.end[rows] - lists.begin[rows]
        part = np.maximum(np.arange(len(rows)) // size, np.cumsum(length) // items)
        return np.split(rows, np.flatnonzero(np.diff(part)) + 1) if len(rows) else []

    def tiles(self, ages: bool, size: int, least: int) -> tuple[list[Ints], Ints]:
        """The numbers of requests whose history ``least`` or more of them share, in tiles (H, K) of about ``size``: a
        history per row, its K requests in the columns. And the numbers of all other requests (n,).

        A row with fewer requests than its tile has columns repeats the last one. Requests share a history if they see
        the same events, with ``ages`` at the same time.
        """
        seen = [end for lists in self.lists for end in (lists.begin, lists.end)]
        if ages and self.now is not None:
            seen.append(self.now)
        if not self.rows or not seen:
            return [], np.arange(self.rows)
        order = np.lexsort(seen)
        new = np.ones(self.rows, bool)
        new[1:] = np.logical_or.reduce([values[order[1:]] != values[order[:-1]] for values in seen])
        first = np.flatnonzero(new)
        count = np.diff(np.append(first, self.rows))
        alone = order[np.repeat(count < least, count)]
        largest = np.argsort(-count, kind="stable")[: np.count_nonzero(count >= least)]
        first, count = first[largest], count[largest]
        tiles, start = [], 0
        while start < len(first):
            width = int(count[start])
            end = start + int((2 * count[start : start + max(1, size // width)] > width).sum())  # half is no repetition
            tiles.append(order[first[start:end, None] + np.minimum(np.arange(width), count[start:end, None] - 1)])
            start = end
        return tiles, alone


class Encoder:
    """Turns raw ids into those of one model.

    Args:
        model: the trained model: its field groups and features.
        feature_map: content of its feature_map.json.
        vocabularies: feature -> original as text -> id, FuxiCTR's reserved entries included.
        columns: what raw columns are called.
        items: the catalogue: the item's raw id, its attributes, and the id of each, in columns that end with ``:id``.
    """

    def __init__(
        self,
        model: Any,
        feature_map: Mapping[str, Any],
        vocabularies: Mapping[str, Mapping[str, int]],
        columns: Columns,
        items: pl.DataFrame | None = None,
    ) -> None:
        self.feature_map, self.vocabularies, self.columns, self.items = feature_map, vocabularies, columns, items
        self.features: Mapping[str, Any] = model.feature_map.features
        self.groups: list[SizedGroup] = list(model.groups)
        self.chosen = [bool(self.features[group.history[0]].get("chosen", True)) for group in self.groups]
        self.item_fields = list(dict.fromkeys(name for group in self.groups for name in group.target))
        of_items = {*self.item_fields, *(name for group in self.groups for name in group.history)}
        self.other_fields = [name for name in model.other_fields if name not in of_items]
        encodings = [module for module in model.modules() if isinstance(module, PositionEncoding)]
        self.needs_age = any(encoding.about.needs_age for encoding in encodings)
        self._tables: dict[str, tuple[Index, Ints]] = {}

    @cached_property
    def catalogue(self) -> Index | None:
        """Raw id of an item -> its row of ``items``."""
        return None if self.items is None else Index(self.items[ITEM])

    @cached_property
    def item_ids(self) -> dict[str, Ints]:
        """Target field -> the ids of the catalogue's items, and after them that of an item that is not in it."""
        if self.items is None:
            return {}
        made = {name: self.items[name + ID].to_numpy() for name in self.item_fields if name + ID in self.items.columns}
        return {name: np.append(ids, self.unseen(name)).astype(np.int64) for name, ids in made.items()}

    def unseen(self, name: str) -> int:
        """The id of values that are not known."""
        spec = self.features[name]
        return int(spec.get("oov_idx", spec["vocab_size"] - 1))

    def reads(self, table: Iterable[str]) -> list[str]:
        """Those columns of a table of requests that are read."""
        names = self.columns
        of_groups = [name for group in self.groups for name in (*group.history, group.age) if name is not None]
        fields = [*self.item_fields, *of_groups, *self.other_fields]
        known = {names.user, names.item, names.time, names.order, *fields, *map(self._raw, fields)}
        return [name for name in table if name in known]

    def events(self, history: pl.DataFrame | pl.LazyFrame, what: str = "history") -> Events:
        """Encode a log of events: columns of user and item, of time or order where there are any, of the label.

        Without time and order, later rows are later. Of a LazyFrame one raw column at a time is in memory.

        Raises:
            UserError: a column that is missing, has nulls or another type.
        """
        names, log = self.columns, history.lazy()
        there = log.collect_schema().names()

        def read(*wanted: str | None) -> pl.DataFrame:
            return log.select([name for name in dict.fromkeys(wanted) if name in there]).collect()

        raw = keys(column(read(names.user), names.user, what), what)
        users = Index(raw.unique())
        user = _small(users.find(raw), len(users.sorted))
        del raw
        time = self._times(read(names.time), names.time, what)
        if time is None and self.needs_age:
            raise UserError(f"{what}: no time column '{names.time}', and this model's encoding reads the age of events")
        order = self._times(read(names.order), names.order, what)
        of_items = read(names.item, *self.item_fields, *map(self._raw, self.item_fields))
        ids = {
            name: _small(values, self.features[name]["vocab_size"])
            for name, values in self._items(of_items, what).items()
        }
        tie = None
        if names.item in there and (time is not None or order is not None):
            item = keys(column(of_items, names.item, what), what)
            tie = _small(Index(item.unique().sort()).find(item), len(item))
        label = read(names.label)
        positive = labels(column(label, names.label, what), what) if names.label in there else None
        listed = [positive if chosen or positive is None else ~positive for chosen in self.chosen]
        return Events(
            users=users,
            groups=timelines(len(users.sorted), user, ids, time, order, tie, listed),
            newest=None if time is None or not len(time) else int(time.max()),
            unknown=self._unknown(ids),
        )

    def requests(self, requests: pl.DataFrame, events: Events | None = None, what: str = "requests") -> Encoded:
        """Encode requests: columns of user and item, of time where there is one, and of all other fields of the model.

        A request sees the events of its user strictly before its time (or order, where both tables have it); without
        a time all of them, and its time is that of the newest event. The column of a history, a list per row, stands
        for the events.

        Raises:
            UserError: a column that is missing, has nulls or another type.
        """
        given = {self._raw(name) for group in self.groups for name in group.history} <= set(requests.columns)
        if events is None and not given:
            raise UserError(f"{what}: no history: give one, or save the model with the histories of its users")
        counts: Counter[str] = Counter({"requests": requests.height})
        ids = self._items(requests, what)
        now = self._times(requests, self.columns.time, what, None if events is None else events.newest)
        lists: list[Lists] = []
        if given:
            lists += [self._given(requests, group.history, group.age, group.max_len, what) for group in self.groups]
        elif events is not None:
            if now is None and events.newest is not None:
                now = np.full(requests.height, events.newest)
            lists += self._seen(requests, events, now, counts, what)
        scalars: dict[str, Array] = dict(ids)
        for name in self.other_fields:
            if self.features[name]["type"] == "sequence":
                lists.append(self._given(requests, (name,), None, int(self.features[name]["max_len"]), what))
            else:
                scalars[name] = self._column(requests, name, what)
        counts["unknown items"] += self._unknown(ids)
        return Encoded(requests.height, scalars, lists, now, seconds(self.columns.time_unit), counts)

    def one(
        self, history: Sequence[Any], candidates: Sequence[Any], ages: Ints | None, what: str = "candidates"
    ) -> Encoded:
        """One user's history, oldest first, its ages in seconds, and candidates; both are raw item ids."""
        if self.catalogue is None or self.other_fields:
            raise UserError(f"{what}: this model has no catalogue of items: score requests with all their columns")
        if ages is None and self.needs_age and len(history):
            raise UserError("times: this model's encoding reads the age of events: give the time of each")
        past, asked = (self.catalogue.find(self.catalogue.of(ids)) for ids in (history, candidates))
        scalars = {name: ids[asked] for name, ids in self.item_ids.items()}
        begin, end = np.zeros(len(asked), np.int64), np.full(len(asked), len(past))
        lists = []
        for group, chosen in zip(self.groups, self.chosen, strict=True):
            ids = {name: self.item_ids[target][past] for target, name in zip(group.target, group.history, strict=True)}
            first = np.maximum(begin, end - group.max_len) if chosen else end
            lists.append(Lists(ids, first, end, group.age, age=ages))
        counts = Counter({"requests": len(asked), "unknown items": self._unknown(scalars)})
        of_history = {name: self.item_ids[name][past] for name in self.item_fields[:1]}
        counts["unknown history items"] = self._unknown(of_history)
        return Encoded(len(asked), scalars, lists, None, seconds(self.columns.time_unit), counts)

    def _seen(
        self, requests: pl.DataFrame, events: Events, now: Ints | None, counts: Counter[str], what: str
    ) -> list[Lists]:
        """Per field group, the newest events of each request's user before it."""
        raw = keys(column(requests, self.columns.user, what), what)
        if len(raw) and len(events.users.sorted) and raw.dtype != events.users.dtype:
            name = self.columns.user
            raise UserError(f"{what}: column '{name}' holds {raw.dtype}, in the history it holds {events.users.dtype}")
        user = events.users.find(raw) if raw.dtype == events.users.dtype else np.full(len(raw), -1)
        counts["unknown users"] += int((raw.filter(pl.Series(user < 0))).n_unique())
        counts["requests of unknown users"] += int((user < 0).sum())
        counts["unknown history items"] += events.unknown
        order = self._times(requests, self.columns.order, what) if events.ordered else None
        timed = self.columns.time in requests.columns
        lists = []
        for group, line in zip(self.groups, events.groups, strict=True):
            clock, asked = (line.order, order) if order is not None else (line.by_time, now if timed else None)
            begin, end = line.newest(user, clock, asked, group.max_len)
            ids = {name: line.ids[target] for target, name in zip(group.target, group.history, strict=True)}
            lists.append(Lists(ids, begin, end, group.age, time=line.time))
        return lists

    def _given(self, requests: pl.DataFrame, fields: Sequence[str], age: str | None, max_len: int, what: str) -> Lists:
        """Histories from columns of lists, oldest first."""
        lists = {name: column(requests, self._raw(name), what) for name in (*fields, *([age] if age else []))}
        for name, values in lists.items():
            if not isinstance(values.dtype, (pl.List, pl.Array)):
                raise UserError(f"{what}: column '{self._raw(name)}' holds {values.dtype}, not a list per row")
            if isinstance(values.dtype, pl.Array):
                lists[name] = values.arr.to_list()
        lists = {name: values.list.tail(max_len) for name, values in lists.items()}
        lengths = {name: values.list.len().to_numpy().astype(np.int64) for name, values in lists.items()}
        first = lengths[fields[0]]
        for name, length in lengths.items():
            if (length != first).any():
                raise UserError(f"{what}: lists of '{name}' and '{fields[0]}' have different lengths")
        flat = {name: values.explode(empty_as_null=False) for name, values in lists.items()}
        end = np.cumsum(first)
        ids = {name: self._encode(flat[name], name, what) for name in fields}
        return Lists(ids, end - first, end, age, age=flat[age].to_numpy() if age else None)

    def _items(self, table: pl.DataFrame, what: str) -> dict[str, Ints]:
        """Target field -> ids (n,) of the table's items."""
        row, item = None, self.columns.item
        if self.catalogue is not None:
            raw = keys(column(table, item, what), what)
            if len(raw) and raw.dtype != self.catalogue.dtype:
                raise UserError(f"{what}: column '{item}' holds {raw.dtype}, the model's items {self.catalogue.dtype}")
            row = self.catalogue.find(raw) if len(raw) else np.zeros(0, np.int64)
        ids = {}
        for name in self.item_fields:
            if row is None or name not in self.item_ids:
                ids[name] = np.asarray(self._column(table, name, what), np.int64)
                continue
            ids[name] = self.item_ids[name][row]
            new = np.flatnonzero(row < 0)
            if len(new) and name in table.columns and name != ITEM:
                ids[name][new] = self._encode(table[name].gather(new), name, what)
        return ids

    def _unknown(self, ids: Mapping[str, Ints]) -> int:
        own = self.item_fields[0]
        return int((ids[own] == self.unseen(own)).sum()) if own in ids else 0

    def _column(self, table: pl.DataFrame, name: str, what: str) -> Array:
        values = column(table, self._raw(name), what)
        if self.features[name]["type"] == "numeric":
            if not values.dtype.is_numeric():
                raise UserError(f"{what}: column '{values.name}' holds {values.dtype}, not numbers")
            shift, scale = self.columns.normalizers.get(name, (0.0, 1.0))
            return ((values.cast(pl.Float64) - shift) / scale).cast(pl.Float32).to_numpy()
        return self._encode(values, name, what)

    def _encode(self, values: pl.Series, name: str, what: str) -> Ints:
        """(n,) ids of original values of a feature, by its vocabulary; nulls are unseen."""
        table = name
        while table not in self.vocabularies and "share_embedding" in self.features[table]:
            table = str(self.features[table]["share_embedding"])
        if table not in self.vocabularies:
            others = nearest(name, self.vocabularies) if self.vocabularies else "its data set has none"
            raise UserError(f"feature '{name}' has no vocabulary: {others}")
        if table not in self._tables:
            vocabulary = self.vocabularies[table]
            known = pl.Series("key", list(vocabulary), dtype=pl.String)
            ids = np.fromiter(vocabulary.values(), np.int64, len(vocabulary))
            self._tables[table] = Index(known), np.append(ids, self.unseen(name))
        index, ids = self._tables[table]
        if values.dtype.is_float():
            raise UserError(f"{what}: column '{values.name}' holds {values.dtype}, not integers or strings")
        return ids[index.find(values.cast(pl.String))]

    def _raw(self, name: str) -> str:
        return self.columns.raw.get(name, name)

    def _times(self, table: pl.DataFrame, name: str | None, what: str, beside: int | None = None) -> Ints | None:
        """(n,) of the column of times or of the order; times are those of one clock, with ``beside``."""
        if name is None or name not in table.columns:
            return None
        found, unit = times(column(table, name, what), self.columns.time_unit, what), self.columns.time_unit
        if len(found) and name == self.columns.time:
            low, high = int(found.min()), int(found.max())
            clock = (low, high) if beside is None else (min(low, beside), max(high, beside))
            if problem := implausible(low, high, unit) or implausible(*clock, unit):
                raise UserError(f"{what}: time column '{name}': {problem[1]}")
        return found


def _small(values: Array, size: int) -> Codes:
    """Whole numbers below ``size`` in the smallest signed type that holds them."""
    return values.astype(np.min_scalar_type(-size - 1))
