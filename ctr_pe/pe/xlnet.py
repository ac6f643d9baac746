"""XLNet, relative positions of Transformer-XL (Dai et al. 2019, arXiv 1901.02860; Yang et al. 2019, arXiv 1906.08237).

B batch, L keys, Q queries, H heads, D item dim, d = D / H head dim, M offsets.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ctr_pe.pe.base import About, PositionEncoding, PositionLinear
from ctr_pe.pe.contextual import widen
from ctr_pe.pe.sinusoidal import waves
from ctr_pe.pe.vectors import Vectors
from ctr_pe.sequence.positions import Pairs


class XLNet(PositionEncoding):
    """s_ij = [(q_i + u) · k_j + (q_i + v) · W R(r_i - r_j)] / sqrt(d), R(o) = [sin(o w), cos(o w)], w as sinusoidal.

    In target attention the offset is D_j and the logit is the unit's own plus [u · h_j + (q + v) · W R(D_j)], which a
    dot score scales as its products; q is the target, and W' t for a bilinear score hᵀ W' t.

    Parameters: ``content_bias``, ``position_bias (H, d)``, u and v, zeros, shared by all layers;
    ``projection.weight (D, D)``, W, for each layer its own.
    """

    about = About(
        paper="Dai 2019, Yang 2019",
        equation="s_j + (u · h_j + (t + v) · W R(D_j)) / sqrt(d), R(o) = (sin o w, cos o w)",
        cost="2 L d; D² per offset, once for all rows",
        extrapolates="yes",
    )
    shared = ("content_bias", "position_bias")

    def __init__(self, dim: int, max_len: int, num_heads: int = 1) -> None:
        super().__init__(dim, max_len, num_heads)
        self.content_bias = nn.Parameter(torch.zeros(num_heads, self.head_dim))
        self.position_bias = nn.Parameter(torch.zeros(num_heads, self.head_dim))
        self.projection = PositionLinear(dim, dim, bias=False)

    def bias(self, logits: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
        query = vectors.in_key_space(vectors.query)
        wide = widen(logits)
        later = 0 if pairs.causal else wide.shape[-2] - 1
        scored = self.of_offsets(pairs, later + 1) * vectors.scale  # (H, d, M)
        rows, heads, queries, _ = query.shape
        # One matrix per head, (H, B Q, d), so that the product with those of the offsets need not repeat them per row.
        moved = (query + self.position_bias.unsqueeze(1)).transpose(0, 1).flatten(1, 2)
        per_offset = torch.bmm(moved, scored).view(heads, rows, queries, scored.shape[-1])
        of_content = vectors.key_products(self.content_bias * vectors.scale).unsqueeze(2)  # (B, H, 1, L)
        scores = by_key(per_offset, wide.shape[-1]) if pairs.self_attention else per_offset[..., : wide.shape[-1]]
        return wide + scores.transpose(0, 1) + of_content

    def of_offsets(self, pairs: Pairs, more: int) -> Tensor:
        """W R(o) by head, (H, d, L + more): at the offsets of the keys from the last query, oldest first, and ``more``
        later ones."""
        keys = pairs.key.distance.shape[-1]
        offset = keys - pairs.query.distance[0, 0, -1] - torch.arange(keys + more, device=pairs.query.distance.device)
        waved = torch.cat(waves(offset, self.dim, self.projection.weight.dtype), -1)
        projected: Tensor = self.projection(waved)
        return projected.view(-1, self.num_heads, self.head_dim).permute(1, 2, 0)


def by_key(scores: Tensor, keys: int) -> Tensor:
    """Scores per offset (..., Q, M) -> per key (..., Q, L), M > L: column j of query i was column Q - 1 - i + j.

    A view: cut into rows one entry shorter, each query's keys begin one offset before those of the query above.
    """
    queries, offsets = scores.shape[-2:]
    cut = scores.flatten(-2)[..., queries - 1 : queries * offsets - 1]
    return cut.view(*scores.shape[:-1], offsets - 1)[..., :keys]
