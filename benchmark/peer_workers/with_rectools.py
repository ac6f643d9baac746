"""SASRec of RecTools for :mod:`benchmark.peers`, in an environment that has RecTools."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pytorch_lightning import Trainer, seed_everything
from pytorch_lightning.callbacks import LambdaCallback
from rectools import Columns
from rectools.dataset import Dataset
from rectools.metrics import NDCG, Recall, calc_metrics
from rectools.models import SASRecModel

from benchmark.peer_workers.answers import Call, serve, start_torch

TIMES: list[float] = []
"""Begin and end of each epoch, without what ``fit_partial`` prepares before it."""


def trainer() -> Any:
    """RecTools' own, with a clock."""
    off = ("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger")
    note = lambda *ignored: TIMES.append(time.perf_counter())  # noqa: E731
    clock = LambdaCallback(on_train_epoch_start=note, on_train_epoch_end=note)
    return Trainer(max_epochs=1, min_epochs=1, devices=1, callbacks=[clock], **dict.fromkeys(off, False))


def prepare(given: dict[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Call]]:
    """Versions, and an epoch of training and an evaluation of the test users."""
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    start_torch(given["threads"])
    seed_everything(given["seed"])
    train, before, test = (_table(given["folder"], part) for part in ("train", "before_test", "test"))
    learned, asked = Dataset.construct(train), Dataset.construct(before)
    users = test[Columns.User].unique()
    metrics = {"Recall@10": Recall(k=10), "NDCG@10": NDCG(k=10, divide_by_achievable=True)}
    model = SASRecModel(
        session_max_len=given["length"],
        n_factors=given["width"],
        n_blocks=given["blocks"],
        n_heads=given["heads"],
        dropout_rate=given["dropout"],
        loss="softmax",
        lr=given["learning_rate"],
        batch_size=given["rows"],
        get_trainer_func=trainer,
    )

    def epoch() -> Mapping[str, float]:
        model.fit_partial(learned, min_epochs=1, max_epochs=1)
        return {"seconds": TIMES[-1] - TIMES[-2]}

    def evaluate() -> Mapping[str, float]:
        lists = model.recommend(users, asked, k=10, filter_viewed=False)
        return {name: float(value) for name, value in calc_metrics(metrics, lists, interactions=test).items()}

    versions = {name: version(name) for name in ("rectools", "torch", "numpy", "pandas")}
    return versions, {"epoch": epoch, "evaluate": evaluate}


def _table(folder: str, part: str) -> pd.DataFrame:
    """The events of a part of the log; their places among those of their user are their times."""
    with np.load(Path(folder, "events.npz")) as events:
        user, item, place = (events[name][events[part]] for name in ("user", "item", "place"))
    when = pd.to_datetime(place, unit="s")
    return pd.DataFrame({Columns.User: user, Columns.Item: item, Columns.Weight: 1.0, Columns.Datetime: when})


if __name__ == "__main__":
    serve(prepare)
