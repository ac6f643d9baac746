"""Small next-item data sets and models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from ctr_pe.config.schema import parameters
from ctr_pe.data.dataset import Dataset
from ctr_pe.data.logs.log import build
from ctr_pe.data.logs.recipe import Recipe
from ctr_pe.model_zoo.next_item.sasrec import NextItemSASRec
from ctr_pe.pe.base import Losses
from ctr_pe.sequence.batch import JaggedBatch
from ctr_pe.training import Run, build_model

SMALL: dict[str, Any] = {
    "embedding_dim": 8,
    "embedding_init": 0.1,
    "num_heads": 2,
    "num_blocks": 2,
    "batch_size": 16,
    "epochs": 2,
    "learning_rate": 0.02,
    "early_stop_patience": 100,
    "reduce_lr_on_plateau": False,
}


def events(histories: Mapping[Any, Iterable[Any]], step: int = 3600) -> pl.DataFrame:
    """A log: user -> items in the order of their events, which are ``step`` seconds apart from 2020 on."""
    rows = [
        (user, item, 1_577_836_800 + step * place)
        for user, items in histories.items()
        for place, item in enumerate(items)
    ]
    return pl.DataFrame(rows, ("user_id", "item_id", "timestamp"), orient="row")


def random_histories(users: int = 40, items: int = 12, longest: int = 9, seed: int = 0) -> dict[int, list[int]]:
    """Of 4 to ``longest`` items, the next one often the one after: 1, 2, 3, …"""
    draw = np.random.default_rng(seed)
    found = {}
    for user in range(users):
        first, count = draw.integers(items), draw.integers(4, longest + 1)
        jumps = np.where(draw.random(count) < 0.2, draw.integers(items, size=count), 0)
        found[user] = [1 + int(item) for item in (first + np.arange(count) + jumps) % items]
    return found


def dataset(folder: Path, log: pl.DataFrame, items: pl.DataFrame | None = None, **recipe: Any) -> Dataset:
    """A next-item data set, by default leave-one-out with histories of 5 items."""
    folder.mkdir(parents=True, exist_ok=True)
    log.write_parquet(folder / "log.parquet")
    given: dict[str, Any] = {"interactions": folder / "log.parquet", "protocol": "leave-one-out", "max_len": 5}
    if items is not None:
        items.write_parquet(folder / "items.parquet")
        given["items"] = folder / "items.parquet"
    return build(Recipe.model_validate(given | recipe), folder / "data")


def categories(items: int = 12) -> pl.DataFrame:
    """A table of items with three categories."""
    return pl.DataFrame({"item_id": range(1, items + 1), "cate_id": [item % 3 for item in range(items)]})


def run_of(data: Dataset, pe: str = "naive", model: type = NextItemSASRec, seed: int = 0, **params: Any) -> Run:
    kept = {key: value for key, value in SMALL.items() if not key.startswith("num_") or key in parameters(model)}
    return Run(model, data.path, pe, seed, params=kept | params)


def built(data: Dataset, pe: str = "naive", model: type = NextItemSASRec, **params: Any) -> Any:
    """A model before training."""
    run = run_of(data, pe, model, **params)
    return build_model(run, data, data.path.parent / "models")


def batch_of(histories: list[list[int]], targets: list[int], cate: bool = False) -> JaggedBatch:
    """Histories and targets in ids; a category is id 1."""
    lengths, items = (
        torch.tensor([len(one) for one in histories]),
        torch.tensor([item for one in histories for item in one], dtype=torch.int64),
    )
    rows = {"label": torch.ones(len(targets)), "user_id": torch.arange(len(targets)), "item_id": torch.tensor(targets)}
    columns = {"item_history": items, "age_history": torch.arange(len(items), 0, -1)}
    if cate:
        rows["cate_id"], columns["cate_history"] = torch.ones_like(rows["item_id"]), torch.ones_like(items)
    return JaggedBatch(rows, columns, dict.fromkeys(columns, lengths))


def states_of(model: Any, batch: JaggedBatch) -> tuple[Tensor, Losses]:
    """What a model's ``states`` are of the histories of a batch."""
    (history,) = model.planned(batch).plan.histories
    embedded, _ = model.look_up({field: history.ids[field] for field in model.group.history})
    found: tuple[Tensor, Losses] = model.states(model._items(history, embedded), history.positions)
    return found
