"""CAPE, context-aware position encoding for sequential recommendation (Yuan et al. 2025, WWW Companion)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ctr_pe.config.schema import Width
from ctr_pe.pe.base import About, PositionLinear
from ctr_pe.pe.contextual import ContextualEncoding


class CAPE(ContextualEncoding):
    """Items unlike the target push older items further away; items like it leave them where they are.

    Equations 1 to 5 of the paper, on the unit's own logits s (any score function):
    g_j = 1 - σ(s_j), p_j = sum of g_k for k = j..newest, t' = SiLU(W t + b), logits s_j + t' · e[p_j]; e between two
    rows of the table is interpolated.

    Args:
        position_dim: P, width of the position table.
        position_span: ``end`` or ``between``, see :class:`~ctr_pe.pe.contextual.ContextualEncoding`.

    Parameters: ``gate.weight (P, d)``, ``gate.bias (P,)``, shared by the heads; ``table (max_len + 1, P)``, zeros, so
    training starts as without positions. A position can reach max_len, hence the extra row.

    Raises:
        ValueError: position_dim is not a positive integer, or an unknown position_span.
    """

    about = About(
        paper="Yuan 2025",
        equation="s_j + SiLU(W t + b) · e[p_j], p_j = Σ_{k=j..n} (1 - σ(s_k))",
        cost="d P + T P + L",
        extrapolates="last row, after that many unlike items",
    )
    sign = -1

    def __init__(self, dim: int, max_len: int, num_heads: int = 1, *, position_dim: Width = 16, **options: Any) -> None:
        super().__init__(dim, max_len, num_heads, **options)
        self.gate = PositionLinear(self.head_dim, position_dim)
        self.table = nn.Parameter(torch.zeros(max_len + 1, position_dim))
