"""The numbers of the figures, from the stored runs: learning curves, calibration, gAUC by history length, speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ctr_pe.evaluation import evaluate
from ctr_pe.evaluation.paired import mean_sd
from ctr_pe.study.differences import Setting
from ctr_pe.study.store import Result, Store
from ctr_pe.training import PROTOCOLS

BINS, LENGTHS = 10, 6
Array = npt.NDArray[Any]


def curves(setting: Setting) -> dict[str, list[dict[str, Any]]]:
    """Encoding → its runs: seed, the evaluation that was chosen (from 0), and per evaluation epoch, training loss,
    validation metrics by name, and seconds since the start of training."""
    return {
        pe: [_curve(seed, result) for seed, result in runs.items() if result.history]
        for pe, runs in setting.runs.items()
    }


def _curve(seed: int, result: Result) -> dict[str, Any]:
    history = result.history
    epochs = [epoch["number"] for epoch in history]
    steps = history[-1]["steps"] / max(1, epochs[-1])
    often = len(set(epochs)) < len(epochs)  # several evaluations in an epoch: where in it they were
    names = dict.fromkeys(name for epoch in history for name in epoch["metrics"])
    return {
        "seed": seed,
        "best": max((at for at, number in enumerate(epochs) if number == result.epoch), default=None),
        "epochs": [epoch["steps"] / steps if often else epoch["number"] for epoch in history],
        "loss": [epoch["loss"] for epoch in history],
        "metrics": {name: [epoch["metrics"].get(name) for epoch in history] for name in names},
        "seconds": [float(value) for value in np.cumsum([epoch["seconds"] for epoch in history])],
    }


def calibration(store: Store, setting: Setting) -> dict[str, Any]:
    """Encoding → bins of its predictions on the test rows at all seeds, equally many in each: their mean, the share of
    clicks, how many; and ``error``: the mean of their distance from each other, weighted by rows.

    Equal predictions are in the same bin, so there may be fewer bins.
    """
    labels, _ = _rows(store, setting)
    found: dict[str, Any] = {"share": float(labels.mean())}
    encodings = {}
    for pe, runs in setting.runs.items():
        scores = np.concatenate([_scores(store, result) for result in runs.values()])
        clicked = np.tile(labels, len(runs))
        edges = np.unique(np.quantile(scores, np.linspace(0, 1, BINS + 1)[1:-1]))
        of = np.searchsorted(edges, scores, "left")
        count = np.bincount(of, minlength=len(edges) + 1)
        kept = count > 0
        predicted = np.bincount(of, scores, len(edges) + 1)[kept] / count[kept]
        observed = np.bincount(of, clicked, len(edges) + 1)[kept] / count[kept]
        encodings[pe] = {
            "predicted": predicted.tolist(),
            "observed": observed.tolist(),
            "rows": count[kept].tolist(),
            "error": float(np.abs(predicted - observed) @ count[kept] / count.sum()),
        }
    return {**found, "encodings": encodings}


def by_length(store: Store, setting: Setting) -> dict[str, Any]:
    """gAUC of the test rows whose history has so many items: bins with about equally many rows, and per encoding mean
    and standard deviation over the seeds; NaN where no user has both classes."""
    labels, users = _rows(store, setting)
    lengths = store.about(setting.key.data_hash)["lengths"]
    bins = length_bins(lengths)
    inside = [(lengths >= low) & (lengths <= high) for low, high in bins]
    encodings: dict[str, dict[str, list[float]]] = {}
    for pe, runs in setting.runs.items():
        scores = [_scores(store, result) for result in runs.values()]
        values = [[evaluate(labels[of], one[of], users[of], ["gAUC"])["gAUC"] for one in scores] for of in inside]
        means = [mean_sd(of) for of in values]
        encodings[pe] = {"mean": [mean for mean, _ in means], "sd": [sd for _, sd in means]}
    return {
        "bins": [f"{low}" if low == high else f"{low}–{high}" for low, high in bins],
        "rows": [int(of.sum()) for of in inside],
        "users": [len(np.unique(users[of])) for of in inside],
        "encodings": encodings,
    }


def length_bins(lengths: Array, most: int = LENGTHS) -> list[tuple[int, int]]:
    """Smallest and largest length of each bin; they are about equally full, and rows of equal length are together."""
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, most + 1)[1:], method="inverted_cdf"))
    bins, low = [], int(lengths.min())
    for high in map(int, edges):
        bins.append((int(lengths[lengths >= low].min()), high))
        low = high + 1
    return bins


def speed(setting: Setting, splits: Array | None) -> list[dict[str, Any]]:
    """Per encoding means over seeds: seconds of a run, seconds of an epoch, rows per second, parameters.

    ``splits``: rows of train, valid and test. Rows per second: rows trained on and evaluated in the epochs, over the
    epochs' seconds. NaN where a run has no history, or without ``splits``.
    """
    return [
        {
            "pe": pe,
            "parameters": next(iter(runs.values())).parameters,
            "seconds": mean_sd([result.seconds for result in runs.values()])[0],
            "epoch_seconds": _mean([_epoch_seconds(result) for result in runs.values()]),
            "rows_per_second": _mean([_rows_per_second(result, splits) for result in runs.values()]),
            "epochs": _mean([result.history[-1]["number"] if result.history else math.nan for result in runs.values()]),
        }
        for pe, runs in setting.runs.items()
    ]


def _epoch_seconds(result: Result) -> float:
    if not result.history:
        return math.nan
    seconds = sum(epoch["seconds"] for epoch in result.history)
    return float(seconds / result.history[-1]["number"])


def _rows_per_second(result: Result, splits: Array | None) -> float:
    if not result.history or splits is None:
        return math.nan
    rows = dict(zip(("train", "valid", "test"), splits.tolist(), strict=True))
    train_on, select_on = PROTOCOLS[result.protocol]
    trained = sum(rows[split] for split in train_on)
    batches = math.ceil(trained / int(result.params.get("batch_size", 1024)))
    passes = result.history[-1]["steps"] / batches
    seconds = sum(epoch["seconds"] for epoch in result.history)
    return float((passes * trained + len(result.history) * rows[select_on]) / seconds) if seconds else math.nan


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


def _rows(store: Store, setting: Setting) -> tuple[Array, Array]:
    test = store.rows(setting.key.data_hash)
    assert test is not None  # the caller has looked
    return test[0].astype(np.float64), test[1]


def _scores(store: Store, result: Result) -> Array:
    scores = store.scores(result.key)
    assert scores is not None  # the caller has looked
    return scores.astype(np.float64)
