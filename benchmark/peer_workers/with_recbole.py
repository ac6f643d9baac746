"""SASRec of RecBole for :mod:`benchmark.peers`, in an environment that has RecBole.

It needs no Ray: only ``recbole.quick_start`` imports it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recbole.config import Config
from recbole.data import create_dataset, data_preparation
from recbole.utils import get_model, get_trainer, init_seed

from benchmark.peer_workers.answers import Call, serve, start_torch

NAME = "log"
COLUMNS = {"user": "token", "item": "token", "place": "float"}


def prepare(given: dict[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Call]]:
    """Versions, and an epoch of training and an evaluation of the test users."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    folder = Path(given["folder"])
    _write_log(folder / "events.npz", folder / NAME / f"{NAME}.inter")
    config = Config(model="SASRec", dataset=NAME, config_dict=_settings(given, folder))
    start_torch(given["threads"])
    init_seed(config["seed"], config["reproducibility"])
    train, _, test = data_preparation(config, create_dataset(config))
    model = get_model(config["model"])(config, train._dataset).to(config["device"])
    trainer = get_trainer(config["MODEL_TYPE"], config["model"])(config, model)
    trainer.epochs = 0
    # RecBole's module of another model, SINE, turns this on for all of them: a search for NaN that takes time.
    torch.autograd.set_detect_anomaly(False)

    def epoch() -> Mapping[str, float]:
        trainer.start_epoch, trainer.epochs = trainer.epochs, trainer.epochs + 1
        trainer.fit(train, verbose=False, saved=False)
        return {}

    def evaluate() -> Mapping[str, float]:
        found = trainer.evaluate(test, load_best_model=False)
        return {name: float(found[name.lower()]) for name in ("Recall@10", "NDCG@10")}

    versions = {name: version(name) for name in ("recbole", "torch", "numpy", "pandas")}
    return versions, {"epoch": epoch, "evaluate": evaluate}


def _write_log(events: Path, file: Path) -> None:
    """All events as RecBole reads them; it splits them itself."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with np.load(events) as found:
        rows = np.stack([found[name] for name in COLUMNS], 1)
    head = "\t".join(f"{name}:{kind}" for name, kind in COLUMNS.items())
    np.savetxt(file, rows, fmt="%d", delimiter="\t", header=head, comments="")


def _settings(given: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {
        "data_path": str(folder),
        "checkpoint_dir": str(folder / "saved"),
        "use_gpu": False,
        "show_progress": False,
        "seed": given["seed"],
        "USER_ID_FIELD": "user",
        "ITEM_ID_FIELD": "item",
        "TIME_FIELD": "place",
        "load_col": {"inter": list(COLUMNS)},
        "MAX_ITEM_LIST_LENGTH": given["length"],
        "eval_args": {"split": {"LS": "valid_and_test"}, "group_by": "user", "order": "TO", "mode": "full"},
        "metrics": ["Recall", "NDCG"],
        "topk": [10],
        "valid_metric": "NDCG@10",
        "metric_decimal_place": 8,
        "loss_type": "CE",
        "train_neg_sample_args": None,
        "hidden_size": given["width"],
        "n_layers": given["blocks"],
        "n_heads": given["heads"],
        "inner_size": given["ffn_dim"],
        "hidden_dropout_prob": given["dropout"],
        "attn_dropout_prob": given["dropout"],
        "learning_rate": given["learning_rate"],
        "train_batch_size": given["rows"],
    }


if __name__ == "__main__":
    serve(prepare)
