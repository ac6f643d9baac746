"""Rotation of planes: pairs of coordinates, each a complex number λ e^(iθ) with modulus λ and phase θ.

d coordinates, P = d // 2 planes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ctr_pe.ops import native
from ctr_pe.utils.autograd import apply


class Turn(NamedTuple):
    """An angle, which broadcasts against (..., P), with its cosine and sine, which several rotations may share."""

    angle: Tensor
    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, angle: Tensor) -> Turn:
        return cls(angle, angle.cos(), angle.sin())

    def of_heads(self, vectors: Tensor) -> Turn:
        """The same, repeated for each head of packed vectors (N, H, 1, d): a CPU multiplies rows that are as long as
        those of the vectors several times as fast."""
        heads = vectors.shape[1:-1]
        if native.traced() or not vectors.is_cpu or heads.numel() == 1 or self.cos.shape[:-1] != (len(vectors), 1, 1):
            return self
        cos, sin = (x.expand(-1, *heads, -1).contiguous() for x in (self.cos, self.sin))
        return Turn(self.angle, cos, sin)


def rotate_planes(vectors: Tensor, turn: Turn, *, interleaved: bool = False) -> Tensor:
    """Planes λ e^(iθ) become λ e^(i(θ + angle)).

    Args:
        vectors: (..., d).
        turn: by the angle.
        interleaved: see :func:`planes`.

    Returns:
        (..., d), of the type of the vectors; computed in float32 at least.
    """
    wide = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    return rotated(planes(wide, interleaved), turn, interleaved).to(vectors.dtype)


def rotated(parts: tuple[Tensor, Tensor, Tensor], turn: Turn, interleaved: bool = False) -> Tensor:
    """Vectors (..., d) whose :func:`planes` are the parts, rotated."""
    *pair, rest = parts
    found = apply(_Rotation, *pair, *turn)
    return torch.cat((*([torch.stack(found, -1).flatten(-2)] if interleaved else found), rest), -1)


def planes(vectors: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Real parts (..., P) and imaginary parts (..., P), and the coordinate left over from an odd d.

    Plane c is made of the coordinates c and c + P of vectors (..., d), ``interleaved`` of 2c and 2c + 1.
    """
    count, odd = divmod(vectors.shape[-1], 2)
    if interleaved:
        paired, rest = torch.split(vectors, [2 * count, odd], -1)
        real, imaginary = torch.unflatten(paired, -1, (count, 2)).unbind(-1)
    else:
        real, imaginary, rest = torch.split(vectors, [count, count, odd], -1)
    return _side_by_side(real), _side_by_side(imaginary), rest


def _side_by_side(x: Tensor) -> Tensor:
    """On a CPU every operation on half of each row is slower, on an accelerator a copy is one more launch."""
    return x.contiguous() if x.is_cpu else x


def phases(real: Tensor, imaginary: Tensor) -> Tensor:
    """θ in [-π, π] of real and imaginary parts (..., P); zero takes the phase of 1, as long as none is -0."""
    found: Tensor = apply(_Phases, real, imaginary)
    return found


class _Rotation(torch.autograd.Function):
    """By hand, because autograd would compute sines and cosines once more. They are arguments, so that a second
    derivative, which goes through them, is right too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(real: Tensor, imaginary: Tensor, angle: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return torch.addcmul(real * cos, imaginary, sin, value=-1), torch.addcmul(real * sin, imaginary, cos)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.angle_shape = inputs[2].shape
        ctx.save_for_backward(*inputs[3:], *(output if ctx.needs_input_grad[2] else ()))

    @staticmethod
    def backward(ctx: Any, real: Tensor, imaginary: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, *output = ctx.saved_tensors
        real, imaginary = _side_by_side(real), _side_by_side(imaginary)
        of_angle = None
        if output:
            of_angle = torch.addcmul(imaginary * output[0], real, output[1], value=-1).sum_to_size(ctx.angle_shape)
        of_imaginary = torch.addcmul(imaginary * cos, real, sin, value=-1)
        return torch.addcmul(real * cos, imaginary, sin), of_imaginary, of_angle, None, None


class _Phases(torch.autograd.Function):
    """By hand, because θ has no derivative at zero: there it counts as constant."""

    generate_vmap_rule = True

    @staticmethod
    def forward(real: Tensor, imaginary: Tensor) -> Tensor:
        return torch.atan2(imaginary, real)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        real, imaginary = ctx.saved_tensors
        share = grad / torch.addcmul(real * real, imaginary, imaginary).clamp(min=torch.finfo(grad.dtype).tiny)
        return -share * imaginary, share * real
