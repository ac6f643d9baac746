"""Small next-item data sets and models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from ctr_pe.data.dataset import Dataset
from ctr_pe.data.logs.log import build
from ctr_pe.data.logs.recipe import Recipe
from ctr_pe.model_zoo.next_item.sasrec import NextItemSASRec
from ctr_pe.training import Run

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
    kept = SMALL if model is NextItemSASRec else {key: SMALL[key] for key in SMALL if not key.startswith("num_")}
    return Run(model, data.path, pe, seed, params=kept | params)
