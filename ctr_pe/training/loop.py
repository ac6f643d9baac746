"""Epochs, early stopping, learning rate and checkpoint of a training: FuxiCTR's rules, for any FuxiCTR model."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from ctr_pe.errors import UserError, nearest
from ctr_pe.evaluation.monitor import monitor_mode
from ctr_pe.training.steady import Average, schedule

if TYPE_CHECKING:
    from ctr_pe.tracking import Watch

MIN_DELTA = 1e-6  # what an improvement of the monitor is at least
Progress = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Epoch:
    """What an epoch gave, or with ``eval_steps`` the steps since the evaluation before.

    ``number`` of the epoch, from 1; ``steps`` of training so far; ``loss`` and ``auxiliary``, its parts by name, means
    over the batches; ``metrics`` on the validation rows; ``seconds`` of training and evaluation.
    """

    number: int
    steps: int
    loss: float
    metrics: dict[str, float]
    seconds: float
    auxiliary: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Fitted:
    """All evaluations of a training, and the one (``best``) whose weights the model has."""

    history: tuple[Epoch, ...]
    best: Epoch


def fit(
    model: Any,
    batches: Any,
    validation: Any,
    epochs: int = 1,
    max_gradient_norm: float | None = None,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> Fitted:
    """Train a FuxiCTR model, and end with the weights of the epoch that has the best monitor on ``validation``.

    The model's own keys say how: monitor, early_stop_patience, eval_steps, reduce_lr_on_plateau,
    save_best_only (if false, the weights are those of the last evaluation), verbose. It may be called again: the
    optimiser goes on from where it is, all else begins anew.

    ``batches``: an epoch at each iteration; of known length. ``max_gradient_norm``: None for the model's own.
    ``progress`` is called with ``{"epoch", "batch", "batches"}`` about every 1 % of an epoch, and with ``{"epoch",
    "valid"}`` after each evaluation, valid being its metrics. ``watch``: tells a tracker (:mod:`ctr_pe.tracking`).

    Raises:
        UserError: no validation data, evaluation that would never happen, a monitor that is no metric or NaN at first.
    """
    if validation is None:
        raise UserError("fit needs validation_data: without it no epoch can be chosen")
    steps = epochs * len(batches)
    if steps < (model._eval_steps or 1):
        every = "" if model._eval_steps is None else f"eval_steps={model._eval_steps}, but "
        raise UserError(f"{every}training has {steps} steps: none would be evaluated")
    if max_gradient_norm is not None or not hasattr(model, "_max_gradient_norm"):  # FuxiCTR's own fit sets it
        model._max_gradient_norm = 10.0 if max_gradient_norm is None else max_gradient_norm
    checkpoint = Path(model.checkpoint)
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.unlink(missing_ok=True)  # the end loads this file: never that of an earlier training
    low = monitor_mode(model._monitor.kv_pairs) == "min"
    history: list[Epoch] = []
    best: float | None = None
    stale = 0  # evaluations since the best
    for epoch in _evaluated(model, batches, validation, epochs, progress or (lambda state: None), watch):
        history.append(epoch)
        value = _monitored(model, epoch.metrics, first=best is None)
        better = best is None or (value <= best - MIN_DELTA if low else value >= best + MIN_DELTA)
        best, stale = (value, 0) if better else (best, stale + 1)
        if better or not model._save_best_only:
            save(model, checkpoint)
            kept = epoch
        if not better and model._reduce_lr_on_plateau and not _scheduled(model):
            logging.info("No improvement: learning rate %g", model.lr_decay())
        if stale >= model._early_stop_patience:
            logging.info("Early stop in epoch %d", epoch.number)
            break
    model.load_weights(model.checkpoint)
    return Fitted(tuple(history), kept)


def _evaluated(
    model: Any, batches: Any, validation: Any, epochs: int, progress: Progress, watch: Watch | None
) -> Iterator[Epoch]:
    """Train, and evaluate after each epoch, or each ``eval_steps`` steps."""
    names = [name for name in model.validation_metrics if name != "gAUC" or model.feature_map.group_id]
    names = list(dict.fromkeys([*names, *model._monitor.kv_pairs]))
    every, often, steps = model._eval_steps or len(batches), max(1, len(batches) // 100), 0
    total, parts, began = _nothing(model)
    share, planned = getattr(model, "_weight_average", None), epochs * len(batches)
    falling = schedule(model.optimizer, model._learning_rate_schedule, planned) if _scheduled(model) else None
    average = None if share is None else Average(model, share, planned)
    if watch is not None:
        watch.every = often
    for number in range(1, epochs + 1):
        model.train()
        for index, batch in enumerate(tqdm(batches, file=sys.stdout) if model._verbose else batches):
            if index % often == 0:
                progress({"epoch": number, "batch": index, "batches": len(batches)})
            loss = model.train_step(batch).detach()
            total += loss
            if falling is not None:
                falling.step()
            if average is not None:
                average.update()
            if watch is not None:
                watch.step(model, loss, batch)
            for name, part in getattr(model, "auxiliary_parts", {}).items():
                parts.setdefault(name, []).append(part)
            steps += 1
            if steps % every:
                continue
            mean = float(total) / every
            auxiliary = {name: float(torch.stack(found).mean()) for name, found in parts.items()}
            written = "".join(f", of which {name} {value:.6f}" for name, value in auxiliary.items())
            logging.info("Epoch %d, step %d: train loss %.6f%s", number, steps, mean, written)
            if watch is not None:
                watch.report(model)
            with contextlib.nullcontext() if average is None else average.in_place():
                metrics = dict(model.evaluate(validation, metrics=names))
                model.train()
                epoch = Epoch(number, steps, mean, metrics, time.perf_counter() - began, auxiliary)
                progress({"epoch": number, "valid": metrics})
                if watch is not None:
                    watch.evaluated("valid", metrics, epoch=number)
                yield epoch
            total, parts, began = _nothing(model)


def _scheduled(model: Any) -> bool:
    return getattr(model, "_learning_rate_schedule", "constant") != "constant"


def _nothing(model: Any) -> tuple[Tensor, dict[str, list[Tensor]], float]:
    """Before a first step: the sum of the losses, their auxiliary parts, and the time."""
    # The sum stays on its device: to ask for it after every step makes a GPU wait.
    return torch.zeros((), dtype=torch.float64, device=model.device), {}, time.perf_counter()


def _monitored(model: Any, metrics: Mapping[str, float], first: bool) -> float:
    """The monitor's value; NaN, which is no improvement, is an error the first time."""
    monitor: Mapping[str, float] = model._monitor.kv_pairs
    for name in monitor:
        if name not in metrics:
            raise UserError(f"monitor '{name}' is not among the metrics: {nearest(name, metrics)}")
    value = sum(metrics[name] * weight for name, weight in monitor.items())
    if math.isnan(value) and first:
        raise UserError(
            f"monitor {monitor} is NaN on the validation data: labels of one class (in every group, for gAUC), or "
            "scores that are not finite"
        )
    if math.isnan(value):
        logging.warning("The monitor is NaN: no improvement.")
    return value


def save(model: torch.nn.Module, file: Path) -> None:
    """Write a model's weights: all or nothing, also when two processes write the same file, or raise UserError."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), partial)
        partial.replace(file)
    except (OSError, RuntimeError) as error:  # torch's writer has its own word for a full disk
        with contextlib.suppress(OSError):
            partial.unlink()
        raise UserError(f"{file}: {getattr(error, 'strerror', None) or error}") from None
