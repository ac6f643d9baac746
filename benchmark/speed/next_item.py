"""What an encoding costs the next-item task: whole training steps of SASRec with its default settings, whose loss is
the full softmax, on a log as large as Amazon Beauty's: 22,363 users, 12,101 items, nine events each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmark.speed import models
from benchmark.speed.cases import BY_ARITHMETIC, Settings
from benchmark.speed.timing import Figure, alternate_all, say
from benchmark.speed.training_steps import multiply_adds
from ctr_pe.config.yaml import next_item_params
from ctr_pe.data.logs.log import build
from ctr_pe.data.logs.recipe import load_recipe
from ctr_pe.models.sections import model_class
from ctr_pe.training import Run, build_model
from ctr_pe.training.source import DataSource

USERS, ITEMS, CATEGORIES, BATCHES = 22_363, 12_101, 240, 4


def encodings(settings: Settings, each: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Steps with each encoding over steps without, in turn; those in ``BY_ARITHMETIC`` may take 1.1 times the ratio of
    the multiply-adds."""
    names = [options["pe"] for options in each]
    source = DataSource.of(_log(settings.folder, settings.size(USERS, 300), settings.size(ITEMS, 500)))
    params = next_item_params("SASRec", "log")

    def model(pe: str) -> Any:
        run = Run(model_class("SASRec", "next-item"), source, pe, seed=1, params=params, gpu=settings.gpu)
        return models.ready(build_model(run, source, settings.folder))

    without, *those = (model(name) for name in ("none", *names))
    every = source.batches(without.feature_map, ["train"], {**params, "seed": 1}, train=True)
    batches = list(islice(every, BATCHES))
    say(f"next-item SASRec with {', '.join(names)}, batches of {params['batch_size']} rows, against none")
    timed = alternate_all(
        [models.steps(one, batches) for one in those],
        models.steps(without, batches),
        settings.size(15, settings.repeats),
        warm_up=2,
        wait=models.wait(settings.gpu),
    )
    least, figures = multiply_adds(without, batches[0]), []
    for name, one, times in zip(names, those, timed, strict=True):
        arithmetic = multiply_adds(one, batches[0]) / least
        goal = 1.1 * arithmetic if name in BY_ARITHMETIC else None
        figures.append(times.overhead("none", goal=goal, batch_size=params["batch_size"], multiply_adds=arithmetic))
    return figures


def _log(folder: Path, users: int, items: int) -> Path:
    """A data set of the next-item task, an event an hour."""
    draw = np.random.default_rng(0)
    counts = 4 + draw.geometric(1 / 4.9, users)
    user = np.repeat(np.arange(users), counts)
    item = draw.zipf(1.3, len(user)) % items
    log = pl.DataFrame({"user_id": user, "item_id": item, "timestamp": 1_300_000_000 + 3_600 * np.arange(len(user))})
    log.write_parquet(folder / "next_item.parquet")
    table = pl.DataFrame({"item_id": np.arange(items), "cate_id": draw.integers(0, CATEGORIES, items)})
    table.write_parquet(folder / "next_items.parquet")
    given = {
        "interactions": folder / "next_item.parquet", "items": folder / "next_items.parquet",
        "protocol": "leave-one-out", "attributes": ["cate_id"],
    }  # fmt: skip
    return build(load_recipe(None, given), folder / "next_item", dataset_id="log").path
