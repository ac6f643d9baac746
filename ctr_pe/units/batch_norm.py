"""Batch norm that is a multiplication and an addition in evaluation, a fraction of torch's time on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BatchNorm1d(nn.BatchNorm1d):
    """As ``torch.nn.BatchNorm1d`` with running statistics, of rows (N, units)."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, units) -> (N, units)."""
        if self.training:
            return super().forward(x)
        assert self.running_mean is not None
        assert self.running_var is not None
        factor = self.weight * (self.running_var + self.eps).rsqrt()
        return torch.addcmul(self.bias - self.running_mean * factor, x, factor).to(x.dtype)
