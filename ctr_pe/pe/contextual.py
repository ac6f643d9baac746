"""Positions that depend on content: sums of gates, between the rows of a table. What CoPE and CAPE share.

B batch, H heads, Q queries, L keys, T rows of the table, P its width.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor, nn

from ctr_pe.ops.contextual import contextual_bias
from ctr_pe.ops.contextual.reference import contextual_positions, open_gates, towards_query, widen
from ctr_pe.pe.base import Contextual, PositionEncoding, PositionLinear
from ctr_pe.pe.vectors import Vectors
from ctr_pe.sequence.positions import Pairs


class ContextualEncoding(PositionEncoding):
    """Logits s_j + t' · e[p_j] with p_j = Σ_{k=j..n} g_k, gates g = σ(sign · s); e between two rows is interpolated.

    Gates are zero at padding and at forbidden keys. A query is scored against the whole table once, a (B, P) x (P, T)
    product, and the scores are interpolated: no (B, L, T) tensor and no vector per item.

    t' is SiLU(W t + b) in a subclass with a ``gate`` that gives W t + b, else ``scale`` times the query. A subclass has
    a ``table (T, P)``; it may override ``gate_weights``, and ``gate_logits`` for gates of something else than s.

    Args:
        position_span: ``end`` sums gates from the key to the newest allowed key; ``between`` from the key to the
            query, which differs only in bidirectional self-attention.

    Raises:
        ValueError: an unknown position_span.
    """

    sign: ClassVar[int]
    """1 where items like the query have open gates, -1 where items unlike it have, 0 where all are half open."""

    scale = 1.0
    table: nn.Parameter

    def __init__(
        self, dim: int, max_len: int, num_heads: int = 1, *, position_span: Literal["end", "between"] = "end"
    ) -> None:
        super().__init__(dim, max_len, num_heads)
        self.between = position_span == "between"
        self.gate: PositionLinear | None = None

    def bias(self, logits: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
        given, between = self.operands(pairs)._asdict(), self.between and not pairs.causal
        given["allowed"] = pairs.allowed.expand(*pairs.allowed.shape[:-2], logits.shape[-2], -1)
        given["gate_logits"] = self.gate_logits(pairs)
        given["additive_mask"] = pairs.additive_mask
        return contextual_bias(logits, vectors.query, **given, among_items=pairs.self_attention, between=between)

    def plain_bias(self, vectors: Vectors, pairs: Pairs) -> Tensor | None:
        of_logits = self.sign != 0 and type(self).gate_logits is ContextualEncoding.gate_logits
        if of_logits or not self._has_hooks_of(ContextualEncoding):
            return None
        zero = widen(vectors.query).new_zeros(())
        return self.bias(zero.expand(*vectors.query.shape[:-1], pairs.allowed.shape[-1]), vectors, pairs)

    def contextual(self, pairs: Pairs) -> Contextual | None:
        hooks = ("rotate", "bias", "mix", "gate_logits")
        plain = all(getattr(type(self), hook) is getattr(ContextualEncoding, hook) for hook in hooks)
        return self.operands(pairs) if plain and (pairs.causal or not self.between) else None

    def gate_logits(self, pairs: Pairs) -> Tensor | None:
        """(B, H or 1, Q, L), whose sigmoids the gates are; None for the logits of the attention."""
        return None

    def gate_weights(self, pairs: Pairs) -> Tensor | None:
        """(B, H, L) in [0, 1], factors of the gates where another key follows towards the query; None for ones."""
        return None

    def fractional_positions(self, logits: Tensor, pairs: Pairs) -> Tensor:
        """logits -> p (B, H, Q, L), which ``ctr-pe draw`` shows."""
        logits_of_gates, weights = self.gate_logits(pairs), self.gate_weights(pairs)
        gates = open_gates(
            widen(logits if logits_of_gates is None else logits_of_gates), pairs.additive_mask, self.sign
        )
        if weights is not None:
            gates = gates * towards_query(weights.unsqueeze(2), pairs.allowed, pairs.self_attention, self.between)
        return contextual_positions(gates, self.between and pairs.self_attention)

    def operands(self, pairs: Pairs) -> Contextual:
        """What the operators of :mod:`ctr_pe.ops.contextual` take of this encoding."""
        gate = None if self.gate is None else (self.gate.weight, self.gate.bias)
        return Contextual(self.table, gate, self.gate_weights(pairs), self.sign, self.scale)


__all__ = ["ContextualEncoding", "widen"]
