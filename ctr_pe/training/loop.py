"""Epochs, early stopping, learning rate and checkpoint of a training: FuxiCTR's rules, for any FuxiCTR model."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ctr_pe.errors import UserError, nearest

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
) -> Fitted:
    """Train a FuxiCTR model, and end with the weights of the epoch that has the best monitor on ``validation``.

    The model's own keys say how: monitor, monitor_mode, early_stop_patience, eval_steps, reduce_lr_on_plateau,
    save_best_only (if false, the weights are those of the last evaluation), verbose. It may be called again: the
    optimiser goes on from where it is, all else begins anew.

    Args:
        batches: an epoch at each iteration; of known length.
        max_gradient_norm: None for the model's own.
        progress: called with ``{"epoch", "batch", "batches"}`` about every 1 % of an epoch, and with ``{"epoch",
            "valid"}`` after each evaluation, valid being its metrics.

    Raises:
        UserError: no validation data, evaluation that would never happen, a monitor that is no metric or NaN at first.
    """
    if validation is None:
        raise UserError("fit needs validation_data: without it no epoch can be chosen")
    steps = epochs * len(batches)
    if steps < (model._eval_steps or 1):
        every = "" if model._eval_steps is None else f"eval_steps={model._eval_steps}, but "
        raise UserError(f"{every}training has {steps} steps: none would be evaluated")
    if max_gradient_norm is not None:
        model._max_gradient_norm = max_gradient_norm
    os.makedirs(model.model_dir, exist_ok=True)
    Path(model.checkpoint).unlink(missing_ok=True)  # the end loads this file: never that of an earlier training
    training = _Training(model, validation, progress)
    for epoch in range(1, epochs + 1):
        training.epoch(epoch, batches)
        if training.stopped:
            logging.info("Early stop in epoch %d", epoch)
            break
    model.load_weights(model.checkpoint)
    return Fitted(tuple(training.history), training.kept)


class _Training:
    """A training under way: the evaluations so far, the best monitor value, and the evaluations since."""

    kept: Epoch

    def __init__(self, model: Any, validation: Any, progress: Progress | None) -> None:
        self.model, self.validation, self.progress = model, validation, progress
        self.monitor: Mapping[str, float] = model._monitor.kv_pairs
        measured = [name for name in model.validation_metrics if name != "gAUC" or model.feature_map.group_id]
        self.metrics = list(dict.fromkeys([*measured, *self.monitor]))
        self.history: list[Epoch] = []
        self.best: float | None = None
        self.steps = self.stale = 0
        self._begin()

    def _begin(self) -> None:
        """Nothing since the last evaluation."""
        # The loss stays on its device: to ask for it after every step makes a GPU wait.
        self.loss = torch.zeros((), dtype=torch.float64, device=self.model.device)
        self.since, self.began = 0, time.perf_counter()
        self.parts: dict[str, list[Tensor]] = {}

    @property
    def stopped(self) -> bool:
        return bool(self.history) and self.stale >= self.model._early_stop_patience

    def epoch(self, number: int, batches: Any) -> None:
        model, often = self.model, max(1, len(batches) // 100)
        model.train()
        shown: Iterable[Mapping[str, Tensor]] = tqdm(batches, file=sys.stdout) if model._verbose else batches
        for index, batch in enumerate(shown):
            if self.progress is not None and index % often == 0:
                self.progress({"epoch": number, "batch": index, "batches": len(batches)})
            self.loss += model.train_step(batch).detach()
            for name, part in getattr(model, "auxiliary_parts", {}).items():
                self.parts.setdefault(name, []).append(part)
            self.steps += 1
            self.since += 1
            if model._eval_steps is not None and self.steps % model._eval_steps == 0:
                self._evaluate(number)
                if self.stopped:
                    return
        if model._eval_steps is None:
            self._evaluate(number)

    def _evaluate(self, number: int) -> None:
        """Measure, and do what follows: keep the weights, or lower the learning rate."""
        model = self.model
        loss = float(self.loss) / max(1, self.since)
        auxiliary = {name: float(torch.stack(parts).mean()) for name, parts in self.parts.items()}
        written = "".join(f", of which {name} {value:.6f}" for name, value in auxiliary.items())
        logging.info("Epoch %d, step %d: train loss %.6f%s", number, self.steps, loss, written)
        metrics = model.evaluate(self.validation, metrics=self.metrics)
        model.train()
        epoch = Epoch(number, self.steps, loss, dict(metrics), time.perf_counter() - self.began, auxiliary)
        self.history.append(epoch)
        if self.progress is not None:
            self.progress({"epoch": number, "valid": epoch.metrics})
        better = self._improves(epoch.metrics)
        self.stale = 0 if better else self.stale + 1
        if better or not model._save_best_only:
            save(model, Path(model.checkpoint))
            self.kept = epoch
        if not better and model._reduce_lr_on_plateau:
            logging.info("No improvement: learning rate %g", model.lr_decay())
        self._begin()

    def _improves(self, metrics: Mapping[str, float]) -> bool:
        for name in self.monitor:
            if name not in metrics:
                raise UserError(f"monitor '{name}' is not among the metrics: {nearest(name, metrics)}")
        value = sum(metrics[name] * weight for name, weight in self.monitor.items())
        if math.isnan(value):  # FuxiCTR's comparisons take it for an improvement
            if self.best is None:
                raise UserError(
                    f"monitor {self.model._monitor.kv_pairs} is NaN on the validation data: labels of one class (in "
                    "every group, for gAUC), or scores that are not finite"
                )
            logging.warning("The monitor is NaN: no improvement.")
            return False
        if self.best is not None and (
            value > self.best - MIN_DELTA if self.model._monitor_mode == "min" else value < self.best + MIN_DELTA
        ):
            return False
        self.best = value
        return True


def save(model: torch.nn.Module, file: Path) -> None:
    """Write a model's weights: all or nothing, also when two processes write the same file.

    Raises:
        UserError: they cannot be written.
    """
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), partial)
        partial.replace(file)
    except (OSError, RuntimeError) as error:  # torch's writer has its own word for a full disk
        with contextlib.suppress(OSError):
            partial.unlink()
        raise UserError(f"{file}: {getattr(error, 'strerror', None) or error}") from None
