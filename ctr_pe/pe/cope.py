"""CoPE, contextual position encoding (Golovneva et al. 2024, arXiv 2405.18719)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ctr_pe.pe.base import PositionEncoding
from ctr_pe.positions import Pairs


def contextual_positions(gates: Tensor, pairs: Pairs, between: bool) -> Tensor:
    """Sum gates over keys: p_ij = sum of g_ik for k from j to the newest allowed key (CAPE paper, equation 2).

    Args:
        gates: (B, H, Q, L) in [0, 1], zero where not allowed; keys in time order.
        between: sum from j to the query i instead, in either direction. The same under a causal mask and in target
            attention, where the query is the newest.

    Returns:
        (B, H, Q, L) positions in [0, L].
    """
    to_newest = gates.flip(-1).cumsum(-1).flip(-1)
    if not between:
        return to_newest
    own = (pairs.offset == 0) & pairs.allowed
    from_own = (to_newest * own).sum(-1, keepdim=True)
    own_gate = (gates * own).sum(-1, keepdim=True)
    return torch.where(pairs.offset >= 0, to_newest - from_own + own_gate, from_own - to_newest + gates)


def interpolate(table: Tensor, position: Tensor) -> Tensor:
    """Linear interpolation of per-query scores (CAPE paper, equations 3 and 5).

    Args:
        table: (B, H, Q, T) score of each table row under each query.
        position: (B, H, Q, L) fractional rows; those below 0 or past T - 1 take the first or last row.

    Returns:
        (B, H, Q, L): equal to scoring the interpolated table row, because the score is linear in it.
    """
    last = table.shape[-1] - 1
    position = position.clamp(0, last)
    low = position.detach().floor().long()
    # low + 1, not ceil: at an integer position ceil would lose the gradient.
    high = (low + 1).clamp(max=last)
    fraction = position - low
    return torch.lerp(table.gather(-1, low), table.gather(-1, high), fraction)


class CoPE(PositionEncoding):
    """p_ij = sum over k = j..i of σ(s_ik); logits s_ij + q_i · e[p_ij], e interpolated between table rows.

    Args:
        scale_bias: divide q · e by sqrt(d), as the authors' default does; their paper's listing adds it unscaled.
        position_span: ``end`` sums gates from the key to the newest allowed key; ``between`` from the key to the
            query, which differs only in bidirectional self-attention.

    Parameters: ``table (max_len + 1, d)``, zeros, so training starts exactly as without positions.

    Raises:
        ValueError: an unknown position_span.
    """

    def __init__(
        self,
        dim: int,
        max_len: int,
        num_heads: int = 1,
        *,
        scale_bias: bool = False,
        position_span: str = "end",
    ) -> None:
        super().__init__(dim, max_len, num_heads)
        self.between = check_span(position_span)
        self.scale = self.head_dim**-0.5 if scale_bias else 1.0
        self.table = nn.Parameter(torch.zeros(max_len + 1, self.head_dim))

    def bias(self, query: Tensor, keys: Tensor, logits: Tensor, pairs: Pairs) -> Tensor:
        wide = widen(logits)
        gates = torch.sigmoid(wide) * pairs.allowed
        scores = widen(query @ self.table.T) * self.scale  # (B, H, Q, T)
        return wide + interpolate(scores, contextual_positions(gates, pairs, self.between))


def widen(x: Tensor) -> Tensor:
    """Position arithmetic needs float32: a sum of 100 gates is off by 0.15 positions in bfloat16."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def check_span(position_span: str) -> bool:
    """True for ``between``, False for ``end``; anything else is a ValueError."""
    if position_span not in ("end", "between"):
        raise ValueError(f"position_span must be 'end' or 'between', got {position_span!r}")
    return position_span == "between"
