"""Rotation in torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


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


def rotate_planes(vectors: Tensor, angle: Tensor, scale: Tensor | None) -> Tensor:
    """Of vectors (..., d) in halves."""
    rotated: Tensor = _Rotation.apply(vectors, angle, scale)  # type: ignore[no-untyped-call]
    return rotated


class _Rotation(torch.autograd.Function):
    """By hand, because autograd would take cosines and sines once more, and because θ has no derivative at zero: there
    it counts as constant. In real numbers it is a rotation by (δ - 1) θ + angle."""

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
        dr = (real * cos).addcmul_(imaginary, sin)  # rotated back
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
