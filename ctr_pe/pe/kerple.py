"""KERPLE, kernelized relative positions: logarithmic and power bias (Chi et al. 2022, arXiv 2205.09921)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ctr_pe.pe.base import About
from ctr_pe.pe.contextual import widen
from ctr_pe.pe.relative import RelativeBias

SMALLEST = 1e-2
"""The authors' lower bound; here of the initial values only."""


class KerpleLog(RelativeBias):
    """β_h(offset) = -a_h log(1 + b_h |offset|) with learned a_h, b_h > 0.

    Parameters, shared by all layers: ``r1 (H,)``, ``r2 (H,)``, with a = softplus(r1), b = softplus(r2): clamped at a
    bound, as the authors have it, they would stop learning there. They are drawn so that a ~ U(0, 2) and b ~ U(0, 1).
    """

    about = About(paper="Chi 2022", equation="s_j - a log(1 + b D_j)", cost="L, once for all rows", extrapolates="yes")

    def __init__(self, dim: int, max_len: int, num_heads: int = 1) -> None:
        super().__init__(dim, max_len, num_heads)
        self.r1 = nn.Parameter(_before_softplus(2.0 * torch.rand(num_heads)))
        self.r2 = nn.Parameter(_before_softplus(torch.rand(num_heads)))

    def curve(self, offset: Tensor, causal: bool) -> Tensor:
        a, b = nn.functional.softplus(widen(self.r1)), nn.functional.softplus(widen(self.r2))
        return -a.unsqueeze(1) * torch.log1p(b.unsqueeze(1) * offset.abs())


class KerplePower(RelativeBias):
    """β_h(offset) = -a_h |offset|^b_h with learned a_h > 0 and 0 < b_h < 2: beyond 2 it is no kernel.

    Parameters, shared by all layers: ``r1 (H,)``, ``r2 (H,)``, with a = softplus(r1), b = 2 σ(r2). They are drawn so
    that a ~ U(0, 1) and b ~ U(0, 2).
    """

    about = About(
        paper="Chi 2022", equation="s_j - a D_j^b, 0 < b < 2", cost="L, once for all rows", extrapolates="yes"
    )

    def __init__(self, dim: int, max_len: int, num_heads: int = 1) -> None:
        super().__init__(dim, max_len, num_heads)
        self.r1 = nn.Parameter(_before_softplus(torch.rand(num_heads)))
        self.r2 = nn.Parameter(torch.rand(num_heads).logit(SMALLEST))

    def curve(self, offset: Tensor, causal: bool) -> Tensor:
        a, b = nn.functional.softplus(widen(self.r1)), 2 * torch.sigmoid(widen(self.r2))
        distance = offset.abs()
        # 0^b is 0, but its gradient is 0 · log 0.
        power = distance.clamp(min=1).to(b.dtype) ** b.unsqueeze(1) * (distance > 0)
        return -a.unsqueeze(1) * power


def _before_softplus(x: Tensor) -> Tensor:
    return x.clamp(min=SMALLEST).expm1().log()
