"""Batch norm that is one pass in evaluation, which takes a fraction of torch's time on a CPU.

Several processes norm by the mean and variance of all their rows: those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn

from ctr_pe.utils import distributed


class BatchNorm1d(nn.BatchNorm1d):
    """As ``torch.nn.BatchNorm1d`` with running statistics, of rows (N, units)."""

    maskable: ClassVar[bool] = True
    """Whether ``forward`` can be told which rows there are."""

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """(N, units) -> (N, units). ``real`` (N,) bool: the rows that there are, None for all."""
        if self.training and real is not None:
            return normed(self, x, real)
        if self.training and distributed.processes() == 1:
            return super().forward(x)
        assert self.running_mean is not None
        assert self.running_var is not None
        mean, variance = self.running_mean, self.running_var
        if self.training:
            rows, mean, variance = over_processes(len(x), *moments(x.float()))
            keep_running(self, rows, mean, variance)
        factor = self.weight * (variance + self.eps).rsqrt()
        return torch.addcmul(self.bias - mean * factor, x, factor).to(x.dtype)


def through(layers: Iterable[nn.Module], x: Tensor, real: Tensor | None) -> Tensor:
    """Layers one after the other, of which those with statistics of their batch take ``real`` (N,) bool: the rows of x
    (N, any) that there are, None for all."""
    for layer in layers:
        x = layer(x) if real is None or not getattr(layer, "maskable", False) else layer(x, real)
    return x


def normed(norm: nn.BatchNorm1d, x: Tensor, real: Tensor) -> Tensor:
    """x (N, units) normed by the mean and variance of its ``real`` rows (N,), which enter the running ones; by those
    where there is one row or none. No size depends on ``real``."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    x = x.float() if x.itemsize < 4 else x
    of_rows = real.to(x.dtype)
    rows = of_rows.sum()
    share = of_rows / rows.clamp(min=1)
    mean = x.T.mv(share)
    variance = (x - mean).square().T.mv(share)
    several = rows > 1
    with torch.no_grad():
        weight = several.to(x.dtype) * (norm.momentum or 0.0)
        norm.num_batches_tracked += several
        unbiased = variance * (rows / (rows - 1).clamp(min=1))
        for running, new in ((norm.running_mean, mean), (norm.running_var, unbiased)):
            running += weight * (new - running)
    mean = torch.where(several, mean, norm.running_mean)
    factor = (torch.where(several, variance, norm.running_var) + norm.eps).rsqrt()
    if norm.affine:
        factor = factor * norm.weight
        return torch.addcmul(norm.bias - mean * factor, x, factor)
    return torch.addcmul(-mean * factor, x, factor)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance (units,) of rows (N, units); zeros of no rows."""
    if not len(x):
        x = nn.functional.pad(x, (0, 0, 0, 1))
    mean = x.mean(0)
    return mean, (x - mean).square_().mean(0)


def over_processes(rows: int, mean: Tensor, variance: Tensor) -> tuple[int, Tensor, Tensor]:
    """The rows of all processes, and their mean and variance, from those of each."""
    if (processes := distributed.processes()) == 1:
        return rows, mean, variance
    each = distributed.average(float(rows))
    share = rows / max(each, 1 / processes)
    whole = distributed.average(mean * share)
    return round(each * processes), whole, distributed.average((variance + (mean - whole).square()) * share)


@torch.no_grad()
def keep_running(norm: nn.BatchNorm1d, rows: int, mean: Tensor, variance: Tensor) -> None:
    """Take the mean and variance of several rows into the running ones."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    if rows > 1:
        norm.num_batches_tracked += 1
        norm.running_mean.lerp_(mean, norm.momentum or 0.0)
        norm.running_var.lerp_(variance * (rows / (rows - 1)), norm.momentum or 0.0)
