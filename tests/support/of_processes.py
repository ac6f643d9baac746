"""``torchrun --nproc-per-node N of_processes.py DATA OUT``: what :mod:`test_ranks` compares with one process.

Writes OUT/gradients.pt, of a step of each model, and OUT/outcomes.json, of each training.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ctr_pe.training import Outcome, Run, train
from ctr_pe.utils import distributed
from tests.support.models import NEGATIVES, batch, build, with_negatives

COMMON: dict[str, Any] = {
    "embedding_regularizer": 0.01,
    "net_regularizer": 0.01,
    "batch_norm": True,
    "dnn_activations": "Dice",
    "max_gradient_norm": 0.5,
}
NEGATIVE_FIELDS = {"neg_seq_field": [["item_neg", "cate_neg"]]}
STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "DIN": ("DIN", {"position_encoding": "cape"}),
    "DIN lazy": ("DIN", {"table_optimizer": "lazy_adam"}),
    "DIEN": ("DIEN", {"attention_activation": "Dice", "aux_loss_alpha": 0.5, **NEGATIVE_FIELDS}),
    "BST": ("BST", {"position_encoding": "cope"}),
    "DMIN": ("DMIN", {"position_encoding": "native", "aux_loss_lambda": 0.5, **NEGATIVE_FIELDS}),
    "TIN": ("TIN", {}),
    "SASRec": ("SASRec", {"position_encoding": "t5"}),
}
COUNTS = {  # items in the histories of each row; every other row is one process'
    "of many lengths": [3, 0, 6, 1, 5, 4, 2],
    "empty in one process": [3, 0, 6, 0, 5, 0, 2],
    "of one item in all": [0, 0, 1, 0],
    "a row each": [3, 2],
}
SMALL: dict[str, Any] = {
    "embedding_dim": 4,
    "attention_hidden_units": [4],
    "dnn_hidden_units": [4],
    "batch_size": 61,
    "epochs": 2,
    "learning_rate": 0.01,
    "monitor": "AUC",
    "net_dropout": 0,
    "attention_dropout": 0,
}
TRAININGS: dict[str, tuple[str, dict[str, Any]]] = {
    "a learning rate that falls": (
        "cape",
        {"learning_rate_schedule": "cosine", "weight_average": 0.3, "num_workers": 1},
    ),
    "steps of an evaluation": ("rope", {"eval_steps": 3, "save_best_only": False, "num_workers": 1}),
    "sparse tables": ("none", {"table_optimizer": "rowwise_adagrad", "optimizer": "adagrad"}),
    "regularised": ("cape", {"embedding_regularizer": 1e-3, "net_regularizer": 1e-3, "max_gradient_norm": 0.1}),
    # Not by Adam, which takes steps along rounding errors: the gradient of a bias before batch norm is nothing else.
    "normed by its batches": ("cape", {"batch_norm": True, "dnn_activations": "Dice", "optimizer": "sgd"}),
}


def step(name: str, counts: str, folder: Path) -> dict[str, Tensor]:
    """The loss, gradients and running statistics of a training step on this process' share of a batch."""
    model_name, changes = STEPS[name]
    model = build(model_name, folder, NEGATIVES if "neg_seq_field" in changes else None, **COMMON | changes).train()
    torch.manual_seed(2)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    rows = with_negatives(batch(COUNTS[counts]))
    if "neg_seq_field" not in changes:
        rows = {key: values for key, values in rows.items() if not key.endswith("_neg")}
    loss = model.train_step({key: values[distributed.rank_slice()] for key, values in rows.items()})
    found = {key: p.grad.to_dense() for key, p in model.named_parameters() if p.grad is not None}
    found |= {f"buffer {key}": value.double() for key, value in model.named_buffers()}
    return {**found, "loss": loss.detach()}


def training(name: str, data: Path) -> Outcome:
    pe, params = TRAININGS[name]
    return train(Run("DIN", data, pe, seed=3, params=SMALL | params))


def facts(outcome: Outcome) -> Any:
    losses = [epoch.loss for epoch in outcome.history]
    metrics = [[*epoch.metrics.values()] for epoch in outcome.history]
    return [outcome.epoch, [*outcome.metrics.values()], losses, metrics, outcome.scores.tolist()]


def main(data: Path, out: Path) -> None:
    torch.set_num_threads(1)
    with distributed.process_group():
        own = out / str(distributed.rank_slice().start)
        own.mkdir()
        steps = {f"{name}, {counts}": step(name, counts, own) for name in STEPS for counts in COUNTS}
        torch.save(steps, own / "gradients.pt")
        outcomes = {name: facts(training(name, data)) for name in TRAININGS}
        (own / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
