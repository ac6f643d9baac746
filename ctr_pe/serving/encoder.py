"""Raw events and requests -> what a model takes, from the content of a model folder alone.

Legend: n requests, E events of all histories, B rows of a batch.

An item's fields come from the catalogue, by its raw id; what the catalogue lacks comes from the table's own columns, by
the vocabulary of each; what is nowhere takes the reserved id of unseen values. Fields of the user come likewise from
the table of users, fields of the event from the table's columns. Models of data sets without a catalogue
(published sets, FuxiCTR's CSV) take every column by its vocabulary.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import polars as pl

from ctr_pe.config.columns import Behaviours
from ctr_pe.data.dataset import ID, ITEM
from ctr_pe.data.id_map import Array, IdMap, Index, Ints, categories, missing
from ctr_pe.data.logs.clock import SECOND, UNITS, Unit
from ctr_pe.data.logs.labels import label_column
from ctr_pe.data.logs.roles import keys, order_column, times
from ctr_pe.data.requests import EncodedRequests, RequestHistories
from ctr_pe.data.timeline import Codes, EncodedLog, Timeline, sorted_events
from ctr_pe.data.value_maps import Buckets, Scaled, Several, ValueMap, map_of, numbers, several
from ctr_pe.fuxictr.feature_specs import FeatureSpecs, unseen_id
from ctr_pe.pe.base import PositionEncoding
from ctr_pe.serving.tables import check_there, column, labels, of_log
from ctr_pe.serving.tables import ids as raw_ids
from ctr_pe.utils.errors import UserError, counted, nearest, option

if TYPE_CHECKING:
    from ctr_pe.models.groups import SizedGroup

log = logging.getLogger(__name__)
MISSING = "missing values of "
"""What the count of a field begins with."""
ZONELESS = "times without a zone, read as UTC"


@dataclass(frozen=True)
class ColumnNames:
    """How the columns of raw tables are called, and what they mean.

    ``time``: dates, numbers in ``time_unit`` or texts of the form ``time_format``; ``order``: a column that decides
    what is earlier where the history has it; ``label``: of events, 0 for an item that was shown and not chosen;
    ``weight``: of events, in training; ``keep``: which rows of one event count, the first, the last or all; ``raw``:
    the column that a feature is read from, where it is called otherwise; of a numeric feature, ``fill_na``: what
    missing, NaN and infinite numbers become, 0 where it is not given, and ``normalizers``: what is then subtracted and
    divided by; ``columns``: those that were declared, see :mod:`ctr_pe.config.columns`, as
    ``behaviours``; ``zoned``: whether the log's dates had zones, None of numbers.
    """

    user: str = "user_id"
    item: str = "item_id"
    time: str | None = "timestamp"
    order: str | None = None
    label: str | None = "label"
    weight: str | None = None
    time_unit: Unit = "s"
    time_format: str | None = None
    keep: Literal["first", "last", "all"] | None = None
    raw: Mapping[str, str] = field(default_factory=dict)
    fill_na: Mapping[str, float] = field(default_factory=dict)
    normalizers: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)
    behaviours: Mapping[str, Any] | None = None
    zoned: bool | None = None


class Encoder:
    """Turns raw ids into those of one model.

    Args:
        model: the trained model: its field groups and features.
        feature_map: the specifications of its features.
        vocabularies: feature -> original as text -> id, FuxiCTR's reserved entries included.
        columns: what raw columns are called.
        items: the catalogue: the item's raw id, its attributes, and the id of each, in columns that end with ``:id``.
        users: likewise the users whose columns were declared: the raw id in the column ``user``.
    """

    def __init__(
        self,
        model: Any,
        feature_map: FeatureSpecs,
        vocabularies: Mapping[str, Mapping[str, int]],
        columns: ColumnNames,
        items: pl.DataFrame | None = None,
        users: pl.DataFrame | None = None,
    ) -> None:
        self.feature_map, self.vocabularies, self.columns, self.items = feature_map, vocabularies, columns, items
        self.users = users
        self.features: Mapping[str, Any] = model.feature_map.features
        self.groups: list[SizedGroup] = list(model.groups)
        self.chosen = [bool(self.features[group.history[0]].get("chosen", True)) for group in self.groups]
        self.behaviours = None if columns.behaviours is None else Behaviours.model_validate(columns.behaviours)
        self.item_fields = list(dict.fromkeys(name for group in self.groups for name in group.target))
        of_items = {*self.item_fields, *(name for group in self.groups for name in group.history)}
        self.other_fields = [name for name in model.other_fields if name not in of_items]
        encodings = [module for module in model.modules() if isinstance(module, PositionEncoding)]
        self.needs_age = any(encoding.about.needs_age for encoding in encodings)
        self._maps: dict[str, ValueMap | Several | None] = {}
        self._zoneless = False
        catalogue = set() if items is None else set(items.columns)
        self.event_fields = [] if items is None else [name for name in self.item_fields if name + ID not in catalogue]

    @cached_property
    def catalogue(self) -> Index | None:
        """Raw id of an item -> its row of ``items``."""
        return None if self.items is None else Index(self.items[ITEM])

    @cached_property
    def item_ids(self) -> dict[str, Ints]:
        """Target field -> the ids of the catalogue's items, and after them that of an item that is not in it."""
        return {} if self.items is None else self._ids_of(self.items, self.item_fields)

    @cached_property
    def _owners(self) -> tuple[Index | None, dict[str, Ints]]:
        """Raw id of a user -> its row of ``users``; and as :attr:`item_ids`."""
        if self.users is None:
            return None, {}
        return Index(self.users["user"]), self._ids_of(self.users, self.other_fields)

    def _ids_of(self, table: pl.DataFrame, names: Iterable[str]) -> dict[str, Ints]:
        found = {name: table[name + ID].to_numpy() for name in names if name + ID in table.columns}
        return {name: _wide(np.concatenate([ids, missing(self.unseen(name), 1, ids)])) for name, ids in found.items()}

    def unseen(self, name: str) -> int:
        """The id of values that are not known."""
        return 0 if self.features[name]["type"] == "numeric" else unseen_id(self.features[name])

    def id_map(self, name: str) -> ValueMap | Several | None:
        """Of a feature's embedding table, or how its numbers are scaled; None where the data set has no vocabulary."""
        names = self.columns
        if name not in self._maps:
            self._maps[name] = map_of(name, self.features, self.vocabularies, names.normalizers, names.fill_na)
        return self._maps[name]

    def has_vectors(self, name: str) -> bool:
        """Whether the field is a declared column of vectors, whose categories are the items that have one."""
        return self.optional(name) and "pretrained_emb" in self.features[name]

    def plain(self, name: str, values: pl.Series) -> pl.Series:
        """Raw values of a declared column in the one type that its kind has: float64, text or lists of texts."""
        ids = self.id_map(name)
        if isinstance(ids, Several):
            return several(values, ids.splitter).alias(values.name)
        return (numbers(values) if isinstance(ids, (Buckets, Scaled)) else categories(values)).alias(values.name)

    def _lacking(self, name: str, values: pl.Series) -> int:
        """How many raw values are missing."""
        if name not in self.columns.columns:
            return values.null_count()
        plain = self.plain(name, values)
        return int((plain.list.len() == 0).sum()) if isinstance(plain.dtype, pl.List) else plain.null_count()

    @cached_property
    def numeric(self) -> list[str]:
        """Features whose numbers the model takes as they are."""
        return [name for name in self.other_fields if self.features[name]["type"] == "numeric"]

    def optional(self, name: str) -> bool:
        """Whether missing values of a raw column are values."""
        return name in self.columns.columns or any(self._raw(feature) == name for feature in self.numeric)

    def brings_histories(self, table: Iterable[str]) -> bool:
        """Whether a table of requests has the columns of all histories, lists."""
        return {self._raw(name) for group in self.groups for name in group.history} <= set(table)

    @property
    def readable(self) -> list[str]:
        """The columns that a table of requests may have."""
        names = self.columns
        of_groups = [name for group in self.groups for name in (*group.history, group.age) if name is not None]
        fields = [*self.item_fields, *of_groups, *self.other_fields]
        known = [names.user, names.item, names.time, names.order, *fields, *map(self._raw, fields)]
        return list(dict.fromkeys(name for name in known if name is not None))

    def reads(self, table: Iterable[str]) -> list[str]:
        """Those columns of a table of requests that are read."""
        return [name for name in table if name in self.readable]

    def events(self, history: pl.DataFrame | pl.LazyFrame, what: str = "history") -> EncodedLog:
        """Encode a log of events: columns of user and item, of time or order where there are any, of the label.

        Without time and order, later rows are later. Of a LazyFrame one raw column at a time is in memory.

        Raises:
            UserError: a column that is missing, has nulls or another type.
        """
        names, raw_events = self.columns, history.lazy()
        there = raw_events.collect_schema().names()

        def read(*wanted: str | None) -> pl.DataFrame:
            return raw_events.select([name for name in dict.fromkeys(wanted) if name in there]).collect()

        known = {} if self.items is None else self.item_ids
        needed = [names.user, *([] if self.items is None else [names.item])]
        needed += [self._raw(name) for name in self.item_fields if name not in known]
        for name in [*needed, *([self.behaviours.column] if self.behaviours else [])]:
            check_there(name, there, what)
        raw = raw_ids(read(names.user), names.user, what)
        users = Index(raw.unique())
        user = _small(users.find(raw), len(users.sorted))
        del raw
        time = self.clock(read(names.time, names.order), names.time, what)
        if time is None and self.needs_age:
            raise UserError(f"{what}: no time column '{names.time}', and this model's encoding reads the age of events")
        order = self.clock(read(names.order), names.order, what)
        of_items = read(names.item, *self.item_fields, *map(self._raw, self.item_fields))
        ids = self._items(of_items, what)
        for name, values in ids.items():
            if self.items is None:
                values = self._of_items(of_items[self._raw(name)], values)
            ids[name] = _small(values, self.features[name]["vocab_size"])
        columns: dict[str, Any] = {"user": user, "time": time, "order": order}
        columns |= {name + ID: values for name, values in ids.items()}
        if names.item in there and (time is not None or order is not None):
            item = raw_ids(of_items, names.item, what)
            columns["tie"] = _small(Index(item.unique().sort()).find(item), len(item))
        if names.label and (made_of := label_column(names.label, there)) in there:
            columns["label"] = labels(read(made_of), names.label, what)
        if self.behaviours:
            columns["behaviour"] = self._behaviour(read(self.behaviours.column), what)
        given = {name: values for name, values in columns.items() if values is not None}
        table = pl.LazyFrame(given)
        key = [name for name in ("user", "tie", "order", "time", "behaviour") if name in given]
        if "tie" in given and names.keep in ("first", "last"):
            table = table.unique(key, keep=names.keep, maintain_order=True)
        events, fields = sorted_events(table, given).collect(), {name: name + ID for name in ids}
        if "tie" in given and names.keep is None and (again := events.height - events.n_unique(key)):
            rows = counted(again, "row")
            log.warning("%s: %s repeat the event of another row and all count: %s", what, rows, option("keep", "first"))
        listed = [events.filter(pl.col("label") == chosen) if "label" in given else events for chosen in self.chosen]
        if self.behaviours:
            listed = [
                some if place is None else some.filter(pl.col("behaviour") == place)
                for some, place in zip(listed, self._places(), strict=True)
            ]
        return EncodedLog(
            users=users,
            groups=[Timeline.of(chosen, len(users.sorted), fields) for chosen in listed],
            newest=None if time is None or not len(time) else int(time.max()),
            unknown=self._unknown(ids),
            unlisted=int((columns["behaviour"] < 0).sum()) if self.behaviours else 0,
        )

    def _behaviour(self, table: pl.DataFrame, what: str) -> Codes:
        """(n,) the place of each event's behaviour in the list, -1 for others."""
        assert self.behaviours is not None
        values = categories(of_log(table, self.behaviours.column, what))
        return values.replace_strict(self.behaviours.code(), default=-1, return_dtype=pl.Int8).to_numpy()

    def _places(self) -> list[int | None]:
        """Per field group, the place of its behaviour in the list; None for all."""
        code = self.behaviours.code() if self.behaviours else {}
        return [code.get(self.features[group.history[0]].get("behaviour")) for group in self.groups]

    def requests(
        self, requests: pl.DataFrame, events: EncodedLog | None = None, what: str = "requests"
    ) -> EncodedRequests:
        """Encode requests: columns of user and item, of time where there is one, and of all other fields of the model.

        A request sees the events of its user strictly before its time (or order, where both tables have it); without
        a time all of them, and its time is that of the newest event. The column of a history, a list per row, stands
        for the events.

        Raises:
            UserError: a column that is missing, has nulls or another type.
        """
        given = self.brings_histories(requests.columns)
        if events is None and not given:
            raise UserError(f"{what}: no history: give one, or save the model with the histories of its users")
        counts: Counter[str] = Counter({"requests": requests.height})
        ids = self._items(requests, what, target=True)
        now = self.clock(requests, self.columns.time, what, None if events is None else events.newest, counts)
        lists: list[RequestHistories] = []
        if given:
            lists += [self._given(requests, group.history, group.age, group.max_len, what) for group in self.groups]
        elif events is not None:
            if now is None and events.newest is not None:
                now = np.full(requests.height, events.newest)
            lists += self._seen(requests, events, now, counts, what)
        scalars: dict[str, Array] = dict(ids)
        owners, of_users = self._owners
        row = (
            None
            if owners is None
            else owners.find(raw_ids(requests, self.columns.user, what, owners.dtype, "the table of users"))
        )
        for name in self.other_fields:
            if row is not None and name in of_users:
                scalars[name] = of_users[name][row]
                if name in requests.columns:
                    scalars[name] = self._encode(requests[name], name, what)
                else:
                    counts[MISSING + name] += int((row < 0).sum())
            elif self.is_list(name):
                lists.append(self._given(requests, (name,), None, int(self.features[name]["max_len"]), what))
            else:
                scalars[name] = self._column(requests, name, what)
        for name in sorted(
            self.columns.columns.keys() & {*self.other_fields, *self.event_fields} & {*requests.columns}
        ):
            if self.features[name].get("known") != "afterwards":
                counts[MISSING + name] += self._lacking(name, requests[name])
        if self.numeric:
            there = [self._raw(name) for name in self.numeric if self._raw(name) in requests.columns]
            if lacking := sum(numbers(requests[raw]).null_count() for raw in there):
                counts["missing numbers"] += lacking
        counts["unknown items"] += self._unknown(ids)
        counts = Counter({name: count for name, count in counts.items() if count or not name.startswith(MISSING)})
        return EncodedRequests(requests.height, scalars, lists, now, counts)

    def of_users(self, users: pl.DataFrame, events: EncodedLog) -> EncodedRequests:
        """The histories of users, a row each, at the time of the newest event: requests without an item.

        Raises:
            UserError: the column of users is missing, has nulls or another type.
        """
        counts: Counter[str] = Counter({"requests": users.height})
        now = None if events.newest is None else np.full(users.height, events.newest)
        lists = self._seen(users, events, None, counts, "users")
        return EncodedRequests(users.height, {}, lists, now, counts)

    def of_user(self, user: Any, events: EncodedLog, now: Any = None) -> EncodedRequests:
        """The history of one user by its raw id, a request without an item; ``now``: its time, by default that of the
        newest event of all users.

        Raises:
            UserError: an id of another type, or a time before the user's newest event.
        """
        found = self.of_users(pl.DataFrame({self.columns.user: [user]}), events)
        if now is not None:
            found = replace(found, now=self.moments([now], "now"))
        alone = found.alone()
        for one in alone.lists:
            if now is not None and one.age is not None and (one.age < 0).any():
                raise UserError(f"now: before the newest event of user {user!r}")
        [first, *_], unknown = alone.lists, found.counts["unknown users"]
        item = {self.item_fields[0]: next(iter(first.ids.values()))}
        counts = {"requests": 1, "unknown users": unknown, "unknown history items": self._unknown(item)}
        return replace(alone, counts=Counter(counts))

    def one(
        self,
        history: Sequence[Any],
        candidates: Sequence[Any] | None,
        times: Sequence[Any] | None = None,
        now: Any = None,
        *,
        user: Any = None,
        context: Mapping[str, Any] = MappingProxyType({}),
        history_context: Mapping[str, Sequence[Any]] = MappingProxyType({}),
        candidate_context: Mapping[str, Sequence[Any]] = MappingProxyType({}),
    ) -> EncodedRequests:
        """One user's history and candidates, as :meth:`~ctr_pe.serving.scorer.Scorer.score_one` takes them; without
        ``candidates`` a request without an item.

        ``user``: the raw id, which fields of the user are looked up by. ``context``: raw values of the request's fields
        of the event, and of the user where the table of users lacks them; ``history_context``: field -> a raw value per
        item of the history, of its event or, where the catalogue lacks the item, an attribute of it; of a model with
        behaviours also their column -> the behaviour of each.
        ``candidate_context``: likewise of the candidates. Without a catalogue both have the attributes of the items
        too, and ``history_context`` the columns of further histories, in any length.
        """
        if times is None and self.needs_age and len(history):
            raise UserError("times: this model's encoding reads the age of events: give the time of each")
        if times is not None and len(times) != len(history):
            raise UserError(f"times: {len(times)} for {len(history)} items of the history")
        of_target = [*self.item_fields[1:], *self.other_fields]
        self._check_names("context", context, [name for name in of_target if not self.has_vectors(name)])
        self._check_names("candidate_context", candidate_context, [n for n in of_target if not self.has_vectors(n)])
        further = [] if self.catalogue else [self._raw(name) for group in self.groups for name in group.history]
        of_history = self.item_fields[1:]
        if self.catalogue:
            of_history = [name for name in of_history if name in self.event_fields or not self.has_vectors(name)]
        of_kind: dict[str, Any] = dict(history_context)
        place = np.zeros(len(history), np.int8)
        if self.behaviours:
            name = self.behaviours.column
            if len(kinds := of_kind.pop(name, ())) != len(history):
                why = f"{len(kinds)} values of '{name}' for {len(history)} items of the history"
                raise UserError(f"history_context: {why}: this model has a history of each behaviour")
            place = self._behaviour(_column("history_context", name, kinds).to_frame(), "history_context")
        self._check_names("history_context", of_kind, [*of_history, *further])
        ages, counts = None, Counter[str]()
        if times is not None:
            at = self.moments(times, counts=counts)
            ages = ((self.moments([now], counts=counts)[0] if now is not None else at.max(initial=0)) - at) // SECOND
        alone = candidates is None
        candidates = () if candidates is None else candidates
        count, of_past = 1 if alone else len(candidates), {}
        if self.catalogue is not None:
            past, wanted = (self.catalogue.find(self.catalogue.of(ids)) for ids in (history, candidates))
            of_past = {name: ids[past] for name, ids in self.item_ids.items()}
            scalars = {name: ids[wanted] for name, ids in self.item_ids.items()}
            for name in self.event_fields:
                given = self._one_each("history_context", history_context, name, len(past), "items of the history")
                counts[MISSING + name] += self._lacking(name, given)
                of_past[name] = self._encode(given, name, "history_context")
            new = np.flatnonzero(past < 0)
            for name in history_context.keys() & self.item_ids.keys():
                given = self._one_each("history_context", history_context, name, len(past), "items of the history")
                of_past[name][new] = self._encode(given.gather(new), name, "history_context")
        else:
            item = self.item_fields[0]
            scalars = {item: self._encode(pl.Series(item, candidates, strict=False), item, "candidates")}
        afterwards = [name for name, spec in self.features.items() if spec.get("known") == "afterwards"]
        for name in candidate_context.keys() - afterwards:
            given = self._one_each("candidate_context", candidate_context, name, count, "candidates")
            counts[MISSING + name] += self._lacking(name, given)
            scalars[name] = self._values(given, name, "candidate_context")
        owners, of_users = self._owners
        row = -1 if owners is None or user is None else int(owners.find(owners.of([user]))[0])
        scalars |= {name: np.repeat(ids[[row]], count, axis=0) for name, ids in of_users.items()}
        pooled = [name for name in self.other_fields if self.is_list(name)]
        for name in (*self.item_fields, *self.other_fields):
            if name in pooled or (name in scalars and (name not in context or name in candidate_context)):
                counts[MISSING + name] += count * (row < 0 and name in of_users and name not in candidate_context)
                continue
            is_user = self.catalogue is None and self._raw(name) == self.columns.user
            value = None if name in afterwards else context.get(name, user if is_user else None)
            values = _column("context", name, [value], isinstance(self.id_map(name), Several))
            counts[MISSING + name] += count * self._lacking(name, values) * (name not in afterwards)
            ids = self._values(values, name, "context")
            scalars[name] = np.repeat(ids, count, axis=0)
        lists = []
        for group, chosen, behaviour in zip(self.groups, self.chosen, self._places(), strict=True):
            seen = np.flatnonzero(np.full(len(history), chosen) if behaviour is None else place == behaviour)
            pairs = zip(group.target, group.history, strict=True)
            if self.catalogue is None:
                ids_of = self._listed(group, history if group is self.groups[0] else (), history_context, counts)
                aged = ages
            else:
                ids_of = {name: of_past[target][seen] for target, name in pairs}
                aged = None if ages is None else ages[seen]
            events = len(next(iter(ids_of.values())))
            end = np.full(count, events)
            of_group = aged if aged is None or len(aged) == events else np.zeros(events, np.int64)
            lists.append(RequestHistories(ids_of, np.maximum(0, end - group.max_len), end, group.age, age=of_group))
        for name in pooled:
            counts[MISSING + name] += count * (context.get(name) is None)
            if isinstance(listed := context.get(name), (str, int, float)):
                raise UserError(f"context: '{name}' has a list of values, not {listed!r}")
            most = int(self.features[name]["max_len"])
            values = _column("context", name, list(() if listed is None else listed)[-most:])
            ids = self._of_items(values, self._encode(values, name, "context"))
            lists.append(RequestHistories({name: ids}, np.zeros(count, np.int64), np.full(count, len(ids))))
        counts = Counter({name: number for name, number in counts.items() if number})
        counts.update({"requests": count, "unknown items": self._unknown(scalars)})
        item = self.item_fields[0]
        of_first = of_past[item] if of_past else next(iter(lists[0].ids.values()))
        counts["unknown history items"] = self._unknown({item: of_first})
        if others := int((place < 0).sum()):
            counts["history items of other behaviours"] = others
        return EncodedRequests(count, {} if alone else scalars, lists, None, counts)

    def _one_each(self, what: str, given: Mapping[str, Sequence[Any]], name: str, count: int, whose: str) -> pl.Series:
        """Raw values of a field, one for each of ``count``; missing ones where the request has none."""
        values = given.get(name, [None] * count)
        if len(values) != count:
            raise UserError(f"{what}: {len(values)} values of '{name}' for {count} {whose}")
        return _column(what, name, values, isinstance(self.id_map(name), Several))

    def _listed(
        self,
        group: SizedGroup,
        history: Sequence[Any],
        context: Mapping[str, Sequence[Any]],
        counts: Counter[str],
    ) -> dict[str, Ints]:
        """The ids of a history without a catalogue: of its columns, and of attributes beside ``history``."""
        columns = {name: context[raw] for name in group.history if (raw := self._raw(name)) in context}
        first = group.history[0]
        columns |= {first: history} if first not in columns else {}
        found = {}
        for target, name in zip(group.target, group.history, strict=True):
            given = columns if name in columns else {name: context[target]} if target in context and history else {}
            values = self._one_each("history_context", given, name, len(columns[first]), "items of the history")
            counts[MISSING + self._raw(name)] += values.null_count()
            found[name] = self._of_items(values, self._encode(values, name, "history_context"))
        return found

    def is_list(self, name: str) -> bool:
        """Whether a field outside the histories is a list that the model pools."""
        return self.features[name]["type"] == "sequence" and "values" not in self.features[name]

    def _check_names(self, what: str, given: Iterable[str], known: Sequence[str]) -> None:
        for name in given:
            if name not in known:
                raise UserError(f"{what}: no field '{name}' in this model: {nearest(name, known) if known else 'none'}")

    def _seen(
        self, requests: pl.DataFrame, events: EncodedLog, now: Ints | None, counts: Counter[str], what: str
    ) -> list[RequestHistories]:
        """Per field group, the newest events of each request's user before it."""
        kind = events.users.dtype if len(events.users.sorted) else None
        raw = raw_ids(requests, self.columns.user, what, kind, "in the history it holds")
        user = events.users.find(raw) if raw.dtype == events.users.dtype else np.full(len(raw), -1)
        counts["unknown users"] += int((raw.filter(pl.Series(user < 0))).n_unique())
        counts["requests of unknown users"] += int((user < 0).sum())
        counts["unknown history items"] += events.unknown
        if events.unlisted:
            counts["history items of other behaviours"] += events.unlisted
        order = self.clock(requests, self.columns.order, what) if events.ordered else None
        timed = self.columns.time in requests.columns and (order is None or self.needs_age)
        lists = []
        for group, line in zip(self.groups, events.groups, strict=True):
            wanted = order if order is not None else now if timed else None
            begin, end = line.newest(user, wanted, group.max_len, by_order=order is not None)
            ids = {name: line.ids[target] for target, name in zip(group.target, group.history, strict=True)}
            lists.append(RequestHistories(ids, begin, end, group.age, time=line.time))
        return lists

    def _given(
        self, requests: pl.DataFrame, fields: Sequence[str], age: str | None, max_len: int, what: str
    ) -> RequestHistories:
        """Histories from columns of lists, oldest first."""
        read = [age] if age is not None and (self.needs_age or self._raw(age) in requests.columns) else []
        lists = {name: column(requests, self._raw(name), what) for name in (*fields, *read)}
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
        ids = {name: self._of_items(flat[name], self._encode(flat[name], name, what)) for name in fields}
        return RequestHistories(ids, end - first, end, age, age=flat[age].to_numpy() if age in flat else None)

    def _items(self, table: pl.DataFrame, what: str, target: bool = False) -> dict[str, Ints]:
        """Target field -> ids (n,) of the table's items, and of their events; of targets what is known before."""
        row = None
        if self.catalogue is not None:
            raw = raw_ids(table, self.columns.item, what, self.catalogue.dtype, "the model's items")
            row = self.catalogue.find(raw) if len(raw) else np.zeros(0, np.int64)
        ids = {}
        for name in self.item_fields:
            if target and self.features[name].get("known") == "afterwards":
                axes = [int(self.features[name]["values"])] if "values" in self.features[name] else []
                ids[name] = missing(self.unseen(name), table.height, np.zeros((0, *axes), np.int64))
                continue
            if row is None or name not in self.item_ids:
                ids[name] = np.asarray(self._column(table, name, what), np.int64)
                continue
            ids[name] = self.item_ids[name][row]
            new = np.flatnonzero(row < 0)
            if len(new) and name in table.columns and name != ITEM and not self.has_vectors(name):
                ids[name][new] = self._encode(table[name].gather(new), name, what)
        return ids

    def _unknown(self, ids: Mapping[str, Ints]) -> int:
        item = self.item_fields[0]
        return int((ids[item] == self.unseen(item)).sum()) if item in ids else 0

    def _column(self, table: pl.DataFrame, name: str, what: str) -> Array:
        raw = self._raw(name)
        values = of_log(table, raw, what) if self.optional(raw) else column(table, raw, what)
        return self._values(values, name, what)

    def _values(self, values: pl.Series, name: str, what: str) -> Array:
        """(n, …) ids of raw values of a feature, or numbers as training normalised them."""
        known = values.dtype.is_numeric() or values.dtype == pl.Null or name in self.columns.columns
        if self.features[name]["type"] == "numeric" and not known:
            raise UserError(f"{what}: column '{values.name}' holds {values.dtype}, not numbers")
        if self.features[name]["type"] == "embedding":
            return self._vectors(values, name, what)
        return self._encode(values, name, what)

    def _vectors(self, values: pl.Series, name: str, what: str) -> Array:
        """(n, dim) float32 of a field whose raw values are vectors; zeros where one is missing."""
        spec = self.features[name]
        dim = int(spec.get("pretrain_dim") or spec["embedding_dim"])
        lists = values.cast(pl.List(pl.Float32), strict=False)
        if (wrong := (lists.list.len() != dim).fill_null(False)).any():
            found = lists.list.len().filter(wrong)[0]
            raise UserError(f"{what}: a vector of {found} numbers in '{values.name}', which has {dim}")
        return np.array([vector or [0.0] * dim for vector in lists.to_list()], np.float32).reshape(-1, dim)

    def _encode(self, values: pl.Series, name: str, what: str) -> Ints:
        """(n,) ids of original values of a feature, by its vocabulary; nulls are unseen."""
        ids = self.id_map(name)
        if ids is None:
            others = nearest(name, self.vocabularies) if self.vocabularies else "its data set has none"
            raise UserError(f"feature '{name}' has no vocabulary: {others}")
        if values.dtype.is_float() and isinstance(ids, IdMap) and not self.optional(name):
            values = keys(values, what)
        return _wide(ids.ids(values))

    def _of_items(self, raw: pl.Series, ids: Ints) -> Ints:
        """Ids of a history's items: 0 where the raw value is null or empty, as in training."""
        return np.where((raw.cast(pl.String).fill_null("") == "").to_numpy(), 0, ids)

    def _raw(self, name: str) -> str:
        return self.columns.raw.get(name, name)

    def moments(self, values: Sequence[Any], what: str = "times", counts: Counter[str] | None = None) -> Ints:
        """(n,) times in nanoseconds: numbers in the log's unit, dates, or texts as the log has them; ``counts`` gets
        those that lack a zone."""
        if all(type(value) is int for value in values):
            step = SECOND // UNITS[self.columns.time_unit]
            return np.clip(np.asarray(values, np.int64), -(2**63 // step - 1), 2**63 // step - 1) * step
        try:
            table = pl.DataFrame({what: pl.Series(what, values)})
        except (TypeError, pl.exceptions.PolarsError):
            raise UserError(f"{what}: numbers, dates or texts, all of one type") from None
        names = self.columns
        found = times(what, what, table.lazy(), names.time_unit, names.time_format)
        self._compare_zones(found.zoned, len(values), what, counts)
        return self._read(table.lazy(), found.at, what, what)

    def clock(
        self,
        table: pl.DataFrame,
        name: str | None,
        what: str,
        beside: int | None = None,
        counts: Counter[str] | None = None,
    ) -> Ints | None:
        """(n,) of the column of times, in nanoseconds and of one clock, with ``beside``; or of the order; None without.
        ``counts`` as of :meth:`moments`.

        Times with nulls are left alone where an order decides what is earlier and no encoding reads ages.
        """
        names = self.columns
        if name is None or name not in table.columns:
            return None
        if name == names.time and table[name].null_count() and names.order in table.columns and not self.needs_age:
            return None
        if not table.height:
            return np.zeros(0, np.int64)
        alone = column(table, name, what).to_frame().lazy()
        if name != names.time:
            return self._read(alone, order_column(what, name, alone), name, what)
        found = times(what, name, alone, names.time_unit, names.time_format)
        found.check(what, name, alone, beside)
        self._compare_zones(found.zoned, table.height, what, counts)
        return self._read(alone, found.at, name, what)

    def _compare_zones(self, zoned: bool | None, rows: int, what: str, counts: Counter[str] | None) -> None:
        """Say once that dates without a zone, read as UTC, meet a log whose dates had zones."""
        if zoned is False and self.columns.zoned:
            if counts is not None:
                counts[ZONELESS] += rows
            if not self._zoneless:
                self._zoneless = True
                log.warning("%s: %s: those of the log had zones", what, ZONELESS)

    def _read(self, table: pl.LazyFrame, at: pl.Expr, name: str, what: str) -> Ints:
        return column(table.select(at.alias(name)).collect(), name, what).to_numpy()


def _column(what: str, name: str, values: Sequence[Any], several: bool = False) -> pl.Series:
    """Raw values of a request as a column; ``several``: whether a value may be a list of categories.

    Raises UserError for a list where there is one value, and for lists beside single values.
    """
    lists = {isinstance(value, (list, tuple)) for value in values if value is not None}
    if True in lists and not several:
        raise UserError(f"{what}: '{name}' has one value, not a list")
    if len(lists) > 1:
        raise UserError(f"{what}: '{name}' has lists beside single values: write all of them as lists")
    return pl.Series(name, values, strict=False)


def _wide(ids: Array) -> Array:
    """Ids as int64, numbers as they are."""
    return ids if ids.dtype == np.float32 else ids.astype(np.int64)


def _small(values: Array, size: int) -> Codes:
    """Whole numbers below ``size`` in the smallest signed type that holds them."""
    return values.astype(np.min_scalar_type(-size - 1))
