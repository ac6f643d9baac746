"""FIRE, functional interpolation of relative positions (Li et al. 2024, arXiv 2310.04418).

B batch, L keys, Q queries, H heads, U different numbers of items of the rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ctr_pe.pe.base import About, PositionEncoding, PositionLinear
from ctr_pe.pe.contextual import widen
from ctr_pe.pe.vectors import Vectors
from ctr_pe.sequence.positions import Pairs

HIDDEN = 32
RATE = 0.1
"""c at the start, as in the authors' code."""


class FIRE(PositionEncoding):
    """Logits s_ij + f(ψ(i - j) / ψ(max(T, i)))_h with ψ(x) = log(c x + 1): the offset as a share of the query's index.

    i counts from the oldest item, which is 1; the target stands at n + 1. f is an MLP from 1 to 32 to H with ReLU. So a
    history longer than any in training gives f values that it has seen. In bidirectional self-attention the offset is
    |i - j|, over the larger of the two indices.

    Parameters: ``rate``, c, and ``threshold``, T, before a softplus that keeps them positive; c is .1 and T a quarter
    of max_len at the start. ``mlp.0 (32, 1)``, ``mlp.2 (H, 32)``, with bias.
    """

    about = About(
        paper="Li 2024",
        equation="s_j + f(log(c D_j + 1) / log(c max(T, n + 1) + 1))",
        cost="32 (H + 1) L / H, once for all rows of a length",
        extrapolates="yes",
    )

    def __init__(self, dim: int, max_len: int, num_heads: int = 1) -> None:
        super().__init__(dim, max_len, num_heads)
        self.rate = nn.Parameter(torch.tensor(_before_softplus(RATE)))
        self.threshold = nn.Parameter(torch.tensor(_before_softplus(max(max_len / 4, 1.0))))
        self.mlp = nn.Sequential(PositionLinear(1, HIDDEN), nn.ReLU(), PositionLinear(HIDDEN, num_heads))

    def bias(self, logits: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
        wide = widen(logits)
        counts, row = pairs.block.distinct_lengths()  # rows of one length share their bias
        return wide + self.curves(counts, pairs).to(wide.dtype).index_select(0, row)

    def curves(self, counts: Tensor, pairs: Pairs) -> Tensor:
        """Bias (U, H, Q, L) of rows with so many items, counts (U,) int64."""
        with torch.autocast(counts.device.type, enabled=False):
            rate, threshold = (nn.functional.softplus(widen(x)) for x in (self.rate, self.threshold))
            index = counts.view(-1, 1, 1) + 1 - pairs.query.distance[0].unsqueeze(-1)  # (U, Q, 1)
            if not pairs.causal:
                index = torch.maximum(index, counts.view(-1, 1, 1) + 1 - pairs.key.distance[0].unsqueeze(-2))
            offset = pairs.offset[0].abs()  # (1, Q, L); later keys of a causal attention are forbidden
            share = torch.log1p(rate * offset) / torch.log1p(rate * torch.maximum(threshold, index))
            curves: Tensor = self.mlp(share.to(self.rate.dtype).unsqueeze(-1))
            return curves.permute(0, 3, 1, 2)


def _before_softplus(x: float) -> float:
    return x + math.log(-math.expm1(-x))
