"""What a next-item model knows of the items of its data set: the ids of their fields, and how often each is an answer.

V items of the model, M values of a field.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from ctr_pe.data.dataset import ID, ITEMS, Dataset
from ctr_pe.data.id_map import places
from ctr_pe.models.sections import registered_name, task_of
from ctr_pe.training.source import DataSource
from ctr_pe.utils.errors import UserError, option


def check_task(model: type, dataset: Dataset | None) -> None:
    """Raises UserError if the rows of a data set ask something else than a model answers."""
    wanted = task_of(model)
    if dataset is None and wanted != "click":
        raise UserError(f"{registered_name(model)}: a next-item model needs a data set of `ctr-pe data build`")
    if dataset is not None and dataset.task != wanted:
        how = option("protocol", "leave-one-out" if wanted == "next-item" else "din")
        asks = {"click": "whether an item is clicked", "next-item": "which item comes next"}
        other = f"its rows ask {asks[dataset.task]}, {registered_name(model)} answers {asks[wanted]}"
        raise UserError(f"{dataset.path}: {other}: build it with {how}")


def give_catalogue(model: Any, source: DataSource) -> None:
    """Give a next-item model the catalogue of its data set."""
    dataset = source.dataset
    assert dataset is not None
    target, history = model.group.target[0], model.group.history[0]
    ids = model.item_ids.cpu().numpy()
    rows = dataset.scan("train")
    later = rows.select(pl.col(history).list.slice(1).explode(empty_as_null=False).cast(pl.Int64).alias("id"))
    answers = pl.concat([rows.select(pl.col(target).cast(pl.Int64).alias("id")), later])
    counted = answers.group_by("id").len().collect(engine="streaming")
    frequency = np.zeros(int(ids.max(initial=0)) + 1, np.int64)
    known = counted.filter(pl.col("id") < len(frequency))
    frequency[known["id"].to_numpy()] = known["len"].to_numpy()
    attributes: dict[str, Tensor] = {}
    if len(model.group.target) > 1:
        items = pl.read_parquet(dataset.path / ITEMS, columns=[name + ID for name in model.group.target])
        place = places(items[target + ID].to_numpy(), len(frequency))
        for field in model.group.target[1:]:
            values = torch.from_numpy(items[field + ID].to_numpy().astype(np.int64))
            found = torch.from_numpy(place[ids])
            shape = (-1, *[1] * (values.dim() - 1))
            attributes[field] = values[found.clamp(min=0)] * (found >= 0).view(shape)
    model.set_catalogue(attributes, torch.from_numpy(frequency[ids]).float())
