"""Training goes on: yesterday's model and today's events, whose new values grow its vocabulary.

Every id keeps its row, new ids begin with the row of unseen values: so a model scores after the growth as it did before
it, to the last bit, until it is trained further.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pyarrow as pa
import torch

from ctr_pe.config.columns import declared
from ctr_pe.config.field_groups import log_group
from ctr_pe.data.dataset import ID, ITEM, ITEMS, LABEL, USER, USERS, Dataset
from ctr_pe.data.id_map import NO_VALUE, IdMap, Index, categories, check_growth, texts, with_ids
from ctr_pe.data.logs.clock import SECOND, UNITS
from ctr_pe.data.logs.log import never_clicked
from ctr_pe.data.logs.roles import keys, stored_as, times
from ctr_pe.data.requests import EncodedRequests
from ctr_pe.data.value_maps import Several, map_of, normalizers_of, several, value_maps, vocabularies_of
from ctr_pe.data.vectors import ItemVectorTable, file_of, item_vectors
from ctr_pe.data.writer import Content, DatasetWriter, item_specs, make_dataset
from ctr_pe.fuxictr.embeddings import FIELD_SUFFIX
from ctr_pe.fuxictr.feature_specs import FEATURES, read_feature_map, table_of, unseen_id
from ctr_pe.sequence.batch import JaggedBatch
from ctr_pe.serving.encoder import ColumnNames, Encoder
from ctr_pe.serving.model_folder import (
    VOCABULARY,
    Vocabularies,
    read_json,
    read_model,
    rebuild,
    vocabulary_hash,
    write_stand_ins,
)
from ctr_pe.serving.profile import added, profile
from ctr_pe.serving.scorer import Scorer
from ctr_pe.serving.tables import column, ids, labels, lazy, newest, of_log, weights
from ctr_pe.training import fit
from ctr_pe.training.source import DataSource
from ctr_pe.utils.errors import UserError, counted
from ctr_pe.utils.files import scratch_folder, write_json, write_vocabularies

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from ctr_pe.config.columns import DeclaredColumn
    from ctr_pe.data.logs.recipe import Recipe
    from ctr_pe.data.timeline import EncodedLog

log = logging.getLogger(__name__)
OF_TRAINING = frozenset(
    "batch_size embedding_regularizer learning_rate loss max_gradient_norm net_regularizer optimizer"
    " table_optimizer".split()
)
"""Hyper-parameters that an update may have of its own: all others are the model's."""
OF_VECTORS = "pretrain_embedding.weight"  # of an item in FuxiCTR's layer, its own when the item is new
NEW, CHOSEN, WEIGHED = ":new", ":label", ":weight"  # columns that no log has: made here, beside raw ones


def update(
    scorer: Scorer,
    events: pl.DataFrame,
    items: pl.DataFrame | None,
    protocol: str,
    epochs: int,
    training: Mapping[str, Any] = MappingProxyType({}),
    users: pl.DataFrame | None = None,
    weight: str | None = None,
) -> Scorer:
    """A scorer of its own that was trained further on new events; the given one stays as it is.

    Values that are new get ids at the end. A history has the stored events of its user and the new ones, strictly
    before the time of the row. Every new event is a row, in an order that depends on the seed and the number of
    earlier updates; nothing is held out. The optimiser begins anew; if it is Adam, rows of embedding tables that the
    events do not have stay as they are (``table_optimizer: lazy_adam``).

    Args:
        scorer: with ``histories``.
        protocol: ``impressions``: rows are the new events, with their labels; ``din``: the new events but a user's very
            first, each with a known item that the user has no stored or new event with.
        training: those of ``OF_TRAINING`` that have changed since the last training.
        weight: the column of the events' weights in the loss; None if all count alike.
        users: new users and their declared columns, or known ones whose columns have changed.

    Raises:
        UserError: a scorer without catalogue or histories; a column that is missing, has nulls or another type.
    """
    began, names = time.perf_counter(), scorer.encoder.columns
    if scorer.histories is None:
        raise UserError("new_events: this model was saved without histories, which new events go on with")
    if not events.height:
        raise UserError("new_events: no rows")
    field = scorer.model.weight_field
    if weight is not None and field is None:
        raise UserError("new_events: weights, but this model was trained without any: fit it with weights")
    older, new, clock = with_stored(scorer, events, protocol == "impressions", weight)
    kinds = scorer.encoder.behaviours
    past = older.join(new, on=names.user, how="semi", maintain_order="left")
    both = pl.concat([past, new]).with_columns(pl.Series(NEW, np.arange(past.height + new.height) >= past.height))
    seed, updates = int(scorer.config["seed"]), list(scorer.config.get("updates", []))
    trained, params = bool(scorer.config["epoch"] or updates), {**scorer.config["params"], **training}
    # A new Adam moves every row with a gradient by the learning rate, also one that has only its regularisation.
    lazy = trained and not params.get("table_optimizer") and params.get("optimizer", "adam").lower() == "adam"
    found = with_new_items(
        scorer, both, items, trained, users, **params | ({"table_optimizer": "lazy_adam"} if lazy else {})
    )
    draw = np.random.default_rng([seed, 1 + len(updates)])
    rows = both.filter(NEW) if protocol == "impressions" else _sampled(both, clock, found.encoder, draw)
    history = found.encoder.events(both.rename({CHOSEN: names.label}) if names.label else both, "new_events")
    encoded = found.encoder.requests(rows.drop(CHOSEN, WEIGHED), history, "new_events")
    torch.manual_seed(seed + 1 + len(updates))  # dropout
    read = {found.model.feature_map.labels[0]: CHOSEN} | ({field: WEIGHED} if field else {})
    facts = {name: rows[of].cast(pl.Float32).to_numpy() for name, of in read.items()}
    batches = _TrainingRows(facts, encoded, int(params.get("batch_size", 1024)), draw)
    fitted = fit(found.model, batches, epochs=epochs) if encoded.rows and epochs else None
    found.model.eval()
    if encoded.rows and (scorer.profile is not None or not trained):
        trained_on = profile(found.encoder, batches, found.model.feature_map.labels[0], scorer.profile)
        found.profile = added([one for one in (scorer.profile, trained_on) if one is not None])
    chosen = pl.concat([older, new]).filter(pl.col(CHOSEN) == 1)
    count, fields = int(scorer.config["max_len"]), _of_events(scorer.encoder)
    found.histories = newest(chosen.lazy(), names.user, names.item, clock, count, fields, kinds)
    before = {name: len(known) for name, known in scorer.encoder.vocabularies.items()}
    done = {
        "events": new.height,
        "rows": rows.height,
        "epochs": epochs,
        "loss": fitted.best.loss if fitted else None,
        "new_ids": {name: len(known) - before[name] for name, known in found.encoder.vocabularies.items()},
        "seconds": round(time.perf_counter() - began, 3),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    log.info("update: %s", done)
    found.config = {**found.config, "params": params, "updates": [*updates, done]}
    return found


def with_stored(
    scorer: Scorer, events: pl.DataFrame, labelled: bool, weight: str | None = None, what: str = "new_events"
) -> tuple[pl.DataFrame, pl.DataFrame, list[str]]:
    """The stored events that are not among the new ones; the new ones, in the same columns and CHOSEN and WEIGHED; and
    the columns of the clock. Raises UserError as :func:`update`."""
    assert scorer.histories is not None
    names, kinds = scorer.encoder.columns, scorer.encoder.behaviours
    clock = [name for name in (names.order, names.time) if name is not None and name in scorer.histories.columns]
    if names.order in clock and names.time not in events.columns and not scorer.encoder.needs_age:
        clock = [name for name in clock if name != names.time]
    stored = _plain(scorer.histories, clock, scorer.encoder, "histories")
    new = _plain(events, clock, scorer.encoder, what, labelled=labelled, weight=weight)
    event = [names.user, names.item, *clock, *([kinds.column] if kinds else [])]
    if names.keep in ("first", "last"):
        new = new.unique(event, keep=names.keep, maintain_order=True)
    stored, new = _times_as_stored(stored, new, names)
    if not stored.height:
        stored = new.clear()
    for name in (names.user, names.item):
        ids(new, name, what, stored[name].dtype, "in the stored histories")
    older = stored.join(new, on=event, how="anti", maintain_order="left")
    if again := stored.height - older.height:
        log.warning("%s of the stored histories are among the new ones: they count once", counted(again, "event"))
    return older, new, clock


def history_with(scorer: Scorer, events: pl.DataFrame, labelled: bool, what: str) -> EncodedLog:
    """The stored histories of the users of new events, and these: what :meth:`Encoder.requests` takes.

    Args:
        labelled: whether a label says which of the events are chosen; else all are.

    Raises:
        UserError: as :func:`update`.
    """
    names = scorer.encoder.columns
    older, new, _ = with_stored(scorer, events, labelled, what=what)
    both = pl.concat([older.join(new, on=names.user, how="semi", maintain_order="left"), new])
    return scorer.encoder.events(both.rename({CHOSEN: names.label}) if names.label else both, what)


def _plain(
    table: pl.DataFrame,
    clock: list[str],
    encoder: Encoder,
    what: str,
    labelled: bool = False,
    weight: str | None = None,
) -> pl.DataFrame:
    """The columns of events that are read, each in the type of its kind; without a label all are chosen, without a
    weight all count alike."""
    names = encoder.columns
    users, items = (ids(table, name, what).alias(name) for name in (names.user, names.item))
    for name in clock:
        column(table, name, what)  # is there, without nulls
    at = [pl.Series(name, encoder.clock(table, name, what), pl.Int64) for name in clock]
    label = labels(table, names.label or "label", what) if labelled else np.ones(table.height, bool)
    fields = [encoder.plain(name, of_log(table, name, what)) for name in _of_events(encoder)]
    if kinds := encoder.behaviours:
        fields.append(categories(of_log(table, kinds.column, what)).alias(kinds.column))
    counts = np.ones(table.height, np.float32) if weight is None else weights(table, weight, what)
    made = [pl.Series(CHOSEN, label.astype(np.int8)), pl.Series(WEIGHED, counts)]
    return pl.DataFrame([users, items, *at, *fields, *made])


def _times_as_stored(stored: pl.DataFrame, new: pl.DataFrame, names: ColumnNames) -> list[pl.DataFrame]:
    """Both tables with their nanoseconds as numbers in the log's unit, or as dates if those would lose something."""
    step = SECOND // UNITS[names.time_unit]
    if names.time not in stored.columns:
        return [stored, new]
    at = pl.col(names.time)
    whole = names.time_format is None and all(table.select((at % step == 0).all()).item() for table in (stored, new))
    return [table.with_columns(at // step if whole else at.cast(stored_as(names.zoned))) for table in (stored, new)]


def _of_events(encoder: Encoder) -> list[str]:
    """Declared columns that the table of events has."""
    sources = {"event"} | ({"user"} if encoder.users is None else set())
    return [name for name, column in encoder.columns.columns.items() if column["source"] in sources]


def _sampled(both: pl.DataFrame, clock: list[str], encoder: Encoder, draw: np.random.Generator) -> pl.DataFrame:
    """Rows in pairs: a new event, and the same with a known item that the user has no event with."""
    names = encoder.columns
    assert encoder.items is not None
    events = both.sort(names.user, *clock, names.item, maintain_order=True)
    items = encoder.items.filter(pl.col(ITEM + ID) != encoder.unseen(ITEM))[ITEM]
    user = events[names.user].rle_id().cast(pl.Int64).to_numpy()
    wanted = events[NEW].to_numpy() & np.append(False, user[1:] == user[:-1])
    if kinds := encoder.behaviours:
        wanted &= (events[kinds.column] == kinds.texts[0]).fill_null(False).to_numpy()
    target = np.flatnonzero(wanted)
    negative = never_clicked(user, Index(items).find(events[names.item]), target, len(items), draw)
    clicked = events.gather(target)
    other = clicked.with_columns(
        items.gather(np.maximum(negative, 0)).alias(names.item), pl.lit(0, pl.Int8).alias(CHOSEN)
    )
    return pl.concat([clicked, other.filter(pl.Series(negative >= 0))])


class _TrainingRows:
    """Epochs of encoded rows, each in an order that ``generator`` draws; a last batch of one row joins the one before
    it. ``facts``: columns beside the encoded ones, that of the label first."""

    def __init__(
        self, facts: Mapping[str, npt.NDArray[np.float32]], encoded: EncodedRequests, size: int, generator: Any
    ) -> None:
        self.facts, self.encoded, self.generator = facts, encoded, generator
        self.cuts = [*range(0, encoded.rows, size), encoded.rows]
        if len(self.cuts) > 2 and size > 1 and self.cuts[-1] - self.cuts[-2] == 1:
            del self.cuts[-2]

    def __len__(self) -> int:
        return len(self.cuts) - 1

    def __iter__(self) -> Iterator[JaggedBatch]:
        order = self.generator.permutation(self.encoded.rows)
        for first, last in pairwise(self.cuts):
            rows = order[first:last]
            batch, facts = self.encoded.batch(rows), {name: of[rows] for name, of in self.facts.items()}
            yield replace(batch, rows=batch.rows | {name: torch.from_numpy(of) for name, of in facts.items()})

    @property
    def positives(self) -> float:
        """The share of rows with label 1."""
        return float(next(iter(self.facts.values())).mean())


def load_onto(folder: str | Path, dataset: Dataset | Path | DataSource, gpu: int = -1) -> Scorer:
    """The scorer of a model folder on the vocabulary of a data set, which is that of the model or a growth of it.

    Raises:
        UserError: as ``read_model``; a data set with other fields, or whose vocabulary is no growth of the model's.
    """
    scorer, source = read_model(folder, gpu), DataSource.of(dataset)
    vocabularies = _vocabularies(scorer, source, folder)
    known = {ITEMS: scorer.encoder.items, USERS: scorer.encoder.users}
    items, users = (
        pl.read_parquet(source.folder / file) if (source.folder / file).is_file() else table
        for file, table in known.items()
    )
    return _grown(scorer, source.folder, vocabularies, (items, users), folder, dataset_id=source.dataset_id)


def start_from(folder: str | Path) -> Callable[[Any, DataSource], None]:
    """A ``Run.start``: training begins with the weights of a model folder instead of random ones.

    The data set's vocabulary has to be that of the model or a growth of it; raises UserError, when it is called, as
    ``load_onto``.
    """

    return partial(_start, folder)


def _start(folder: str | Path, model: Any, source: DataSource) -> None:
    scorer = read_model(folder)
    _vocabularies(scorer, source, folder)
    carry_over(scorer.model, model, folder)


def carry_over(trained: Any, model: Any, whose: object = "the model") -> None:
    """Give ``model`` the weights of ``trained``, which is the same on a vocabulary that has grown since.

    Rows of new ids begin as the row of unseen values; so do those of other parameters with a row per id, such as the
    attribute predictors of ``dif``. The optimiser of ``model`` begins anew.

    Raises:
        UserError: another class or encoding, or parameters of other shapes, by name.
    """
    old, before, now = trained.state_dict(), trained.feature_map.features, model.feature_map.features
    new = model.state_dict()
    if different := sorted(old.keys() ^ new.keys()):
        raise UserError(f"{whose}: a {type(trained).__name__} with other parameters: {different[0]} is not in both")
    with torch.no_grad():
        for name, rows in new.items():
            known: Tensor = old[name].to(rows.device)
            if name.endswith(OF_VECTORS) and now[name.split(".")[2].removesuffix(FIELD_SUFFIX)].get("freeze_emb", True):
                brought = rows[: len(known)]  # of items whose vector has changed
                known = torch.where(brought.any(1, keepdim=True), brought, known)
            if known.shape == rows.shape:
                rows.copy_(known)
                continue
            unseen = _unseen(name, known, rows, before, now)
            if unseen is None:
                shapes = f"{tuple(known.shape)} there, {tuple(rows.shape)} here"
                raise UserError(f"{whose}: '{name}' has another shape: {shapes}")
            if not name.endswith(OF_VECTORS):
                rows[len(known) :] = known[unseen]
            rows[: len(known)] = known


def with_new_items(
    scorer: Scorer, events: pl.DataFrame, items: pl.DataFrame | None = None, trained: bool = True,
    users: pl.DataFrame | None = None, **training: Any,
) -> Scorer:  # fmt: skip
    """The scorer, on a model of its own, with ids for all values that ``events``, their items and users have.

    Args:
        events: a row per event, with the column of items.
        items: new items and their attributes, or known ones whose attributes have changed. Attributes of an item that
            has no row anywhere take their reserved ids; such items are counted in the log.
        users: likewise of users, where the model has a table of them.
        trained: whether the weights are carried over; else the model has initial ones that depend on its seed.
        training: hyper-parameters of training the new model, instead of those of the old one.

    Raises:
        UserError: a model without a catalogue; a column that is missing or of another type.
    """
    encoder = scorer.encoder
    if encoder.items is None:
        raise UserError("this model has no catalogue of items: its vocabulary does not grow with events")
    wanted = ids(events, encoder.columns.item, "new_events", encoder.items[ITEM].dtype, "the model's items").alias(ITEM)
    vectors = {} if items is None else _new_vectors(encoder, items)
    catalogue, owners = _catalogue(encoder, wanted, items, vectors), _with_users(encoder, users)
    seen = wanted.to_frame().join(catalogue, on=ITEM, how="left", maintain_order="left")
    values = {name: catalogue[name] if encoder.has_vectors(name) else seen[name] for name in encoder.item_ids}
    values |= {} if owners is None else {name: owners[name] for name in owners.columns[1:]}
    values |= {name: events[name] for name in _of_events(encoder)}
    vocabularies = {**encoder.vocabularies, **_grown_vocabularies(encoder, values)}
    names, sizes = encoder.columns, {name: max(ids.values()) + 1 for name, ids in vocabularies.items()}
    feature_map = encoder.feature_map.sized(sizes)

    def mapped(table: pl.DataFrame) -> pl.DataFrame:
        maps = {
            name: map_of(name, feature_map.features, vocabularies, names.normalizers, names.fill_na)
            for name in table.columns
            if name in values
        }
        return with_ids(table, maps)

    catalogue, owners = mapped(catalogue), None if owners is None else mapped(owners)
    with scratch_folder() as scratch:
        write_json(scratch / FEATURES, feature_map.content)
        write_vocabularies(scratch / VOCABULARY, vocabularies)
        for name, some in vectors.items():
            some.write(scratch / file_of(name))
        write_stand_ins(scratch, encoder)
        whose = "the model" if trained else None
        return _grown(scorer, scratch, vocabularies, (catalogue, owners), whose, training)


def _grown(
    scorer: Scorer, folder: Path, vocabularies: Mapping[str, Mapping[str, int]],
    tables: tuple[pl.DataFrame | None, pl.DataFrame | None],
    whose: object, training: Mapping[str, Any] = MappingProxyType({}), **changes: Any,
) -> Scorer:  # fmt: skip
    """The scorer on the features of ``folder``, with the weights of the given one, or with initial ones if they are
    of nobody."""
    config = {**scorer.config, **changes, "vocabulary": vocabulary_hash(vocabularies)}
    device: torch.device = scorer.model.device
    gpu = -1 if device.type == "cpu" else device.index or 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(config["seed"]))
        given = {**config, "params": {**config["params"], **training}}
        model = rebuild(folder, given, gpu, type(scorer.model))
    if whose is not None:
        carry_over(scorer.model, model, whose)
    config["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    encoder = Encoder(model, read_feature_map(folder / FEATURES), vocabularies, scorer.encoder.columns, *tables)
    return Scorer(model, encoder, config, scorer.histories, scorer.profile)


def _grown_vocabularies(encoder: Encoder, values: Mapping[str, pl.Series]) -> Vocabularies:
    """By table, with the new categories among the raw values of its features, the most frequent first."""
    parts: dict[str, list[pl.Series]] = {}
    for name, raw in values.items():
        ids = encoder.id_map(name)
        if isinstance(ids, Several):
            raw = several(raw, ids.splitter).list.head(ids.most).explode(empty_as_null=False, keep_nulls=False)
        if isinstance(ids.of_one if isinstance(ids, Several) else ids, IdMap):
            table = table_of(name, encoder.features, encoder.vocabularies)
            parts.setdefault(table, []).append(texts(raw).alias("text"))
    found = {}
    for table, some in parts.items():
        together, known = pl.concat(some), encoder.vocabularies[table]
        often = IdMap.by_frequency(together, np.ones(len(together), np.int64))
        found[table] = dict(IdMap(known, unseen_id(encoder.features[table])).grow(list(often.known)).stored)
    return found


def _new_vectors(encoder: Encoder, items: pl.DataFrame) -> dict[str, ItemVectorTable]:
    """By declared column, the vectors that items bring: in their table, or in the file that the column names."""
    names, found = encoder.columns, {}
    table = items.with_columns(ids(items, names.item, "items").alias(ITEM))
    for name, one in declared(names.columns).items():
        if one.type != "embedding" or not (
            name in items.columns or one.pretrained_emb is None or one.pretrained_emb.is_file()
        ):
            continue
        brought = item_vectors(name, one, table, names.item, "items").among(texts(table[ITEM]))
        wanted = int(encoder.features[name]["pretrain_dim"])
        if len(brought.keys) and brought.dim != wanted:
            raise UserError(f"items: vectors of '{name}' have {brought.dim} numbers, in the model {wanted}")
        if len(brought.keys):
            found[name] = brought
    return found


def _with_users(encoder: Encoder, users: pl.DataFrame | None) -> pl.DataFrame | None:
    """The raw table of users with the rows of ``users``."""
    if encoder.users is None:
        return None
    known = encoder.users.select(name for name in encoder.users.columns if not name.endswith(ID))
    if users is None:
        return known
    given = [ids(users, encoder.columns.user, "users").alias("user")]
    given += [encoder.plain(name, of_log(users, name, "users")).cast(known[name].dtype) for name in known.columns[1:]]
    return pl.concat([pl.DataFrame(given), known]).unique("user", keep="first", maintain_order=True)


def _vocabularies(scorer: Scorer, source: DataSource, folder: object) -> dict[str, dict[str, int]]:
    """Those of a data set that a model folder's model is to read."""
    file = source.folder / VOCABULARY
    if not scorer.encoder.vocabularies or not file.is_file():
        where = file if scorer.encoder.vocabularies else folder
        raise UserError(f"{where}: no vocabulary: nothing says that the ids of model and data set are the same")
    vocabularies: Vocabularies = read_json(file, Vocabularies)
    check_growth(scorer.encoder.vocabularies, vocabularies, f"model {folder}", str(source.folder))
    return vocabularies


def _unseen(name: str, old: Tensor, new: Tensor, before: Mapping[str, Any], now: Mapping[str, Any]) -> int | None:
    """The row of unseen values in a parameter with a row per id; None for others."""
    sizes = (len(old), len(new)) if old.shape[1:] == new.shape[1:] and old.dim() else None
    raw = (
        name.split(".")[2].removesuffix(FIELD_SUFFIX) if name.startswith("embedding_layer.embedding_layers.") else None
    )
    for feature, spec in before.items():
        later = now.get(feature, {})
        if raw in (None, feature) and (spec.get("vocab_size"), later.get("vocab_size")) == sizes:
            return unseen_id(spec)
    return None


def _catalogue(
    encoder: Encoder, wanted: pl.Series, items: pl.DataFrame | None, vectors: Mapping[str, ItemVectorTable]
) -> pl.DataFrame:
    """The raw catalogue with the rows of ``items``, and of the items ``wanted`` that neither has."""
    assert encoder.items is not None
    known = encoder.items.select(name for name in encoder.items.columns if not name.endswith(ID))
    parts = [known]
    if items is not None:
        there = [name for name in known.columns if not encoder.has_vectors(name)]
        raw = {name: encoder.columns.item if name == ITEM else name for name in there}
        given = pl.DataFrame({
            name: encoder.plain(name, of_log(items, name, "items")).cast(known[name].dtype)
            if encoder.optional(name) else _typed(items, column_name, known[name].dtype)
            for name, column_name in raw.items()
        })  # fmt: skip
        if nulls := given[ITEM].null_count():
            raise UserError(f"items: column '{raw[ITEM]}' has null values: {nulls:,} of {given.height:,} rows")
        if repeated := given.height - given[ITEM].n_unique():
            raise UserError(f"items: {repeated:,} of {given.height:,} rows repeat another row's {raw[ITEM]}")
        given = given.with_columns(some.found(given[ITEM]).alias(name) for name, some in vectors.items())
        changed = known.update(given, on=ITEM, include_nulls=True, maintain_order="left")
        parts = [changed, given.join(known, on=ITEM, how="anti", maintain_order="left")]
    catalogue = pl.concat(parts, how="diagonal")
    new = wanted.unique().sort().to_frame().join(catalogue, on=ITEM, how="anti", maintain_order="left")
    if new.height and len(known.columns) > 1:
        log.warning("%s without attributes: they take reserved ids", counted(new.height, "new item"))
    return pl.concat([catalogue, new], how="diagonal")


def _typed(items: pl.DataFrame, name: str, kind: pl.DataType) -> pl.Series:
    """A column of the items, of the type that the catalogue has."""
    if name not in items.columns:
        column(items, name, "items")  # says which columns there are
    values = keys(items[name], "items") if items[name].null_count() < items.height else items[name].cast(kind)
    if values.dtype != kind:
        raise UserError(f"items: column '{name}' holds {items[name].dtype}, in the model's catalogue {kind}")
    return values.set(values.is_in(list(NO_VALUE)), None) if kind == pl.String else values


def _empty(table: pl.DataFrame, name: str, spec: DeclaredColumn, what: str) -> pl.Series:
    """No values of a declared column, in the type that its table in a model folder has."""
    kinds = {"numeric": pl.Float64(), "sequence": pl.List(pl.String)}
    if spec.pretrained_emb is None:
        of_log(table, name, what)
    return pl.Series(name, [], kinds.get(spec.type, pl.String()))


def empty_dataset(recipe: Recipe, out: Path) -> Dataset:
    """The features of a log without any known value: id 0 is padding, 1 stays that of unseen values for ever.

    Raises:
        UserError: a column that is missing or of another type.
    """
    events = lazy(recipe.interactions, "new_events").head(0).collect()
    every_item = None if recipe.items is None else lazy(recipe.items, "items")
    items = None if every_item is None else every_item.head(0).collect()
    if not {recipe.time, recipe.order} & set(events.columns):
        raise UserError(f"new_events: no column '{recipe.time or recipe.order or 'timestamp'}' says what is earlier")
    if recipe.attributes and recipe.demanded("attributes") and items is None:
        raise UserError(f"attributes {', '.join(recipe.attributes)}: need a table of items")
    ids(events, recipe.user, "new_events")
    raw = {ITEM: ids(events, recipe.item, "new_events")}
    of_items, columns = recipe.of("item"), recipe.columns
    if items is not None:
        attributes = [name for name in recipe.attributes or () if name not in of_items]
        raw |= {name: ids(items, name, "items") for name in attributes}
        raw |= {name: _empty(items, name, columns[name], "items") for name in of_items}
    users, of_users = None, recipe.of("user")
    if recipe.users is not None and of_users:
        table = lazy(recipe.users, "users").head(0).collect()
        given = {name: _empty(table, name, one, "users") for name, one in of_users.items()}
        users = pl.DataFrame({"user": ids(events, recipe.user, "new_events"), **given})
    counted_values: dict[str, Any] = {name: (pl.Series(name, [], pl.String), np.zeros(0, np.int64)) for name in raw}
    every, dims = lazy(recipe.interactions, "new_events"), {}
    for name, one in columns.items():
        if one.type == "embedding" and every_item is not None:
            table = every_item.collect()
            table = table.with_columns(ids(table, recipe.item, "items").alias(ITEM))
            dims[name] = item_vectors(name, one, table, recipe.item, "items").dim
            continue
        whole = {"event": every, "user": every if users is None else users.lazy(), "item": pl.LazyFrame(raw)}[
            one.source
        ]
        values = of_log(whole.select(pl.col(f"^{re.escape(name)}$")).collect(), name, "new_events")
        values = values if one.type == "numeric" else values.head(0)
        counted_values[name] = values, np.ones(len(values), np.int64)
    maps = value_maps(columns, counted_values)
    fields, timed, weighted = [*raw, *recipe.of_history()], recipe.time in events.columns, recipe.weight is not None
    groups = [log_group(fields, timed, listed.name) for listed in recipe.histories]
    features = item_specs(maps, groups, recipe.max_len, columns, weighted, dims, recipe.histories)
    vocabs, of_raw = vocabularies_of(maps, columns), {name: maps[name] for name in raw}
    unordered = {} if recipe.order in events.columns else {"order": None}
    report = {"recipe": recipe.model_dump(mode="json") | unordered, **normalizers_of(maps)}
    if timed:
        unit, form = recipe.time_unit, recipe.time_format
        report["zoned"] = times("new_events", str(recipe.time), every, unit, form).zoned

    def source(writer: DatasetWriter) -> Content:
        for split in ("train", "test"):
            writer.add(split, pa.table({name: pa.array([], pa.int64()) for name in (LABEL, *features)}))
        for name, dim in dims.items():
            ItemVectorTable(pl.Series([], dtype=pl.String), np.zeros((0, dim), np.float32)).write(
                writer.path / file_of(name)
            )
        owners = None if users is None else with_ids(users, {name: maps[name] for name in users.columns[1:]})
        return Content(LABEL, USER, features, groups, vocabs, report, with_ids(pl.DataFrame(raw), of_raw), owners)

    return make_dataset(source, out)
