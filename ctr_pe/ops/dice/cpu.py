"""Dice by the kernel (``csrc/dice.h``): one pass each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ctr_pe.ops import native
from ctr_pe.ops.operator import operator


def _dice(*arguments: Any) -> Tensor:
    """As :func:`ctr_pe.ops.dice.dice`."""
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


dice = operator(
    "dice(Tensor x, Tensor factor, Tensor shift, Tensor alpha, Tensor? mean, Tensor? kept, float kept_factor)"
    " -> Tensor",
    _dice,
    lambda x, *others: x.new_empty(x.shape),
    _dice_backward,
    learned="x factor shift alpha",
)
