"""A data set of no rows, for a model that has learned nothing yet and grows with its first events."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pyarrow as pa

from ctr_pe.config.field_groups import log_group
from ctr_pe.data.dataset import ITEM, LABEL, USER, Dataset
from ctr_pe.data.id_map import IdMap, with_ids
from ctr_pe.data.logs.recipe import Recipe
from ctr_pe.data.writer import Content, DatasetWriter, item_specs, make_dataset
from ctr_pe.serving.tables import column, keys, lazy
from ctr_pe.utils.errors import UserError


def empty_dataset(recipe: Recipe, out: Path) -> Dataset:
    """The features of a log without any known value: id 0 is padding, 1 stays that of unseen values for ever.

    Raises:
        UserError: a column that is missing or of another type.
    """
    events = lazy(recipe.interactions, "new_events").head(0).collect()
    items = None if recipe.items is None else lazy(recipe.items, "items").head(0).collect()
    if not {recipe.time, recipe.order} & set(events.columns):
        raise UserError(f"new_events: no column '{recipe.time or recipe.order or 'timestamp'}' says what is earlier")
    if recipe.attributes and recipe.demanded("attributes") and items is None:
        raise UserError(f"attributes {', '.join(recipe.attributes)}: need a table of items")
    keys(column(events, recipe.user, "new_events"), "new_events")
    raw = {ITEM: keys(column(events, recipe.item, "new_events"), "new_events")}
    if items is not None:
        raw |= {name: keys(column(items, name, "items"), "items") for name in recipe.attributes or ()}
    maps = {name: IdMap.of(()) for name in raw}
    group = log_group(list(raw), recipe.time in events.columns)
    features = item_specs(maps, [group], recipe.max_len)
    vocabs = {name: ids.stored for name, ids in maps.items()}
    unordered = {} if recipe.order in events.columns else {"order": None}
    report = {"recipe": recipe.model_dump(mode="json") | unordered}

    def source(writer: DatasetWriter) -> Content:
        for split in ("train", "test"):
            writer.add(split, pa.table({name: pa.array([], pa.int64()) for name in (LABEL, *features)}))
        return Content(LABEL, USER, features, [group], vocabs, report, with_ids(pl.DataFrame(raw), maps))

    return make_dataset(source, out)
