"""Raw events and requests -> what a model takes, from the content of a model folder alone.

Legend: n requests, E events of all histories, B rows of a batch, L history slots.

An item's fields come from the catalogue, by its raw id; what the catalogue lacks comes from the table's own columns, by
the vocabulary of each; what is nowhere takes the reserved id of unseen values. Models of data sets without a catalogue
(published sets, FuxiCTR's CSV) take every column by its vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from torch import Tensor

from ctr_pe.data.sources.events import ITEM
from ctr_pe.errors import UserError, nearest
from ctr_pe.pe.base import PositionEncoding
from ctr_pe.pipeline.frames import Index, Ints, Unit, column, keys, labels, seconds, times

if TYPE_CHECKING:
    from ctr_pe.model_zoo.fields import SizedGroup

ID = ":id"  # in items.parquet the column ``cate_id:id`` has the ids of the column ``cate_id``
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Columns:
    """How the columns of raw tables are called, and what they mean.

    ``time`` in ``time_unit``; ``order``: a column that decides what is earlier where the history has it; ``label``: of
    events, 0 for an item that was shown and not chosen; ``raw``: the column that a feature is read from, where it is
    called otherwise.
    """

    user: str = "user_id"
    item: str = "item_id"
    time: str | None = "timestamp"
    order: str | None = None
    label: str | None = "label"
    time_unit: Unit = "s"
    raw: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Events:
    """E encoded events by user, of each user the oldest first; a slice per field group, because some hold the chosen
    items and others those that were not.

    ``users``: raw ids, in the order of their numbers; ``listed`` per field group: the events' numbers (E_g,);
    ``user``, ``time``, ``order`` (E,); ``ids``: target field -> (E,); ``newest``: the largest time, or None.
    """

    users: Index
    user: Ints
    time: Ints | None
    order: Ints | None
    ids: Mapping[str, Ints]
    listed: Sequence[Ints]
    unknown: int

    @property
    def newest(self) -> int | None:
        return None if self.time is None or not len(self.time) else int(self.time.max())


@dataclass(frozen=True)
class Lists:
    """Histories of n requests: that of request i is ``begin[i]:end[i]`` of the flat columns, oldest first.

    ``ids``: history field -> (E,). Of ``time`` (E,), in the log's unit, and ``age`` (E,), in seconds, one or, where no
    encoding needs ages, none.
    """

    ids: Mapping[str, Ints]
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
        batch = {name: torch.from_numpy(values[rows]) for name, values in self.scalars.items()}
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

    def batches(self, size: int) -> Iterator[tuple[Ints, dict[str, Tensor]]]:
        """All requests, ``size`` at a time: their numbers and their batch. Those of one history are neighbours."""
        history = [self.lists[0].begin, self.lists[0].end] if self.lists else []
        order = np.lexsort(history) if history else np.arange(self.rows)
        for start in range(0, self.rows, size):
            rows = order[start : start + size]
            yield rows, self.batch(rows)


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

    def events(self, history: pl.DataFrame, what: str = "history") -> Events:
        """Encode a log of events: columns of user and item, of time or order where there are any, of the label.

        Without time and order, later rows are later.

        Raises:
            UserError: a column that is missing, has nulls or another type.
        """
        names = self.columns
        raw = keys(column(history, names.user, what), what)
        users = Index(raw.unique())
        user = users.find(raw)
        time = self._times(history, names.time, what)
        if time is None and self.needs_age:
            raise UserError(f"{what}: no time column '{names.time}', and this model's encoding reads the age of events")
        order = self._times(history, names.order, what)
        item = column(history, names.item, what) if names.item in history.columns else None
        tie = keys(item, what).rank("dense").to_numpy() if item is not None else np.zeros(len(user))
        by = [values for values in (time, order) if values is not None]
        sort = np.lexsort([tie, *by, user] if by else [user])
        ids = {name: values[sort] for name, values in self._items(history, what).items()}
        positive = np.ones(len(user), bool)
        if names.label is not None and names.label in history.columns:
            positive = labels(column(history, names.label, what), what)[sort]
        return Events(
            users=users,
            user=user[sort],
            time=None if time is None else time[sort],
            order=None if order is None else order[sort],
            ids=ids,
            listed=[np.flatnonzero(positive if chosen else ~positive) for chosen in self.chosen],
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
        now = self._times(requests, self.columns.time, what)
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
        counts["unknown history items"] += events.unknown
        order = self._times(requests, self.columns.order, what) if events.order is not None else None
        asked, clock = (order, events.order) if order is not None else (now, events.time)
        if self.columns.time not in requests.columns and order is None:
            asked = clock = None
        return [
            _newest(group, events, listed, user, asked, clock)
            for group, listed in zip(self.groups, events.listed, strict=True)
        ]

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
            return values.cast(pl.Float32).to_numpy()
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

    def _times(self, table: pl.DataFrame, name: str | None, what: str) -> Ints | None:
        if name is None or name not in table.columns:
            return None
        return times(column(table, name, what), self.columns.time_unit, what)


def _newest(
    group: SizedGroup, events: Events, listed: Ints, user: Ints, asked: Ints | None, clock: Ints | None
) -> Lists:
    """The last events of each request's user before ``asked`` on the ``clock``; without them, the last of all.

    ``user`` (n,): numbers of the requests' users, -1 for unknown ones.
    """
    owner = events.user[listed]
    first, last = (np.searchsorted(owner, user, side) for side in ("left", "right"))
    end = last
    if asked is not None and clock is not None:
        ticks = np.unique(clock[listed])
        size = len(ticks) + 1  # a key is the user, then the place of the time among all times
        # sorted already, unless an order column contradicts the times: then what follows a later event is hidden too
        known = np.maximum.accumulate(owner * size + np.searchsorted(ticks, clock[listed]))
        end = np.searchsorted(known, user * size + np.searchsorted(ticks, asked))
        end = np.clip(end, first, last)
    begin = np.maximum(first, end - group.max_len)
    ids = {name: events.ids[target][listed] for target, name in zip(group.target, group.history, strict=True)}
    time = None if events.time is None else events.time[listed]
    return Lists(ids, begin, end, group.age, time=time)
