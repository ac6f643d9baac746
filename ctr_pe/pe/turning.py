"""Turning pairs of coordinates, each a complex number λ e^(iθ), what RoPE, its form by time and EulerFormer share.

d coordinates, P = d // 2 planes. In halves: real parts, imaginary parts, and the coordinate left over from an odd d.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ctr_pe import compiled


def turned(vectors: Tensor, angle: Tensor, interleaved: bool, scale: Tensor | None = None) -> Tensor:
    """:func:`turn` for vectors (..., d) in halves, or interleaved: real and imaginary parts take turns. In float32 at
    least; the result has the type of the vectors."""
    whole = in_halves(vectors, interleaved)
    moved = turn(whole.to(torch.promote_types(whole.dtype, torch.float32)), angle, scale).to(vectors.dtype)
    return from_halves(moved, interleaved)


def turned_rows(vectors: Tensor, rows: Tensor, added: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Vectors (..., d) to which rows of a table ``added`` (T, d) are added, and which are then turned by those of
    ``angles`` (T, P). rows (...) int64, in [0, T)."""
    if not compiled.suits(vectors, added, angles):
        places = nn.functional.embedding(rows, added), nn.functional.embedding(rows, angles)
        return turned(vectors + places[0], places[1], interleaved)
    rows = rows.expand(vectors.shape[:-1]).contiguous()
    whole, added = (in_halves(x, interleaved) for x in (vectors, added))
    moved: Tensor = _Compiled.apply((rows.numel(), 1, 1), whole, angles, None, added, rows)  # type: ignore[no-untyped-call]
    return from_halves(moved, interleaved)


def in_halves(vectors: Tensor, interleaved: bool) -> Tensor:
    """Vectors (..., d), interleaved or not, in halves."""
    if not interleaved:
        return vectors
    paired = vectors.shape[-1] // 2 * 2
    return torch.cat((vectors[..., :paired:2], vectors[..., 1:paired:2], vectors[..., paired:]), dim=-1)


def from_halves(vectors: Tensor, interleaved: bool) -> Tensor:
    """The inverse of :func:`in_halves`."""
    if not interleaved:
        return vectors
    real, imaginary, rest = halves(vectors)
    return torch.cat((torch.stack((real, imaginary), dim=-1).flatten(-2), rest), dim=-1)


def halves(vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of real parts (..., P), imaginary parts (..., P) and the coordinate left over from an odd width."""
    planes = vectors.shape[-1] // 2
    return vectors[..., :planes], vectors[..., planes : 2 * planes], vectors[..., 2 * planes :]


def turn(vectors: Tensor, angle: Tensor, scale: Tensor | None = None) -> Tensor:
    """Planes λ e^(iθ) of vectors (..., d) become λ e^(i(δ θ + angle)).

    Args:
        vectors: real parts, imaginary parts, and the coordinate left over from an odd d, which stays.
        angle: broadcasts against θ (..., P).
        scale: δ, likewise; 1 by default.
    """
    turned: Tensor
    if compiled.suits(vectors, angle, *(() if scale is None else (scale,))) and _fits(vectors, angle):
        *leading, planes = *vectors.shape[:-1], vectors.shape[-1] // 2
        axes = _axes(leading, (1,) * (len(leading) + 1 - angle.dim()) + angle.shape[:-1])
        angle = angle.expand(*(angle.shape[:-1] if axes else leading), planes)
        axes = axes or (math.prod(leading), 1, 1)
        scale = None if scale is None else scale.expand(planes)
        turned = _Compiled.apply(axes, vectors, angle, scale, None, None)  # type: ignore[no-untyped-call]
    else:
        turned = _Turn.apply(vectors, angle, scale)  # type: ignore[no-untyped-call]
    return turned


def _fits(vectors: Tensor, angle: Tensor) -> bool:
    """There are planes, and no more angles than vectors."""
    shape = *vectors.shape[:-1], vectors.shape[-1] // 2
    last = zip(reversed(shape), reversed(angle.shape), strict=False)
    return shape[-1] > 0 and angle.dim() <= len(shape) and all(given in (1, size) for size, given in last)


def _axes(leading: Sequence[int], of_angles: Sequence[int]) -> tuple[int, int, int] | None:
    """How many vectors have angles of their own, how many share them, and how many again have their own, one within the
    other; None for another order."""
    own = [size == of_angle for size, of_angle in zip(leading, of_angles, strict=True)]
    if all(own):
        return math.prod(leading), 1, 1
    first, last = own.index(False), len(own) - own[::-1].index(False)
    if any(own[axis] and leading[axis] > 1 for axis in range(first, last)):
        return None
    return math.prod(leading[:first]), math.prod(leading[first:last]), math.prod(leading[last:])


class _Turn(torch.autograd.Function):
    """By hand, because autograd would take cosines and sines once more, and because θ has no derivative at zero: there
    it counts as constant. In real numbers it is a turn by (δ - 1) θ + angle."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, angle: Tensor, scale: Tensor | None) -> Tensor:
        real, imaginary, rest = halves(vectors)
        r, s = real.contiguous(), imaginary.contiguous()  # every operation on a view of half a row is slower
        theta, ctx.angle_shape = None, angle.shape
        if scale is not None:
            theta = torch.atan2(s, r)
            angle = torch.addcmul(angle, theta, scale - 1)
        cos, sin = angle.cos(), angle.sin()
        ctx.save_for_backward(r, s, cos, sin, theta, scale)
        return torch.cat(((r * cos).addcmul_(s, sin, value=-1), (r * sin).addcmul_(s, cos), rest), dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        r, s, cos, sin, theta, scale = ctx.saved_tensors
        real, imaginary, rest = halves(grad)
        real, imaginary = real.contiguous(), imaginary.contiguous()
        dr = (real * cos).addcmul_(imaginary, sin)  # turned back
        ds = (imaginary * cos).addcmul_(real, sin, value=-1)
        of_angle = of_scale = None
        if scale is not None or ctx.needs_input_grad[1]:
            around = (ds * r).addcmul_(dr, s, value=-1)
            of_angle = around.sum_to_size(ctx.angle_shape) if ctx.needs_input_grad[1] else None
            if scale is not None:
                of_scale = (around * theta).sum_to_size(scale.shape)
                square = (r * r).addcmul_(s, s).clamp_min_(torch.finfo(r.dtype).tiny)
                around = (around * (scale - 1)).div_(square)
                dr.addcmul_(around, s, value=-1)
                ds.addcmul_(around, r)
        return torch.cat((dr, ds, rest), dim=-1), of_angle, of_scale


class _Given(ctypes.Structure):
    """The structure ``Turn`` in compiled/turn.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("n1", "n2", "n3", "width")),
        *((name, ctypes.c_void_p) for name in ("x", "angle", "scale", "added", "index")),
    )


class _Gradients(ctypes.Structure):
    """The structure ``Turned`` in compiled/turn.h."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("x", "angle", "scale", "added"))


class _Compiled(torch.autograd.Function):
    """vectors (n1 n2 n3 vectors, d) by angles (n1 n3, P), for :func:`turn`, or with an index by rows of tables, for
    :func:`turned_rows`."""

    @staticmethod
    def forward(ctx: Any, axes: tuple[int, int, int], *given: Tensor | None) -> Tensor:
        vectors, *others = (None if x is None else x.contiguous() for x in given)
        assert vectors is not None
        moved, call = torch.empty_like(vectors), _given(axes, vectors, *others)
        room = _room(call)
        compiled.run("turn_forward", ctypes.byref(call), moved.data_ptr(), compiled.address(room))
        ctx.save_for_backward(vectors, *others)
        ctx.axes = axes
        return moved

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        given, grad, threads = ctx.saved_tensors, grad.contiguous(), torch.get_num_threads()
        vectors, angle, scale, added, _ = given
        of_vectors, planes, call = torch.empty_like(vectors), angle.shape[-1], _given(ctx.axes, *given)
        # Each thread has sums of its own.
        of_angle = grad.new_zeros(threads, *angle.shape) if ctx.needs_input_grad[2] else None
        of_scale = None if scale is None else grad.new_zeros(threads, _padded(planes))
        of_added = None if added is None else grad.new_zeros(threads, *added.shape)
        sums = (of_angle, of_scale, of_added)
        into = [_Gradients(of_vectors.data_ptr(), *(None if x is None else x[k].data_ptr() for x in sums))
                for k in range(threads)]  # fmt: skip
        out, room = (_Gradients * threads)(*into), _room(call)
        compiled.run("turn_backward", ctypes.byref(call), grad.data_ptr(), out, compiled.address(room))
        of_angle, of_scale, of_added = (None if x is None else x.sum(0) for x in sums)
        return None, of_vectors, of_angle, None if of_scale is None else of_scale[:planes], of_added, None


def _given(axes: tuple[int, int, int], vectors: Tensor, *others: Tensor | None) -> _Given:
    return _Given(*axes, vectors.shape[-1], *map(compiled.address, (vectors, *others)))


def _room(call: _Given) -> Tensor | None:
    """For each thread, the sines and cosines of vectors that share them."""
    return None if call.scale else torch.empty(torch.get_num_threads(), 2, call.n3, _padded(call.width // 2))


def _padded(planes: int) -> int:
    return -(-planes // 16) * 16
