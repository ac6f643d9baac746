"""Dice compiled: its gate over whole batches; what :mod:`ctr_pe.units.pieces` calls for the pieces of a score.

N rows, W columns.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ctr_pe import compiled


class Gate(ctypes.Structure):
    """The structure of that name in compiled/gate.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "width")),
        *((name, ctypes.c_void_p) for name in ("x", "factor", "shift", "alpha", "kept")),
        ("scale", ctypes.c_float),
    )

    @classmethod
    def of(cls, x: Tensor, factor: Tensor, shift: Tensor, alpha: Tensor, kept: Tensor | None, scale: float) -> Gate:
        """Of x (N, W), the others (W,), and ``kept`` (N, W) int16 or None."""
        return cls(*x.shape, *map(compiled.address, (x, factor, shift, alpha, kept)), scale)


def gated(x: Tensor, factor: Tensor, shift: Tensor, alpha: Tensor, mean: Tensor | None) -> Tensor:
    """x (α + (1 - α) σ(factor x + shift)) for x (N, W), the others (W,), of what :func:`~ctr_pe.compiled.suits`.

    ``mean``: of the rows of x, if factor and shift norm them: x enters these too.
    """
    y: Tensor = _Gated.apply(x, alpha, factor, shift, mean)  # type: ignore[no-untyped-call]
    return y


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor, factor: Tensor, shift: Tensor, mean: Tensor | None) -> Tensor:
        x, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        compiled.run("gate_forward", ctypes.byref(Gate.of(x, factor, shift, alpha, None, 1.0)), y.data_ptr())
        ctx.save_for_backward(x, alpha, factor, shift, mean)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad, (x, alpha, factor, shift, mean) = grad.contiguous(), ctx.saved_tensors
        of_x, (of_alpha, of_shift, of_factor) = torch.empty_like(x), grad.new_zeros(3, len(alpha)).unbind()
        into = map(compiled.address, (grad, of_x, of_alpha, of_shift, of_factor))
        compiled.run("gate_backward", ctypes.byref(Gate.of(x, factor, shift, alpha, None, 1.0)), *into)
        if mean is not None:  # shift = -mean · factor, factor = 1 / sqrt(variance + eps); of the moments, as in pieces
            of_variance = (of_factor - mean * of_shift) * factor**3 / -2
            slope = of_variance * (2 / len(x))
            of_x.addcmul_(x, slope).sub_(of_shift * factor / len(x) + slope * mean)
        return of_x, of_alpha, None, None, None
