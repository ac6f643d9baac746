"""Dice, the activation of DIN (Zhou et al. 2018, equation 3), with the dropout that follows it. The kernel
(``csrc/dice.h``) is one pass each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ctr_pe.ops import native
from ctr_pe.ops.operator import operator


def dice(
    x: Tensor,
    factor: Tensor,
    shift: Tensor,
    alpha: Tensor,
    mean: Tensor | None = None,
    kept: Tensor | None = None,
    kept_factor: float = 1.0,
) -> Tensor:
    """x (α + (1 - α) σ(factor x + shift)), times dropout's mask.

    Args:
        x: (N, W). factor, shift, alpha: (W,); factor x + shift is x normed.
        mean: (W,) of the rows of x, if factor = 1 / sqrt(variance + eps) and shift = -mean factor norm them by their
            own statistics. Then x gets the gradient through these, and factor and shift get none.
        kept: (N, W) int16, 1 for an entry that dropout keeps, else 0. kept_factor: of what is kept.

    Returns:
        (N, W).
    """
    run = dice_cpu if native.takes(x, factor, shift, alpha) else in_torch
    y: Tensor = run(x, factor, shift, alpha, mean, kept, kept_factor)
    return y


def dice_backward(
    grad: Tensor,
    x: Tensor,
    factor: Tensor,
    shift: Tensor,
    alpha: Tensor,
    kept: Tensor | None = None,
    kept_factor: float = 1.0,
) -> tuple[Tensor, ...]:
    """The gradients of x (N, W), factor, shift and alpha (W,) by themselves, for callers that write their own backward.
    ``grad`` (N, W): that of :func:`dice` without ``mean``."""
    if native.takes(x, factor, shift, alpha):
        found: tuple[Tensor, ...] = torch.ops.ctr_pe.dice_backward(
            grad, x, factor, shift, alpha, None, kept, kept_factor
        )
        return found
    with torch.enable_grad():
        x, factor, shift, alpha = leaves = [given.detach().requires_grad_() for given in (x, factor, shift, alpha)]
        return torch.autograd.grad(in_torch(x, factor, shift, alpha, None, kept, kept_factor), leaves, grad)


def in_torch(
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


def _dice(*arguments: Any) -> Tensor:
    y = torch.empty_like(arguments[0])
    native.call("dice", *_checked(*arguments), y)
    return y


def _dice_backward(into: list[Tensor], grad: Tensor, *arguments: Any) -> None:
    rows, width, x, factor, *others = _checked(*arguments)
    if grad.shape != x.shape:
        raise ValueError(f"the gradient {tuple(grad.shape)} does not match x {tuple(x.shape)}")
    native.call("dice_backward", rows, width, grad, x, factor, *others, *into)
    mean = arguments[4]
    if mean is not None:  # factor and shift norm x by its own mean and variance
        of_x, of_factor, of_shift, _ = into
        of_variance = (of_factor - mean * of_shift) * factor**3 / -2
        slope = of_variance * (2 / rows)
        of_x.addcmul_(x, slope).sub_(of_shift * factor / rows + slope * mean)
        of_factor.zero_()
        of_shift.zero_()


def _checked(
    x: Tensor, factor: Tensor, shift: Tensor, alpha: Tensor, mean: Any, kept: Tensor | None, kept_factor: float
) -> tuple[Any, ...]:
    """What C takes."""
    columns = factor, shift, alpha
    if x.dim() != 2 or any(column.shape != x.shape[1:] for column in columns):
        raise ValueError(f"x {tuple(x.shape)} does not match {[tuple(column.shape) for column in columns]}")
    if kept is not None and (kept.shape != x.shape or kept.dtype != torch.int16):
        raise ValueError(f"kept {tuple(kept.shape)} {kept.dtype} must be int16 of shape {tuple(x.shape)}")
    return *x.shape, x, *columns, kept, kept_factor


dice_cpu = operator(
    "dice(Tensor x, Tensor factor, Tensor shift, Tensor alpha, Tensor? mean, Tensor? kept, float kept_factor)"
    " -> Tensor",
    _dice,
    lambda x, *others: x.new_empty(x.shape),
    _dice_backward,
    learned="x factor shift alpha",
)
