"""Dice by the kernel (``csrc/dice.h``): one pass each way."""

from __future__ import annotations

from typing import Any

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
    x, kept, columns = _checked(x, kept, factor, shift, alpha)
    y = torch.empty_like(x)
    native.call("dice", *x.shape, x, *columns, kept, kept_factor, y)
    return y


def _dice_fake(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape)


def _dice_backward(
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
    x, kept, columns = _checked(x, kept, factor, shift, alpha)
    if grad.shape != x.shape or of_x.shape != x.shape or sums.shape != (3, x.shape[1]):
        raise ValueError(
            f"gradients {tuple(grad.shape)}, {tuple(of_x.shape)}, {tuple(sums.shape)} for {tuple(x.shape)}"
        )
    native.call("dice_backward", *x.shape, grad.contiguous(), x, *columns, kept, kept_factor, of_x, sums)


def _checked(x: Tensor, kept: Tensor | None, *columns: Tensor) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    if x.dim() != 2 or any(column.shape != x.shape[1:] for column in columns):
        raise ValueError(f"x {tuple(x.shape)} does not match {[tuple(column.shape) for column in columns]}")
    if kept is not None and (kept.shape != x.shape or kept.dtype != torch.int16):
        raise ValueError(f"kept {tuple(kept.shape)} {kept.dtype} must be int16 of shape {tuple(x.shape)}")
    return x.contiguous(), None if kept is None else kept.contiguous(), [column.contiguous() for column in columns]


def _both(
    grad: Tensor, x: Tensor, factor: Tensor, shift: Tensor, alpha: Tensor, kept: Tensor | None, kept_factor: float
) -> tuple[Tensor, Tensor]:
    of_x, sums = _both_fake(grad, x)
    _dice_backward(grad, x, factor, shift, alpha, kept, kept_factor, of_x, sums.zero_())
    return of_x, sums


def _both_fake(grad: Tensor, x: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(3, x.shape[1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.kept_factor = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, factor, shift, alpha, mean, kept = ctx.saved_tensors
    of_x, sums = _dice_gradients(grad, x, factor, shift, alpha, kept, ctx.kept_factor)
    of_factor, of_shift, of_alpha = sums.unbind()
    if mean is not None:  # factor and shift norm x by its own mean and variance
        of_variance = (of_factor - mean * of_shift) * factor**3 / -2
        slope = of_variance * (2 / len(x))
        of_x = torch.addcmul(of_x, x, slope).sub_(of_shift * factor / len(x) + slope * mean)
        return of_x, None, None, of_alpha, None, None, None
    return of_x, of_factor, of_shift, of_alpha, None, None, None


_COMMON = "Tensor x, Tensor factor, Tensor shift, Tensor alpha"
dice = operator(
    f"dice({_COMMON}, Tensor? mean, Tensor? kept, float kept_factor) -> Tensor", _dice, _dice_fake, _gradients, _setup
)
_dice_gradients = operator(
    f"dice_gradients(Tensor grad, {_COMMON}, Tensor? kept, float kept_factor) -> (Tensor, Tensor)", _both, _both_fake
)
dice_backward = operator(
    f"dice_backward(Tensor grad, {_COMMON}, Tensor? kept, float kept_factor, Tensor(a!) of_x, Tensor(b!) sums) -> ()",
    _dice_backward,
    lambda *_: None,
)
