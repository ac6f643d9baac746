"""A data set of no rows, for a model that has learned nothing yet and grows with its first events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

from ctr_pe.config.field_groups import Group
from ctr_pe.data.dataset import Dataset
from ctr_pe.data.id_map import Vocabulary
from ctr_pe.data.logs.events import ITEM
from ctr_pe.data.logs.log import LABEL, USER
from ctr_pe.data.logs.recipe import Recipe
from ctr_pe.data.writer import Content, DatasetWriter, make_dataset
from ctr_pe.fuxictr.feature_specs import age_spec, history_spec, target_spec
from ctr_pe.serving.encoder import ID
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
    age = "age_history" if recipe.time in events.columns else None
    group = Group(tuple(raw), tuple(f"{name.removesuffix('_id')}_history" for name in raw), age)
    features: dict[str, dict[str, Any]] = {USER: {"type": "meta"}, **{name: target_spec(0) for name in raw}}
    features |= {
        history: history_spec(name, 0, recipe.max_len)
        for name, history in zip(group.target, group.history, strict=True)
    }
    features |= {age: age_spec(recipe.max_len)} if age else {}
    catalogue = pl.DataFrame({**raw, **{name + ID: pl.Series([], dtype=pl.UInt8) for name in raw}})
    vocabs = {name: Vocabulary([]).stored() for name in raw}
    report = {"recipe": recipe.model_dump(mode="json")}

    def source(writer: DatasetWriter) -> Content:
        for split in ("train", "test"):
            writer.add(split, pa.table({name: pa.array([], pa.int64()) for name in (LABEL, *features)}))
        return Content(LABEL, USER, features, [group], vocabs, report, catalogue)

    return make_dataset(source, out)
