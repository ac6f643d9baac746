"""FoX, forgetting attention: a learned forget gate per item (Lin et al. 2025, arXiv 2503.02130).

B batch, L keys, Q queries, H heads, D item dim, d = D / H head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ctr_pe.pe.base import About, PositionEncoding
from ctr_pe.pe.contextual import widen
from ctr_pe.pe.vectors import Vectors
from ctr_pe.sequence.positions import Pairs

OPEN = 4.0
"""Bias of the gates at the start: σ(4) = .982."""


class FoX(PositionEncoding):
    """Logits s_ij + Σ log f_l over the items l newer than key j, query i included; f_l = σ(w_h · k_l + b_h).

    An item with a gate near 0 makes the attention forget all older ones. k is the unit's key vector before rotation. In
    target attention the target's own gate would be one constant for all keys and is left out. In bidirectional
    self-attention the sum is over the items between query and key, with the query's gate and without the key's.

    Parameters: ``forget.weight (H, d)``, zeros, and ``forget.bias (H,)``, 4: at the start every item costs the older
    ones .018.
    """

    about = About(
        paper="Lin 2025", equation="s_j + Σ_{k=j+1..n} log σ(w · h_k + b)", cost="L, and d per key", extrapolates="yes"
    )

    def __init__(self, dim: int, max_len: int, num_heads: int = 1) -> None:
        super().__init__(dim, max_len, num_heads)
        weight, bias = torch.zeros(num_heads, self.head_dim), torch.full((num_heads,), OPEN)
        self.forget = nn.ParameterDict({"weight": weight, "bias": bias})

    def bias(self, logits: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
        gate = widen(vectors.key_products(self.forget["weight"])) + widen(self.forget["bias"]).unsqueeze(-1)
        log = nn.functional.logsigmoid(gate)  # (B, H, L); padding is older than all items and enters no sum of theirs
        newer = log.flip(-1).cumsum(-1).flip(-1) - log  # of the items after each
        keys, wide = newer.unsqueeze(-2), widen(logits)
        if not pairs.self_attention:
            return wide + keys
        queries = newer[..., -logits.shape[-2] :].unsqueeze(-1)  # the last items, or all
        if pairs.causal:
            return wide + (keys - queries)
        own = log[..., -logits.shape[-2] :].unsqueeze(-1)
        return wide + torch.where(pairs.offset >= 0, keys - queries, queries + own - keys - log.unsqueeze(-2))
