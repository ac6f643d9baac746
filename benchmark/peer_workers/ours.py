"""Our SASRec for :mod:`benchmark.peers`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmark.peer_workers.answers import Call, serve, start_torch
from ctr_pe.config.yaml import next_item_params
from ctr_pe.models.sections import model_class
from ctr_pe.study.runner import revision
from ctr_pe.training import Run, build_model, fit
from ctr_pe.training.source import DataSource


def prepare(given: dict[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Call]]:
    """Versions, and an epoch of training and an evaluation of the test rows."""
    start_torch(given["threads"])
    params = {**next_item_params("SASRec", "log", _keys(given)), "seed": given["seed"]}
    source = DataSource.of(Path(given["folder"], "dataset"))
    run = Run(model_class("SASRec", "next-item"), source, "naive", given["seed"], params=params)
    model = build_model(run, source, given["folder"])
    train = source.batches(model.feature_map, ["train"], params, train=True)
    test = source.batches(model.feature_map, ["test"], params)
    torch.manual_seed(given["seed"] + 1)

    def epoch() -> Mapping[str, float]:
        fit(model, train)
        return {}

    def evaluate() -> Mapping[str, float]:
        metrics: Mapping[str, float] = model.measure(test, ("Recall@10", "NDCG@10")).metrics
        return metrics

    versions = {"ctr_pe": revision(), **{name: version(name) for name in ("torch", "numpy", "polars")}}
    return versions, {"epoch": epoch, "evaluate": evaluate}


def _keys(given: dict[str, Any]) -> dict[str, Any]:
    return {
        "max_len": given["length"],
        "embedding_dim": given["width"],
        "num_blocks": given["blocks"],
        "num_heads": given["heads"],
        "ffn_dim": given["ffn_dim"],
        "hidden_dropout": given["dropout"],
        "attention_dropout": given["dropout"],
        "learning_rate": given["learning_rate"],
        "batch_size": given["rows"],
        **given["ours"],
    }


if __name__ == "__main__":
    serve(prepare)
