"""FIRE, functional interpolation of relative positions (Li et al. 2024, arXiv 2310.04418).

B batch, L keys, Q queries, H heads.
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
        return widen(logits) + self._by_row(pairs)

    def plain_bias(self, vectors: Vectors, pairs: Pairs) -> Tensor | None:
        return self._by_row(pairs) if self._has_hooks_of(FIRE) else None

    def _by_row(self, pairs: Pairs) -> Tensor:
        """(B, H, Q, L)"""
        counts, row = pairs.block.distinct_lengths()  # rows of one length share their bias
        query, key = (counts.unsqueeze(1) + 1 - at.distance[0] for at in (pairs.query, pairs.key))
        if pairs.query.distance.shape[-1] == 1:
            curves = self.curve(query, key, pairs.causal)
        else:  # indices come again in every row: f is computed once for each two
            items = pairs.longest
            index = torch.arange(items, device=counts.device) + 1
            table = pairs.once_for_blocks(self, lambda: self.curve(index, index, pairs.causal).flatten(0, 1))
            query, key = ((x - 1).clamp(min=0) for x in (query, key))  # padding has no index
            curves = nn.functional.embedding(query.unsqueeze(-1) * items + key.unsqueeze(-2), table)
        return widen(curves).permute(0, 3, 1, 2).index_select(0, row)

    def curve(self, query: Tensor, key: Tensor, causal: bool) -> Tensor:
        """Bias (…, Q, L, H) of queries (…, Q) and keys (…, L), int64 indices from the oldest item, which is 1."""
        with torch.autocast(query.device.type, enabled=False):
            rate, threshold = (nn.functional.softplus(widen(x)) for x in (self.rate, self.threshold))
            query, key = query.unsqueeze(-1), key.unsqueeze(-2)
            index = query if causal else torch.maximum(query, key)
            offset = (query - key).abs()  # later keys of a causal attention are forbidden
            share = torch.log1p(rate * offset) / torch.log1p(rate * torch.maximum(threshold, index))
            curve: Tensor = self.mlp(share.to(self.rate.dtype).unsqueeze(-1))
            return curve


def _before_softplus(x: float) -> float:
    return x + math.log(-math.expm1(-x))
