"""Positions that depend on content: sums of gates, between the rows of a table. What CoPE and CAPE share.

B batch, H heads, Q queries, L keys, T rows of the table, P its width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from ctr_pe.ops.contextual import contextual_attention, contextual_bias, reference
from ctr_pe.ops.contextual.reference import interpolate, place_scores, towards_query, widen
from ctr_pe.pe.base import PositionEncoding, PositionLinear
from ctr_pe.positions import Pairs

if TYPE_CHECKING:
    from ctr_pe.units.dropout import Dropout


class ContextualEncoding(PositionEncoding):
    """Logits s_j + t' · e[p_j] with p_j = Σ_{k=j..n} g_k and gates g = σ(± s); e between two rows is interpolated.

    Gates are zero at padding and at forbidden keys. A query is scored against the whole table once, a (B, P) x (P, T)
    product, and the scores are interpolated: no (B, L, T) tensor and no vector per item.

    t' is SiLU(W t + b) in a subclass with a ``gate`` that gives W t + b, else ``scale`` times the query. A subclass has
    a ``table (T, P)``; it may override ``steps``, ``gates`` and ``places``.
    """

    sign: ClassVar[int]
    """1 where likeness opens gates, -1 where it shuts them."""

    between = False
    """Whether gates are summed to the query itself, see :func:`check_span`."""

    scale = 1.0
    table: nn.Parameter

    def __init__(self, dim: int, max_len: int, num_heads: int = 1) -> None:
        super().__init__(dim, max_len, num_heads)
        self.gate: PositionLinear | None = None

    def bias(self, query: Tensor, keys: Tensor, logits: Tensor, pairs: Pairs) -> Tensor:
        if not self._is_plain():
            query = query * self.scale if self.gate is None else nn.functional.silu(self.gate(query))
            logits = widen(logits)
            return logits + place_scores(query, self.table, self.places(logits, pairs))
        B, _, Q, L = logits.shape
        allowed, steps = pairs.allowed.expand(B, 1, Q, L), self.steps(pairs, widen(logits).dtype)
        given = logits, query, self.table, allowed, self._gate(), steps
        between = self.between and not pairs.causal
        return contextual_bias(*given, sign=self.sign, scale=self.scale, among_items=pairs.among_items, between=between)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, pairs: Pairs, dropout: Dropout) -> Tensor:
        hooks = type(self).rotate, type(self).weigh, type(self).mix
        plain = hooks == (PositionEncoding.rotate, PositionEncoding.weigh, PositionEncoding.mix)
        (B, Q, H, _), L = query.shape, keys.shape[1]
        if not (plain and self._only_places(pairs) and self._is_plain()) or (self.between and not pairs.causal):
            return super().attend(query, keys, values, pairs, dropout)
        allowed, steps = pairs.allowed.expand(B, 1, Q, L), self.steps(pairs, query.dtype)
        drawn = (dropout.draw(torch.Size((B, H, Q, L))), dropout.factor) if dropout.draws else None
        given = query, keys, values, self.table, allowed, self._gate(), steps
        return contextual_attention(*given, sign=self.sign, scale=self.scale, product=pairs.scale, dropout=drawn)

    def steps(self, pairs: Pairs, dtype: torch.dtype) -> Tensor | None:
        """(B, H, L) in [0, 1], what an open gate counts where another key follows towards the query; None for one."""
        return None

    def gates(self, logits: Tensor, pairs: Pairs) -> Tensor:
        """logits -> how far each key pushes older items away, (B, H, Q, L) in [0, 1]."""
        gates = torch.sigmoid(pairs.barrier - logits if self.sign < 0 else pairs.barrier + logits)
        steps = self.steps(pairs, logits.dtype)
        return (
            gates
            if steps is None
            else gates * towards_query(steps.unsqueeze(2), pairs.allowed, pairs.among_items, self.between)
        )

    def places(self, logits: Tensor, pairs: Pairs) -> Tensor:
        """logits -> p (B, H, Q, L), which `ctr-pe draw` shows."""
        return contextual_positions(self.gates(logits, pairs), pairs, self.between)

    def _gate(self) -> tuple[Tensor, Tensor] | None:
        return None if self.gate is None else (self.gate.weight, self.gate.bias)

    def _only_places(self, pairs: Pairs) -> bool:
        """Whether ``bias`` does what it does here."""
        return type(self).bias is ContextualEncoding.bias

    def _is_plain(self) -> bool:
        """Whether gates and positions are those of this class."""
        own = type(self)
        return (own.gates, own.places) == (ContextualEncoding.gates, ContextualEncoding.places)


def contextual_positions(gates: Tensor, pairs: Pairs, between: bool) -> Tensor:
    """Sums of gates; see :func:`ctr_pe.ops.contextual.reference.contextual_positions`."""
    return reference.contextual_positions(gates, between and pairs.among_items)


def check_span(position_span: str) -> bool:
    """True for ``between``, False for ``end``; anything else is a ValueError."""
    if position_span not in ("end", "between"):
        raise ValueError(f"position_span must be 'end' or 'between', got {position_span!r}")
    return position_span == "between"


__all__ = ["ContextualEncoding", "check_span", "contextual_positions", "interpolate", "place_scores", "widen"]
