"""Activations by name, and Dice."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ctr_pe.errors import UserError
from ctr_pe.ops.dice import dice


class Dice(nn.Module):
    """f(x) = p x + (1 - p) α x with p = σ of the batch-normalised x (DIN, equation 3); α starts at 0.

    A batch of one or no row has no variance: it uses the running statistics.
    """

    def __init__(self, units: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(units, affine=False, eps=1e-9, momentum=0.01)
        self.alpha = nn.Parameter(torch.zeros(units))

    def forward(self, x: Tensor) -> Tensor:
        """(N, units) -> (N, units)."""
        wide = x.float() if x.itemsize < 4 else x
        mean = variance = wide.new_zeros(())
        if self.of_batch(len(x)):
            with torch.no_grad():
                mean = wide.mean(0)
                variance = (wide - mean).square_().mean(0)
        factor, shift = self.norm(len(x), mean, variance)
        y = dice(wide, factor, shift, self.alpha.to(wide.dtype), mean if self.of_batch(len(x)) else None)
        return y.to(x.dtype)

    def of_batch(self, rows: int) -> bool:
        """Whether so many rows are normed by their own statistics."""
        return self.training and rows > 1

    def norm(self, rows: int, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Factor and shift (units,) that norm so many rows by this mean and variance, which enter the running ones, or
        by the running ones."""
        running_mean, running_variance, batches = self.bn.running_mean, self.bn.running_var, self.bn.num_batches_tracked
        assert running_mean is not None
        assert running_variance is not None
        assert batches is not None
        if self.of_batch(rows):
            with torch.no_grad():
                batches += 1
                running_mean.lerp_(mean, self.bn.momentum or 0.0)
                running_variance.lerp_(variance * (rows / (rows - 1)), self.bn.momentum or 0.0)
        else:
            mean, variance = running_mean, running_variance
        factor = (variance + self.bn.eps).rsqrt()
        return factor, -mean * factor


def make_activation(name: str, units: int) -> nn.Module:
    """An activation by name.

    Raises:
        UserError: torch.nn has none of this name.
    """
    known: dict[str, Callable[[], nn.Module]] = {
        "dice": lambda: Dice(units),
        "prelu": lambda: nn.PReLU(units, init=0.1),
        "relu": nn.ReLU,
        "sigmoid": nn.Sigmoid,
        "tanh": nn.Tanh,
    }
    if str(name).lower() in known:
        return known[str(name).lower()]()
    cls = getattr(nn.modules.activation, str(name), None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise UserError(f"activation {name!r} is unknown: {', '.join(sorted(known))} or a torch.nn activation")
    made: nn.Module = cls()
    return made
