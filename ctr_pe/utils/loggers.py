"""Runs in TensorBoard, MLflow or Weights & Biases: off by default, and free when off.

``--track tensorboard``, ``mlflow`` or ``wandb``, after a colon where to: a directory of TensorBoard, a tracking URI of
MLflow, a project of W&B. What is told:

- parameters of the run;
- ``train/loss`` and ``train/<name>`` of each loss with a name, means over the steps since the last report, about every
  1 % of an epoch; ``learning_rate``; ``rows_per_second`` of training;
- ``valid/<metric>`` and ``epoch`` after each evaluation; ``test/<metric>`` at the end; NDCG@5 as NDCG_5, as MLflow
  takes no other characters.

The step of a value counts training steps. A tracker of one's own has the methods of :class:`Tracker`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ctr_pe.utils.errors import UserError, nearest, one_line

if TYPE_CHECKING:
    from torch import Tensor

PROJECT = "ctr_pe"
_INSTALL = {"tensorboard": "pip install 'ctr_pe[track]'", "mlflow": "pip install mlflow", "wandb": "pip install wandb"}


class Tracker(Protocol):
    """One run. ``params`` is called once, ``metrics`` with values at a training step, ``close`` at the end."""

    def params(self, params: Mapping[str, Any]) -> None: ...
    def metrics(self, values: Mapping[str, float], step: int) -> None: ...
    def close(self, finished: bool) -> None: ...


class TensorBoard:
    """An event file in ``where/name``."""

    def __init__(self, name: str, where: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A second run in one folder would be drawn into the first one's curves.
        names = chain([name], (f"{name}-{number}" for number in count(2)))
        folder = next(folder for one in names if not (folder := Path(where or "runs", one)).exists())
        try:
            self.writer = SummaryWriter(str(folder))
        except OSError as error:
            raise UserError(f"--track tensorboard: {folder}: {error.strerror}") from None
        self.given: dict[str, Any] = {}
        self.at_end: dict[str, float] = {}

    def params(self, params: Mapping[str, Any]) -> None:
        self.given = {key: _plain(value) for key, value in params.items()}
        rows = [f"| {key} | {value} |" for key, value in self.given.items()]
        self.writer.add_text("parameters", "\n".join(["| key | value |", "|---|---|", *rows]))

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.at_end |= {name: value for name, value in values.items() if name.startswith("test/")}

    def close(self, finished: bool) -> None:
        if finished and self.at_end:  # the table of runs by parameters; "." writes into the same folder
            self.writer.add_hparams(self.given, self.at_end, run_name=".")
        self.writer.close()


class MLflow:
    """A run of the experiment ``$MLFLOW_EXPERIMENT_NAME``, or ctr_pe."""

    def __init__(self, name: str, where: str) -> None:
        self.mlflow: Any = importlib.import_module("mlflow")
        try:
            self.client = self.mlflow.MlflowClient(where or None)
            experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
            if (found := self.client.get_experiment_by_name(experiment)) is None:
                with contextlib.suppress(self.mlflow.MlflowException):  # another process has just made it
                    self.client.create_experiment(experiment)
                found = self.client.get_experiment_by_name(experiment)
            self.run = self.client.create_run(found.experiment_id, run_name=name).info.run_id
        except (self.mlflow.MlflowException, OSError) as error:
            raise UserError(f"--track mlflow: {one_line(str(error))}") from None

    def params(self, params: Mapping[str, Any]) -> None:
        make = self.mlflow.entities.Param
        self.client.log_batch(self.run, params=[make(key, str(_plain(value))) for key, value in params.items()])

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        make, now = self.mlflow.entities.Metric, int(time.time() * 1000)
        self.client.log_batch(self.run, metrics=[make(name, value, now, step) for name, value in values.items()])

    def close(self, finished: bool) -> None:
        self.client.set_terminated(self.run, "FINISHED" if finished else "FAILED")


class WandB:
    """A run of the project ``where``, or ctr_pe; ``$WANDB_MODE=offline`` needs no account."""

    def __init__(self, name: str, where: str) -> None:
        wandb: Any = importlib.import_module("wandb")
        try:
            self.run = wandb.init(project=where or PROJECT, name=name, reinit="create_new")
        except wandb.Error as error:
            raise UserError(f"--track wandb: {one_line(str(error))}") from None

    def params(self, params: Mapping[str, Any]) -> None:
        self.run.config.update({key: _plain(value) for key, value in params.items()})

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def close(self, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)


TRACKERS: dict[str, Callable[[str, str], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def check(track: str | None, installed: bool = True) -> str | None:
    """The value of ``--track``, if it names a tracker, with ``installed`` one that can be imported.

    Raises:
        UserError: it does not.
    """
    if track is None:
        return None
    name = str(track).partition(":")[0]
    if name not in TRACKERS:
        raise UserError(f"track '{track}' is unknown: {nearest(name, TRACKERS)}")
    if installed and find_spec(name) is None:
        raise UserError(f"--track {name}: {name} is not installed: {_INSTALL[name]}")
    return track


def below(folder: Path, track: str | None) -> str | None:
    """The value with ``folder/tensorboard`` for a TensorBoard that has been given no directory."""
    return f"tensorboard:{folder / 'tensorboard'}" if track == "tensorboard" else track


@contextlib.contextmanager
def watching(track: str | None, name: str, params: Callable[[], Mapping[str, Any]]) -> Iterator[Watch | None]:
    """A :class:`Watch` for one run, closed at the end, or None, without any cost, where nothing is tracked.

    Raises:
        UserError: the tracker is unknown, not installed, or refuses.
    """
    if check(track) is None:
        yield None
        return
    kind, _, where = str(track).partition(":")
    tracker, finished = TRACKERS[kind](name, where), False
    try:
        tracker.params(params())
        yield Watch(tracker)
        finished = True
    finally:
        tracker.close(finished)


class Watch:
    """What training tells a tracker.

    ``steps``: of training so far. ``every``: steps between reports, which training sets.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.tracker, self.steps, self.every = tracker, 0, 1
        self._begin()

    def _begin(self) -> None:
        self._rows, self._since = 0, time.perf_counter()
        self._losses: dict[str, list[Tensor]] = {}

    def step(self, model: Any, loss: Tensor, batch: Mapping[str, Tensor]) -> None:
        """After each step of training."""
        self.steps += 1
        self._rows += len(next(iter(batch.values())))
        for name, part in {"loss": loss, **getattr(model, "auxiliary_parts", {})}.items():
            self._losses.setdefault(f"train/{name}", []).append(part)
        if self.steps % self.every == 0:
            self.report(model)

    def report(self, model: Any) -> None:
        """What there is since the last report. The only place that waits for a GPU."""
        if self._losses:
            values = {name: sum(map(float, parts)) / len(parts) for name, parts in self._losses.items()}
            values["rows_per_second"] = self._rows / (time.perf_counter() - self._since)
            values["learning_rate"] = float(model.optimizer.param_groups[0]["lr"])
            self.tracker.metrics(values, self.steps)
        self._begin()

    def evaluated(self, split: str, metrics: Mapping[str, float], **more: float) -> None:
        """After an evaluation, whose time is not training's."""
        shortened = {re.sub(r"\W+", "_", name).strip("_"): value for name, value in metrics.items()}
        self.tracker.metrics({f"{split}/{name}": value for name, value in shortened.items()} | more, self.steps)
        self._begin()


def _plain(value: Any) -> str | int | float | bool:
    return value if isinstance(value, str | int | float | bool) else json.dumps(value, default=str)
