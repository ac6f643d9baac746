"""Learning rate schedules and the exponential moving average (EMA) of weights: a result depends less on its seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: (1.0 + math.cos(math.pi * done)) / 2,
}
"""``learning_rate_schedule`` -> the factor of the learning rate when a share of all steps is done."""


def schedule(optimizer: Optimizer, name: str, steps: int) -> LambdaLR:
    """To be stepped after each of ``steps`` training steps."""
    return LambdaLR(optimizer, lambda step: SCHEDULES[name](min(1.0, step / steps)))


class MovingAverage:
    """An exponential moving average of a model's weights and running statistics.

    Args:
        reach: part of the training's ``steps`` that the average reaches back, as weight 1 - 1 / (reach steps) of the
            past; in the first steps less, so that the initial weights do not stay.
    """

    def __init__(self, model: nn.Module, reach: float, steps: int) -> None:
        tensors = [*model.parameters(), *(buffer for buffer in model.buffers() if buffer.is_floating_point())]
        self.weights = [tensor.detach() for tensor in tensors]
        self.average = [tensor.clone() for tensor in self.weights]
        self.reach, self.steps = max(1.0, reach * steps), 0

    @torch.no_grad()
    def update(self) -> None:
        """After each training step."""
        self.steps += 1
        torch._foreach_lerp_(self.average, self.weights, 1 / min(self.reach, self.steps))

    def state_dict(self) -> dict[str, Any]:
        """The average so far."""
        return {"average": self.average, "steps": self.steps}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from another's state."""
        torch._foreach_copy_(self.average, state["average"])
        self.steps = state["steps"]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the averaged weights, to be evaluated and saved."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        trained: list[Tensor] = [tensor.clone() for tensor in self.weights]
        torch._foreach_copy_(self.weights, self.average)
        torch._foreach_copy_(self.average, trained)
