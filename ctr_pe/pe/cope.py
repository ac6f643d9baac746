"""CoPE, contextual position encoding (Golovneva et al. 2024, arXiv 2405.18719)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ctr_pe.pe.base import About
from ctr_pe.pe.contextual import ContextualEncoding


class CoPE(ContextualEncoding):
    """p_ij = sum over k = j..i of σ(s_ik); logits s_ij + q_i · e[p_ij], e interpolated between table rows.

    Args:
        scale_bias: divide q · e by sqrt(d), as the authors' default does; their paper's listing adds it unscaled.
        position_span: ``end`` or ``between``, see :class:`~ctr_pe.pe.contextual.ContextualEncoding`.

    Parameters: ``table (max_len + 1, d)``, zeros, so training starts as without positions.

    Raises:
        ValueError: an unknown position_span.
    """

    about = About(
        paper="Golovneva 2024",
        equation="s_j + t · e[p_j], p_j = Σ_{k=j..n} σ(s_k)",
        cost="T d + L",
        extrapolates="last row",
    )
    sign = 1

    def __init__(self, dim: int, max_len: int, num_heads: int = 1, *, scale_bias: bool = False, **options: Any) -> None:
        super().__init__(dim, max_len, num_heads, **options)
        self.scale = self.head_dim**-0.5 if scale_bias else 1.0
        self.table = nn.Parameter(torch.zeros(max_len + 1, self.head_dim))
