"""The match of each item with the target as a bias, without order (ours, no paper; the gates of cape_cosine alone).

B batch, H heads, Q queries, L keys, P width of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ctr_pe.config.schema import Width
from ctr_pe.pe.base import About, PositionLinear
from ctr_pe.pe.cape_cosine import CosineGates
from ctr_pe.pe.contextual import widen
from ctr_pe.pe.vectors import Vectors
from ctr_pe.sequence.positions import Pairs


class Likeness(CosineGates):
    """Logits s_j + t' · e[g_j], g_j = 1 - σ(a (cos(U x, U h_j) - c)), t' = SiLU(W t + b); x is the target, or in
    self-attention the item that asks, and e between the two rows of the table is interpolated.

    CAPE of the same gates (``cape_cosine``) says two things of an item: how many unlike items came after it, which is
    context, and by the item's own gate, whether it matches the target. Here there is the match alone, whatever the
    order of the items. TIN and BST lacked it on a log of purchases, DIN did not (docs/evidence.md). Distance beside it
    is a chain, ``cape_constant+likeness``; what ``cape_cosine`` has above that chain is context.

    Args:
        field_dims, likeness_dim, likeness_of: as those of ``cape_cosine``.
        position_dim: P.

    Parameters: ``gate.weight (P, d)``, ``gate.bias (P,)``, W and b, shared by the heads; ``table (2, P)``, the rows of
    a closed gate (an item like the target) and of an open one, zeros, so training starts exactly as without it;
    ``projection``, ``steepness``, ``middle`` and ``field_weights`` as in ``cape_cosine``, shared by stacked layers.

    Raises:
        ValueError: position_dim or likeness_dim is not a positive integer, an unknown likeness_of, or field_dims of
            which neither all nor the first are dim wide.
    """

    about = About(
        paper="ours, no paper",
        equation="s_j + SiLU(W t + b) · e[g_j], g_j = 1 - σ(a (mean over fields cos(U t, U h_j) - c))",
        cost="d P + 2 P + L; V L for all heads and V D per item, once for all layers, V = likeness_dim = 32",
        extrapolates="yes: no order, no length",
    )

    def __init__(
        self,
        dim: int,
        max_len: int,
        num_heads: int = 1,
        *,
        field_dims: Sequence[int] | None = None,
        likeness_dim: Width = 32,
        likeness_of: Literal["item", "fields"] = "fields",
        position_dim: Width = 16,
    ) -> None:
        super().__init__(dim, max_len, num_heads)
        self.gate = PositionLinear(self.head_dim, position_dim)
        self.table = nn.Parameter(torch.zeros(2, position_dim))
        self.add_gates(field_dims, likeness_dim, likeness_of)

    def bias(self, logits: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
        gates = torch.sigmoid(-self.gate_logits(pairs))
        scores = widen(nn.functional.silu(self.gate(vectors.query)) @ self.table.T)  # (B, H, Q, 2)
        closed, opened = scores[..., :1], scores[..., 1:]
        return logits + closed + gates * (opened - closed)

    def plain_bias(self, vectors: Vectors, pairs: Pairs) -> Tensor | None:
        zero = widen(vectors.query).new_zeros(())
        return self.bias(zero, vectors, pairs) if self._has_hooks_of(Likeness) else None
