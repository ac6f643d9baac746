"""Dice in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def dice(
    x: Tensor,
    factor: Tensor,
    shift: Tensor,
    alpha: Tensor,
    mean: Tensor | None,
    kept: Tensor | None,
    kept_factor: float,
) -> Tensor:
    if mean is not None:  # factor and shift as they are, with the gradient that x has through its mean and variance
        variance = (x - x.mean(0)).square().mean(0)
        factor = factor - (variance - variance.detach()) * factor**3 / 2  # d (variance + eps)^-1/2 = -factor³ / 2
        shift = -(mean + (x.mean(0) - x.mean(0).detach())) * factor
    p = torch.addcmul(shift, x, factor).sigmoid()
    y = x * torch.lerp(alpha.to(p.dtype), torch.ones_like(p), p)
    return y if kept is None else y * kept.to(y.dtype).mul_(kept_factor)
