"""CAPE with additive fusion, the "naive fusion" of its ablation (Yuan et al. 2025, section 5.4.2, Figure 4)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ctr_pe.pe.base import About, Contextual
from ctr_pe.pe.contextual import ContextualEncoding, widen
from ctr_pe.pe.vectors import TargetVectors, Vectors
from ctr_pe.sequence.positions import Pairs


class AdditiveCAPE(ContextualEncoding):
    """CAPE's positions p_j, but the vector e[p_j] is added to the item: logits sim(t, h_j + e[p_j]), values h_j.

    Target attention scores the moved items once more, whatever its score; in self-attention the score is a dot
    product, and q · (k_j + e[p_ij]) needs no vector per pair: the query is scored against the table.

    Parameters: ``table (max_len + 1, d)``, zeros, so training starts as without positions.
    """

    about = About(
        paper="Yuan 2025, ablation",
        equation="score(t, h_j + e[p_j]), p_j as in cape",
        cost="a second score; T d in self-attention",
        extrapolates="last row",
    )
    sign = -1

    def __init__(self, dim: int, max_len: int, num_heads: int = 1) -> None:
        super().__init__(dim, max_len, num_heads)
        self.scale = self.head_dim**-0.5
        self.table = nn.Parameter(torch.zeros(max_len + 1, self.head_dim))

    def bias(self, logits: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
        if not isinstance(vectors, TargetVectors):
            return super().bias(logits, vectors, pairs)
        places = pairs.block.real_pairs(logits.shape[2])
        position = self.fractional_positions(logits, pairs)[:, 0][places].clamp(max=self.max_len)
        low, table = position.detach().floor().long(), widen(self.table)
        vector = torch.lerp(table[low], table[(low + 1).clamp(max=self.max_len)], (position - low).unsqueeze(1))
        return vectors.rescore(vector.to(self.table.dtype))

    def contextual(self, pairs: Pairs) -> Contextual:
        return self.operands(pairs)
