"""Batch norm that is one pass in evaluation, which takes a fraction of torch's time on a CPU.

Several processes norm by the mean and variance of all their rows: those of the whole batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ctr_pe.utils import distributed


class BatchNorm1d(nn.BatchNorm1d):
    """As ``torch.nn.BatchNorm1d`` with running statistics, of rows (N, units)."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, units) -> (N, units)."""
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
