"""Dice, the activation of DIN (Zhou et al. 2018, equation 3), with the dropout that follows it."""

from __future__ import annotations

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
    if native.takes(x, factor, shift, alpha):
        y: Tensor = cpu.dice(x, factor, shift, alpha, mean, kept, kept_factor)
        return y
    return reference.dice(x, factor, shift, alpha, mean, kept, kept_factor)


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
    """The backward of :func:`dice` by itself, for who computes batches in pieces: writes the gradient of x to ``of_x``
    (N, W), and adds those of factor, shift and alpha to ``sums`` (3, W). ``grad`` (N, W) may be overwritten."""
    run = cpu.dice_backward if native.takes(x, factor, shift, alpha) else reference.dice_backward
    run(grad, x, factor, shift, alpha, kept, kept_factor, of_x, sums)


__all__ = ["dice", "dice_backward"]
