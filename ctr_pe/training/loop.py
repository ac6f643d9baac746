"""The training loop: epochs, early stopping, learning rate and checkpoint by FuxiCTR's rules, for any FuxiCTR model."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ctr_pe.evaluation.metrics import monitor_mode, monitored
from ctr_pe.fuxictr.library import base_model, training_settings
from ctr_pe.training.checkpoint import Checkpoint, random_state, set_random_state
from ctr_pe.training.collapse import collapse
from ctr_pe.training.divergence import DivergenceDetector
from ctr_pe.training.overfitting import overfitting
from ctr_pe.training.schedule import MovingAverage, schedule
from ctr_pe.training.scoring import evaluated
from ctr_pe.training.source import prefetch_plans
from ctr_pe.training.step_graphs import StepGraphs
from ctr_pe.training.weights import SUFFIX, load, read_tensors, save, write_tensors
from ctr_pe.utils import distributed
from ctr_pe.utils.errors import UserError, nearest, one_line
from ctr_pe.utils.random_generators import generators_of

if TYPE_CHECKING:
    from ctr_pe.utils.loggers import Watch

MIN_DELTA = 1e-6  # what an improvement of the monitor is at least
GRAPHS = "step graphs"
COUNTS = ("epoch", "steps", "stale", "kept")  # of a training's state
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
    """All epochs of a training, and the one (``best``) whose weights the model has; ``before``: seconds of a process
    that was killed, which this one went on from."""

    history: tuple[Epoch, ...]
    best: Epoch
    before: float = 0.0


def fit(
    model: Any,
    batches: Any,
    validation: Any = None,
    epochs: int = 1,
    progress: Progress | None = None,
    watch: Watch | None = None,
    checkpoint: Checkpoint | None = None,
) -> Fitted:
    """Train a FuxiCTR model, and end with the weights of the epoch that has the best monitor on ``validation``.

    The model's own keys say how: monitor, early_stop_patience, eval_steps, reduce_lr_on_plateau,
    save_best_only (if false, the weights are those of the last evaluation), verbose. Without ``validation`` it trains
    all epochs at one learning rate and ends with the last weights. It may be called again: the optimiser goes on from
    where it is, all else begins anew.

    ``batches``: an epoch at each iteration; of known length.
    ``progress`` is called with ``{"epoch", "batch", "batches"}`` about every 1 % of an epoch, and with ``{"epoch",
    "evaluation", "valid"}`` after each evaluation, with its number and metrics. ``watch``: tells a tracker
    (:mod:`ctr_pe.utils.loggers`).
    ``checkpoint``: keeps the state after each epoch; a training that was killed goes on from there to the same weights.

    Raises:
        Diverged: a loss, gradient or weight that is not finite, or a loss that stays above that of a constant.
        UserError: evaluation that would never happen, a monitor that is no metric or NaN at first.
    """
    training = _Training(model, batches, validation, epochs, progress, watch)
    if checkpoint is not None and (state := distributed.broadcast(checkpoint.read)) is not None:
        try:
            training.restore(state)
        except Exception as error:  # whatever a value of another type or shape leads to
            why = one_line(f"{type(error).__name__}: {error}")[:100]
            raise UserError(f"{checkpoint.file}: not the state of this training ({why}): remove it") from None
        logging.info("Going on after epoch %d", training.epoch)
    before = sum(epoch.seconds for epoch in training.history)
    try:
        while not training.over:
            training.train_epoch()
            if checkpoint is not None:
                state = training.state()
                if distributed.is_first():
                    checkpoint.write(state)
    finally:
        training.close()
    if validation is not None:
        if distributed.is_first():
            load(model, training.best_weights)
        distributed.broadcast_weights(model)
        line = collapse(training.history) or overfitting(training.history, training.history[training.kept])
        if line is not None and distributed.is_first():
            logging.warning(line)
    return Fitted(tuple(training.history), training.history[training.kept], before)


class _Training:
    """A training under way. ``epoch`` and ``steps``: done so far; ``kept``: the place in ``history`` of the evaluation
    whose weights are in the file ``best_weights``; ``stale``: evaluations since the ``best``."""

    def __init__(
        self, model: Any, batches: Any, validation: Any, epochs: int, progress: Progress | None, watch: Watch | None
    ) -> None:
        self.settings = settings = training_settings(model)
        if getattr(model, "class_weight", None) == "balanced":
            model.balance(batches.positives)
        steps, every = epochs * len(batches), None if validation is None else settings.eval_steps
        if steps < (every or 1):
            wanted = "" if every is None else f"eval_steps={every}, but "
            raise UserError(f"{wanted}training has {steps} steps: none would be evaluated")
        if hasattr(model, "step_graphs"):
            model.step_graphs = StepGraphs.of(model)
        self.model, self.batches, self.validation = model, prefetch_plans(model, batches), validation
        self.epochs, self.progress, self.watch = epochs, progress or (lambda state: None), watch
        self.divergence = DivergenceDetector(model)
        self.every, self.often = every or len(batches), max(1, len(batches) // 100)
        if watch is not None:
            watch.every = self.often
        self.average = self.schedule = None
        if validation is not None:
            if settings.weight_average is not None:
                self.average = MovingAverage(model, settings.weight_average, steps)
            if settings.learning_rate_schedule != "constant":
                self.schedule = schedule(model.optimizer, settings.learning_rate_schedule, steps)
            self.best_weights = Path(model.checkpoint).with_suffix(SUFFIX)
            self.best_weights.parent.mkdir(parents=True, exist_ok=True)
            if distributed.is_first():
                self.best_weights.unlink(missing_ok=True)  # the end loads this file: never an earlier training's
        self.epoch = self.steps = self.stale = self.kept = 0
        self.history: list[Epoch] = []
        self.best: float | None = None
        self._begin()

    def _begin(self) -> None:
        """Before the first step after an evaluation."""
        # The sum stays on its device: to ask for it after every step makes a GPU wait.
        self.loss = torch.zeros((), dtype=torch.float64, device=self.model.device)
        self.parts: dict[str, list[Tensor]] = {}
        self.began = time.perf_counter()

    def close(self) -> None:
        """What later calls of the model are to do without."""
        if (graphs := getattr(self.model, "step_graphs", None)) is not None:
            graphs.close()
            self.model.step_graphs = None

    @property
    def over(self) -> bool:
        return self.epoch == self.epochs or self.stopped

    @property
    def stopped(self) -> bool:
        return self.best is not None and self.stale >= self.settings.early_stop_patience

    def train_epoch(self) -> None:
        """Train, and evaluate after the epoch, or each ``eval_steps`` steps."""
        self.epoch += 1
        self.model.train()
        verbose = self.settings.verbose and distributed.is_first()
        for index, batch in enumerate(tqdm(self.batches, file=sys.stdout) if verbose else self.batches):
            if index % self.often == 0:
                self.progress({"epoch": self.epoch, "batch": index, "batches": len(self.batches)})
            self._step(index, batch)
            if self.steps % self.every == 0:
                self.divergence.look_at_all(self.epoch, index + 1)
                self._evaluate()
                if self.stopped:
                    logging.info("Early stop in epoch %d", self.epoch)
                    break
        self.divergence.end_epoch(self.epoch, index + 1, last=self.over)

    def _step(self, index: int, batch: Mapping[str, Tensor]) -> None:
        loss = self.model.train_step(batch).detach()
        self.loss += loss
        self.divergence.step(self.epoch, index + 1, loss, batch)
        if self.schedule is not None:
            self.schedule.step()
        if self.average is not None:
            self.average.update()
        if self.watch is not None:
            self.watch.step(self.model, loss, batch)
        for name, part in getattr(self.model, "auxiliary_parts", {}).items():
            self.parts.setdefault(name, []).append(part)
        self.steps += 1

    def _evaluate(self) -> None:
        """Take the mean loss of the steps, and with validation rows their metrics, into the history."""
        mean = float(self.loss) / self.every
        means = {name: float(torch.stack(found).mean()) for name, found in self.parts.items()}
        everyone = distributed.all_gather(means)
        auxiliary = {name: sum(one.get(name, 0.0) for one in everyone) / len(everyone) for name in means}
        written = "".join(f", of which {name} {value:.6f}" for name, value in auxiliary.items())
        logging.info("Epoch %d, step %d: train loss %.6f%s", self.epoch, self.steps, mean, written)
        if self.watch is not None:
            self.watch.report(self.model)
        with contextlib.nullcontext() if self.average is None else self.average.in_place():
            metrics = {} if self.validation is None else self._metrics()
            seconds = time.perf_counter() - self.began
            self.history.append(Epoch(self.epoch, self.steps, mean, metrics, seconds, auxiliary))
            if self.validation is None:
                self.kept = len(self.history) - 1
            else:
                self._choose(metrics)
        self._begin()

    def _metrics(self) -> dict[str, float]:
        names = [name for name in self.model.validation_metrics if name != "gAUC" or self.model.feature_map.group_id]
        names = list(dict.fromkeys([*names, *self.settings.monitor]))
        evaluate = self.model.evaluate
        if getattr(evaluate, "__func__", None) is vars(base_model())["evaluate"]:  # FuxiCTR's knows fewer names
            evaluate = partial(evaluated, self.model)
        found = evaluate(self.validation, metrics=names)
        metrics = {name: float(value) for name, value in found.items()}
        self.model.train()
        self.progress({"epoch": self.epoch, "evaluation": len(self.history) + 1, "valid": metrics})
        if self.watch is not None:
            self.watch.evaluated("valid", metrics, epoch=self.epoch)
        return metrics

    def _choose(self, metrics: Mapping[str, float]) -> None:
        """Keep the weights if they are the best so far; else stop sooner and more slowly."""
        settings = self.settings
        value = _monitored(settings.monitor, metrics, first=self.best is None)
        low = monitor_mode(settings.monitor) == "min"
        better = self.best is None or (value <= self.best - MIN_DELTA if low else value >= self.best + MIN_DELTA)
        self.best, self.stale = (value, 0) if better else (self.best, self.stale + 1)
        if better or not settings.save_best_only:
            if distributed.is_first():
                save(self.model, self.best_weights)
            self.kept = len(self.history) - 1
        if not better and settings.reduce_lr_on_plateau and self.schedule is None:
            logging.info("No improvement: learning rate %g", self.model.lr_decay())

    def state(self) -> dict[str, Any]:
        """All that the rest of the training depends on, at the end of an epoch: of each process the random state, of
        which all else is equal."""
        return {
            **{name: getattr(self, name) for name in COUNTS},
            "best": self.best,
            "loss": self.loss,
            "parts": {name: torch.stack(found) for name, found in self.parts.items()},
            "history": [asdict(epoch) for epoch in self.history],
            "kept_weights": None if self.best is None else read_tensors(self.best_weights),
            "batches": getattr(self.batches, "epoch", None),
            "random": distributed.all_gather(random_state(self.model.device)),
            **{name: one.state_dict() for name, one in self._stateful().items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` gave."""
        for name in COUNTS:
            setattr(self, name, int(state[name]))
        self.best = None if state["best"] is None else float(state["best"])
        self.loss = state["loss"].to(self.model.device)
        self.parts = {name: list(found.to(self.model.device)) for name, found in state["parts"].items()}
        self.history = [Epoch(**epoch) for epoch in state["history"]]
        if self.best is not None and distributed.is_first():
            write_tensors(state["kept_weights"], self.best_weights)
            load(self.model, self.best_weights)  # fails here rather than after all epochs
        for name, one in self._stateful().items():
            if name in state or name != GRAPHS:  # the process before may have had none
                one.load_state_dict(state[name])
        if state["batches"] is not None:
            self.batches.epoch = state["batches"]
        if self.watch is not None:
            self.watch.steps = self.steps
        [random] = state["random"][distributed.rank_slice()]
        set_random_state(random, self.model.device)

    def _stateful(self) -> dict[str, Any]:
        """What keeps a state of its own."""
        generators = {f"random generators of {name}": found for name, found in generators_of(self.model)}
        found = {"model": self.model, "optimizer": self.model.optimizer, "divergence": self.divergence, **generators}
        found |= {"schedule": self.schedule, "average": self.average}
        found[GRAPHS] = getattr(self.model, "step_graphs", None)
        return {name: one for name, one in found.items() if one is not None}


def _monitored(monitor: Mapping[str, float], metrics: Mapping[str, float], first: bool) -> float:
    """The monitor's value; NaN, which is no improvement, is an error the first time."""
    for name in monitor:
        if name not in metrics:
            raise UserError(f"monitor '{name}' is not among the metrics: {nearest(name, metrics)}")
    value = monitored(monitor, metrics)
    if math.isnan(value) and first:
        why = "labels of one class (in every group, for gAUC), or scores that are not finite"
        raise UserError(f"monitor {monitor} is NaN on the validation data: {why}")
    if math.isnan(value):
        logging.warning("The monitor is NaN: no improvement.")
    return value
