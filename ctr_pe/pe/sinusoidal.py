"""Sinusoidal absolute positions, fixed waves added to each item (Vaswani et al. 2017, arXiv 1706.03762).

B batch, L history slots, D item dim, T table rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ctr_pe.config.schema import Positive
from ctr_pe.pe.base import About
from ctr_pe.pe.naive import AbsolutePositions
from ctr_pe.sequence.positions import Positions


class Sinusoidal(AbsolutePositions):
    """Absolute positions with P[p, 2c] = sin(p w_c), P[p, 2c + 1] = cos(p w_c), w_c = 10000^(-2c/D).

    Nothing is learned, and there is no longest history: rows are made for the slots that a batch has. An odd D has one
    more sine than cosines.

    Args:
        position_index, on_target: see :class:`~ctr_pe.pe.naive.AbsolutePositions`.
        sinusoidal_scale: factor of P. Embeddings that start small, as FuxiCTR's N(0, 1e-4), are lost beside waves of 1.

    Raises:
        ValueError: an unknown position_index, or a scale that is no number above 0.
    """

    about = About(
        paper="Vaswani 2017",
        equation="score(t + P[0], h_j + P[D_j]), P[p] = (sin p w_c, cos p w_c), w_c = 10000^(-2c/D)",
        cost="0; D per item, once",
        extrapolates="yes",
    )

    def __init__(
        self, dim: int, max_len: int, num_heads: int = 1, *, sinusoidal_scale: Positive = 1.0, **options: Any
    ) -> None:
        super().__init__(dim, max_len, num_heads, **options)
        self.scale = sinusoidal_scale

    def vectors(self, history: Tensor, positions: Positions) -> Tensor:
        sin, cos = waves(torch.arange(positions.mask.shape[1] + 1, device=history.device), self.dim, history.dtype)
        pairs = torch.stack([sin[:, : cos.shape[1]], cos], -1).flatten(1)
        return torch.cat([pairs, sin[:, cos.shape[1] :]], 1) * self.scale


def waves(position: Tensor, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """sin(p w_c) and cos(p w_c) of positions p (T,), w_c = 10000^(-2c/D): (T, D/2 rounded up), (T, D/2 rounded down).

    In ``dtype``, computed in float32 at least: in half precision the fastest waves are off after a few positions.
    """
    wave = torch.arange((dim + 1) // 2, device=position.device, dtype=torch.promote_types(dtype, torch.float32))
    angle = position.unsqueeze(-1) * 10000.0 ** (wave * (-2.0 / dim))
    return angle.sin().to(dtype), angle[:, : dim // 2].cos().to(dtype)
