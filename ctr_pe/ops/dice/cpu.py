"""Dice by the kernel (``csrc/dice.h``): one pass each way."""

from __future__ import annotations

import torch
from torch import Tensor

from ctr_pe.ops import native
from ctr_pe.ops.operator import operator


def _dice(
    x: Tensor,
    factor: Tensor,
    shift: Tensor,
    alpha: Tensor,
    mean: Tensor | None,
    kept: Tensor | None,
    kept_factor: float,
) -> Tensor:
    _check(x, kept, factor, shift, alpha)
    y = torch.empty_like(x)
    native.call("dice", *x.shape, x, factor, shift, alpha, kept, kept_factor, y)
    return y


def _dice_backward(
    into: list[Tensor],
    grad: Tensor,
    x: Tensor,
    factor: Tensor,
    shift: Tensor,
    alpha: Tensor,
    mean: Tensor | None,
    kept: Tensor | None,
    kept_factor: float,
) -> None:
    _check(x, kept, factor, shift, alpha)
    if grad.shape != x.shape:
        raise ValueError(f"the gradient {tuple(grad.shape)} does not match x {tuple(x.shape)}")
    native.call("dice_backward", *x.shape, grad, x, factor, shift, alpha, kept, kept_factor, *into)
    if mean is not None:  # factor and shift norm x by its own mean and variance
        of_x, of_factor, of_shift, _ = into
        of_variance = (of_factor - mean * of_shift) * factor**3 / -2
        slope = of_variance * (2 / len(x))
        of_x.addcmul_(x, slope).sub_(of_shift * factor / len(x) + slope * mean)
        of_factor.zero_()
        of_shift.zero_()


def _check(x: Tensor, kept: Tensor | None, *columns: Tensor) -> None:
    if x.dim() != 2 or any(column.shape != x.shape[1:] for column in columns):
        raise ValueError(f"x {tuple(x.shape)} does not match {[tuple(column.shape) for column in columns]}")
    if kept is not None and (kept.shape != x.shape or kept.dtype != torch.int16):
        raise ValueError(f"kept {tuple(kept.shape)} {kept.dtype} must be int16 of shape {tuple(x.shape)}")


dice = operator(
    "dice(Tensor x, Tensor factor, Tensor shift, Tensor alpha, Tensor? mean, Tensor? kept, float kept_factor)"
    " -> Tensor",
    _dice,
    lambda x, *others: x.new_empty(x.shape),
    _dice_backward,
    learned="x factor shift alpha",
)
