"""The numbers of the figures, from the stored runs: learning curves, calibration, gAUC by history length, speed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ctr_pe.evaluation import evaluate
from ctr_pe.evaluation.calibration import reliability
from ctr_pe.evaluation.paired import mean_sd
from ctr_pe.evaluation.ranking import row_values
from ctr_pe.study.differences import Setting
from ctr_pe.study.store import Result, Store
from ctr_pe.training import PROTOCOLS

LENGTHS = 6
Array = npt.NDArray[Any]


def curves(setting: Setting) -> dict[str, list[dict[str, Any]]]:
    """Encoding → its runs: seed, the evaluation that was chosen (from 0), and per evaluation epoch, training loss,
    validation metrics by name, and seconds since the start of training."""
    return {
        pe: [{"seed": seed, **_curve(result)} for seed, result in runs.items() if result.history]
        for pe, runs in setting.runs.items()
    }


def _curve(result: Result) -> dict[str, Any]:
    history = result.history
    epochs = [epoch["number"] for epoch in history]
    steps = history[-1]["steps"] / max(1, epochs[-1])
    often = len(set(epochs)) < len(epochs)  # several evaluations in an epoch: where in it they were
    names = dict.fromkeys(name for epoch in history for name in epoch["metrics"])
    return {
        "best": max((at for at, number in enumerate(epochs) if number == result.epoch), default=None),
        "epochs": [epoch["steps"] / steps for epoch in history] if often else epochs,
        "loss": [epoch["loss"] for epoch in history],
        "metrics": {name: [epoch["metrics"].get(name) for epoch in history] for name in names},
        "seconds": np.cumsum([epoch["seconds"] for epoch in history]).tolist(),
    }


def calibration(store: Store, setting: Setting) -> dict[str, Any]:
    """Encoding → the :class:`~ctr_pe.evaluation.calibration.Reliability` of its predictions on the test rows, at all
    seeds."""
    labels, _ = _rows(store, setting)
    encodings = {}
    for pe, runs in setting.runs.items():
        scores = np.concatenate([_scores(store, result) for result in runs.values()])
        encodings[pe] = reliability(np.tile(labels, len(runs)), scores)._asdict()
    return {"share": float(labels.mean()), "encodings": encodings}


def by_length(store: Store, setting: Setting, metric: str = "gAUC") -> dict[str, Any]:
    """gAUC, or a metric of ranks, of the test rows whose history has so many items: bins with about equally many rows,
    and per encoding mean and standard deviation over the seeds; NaN where no user has both classes."""
    labels, users = _rows(store, setting)
    lengths = store.about(setting.key.data_hash)["lengths"]
    bins = length_bins(lengths)
    inside = [(lengths >= low) & (lengths <= high) for low, high in bins]
    encodings: dict[str, dict[str, list[float]]] = {}
    for pe, runs in setting.runs.items():
        scores = [_scores(store, result) for result in runs.values()]
        if metric == "gAUC":
            values = ([evaluate(labels[of], one[of], users[of], ["gAUC"])["gAUC"] for one in scores] for of in inside)
        else:
            values = ([float(row_values(one[of], metric).mean()) for one in scores] for of in inside)
        mean, sd = zip(*map(mean_sd, values), strict=True)
        encodings[pe] = {"mean": list(mean), "sd": list(sd)}
    return {
        "metric": metric,
        "bins": [f"{low}" if low == high else f"{low}–{high}" for low, high in bins],
        "rows": [int(of.sum()) for of in inside],
        "users": [len(np.unique(users[of])) for of in inside],
        "encodings": encodings,
    }


def length_bins(lengths: Array, most: int = LENGTHS) -> list[tuple[int, int]]:
    """Smallest and largest length of each bin; they are about equally full, and rows of equal length are together."""
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, most + 1)[1:], method="inverted_cdf"))
    below = [-1, *edges[:-1]]
    return [(int(lengths[lengths > low].min()), int(high)) for low, high in zip(below, edges, strict=True)]


def speed(setting: Setting, splits: Array | None) -> list[dict[str, Any]]:
    """Per encoding means over seeds: seconds of a run, epochs and their seconds, rows per second; and parameters.

    ``splits``: rows of train, valid and test. Rows per second: rows trained on and evaluated in the epochs, over the
    epochs' seconds. NaN where a run has no history, or without ``splits``.
    """
    names = ("seconds", "epochs", "epoch_seconds", "rows_per_second")
    lines = []
    for pe, runs in setting.runs.items():
        found = [_speed(result, splits) for result in runs.values()]
        means = {name: mean_sd(one[name] for one in found if name in one)[0] for name in names}
        lines.append({"pe": pe, "parameters": next(iter(runs.values())).parameters, **means})
    return lines


def _speed(result: Result, splits: Array | None) -> dict[str, float]:
    found: dict[str, float] = {"seconds": result.seconds}
    if not result.history:
        return found
    last, seconds = result.history[-1], sum(epoch["seconds"] for epoch in result.history)
    found |= {"epochs": last["number"], "epoch_seconds": seconds / last["number"]}
    if splits is not None and seconds:
        rows = dict(zip(("train", "valid", "test"), splits.tolist(), strict=True))
        train_on, select_on = PROTOCOLS[result.protocol]
        trained = sum(rows[split] for split in train_on)
        passes = last["steps"] / math.ceil(trained / int(result.params.get("batch_size", 1024)))
        found["rows_per_second"] = (passes * trained + len(result.history) * rows[select_on]) / seconds
    return found


def _rows(store: Store, setting: Setting) -> tuple[Array, Array]:
    test = store.rows(setting.key.data_hash)
    assert test is not None  # the caller has looked
    return test[0].astype(np.float64), test[1]


def _scores(store: Store, result: Result) -> Array:
    scores = store.scores(result.key)
    assert scores is not None  # the caller has looked
    return scores.astype(np.float64)
