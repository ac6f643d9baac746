"""Contextual positions in torch.

B batch, H heads, Q queries, L keys, T rows of the table, P its width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ctr_pe.ops import native
from ctr_pe.sequence.jagged import as_numbers
from ctr_pe.utils.autograd import apply


def contextual_bias(
    logits: Tensor,
    query: Tensor,
    table: Tensor,
    allowed: Tensor,
    gate: tuple[Tensor, Tensor] | None,
    gate_weights: Tensor | None,
    gate_logits: Tensor,
    sign: float,
    scale: float,
    among_items: bool,
    between: bool,
    additive_mask: Tensor,
) -> Tensor:
    gates = open_gates(gate_logits, additive_mask, sign)
    if gate_weights is not None:
        gates = gates * towards_query(gate_weights.unsqueeze(2), allowed, among_items, between)
    position = contextual_positions(gates, among_items and between)
    query = query * scale if gate is None else nn.functional.silu(nn.functional.linear(query, *gate))
    return logits + place_scores(query, table, position)


def pool(logits: Tensor, value: Tensor, allowed: Tensor, kept: Tensor | None, factor: float) -> Tensor:
    """Softmax of logits (B, H, Q, L) over the allowed keys, dropout, and the values (B, H, L, D) pooled by it:
    (B, H, Q, D), zeros where nothing is allowed. ``kept`` (B, H, Q, L) int16, and the factor of what is kept."""
    weights = (logits + additive_mask(allowed)).softmax(-1)
    if kept is not None:
        weights = weights * kept.to(weights.dtype).mul_(factor)
    return (weights.to(value.dtype) @ value).masked_fill(~allowed.any(-1, keepdim=True), 0)


def open_gates(gate_logits: Tensor, additive_mask: Tensor, sign: float) -> Tensor:
    """σ(sign · gate_logits), zero where not allowed: (B, H, Q, L)."""
    return torch.sigmoid(torch.add(additive_mask, gate_logits, alpha=sign))


def additive_mask(allowed: Tensor) -> Tensor:
    """float32, 0 where allowed, elsewhere the lowest finite number. Not -inf: a row of nothing else would give NaN, in
    the gradient too. Computed with numbers, because torch takes many times as long where a bool meets a float."""
    return (as_numbers(allowed) - 1) * torch.finfo(torch.float32).max


def contextual_positions(gates: Tensor, between: bool = False) -> Tensor:
    """Sum gates over keys: p_ij = sum of g_ik for k from j to the newest allowed key (CAPE paper, equation 2).

    Args:
        gates: (B, H, Q, L) in [0, 1], zero where not allowed; keys in time order.
        between: sum from j to the query i instead, in either direction; queries are the last Q of the items.

    Returns:
        (B, H, Q, L) positions in [0, L].
    """
    to_newest: Tensor = apply(_SuffixSum, gates)
    if not between:
        return to_newest
    offset = _offset(gates)
    own = offset == 0
    from_own = (to_newest * own).sum(-1, keepdim=True)
    own_gate = (gates * own).sum(-1, keepdim=True)
    return torch.where(offset >= 0, to_newest - from_own + own_gate, from_own - to_newest + gates)


def towards_query(gate_weights: Tensor, allowed: Tensor, among_items: bool, between: bool) -> Tensor:
    """Steps from each key to the next newer one (B, H, 1, L) -> to the next one towards the query, (B, H, Q, L).

    Among items it is one where none follows: at the newest allowed key, and with ``between`` at the query itself.
    """
    if not among_items:
        return gate_weights
    if between:
        offset, before = _offset(allowed), nn.functional.pad(gate_weights[..., :-1], (1, 0))
        return torch.where(offset > 0, gate_weights, before).masked_fill(offset == 0, 1)
    from_here = allowed.flip(-1).cumsum(-1).flip(-1)  # how many keys are allowed from each one on
    return gate_weights.masked_fill(allowed & (from_here == 1), 1)


def _offset(pairs: Tensor) -> Tensor:
    """(Q, L): how many items the key lies before the query; negative for later keys. pairs (B, any, Q, L)."""
    queries, keys = pairs.shape[-2:]
    index = torch.arange(keys, device=pairs.device)
    return index[keys - queries :, None] - index


def place_scores(query: Tensor, table: Tensor, position: Tensor) -> Tensor:
    """query · e[p], e interpolated between rows of the table (CAPE paper, equations 3 and 5).

    The query is scored against the rows and the scores are interpolated, which is the same and needs no vector per
    pair. Positions count keys, so rows past their number are not scored.

    Args:
        query: (B, H, Q, P). table: (T, P). position: (B, H, Q, L), at most L.

    Returns:
        (B, H, Q, L), float32 at least.
    """
    reached = position.shape[-1] + 1
    fits = not native.traced() and reached <= len(table)
    rows = table[:reached] if fits and reached < len(table) else table
    return _between(widen(query @ rows.T), position if fits else position.clamp(max=len(table) - 1))


def interpolate(table: Tensor, position: Tensor) -> Tensor:
    """Linear interpolation of scores per query.

    Args:
        table: (B, H, Q, T) score of each table row under each query.
        position: (B, H, Q, L) fractional rows; those below 0 or past T - 1 take the first or last row.

    Returns:
        (B, H, Q, L).
    """
    return _between(table, position.clamp(0, table.shape[-1] - 1))


def _between(table: Tensor, position: Tensor) -> Tensor:
    """:func:`interpolate` of positions that the table has."""
    low = position.detach().long()  # and the row after it, not the ceiling, which has no slope at integers
    value = table.gather(-1, low)
    return torch.addcmul(value, table.gather(-1, (low + 1).clamp(max=table.shape[-1] - 1)) - value, position.frac())


def widen(x: Tensor) -> Tensor:
    """Position arithmetic needs float32: a sum of 100 gates is off by 0.15 positions in bfloat16."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class _SuffixSum(torch.autograd.Function):
    """By hand, because autograd would make two more tensors of the size of the logits."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.flip(-1).cumsum(-1).flip(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.cumsum(-1)
