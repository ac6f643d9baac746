"""Rotation by the kernel (``csrc/rotation.h``), which computes phases, sines and cosines where they are needed: with
phases that are scaled, and by rows of tables."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ctr_pe.ops import native
from ctr_pe.ops.operator import operator


class Axes(NamedTuple):
    """``sizes`` (n1, n2, n3): how many vectors have angles of their own, how many in these share theirs, and how many
    again in these have their own. ``angles``: leading axes of the angles."""

    sizes: list[int]
    angles: list[int]


def shared_axes(vectors: Tensor, angle: Tensor) -> Axes | None:
    """The axes along which vectors (..., d) share their angles; None where there are no planes, or where the angles do
    not broadcast against (..., P) without making it larger."""
    leading, planes = list(vectors.shape[:-1]), vectors.shape[-1] // 2
    given = [1] * (len(leading) + 1 - angle.dim()) + list(angle.shape)
    if planes == 0 or len(given) > len(leading) + 1:
        return None
    if any(have not in (1, size) for have, size in zip(given, [*leading, planes], strict=True)):
        return None
    own = [have == size for have, size in zip(given[:-1], leading, strict=True)]
    shared = [axis for axis, has_own in enumerate(own) if not has_own]
    first, last = (shared[0], shared[-1] + 1) if shared else (len(own), len(own))
    if not shared or any(own[axis] and leading[axis] > 1 for axis in range(first, last)):  # none, or they lie apart
        return Axes([math.prod(leading), 1, 1], leading)
    sizes = [math.prod(leading[:first]), math.prod(leading[first:last]), math.prod(leading[last:])]
    return Axes(sizes, given[:-1])


def _scaled(x: Tensor, angle: Tensor, scale: Tensor, sizes: list[int]) -> Tensor:
    _check_scaled(x, angle, scale, sizes)
    y = x.new_empty(x.shape)
    x, angle, scale = x.contiguous(), angle.contiguous(), scale.contiguous()
    native.call("rotate", *sizes, x.shape[-1], x, angle, scale, None, None, y)
    return y


def _scaled_backward(
    grad: Tensor, x: Tensor, angle: Tensor, scale: Tensor, sizes: list[int], learns_angle: bool
) -> tuple[Tensor, Tensor, Tensor]:
    _check_scaled(x, angle, scale, sizes)
    grad, x, angle, scale = (part.contiguous() for part in (grad, x, angle, scale))
    of_x, of_angle, of_scale = _scaled_backward_fake(grad, x, angle, scale, sizes, learns_angle)
    into = of_x, of_angle if learns_angle else None, of_scale, None
    native.call("rotate_backward", *sizes, x.shape[-1], sizes[0] * sizes[2], grad, x, angle, scale, None, None, *into)
    return of_x, of_angle, of_scale


def _scaled_backward_fake(
    grad: Tensor, x: Tensor, angle: Tensor, scale: Tensor, sizes: list[int], learns_angle: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), angle.new_empty(angle.shape if learns_angle else 0), scale.new_empty(scale.shape)


def _check_scaled(x: Tensor, angle: Tensor, scale: Tensor, sizes: list[int]) -> None:
    planes, (n1, n2, n3) = x.shape[-1] // 2, sizes
    if x.numel() != n1 * n2 * n3 * x.shape[-1] or angle.numel() != n1 * n3 * planes or scale.shape != (planes,):
        raise ValueError(f"{tuple(x.shape)}, {tuple(angle.shape)} and {tuple(scale.shape)} do not match {sizes}")


def _setup_scaled(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.sizes = inputs
    ctx.save_for_backward(*tensors)


def _scaled_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    learns_angle = ctx.needs_input_grad[1]
    of_x, of_angle, of_scale = _rotate_scaled_backward(grad, *ctx.saved_tensors, ctx.sizes, learns_angle)
    return of_x, of_angle if learns_angle else None, of_scale, None


def _rows(x: Tensor, rows: Tensor, added: Tensor, angles: Tensor) -> Tensor:
    x, rows, added, angles = _checked_rows(x, rows, added, angles)
    y = torch.empty_like(x)
    native.call("rotate", rows.numel(), 1, 1, x.shape[-1], x, angles, None, added, rows, y)
    return y


def _rows_backward(
    grad: Tensor, x: Tensor, rows: Tensor, added: Tensor, angles: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    x, rows, added, angles = _checked_rows(x, rows, added, angles)
    out = _rows_backward_fake(grad, x, rows, added, angles)
    given = grad.contiguous(), x, angles, None, added, rows
    of_x, of_added, of_angles = out
    native.call("rotate_backward", rows.numel(), 1, 1, x.shape[-1], len(added), *given, of_x, of_angles, None, of_added)
    return out


def _rows_backward_fake(
    grad: Tensor, x: Tensor, rows: Tensor, added: Tensor, angles: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), added.new_empty(added.shape), angles.new_empty(angles.shape)


def _checked_rows(x: Tensor, rows: Tensor, added: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    width = x.shape[-1]
    if rows.shape != x.shape[:-1] or rows.dtype != torch.int64 or added.shape[1:] != (width,):
        raise ValueError(f"{tuple(x.shape)}, {tuple(rows.shape)} {rows.dtype} and {tuple(added.shape)} do not match")
    if angles.shape != (len(added), width // 2):
        raise ValueError(f"angles {tuple(angles.shape)} must be {(len(added), width // 2)}")
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < len(added):
        raise IndexError(f"rows from {int(rows.min())} to {int(rows.max())} of a table of {len(added)}")
    return x.contiguous(), rows.contiguous(), added.contiguous(), angles.contiguous()


def _setup_rows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _rows_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    of_x, of_added, of_angles = _rotate_rows_backward(grad, *ctx.saved_tensors)
    return of_x, None, of_added, of_angles


def _like_first(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape)


rotate_scaled = operator(
    "rotate_scaled(Tensor x, Tensor angle, Tensor scale, SymInt[] sizes) -> Tensor",
    _scaled,
    _like_first,
    _scaled_gradients,
    _setup_scaled,
)
_rotate_scaled_backward = operator(
    "rotate_scaled_backward(Tensor grad, Tensor x, Tensor angle, Tensor scale, SymInt[] sizes, bool learns_angle)"
    " -> (Tensor, Tensor, Tensor)",
    _scaled_backward,
    _scaled_backward_fake,
)
rotate_rows = operator(
    "rotate_rows(Tensor x, Tensor rows, Tensor added, Tensor angles) -> Tensor",
    _rows,
    _like_first,
    _rows_gradients,
    _setup_rows,
)
_rotate_rows_backward = operator(
    "rotate_rows_backward(Tensor grad, Tensor x, Tensor rows, Tensor added, Tensor angles) -> (Tensor, Tensor, Tensor)",
    _rows_backward,
    _rows_backward_fake,
)
