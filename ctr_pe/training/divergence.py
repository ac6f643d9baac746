"""Divergence: a loss or gradient that is not finite, or a loss that stays above a constant's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ctr_pe.utils import distributed
from ctr_pe.utils.errors import Diverged, counted

EVERY = 100  # steps between looks at what a GPU has computed: to look makes it wait
MARGIN = 1.1  # a loss of less than this many times a constant's may be noise,
LEAST = 20  # and so may fewer losses than this
NAMED = 3  # tensors that an error names


class Gradients(NamedTuple):
    """The norm of all gradients before they were clipped, and of each, by the name of its parameter."""

    norm: Tensor
    norms: Mapping[str, Tensor]


class Step(NamedTuple):
    epoch: int
    batch: int
    loss: Tensor
    gradients: Gradients | None


class DivergenceDetector:
    """Watches the losses and gradients of a training; a GPU does not wait for it at each step.

    A loss stays above that of a constant if in an epoch, twice in a row or in the only one, each batch's, without its
    regularisation, is above both what predicting the click rate for every row gives, and the very first batch's, which
    auxiliary losses are part of, too; and if there are enough of them.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.every = model, EVERY if model.device.type == "cuda" else 1
        self.first: float | None = None  # batch's loss
        self.constant: float | None = None  # logloss of the click rate for every row, known after an epoch
        self.above = 0  # losses in a row, of whole epochs before this one
        self.unseen: list[Step] = []
        self._begin()

    def _begin(self) -> None:
        self.least, self.count, self.rows = math.inf, 0, torch.zeros((), device=self.model.device)
        self.clicks = torch.zeros((), device=self.model.device)

    def step(self, epoch: int, batch: int, loss: Tensor, rows: Mapping[str, Tensor]) -> None:
        """After each training step. Raises Diverged, on a GPU at times."""
        loss = loss - getattr(self.model, "penalty", 0.0)  # large embeddings that rank well are no divergence
        self.unseen.append(Step(epoch, batch, loss, getattr(self.model, "gradients", None)))
        if self.constant is None:
            labels = self.model.get_labels(rows)
            weight = self.model.row_weights(rows, labels) if hasattr(self.model, "row_weights") else None
            self.clicks += labels.sum() if weight is None else (labels * weight).sum()
            self.rows += len(labels) if weight is None else weight.sum()
        if len(self.unseen) >= self.every:
            self.look()

    def look(self) -> None:
        """At the steps since the last look. Raises Diverged if a loss or a gradient was not finite."""
        if not self.unseen:
            return
        steps, self.unseen = self.unseen, []
        norms = [step.gradients.norm for step in steps if step.gradients is not None]
        losses = torch.stack([*[step.loss for step in steps], *norms]).tolist()
        if not all(map(math.isfinite, losses)):
            raise _not_finite(steps)
        del losses[len(steps) :]
        if self.first is None:
            self.first = losses.pop(0)
        self.least = min([self.least, *losses])
        self.count += len(losses)

    def look_at_all(self, epoch: int, batch: int) -> None:
        """Before an evaluation. Raises Diverged if a loss, gradient, weight or running statistic is not finite."""
        self.look()
        tensors = {name: tensor for name, tensor in self.model.state_dict().items() if tensor.is_floating_point()}
        finite = torch.stack([tensor.isfinite().all() for tensor in tensors.values()]).tolist()
        if names := [name for name, good in zip(tensors, finite, strict=True) if not good]:
            raise _diverged(epoch, batch, f"not finite: {_some(names)}")

    def end_epoch(self, epoch: int, batch: int, last: bool) -> None:
        """After each epoch. Raises Diverged if the loss stays above that of a constant."""
        self.look()
        if self.constant is None:
            rate = distributed.average(float(self.clicks)) / (distributed.average(float(self.rows)) or 1)
            self.constant = -sum(part * math.log(part) for part in (rate, 1 - rate) if part > 0)
        assert self.first is not None
        again, lasting = self.above > 0 or (last and epoch == 1), self.above + self.count >= LEAST
        above = self.least > MARGIN * max(self.first, self.constant)
        if above and again and lasting:
            gradients = getattr(self.model, "gradients", None)
            steepest = f", largest gradient: {max(gradients.norms, key=gradients.norms.get)}" if gradients else ""
            all_above = f"each loss of the epoch is {self.least:.4g} or more, that of a constant {self.constant:.4g}"
            raise _diverged(epoch, batch, all_above + steepest)
        self.above = self.above + self.count if above else 0
        self._begin()

    def state_dict(self) -> dict[str, Any]:
        """At the end of an epoch."""
        return {"first": self.first, "constant": self.constant, "above": self.above}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from another's state."""
        self.first, self.constant, self.above = state["first"], state["constant"], state["above"]


def _not_finite(steps: list[Step]) -> Diverged:
    """About the first step with a number that is not finite."""
    for step in steps:
        norms = step.gradients.norms if step.gradients else {}
        names = [name for name, norm in norms.items() if not norm.isfinite()]
        what = [] if step.loss.isfinite() else [f"the loss is {float(step.loss):g}"]
        what += [f"gradients not finite: {_some(names)}"] if names else []
        if what:
            return _diverged(step.epoch, step.batch, "; ".join(what))
    raise AssertionError("no such step")


def _diverged(epoch: int, batch: int, what: str) -> Diverged:
    return Diverged(f"diverged in epoch {epoch}, batch {batch}: {what}: try a lower learning_rate")


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + f" and {counted(len(names) - NAMED, 'other')}" * (len(names) > NAMED)
