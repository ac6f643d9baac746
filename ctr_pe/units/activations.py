"""Activations by name, and Dice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from ctr_pe import ranks
from ctr_pe.choices import choose
from ctr_pe.ops.dice import dice
from ctr_pe.units.batch_norm import keep_running, moments, over_processes


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
        single = x.float() if x.itemsize < 4 else x
        mean = variance = single.new_zeros(())
        own, alone = self.uses_own_statistics(x.shape[0]), ranks.processes() == 1
        if own:
            with torch.no_grad() if alone else nullcontext():
                mean, variance = moments(single)
        factor, shift = self.norm(x.shape[0], mean, variance)
        y = dice(single, factor, shift, self.alpha.to(single.dtype), mean if own and alone else None)
        return y.to(x.dtype)

    def uses_own_statistics(self, rows: int) -> bool:
        """Whether a batch of so many rows is normed by its own mean and variance and those of other processes."""
        return self.training and (rows > 1 or ranks.processes() > 1)

    def norm(self, rows: int, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Factor and shift (units,) that norm so many rows by this mean and variance, which enter the running ones, or
        by the running ones."""
        if self.uses_own_statistics(rows):
            rows, mean, variance = over_processes(rows, mean, variance)
            keep_running(self.bn, rows, mean, variance)
        if not self.training or rows < 2:
            assert self.bn.running_mean is not None
            assert self.bn.running_var is not None
            mean, variance = self.bn.running_mean, self.bn.running_var
        factor = (variance + self.bn.eps).rsqrt()
        return factor, -mean * factor


def make_activation(name: str, units: int) -> nn.Module:
    """An activation by name.

    Raises:
        UserError: none of :data:`ctr_pe.choices.ACTIVATIONS`.
    """
    name = choose("activation", name)
    learned: dict[str, Callable[[], nn.Module]] = {
        "Dice": lambda: Dice(units),
        "PReLU": lambda: nn.PReLU(units, init=0.1),
    }
    made: nn.Module = (learned.get(name) or getattr(nn, name))()
    return made
