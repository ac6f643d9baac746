"""XLNet, relative positions of Transformer-XL (Dai et al. 2019, arXiv 1901.02860; Yang et al. 2019, arXiv 1906.08237).

B batch, L keys, Q queries, H heads, D item dim, d = D / H head dim, M offsets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ctr_pe.pe.base import About, PositionEncoding, PositionLinear
from ctr_pe.pe.contextual import widen
from ctr_pe.pe.sinusoidal import waves
from ctr_pe.pe.vectors import Vectors
from ctr_pe.positions import Pairs


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
        scores = torch.bmm(_per_head(query + self.position_bias.unsqueeze(1)), scored)  # (H, B Q, M)
        per_offset = scores.view(heads, rows, queries, scored.shape[-1])
        of_content = vectors.key_products(self.content_bias * vectors.scale).unsqueeze(2)  # (B, H, 1, L)
        added: Tensor = _Added.apply(wide, per_offset, of_content)  # type: ignore[no-untyped-call]
        return added

    def of_offsets(self, pairs: Pairs, more: int) -> Tensor:
        """W R(o) by head, (H, d, L + more): at the offsets of the keys from the last query, oldest first, and ``more``
        later ones."""
        keys = pairs.key.distance.shape[-1]
        offset = keys - pairs.query.distance[0, 0, -1] - torch.arange(keys + more, device=pairs.query.distance.device)
        waved = torch.cat(waves(offset, self.dim, self.projection.weight.dtype), -1)
        projected: Tensor = self.projection(waved)
        return projected.view(-1, self.num_heads, self.head_dim).permute(1, 2, 0)

    def next_layer(self, fresh: Callable[[], PositionEncoding]) -> PositionEncoding:
        above = fresh()
        if isinstance(above, XLNet) and (above.dim, above.num_heads) == (self.dim, self.num_heads):
            above.content_bias, above.position_bias = self.content_bias, self.position_bias
        return above


def by_key(scores: Tensor, keys: int) -> Tensor:
    """Scores per offset (..., Q, M) -> per key (..., Q, L), M > L: column j of query i was column Q - 1 - i + j.

    A view: cut into rows one entry shorter, each query's keys begin one offset before those of the query above.
    """
    queries, offsets = scores.shape[-2:]
    cut = scores.flatten(-2)[..., queries - 1 : queries * offsets - 1]
    return cut.view(*scores.shape[:-1], offsets - 1)[..., :keys]


class _Added(torch.autograd.Function):
    """logits (B, H, Q, L) + scores per offset (H, B, Q, M) + content (B, H, 1, L). By hand, because the gradient of the
    view would be written three times."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, scores: Tensor, content: Tensor) -> Tensor:
        return logits + by_key(scores, logits.shape[-1]).transpose(0, 1) + content

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        _, scores, content = inputs
        ctx.offsets, ctx.types = scores.shape[-1], (scores.dtype, content.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, heads, queries, keys = grad.shape
        of_scores = grad.new_empty(heads, rows, queries, ctx.offsets, dtype=ctx.types[0])
        flat = of_scores.flatten(-2)  # what no key has lies before, after and between the rows
        flat[..., : queries - 1] = 0
        flat[..., -1] = 0
        by_key(of_scores, ctx.offsets - 1)[..., keys:] = 0
        by_key(of_scores, keys).copy_(grad.transpose(0, 1))
        return grad, of_scores, grad.sum(-2, keepdim=True).to(ctx.types[1])


def _per_head(vectors: Tensor) -> Tensor:
    """(B, H, L, d) -> (H, B L, d): one matrix per head, so that a product with a table need not repeat it per row."""
    return vectors.transpose(1, 2).flatten(0, 1).transpose(0, 1)
