"""The bias by time in torch."""

from __future__ import annotations

import torch
from torch import Tensor

BUCKETS = 32


def time_decay(amount: Tensor, decay: Tensor, table: Tensor, query_age: Tensor, key_age: Tensor, unit: float) -> Tensor:
    seconds = (key_age.unsqueeze(-2) - query_age.unsqueeze(-1)).abs()
    power = torch.exp(-decay.view(-1, 1, 1) * torch.log1p(seconds.to(decay.dtype) / unit))
    # Half a second more, so that in float64 no logarithm is so near to a whole number that rounding reaches it.
    bucket = (torch.log2(seconds.double() + 0.5).floor() + 1).clamp(max=BUCKETS - 1).long()
    # Gathered from a table per query: the gradient of a plain look-up of all pairs takes ten times as long.
    tables = table.T.unsqueeze(1).expand(bucket.shape[0], -1, bucket.shape[2], -1)
    steps = tables.gather(-1, bucket.expand(-1, amount.shape[0], -1, -1))
    return amount.view(-1, 1, 1) * power + steps
