"""ALiBi, attention with linear biases (Press et al. 2022, arXiv 2108.12409)."""

from __future__ import annotations

import torch
from torch import Tensor

from ctr_pe.config.schema import Positive
from ctr_pe.pe.base import About
from ctr_pe.pe.contextual import widen
from ctr_pe.pe.relative import RelativeBias

PUBLISHED = 2.0**-8


class ALiBi(RelativeBias):
    """β_h(offset) = -m_h |offset|, m_h = 2^(-8h/H) for h = 1..H. Nothing is learned.

    Where H is no power of two: the slopes for the power below, then every other of those for the power above.

    Args:
        alibi_slope: m in m_h = m^(h/H), so the slope itself where there is one head. The published 2^-8 is almost flat
            over the history of one user.

    Buffer: ``slopes (H,)``.

    Raises:
        ValueError: alibi_slope is not a positive number.
    """

    about = About(paper="Press 2022", equation="s_j - m D_j", cost="L, once for all rows", extrapolates="yes")
    slopes: Tensor

    def __init__(self, dim: int, max_len: int, num_heads: int = 1, *, alibi_slope: Positive = PUBLISHED) -> None:
        super().__init__(dim, max_len, num_heads)
        slopes = slope_per_head(num_heads, alibi_slope)
        self.register_buffer("slopes", torch.tensor(slopes))

    def curve(self, offset: Tensor, causal: bool) -> Tensor:
        return -widen(self.slopes).unsqueeze(1) * offset.abs()


def slope_per_head(heads: int, last: float = PUBLISHED) -> list[float]:
    """Slopes of the heads, the last of a power of two being ``last``."""
    power = 2 ** (heads.bit_length() - 1)
    of_power = [last ** (h / power) for h in range(1, power + 1)]
    return of_power + [last ** (h / (2 * power)) for h in range(1, 2 * (heads - power), 2)]
