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
    if mean is not None:
        factor, shift = own_norm(x, factor, mean)
    p = torch.addcmul(shift, x, factor).sigmoid()
    y = x * torch.lerp(alpha.to(p.dtype), torch.ones_like(p), p)
    return y if kept is None else y * kept.to(y.dtype).mul_(kept_factor)


def own_norm(x: Tensor, factor: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Factor and shift (W,) as they are, with the gradient that x (N, W) has through its mean and variance."""
    centred = x - x.mean(0)
    variance = centred.square().mean(0)
    factor = factor - (variance - variance.detach()) * factor**3 / 2  # d (variance + eps)^-1/2 = -factor³ / 2
    mean = mean + (x.mean(0) - x.mean(0).detach())
    return factor, -mean * factor


def dice_backward(
    grad: Tensor,
    x: Tensor,
    factor: Tensor,
    shift: Tensor,
    alpha: Tensor,
    kept: Tensor | None,
    kept_factor: float,
    of_x: Tensor,
    sums: Tensor,
) -> None:
    if kept is not None:
        grad = grad * kept.to(grad.dtype).mul_(kept_factor)
    p = torch.addcmul(shift, x, factor).sigmoid_()
    of_alpha = (grad * x).mul_(1 - p)
    of_normed = of_alpha * p * (1 - alpha)
    torch.mul(grad, torch.lerp(alpha, alpha.new_ones(()), p), out=of_x).addcmul_(of_normed, factor)
    sums[0] += (of_normed * x).sum(0)
    sums[1] += of_normed.sum(0)
    sums[2] += of_alpha.sum(0)
