"""Dice, the activation of DIN (Zhou et al. 2018, equation 3), with the dropout that follows it."""

from __future__ import annotations

import torch
from torch import Tensor

from ctr_pe.ops import native
from ctr_pe.ops.dice import cpu, reference


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
    run = cpu.dice if native.takes(x, factor, shift, alpha) else reference.dice
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
        return torch.autograd.grad(reference.dice(x, factor, shift, alpha, None, kept, kept_factor), leaves, grad)


__all__ = ["dice", "dice_backward"]
