"""A trained model on a vocabulary that has grown: every id keeps its row, new ids begin with the row of unseen values.

So a model scores after the growth as it did before it, to the last bit, until it is trained further.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import torch

from ctr_pe.data.dataset import ID, ITEM, ITEMS, Dataset
from ctr_pe.data.id_map import IdMap, check_growth, with_ids
from ctr_pe.data.logs.events import NO_VALUE
from ctr_pe.fuxictr.feature_specs import FEATURES, read_feature_map, unseen_id
from ctr_pe.serving.encoder import Encoder
from ctr_pe.serving.folder_schema import VOCABULARY, read_json, write_json
from ctr_pe.serving.model_folder import Vocabularies, read_model, rebuild, vocabulary_hash
from ctr_pe.serving.scorer import Scorer
from ctr_pe.serving.tables import column, keys
from ctr_pe.training.source import DataSource
from ctr_pe.utils.errors import UserError, counted
from ctr_pe.utils.files import scratch_folder

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


def load_onto(folder: str | Path, dataset: Dataset | Path | DataSource, gpu: int = -1) -> Scorer:
    """The scorer of a model folder on the vocabulary of a data set, which is that of the model or a growth of it.

    Raises:
        UserError: as ``read_model``; a data set with other fields, or whose vocabulary is no growth of the model's.
    """
    scorer, source = read_model(folder, gpu), DataSource.of(dataset)
    vocabularies = _vocabularies(scorer, source, folder)
    items = source.folder / ITEMS
    config = {**scorer.config, "dataset_id": source.dataset_id, "vocabulary": vocabulary_hash(vocabularies)}
    model = rebuild(source.folder, config, gpu, None)
    carry_over(scorer.model, model, folder)
    catalogue = pl.read_parquet(items) if items.is_file() else scorer.encoder.items
    encoder = Encoder(
        model, read_feature_map(source.folder / FEATURES), vocabularies, scorer.encoder.columns, catalogue
    )
    return Scorer(model, encoder, config, scorer.histories)


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
            if known.shape == rows.shape:
                rows.copy_(known)
                continue
            unseen = _unseen(name, known, rows, before, now)
            if unseen is None:
                shapes = f"{tuple(known.shape)} there, {tuple(rows.shape)} here"
                raise UserError(f"{whose}: '{name}' has another shape: {shapes}")
            rows[: len(known)] = known
            rows[len(known) :] = known[unseen]


def with_new_items(
    scorer: Scorer, events: pl.DataFrame, items: pl.DataFrame | None = None, trained: bool = True, **training: Any
) -> Scorer:
    """The scorer, on a model of its own, with ids for all values that the items of ``events`` have.

    Args:
        events: a row per event, with the column of items.
        items: new items and their attributes, or known ones whose attributes have changed. Attributes of an item that
            has no row anywhere take their reserved ids; such items are counted in the log.
        trained: whether the weights are carried over; else the model has initial ones that depend on its seed.
        training: hyper-parameters of training the new model, instead of those of the old one.

    Raises:
        UserError: a model without a catalogue; a column that is missing or of another type.
    """
    encoder = scorer.encoder
    if encoder.items is None:
        raise UserError("this model has no catalogue of items: its vocabulary does not grow with events")
    wanted = keys(column(events, encoder.columns.item, "new_events"), "new_events").alias(ITEM)
    catalogue = _catalogue(encoder, wanted, items)
    seen = wanted.to_frame().join(catalogue, on=ITEM, how="left", maintain_order="left")
    maps = {}
    for name in encoder.item_ids:
        often = IdMap.by_frequency(seen[name], np.ones(seen.height, np.int64))
        maps[name] = IdMap(encoder.vocabularies[name], encoder.unseen(name)).grow(often.known)
    catalogue = with_ids(catalogue, maps)
    vocabularies = {**encoder.vocabularies, **{name: ids.stored for name, ids in maps.items()}}
    feature_map = encoder.feature_map.sized({name: ids.size for name, ids in maps.items()})
    with scratch_folder() as scratch:
        write_json(scratch / FEATURES, feature_map.content)
        device: torch.device = scorer.model.device
        gpu = -1 if device.type == "cpu" else device.index or 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(scorer.config["seed"]))
            given = {**scorer.config, "params": {**scorer.config["params"], **training}}
            model = rebuild(scratch, given, gpu, type(scorer.model))
    if trained:
        carry_over(scorer.model, model)
    config = {**scorer.config, "vocabulary": vocabulary_hash(vocabularies)}
    config["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    return Scorer(
        model, Encoder(model, feature_map, vocabularies, encoder.columns, catalogue), config, scorer.histories
    )


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
    raw = name.split(".")[2] if name.startswith("embedding_layer.embedding_layers.") else None
    for feature, spec in before.items():
        later = now.get(feature, {})
        if raw in (None, feature) and (spec.get("vocab_size"), later.get("vocab_size")) == sizes:
            return unseen_id(spec)
    return None


def _catalogue(encoder: Encoder, wanted: pl.Series, items: pl.DataFrame | None) -> pl.DataFrame:
    """The raw catalogue with the rows of ``items``, and of the items ``wanted`` that neither has."""
    assert encoder.items is not None
    known = encoder.items.select(name for name in encoder.items.columns if not name.endswith(ID))
    parts = [known]
    if items is not None:
        raw = {name: encoder.columns.item if name == ITEM else name for name in known.columns}
        given = pl.DataFrame({name: _typed(items, column_name, known[name].dtype) for name, column_name in raw.items()})
        if nulls := given[ITEM].null_count():
            raise UserError(f"items: column '{raw[ITEM]}' has null values: {nulls:,} of {given.height:,} rows")
        if repeated := given.height - given[ITEM].n_unique():
            raise UserError(f"items: {repeated:,} of {given.height:,} rows repeat another row's {raw[ITEM]}")
        changed = known.update(given, on=ITEM, include_nulls=True, maintain_order="left")
        parts = [changed, given.join(known, on=ITEM, how="anti", maintain_order="left")]
    catalogue = pl.concat(parts)
    if wanted.dtype != catalogue[ITEM].dtype and len(wanted):
        kinds = f"holds {wanted.dtype}, the model's items {catalogue[ITEM].dtype}"
        raise UserError(f"new_events: column '{encoder.columns.item}' {kinds}")
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
