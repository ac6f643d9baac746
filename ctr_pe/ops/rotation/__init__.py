"""Rotation of planes: pairs of coordinates, each a complex number λ e^(iθ). RoPE, its form by time, EulerFormer.

d coordinates, P = d // 2 planes. Vectors come in halves, real parts, imaginary parts and the coordinate left over from
an odd d, or interleaved, where real and imaginary parts take turns.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ctr_pe.ops import native
from ctr_pe.ops.rotation import cpu, reference
from ctr_pe.ops.rotation.reference import from_halves, halves, in_halves


def rotate_planes(vectors: Tensor, angle: Tensor, scale: Tensor | None = None, *, interleaved: bool = False) -> Tensor:
    """Planes λ e^(iθ) become λ e^(i(δ θ + angle)).

    Args:
        vectors: (..., d).
        angle: broadcasts against θ (..., P).
        scale: δ, (P,) or (1,); 1 by default.

    Returns:
        (..., d), of the type of the vectors; computed in float32 at least.
    """
    whole = in_halves(vectors, interleaved)
    whole = whole.to(torch.promote_types(whole.dtype, torch.float32))
    # Without phases to scale torch is as fast.
    axes = None if scale is None or not native.takes(whole, angle, scale) else cpu.shared_axes(whole, angle)
    if axes is None:
        rotated = reference.rotate_planes(whole, angle, scale)
    else:
        planes = whole.shape[-1] // 2
        assert scale is not None
        rotated = cpu.rotate_scaled(whole, angle.expand(*axes.angles, planes), scale.expand(planes), axes.sizes)
    return from_halves(rotated.to(vectors.dtype), interleaved)


def rotate_rows(vectors: Tensor, rows: Tensor, added: Tensor, angles: Tensor, *, interleaved: bool = False) -> Tensor:
    """(vectors + added[rows]), whose planes are then rotated by angles[rows].

    Args:
        vectors: (..., d).
        rows: (...) int64, in [0, T).
        added: (T, d). angles: (T, P).
    """
    if vectors.shape[-1] < 2 or not native.takes(vectors, added, angles):
        moved = vectors + nn.functional.embedding(rows, added)
        return rotate_planes(moved, nn.functional.embedding(rows, angles), interleaved=interleaved)
    rows = rows.expand(vectors.shape[:-1])
    rotated = cpu.rotate_rows(in_halves(vectors, interleaved), rows, in_halves(added, interleaved), angles)
    return from_halves(rotated, interleaved)


__all__ = ["halves", "in_halves", "rotate_planes", "rotate_rows"]
