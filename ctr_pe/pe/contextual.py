"""Positions that depend on content: sums of gates, between the rows of a table. What CoPE and CAPE share.

B batch, H heads, Q queries, L keys, T rows of the table, P its width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ctr_pe import compiled
from ctr_pe.pe import fused
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
        logits = widen(logits)
        if self._compiles(pairs, query, logits):
            return self._place(query, logits, pairs)
        query = query * self.scale if self.gate is None else nn.functional.silu(self.gate(query))
        return logits + place_scores(query, self.table, self.places(logits, pairs))

    def weigh(
        self, query: Tensor, keys: Tensor, logits: Tensor, pairs: Pairs, dropout: Dropout | None = None
    ) -> Tensor:
        wide = widen(logits)
        if not (self._only_places(pairs) and self._compiles(pairs, query, wide)):
            return super().weigh(query, keys, logits, pairs, dropout)
        if dropout is None or not dropout.draws:
            return self._place(query, wide, pairs, softmax=True)
        return self._place(query, wide, pairs, softmax=True, factor=dropout.factor, kept=dropout.draw(wide.shape))

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, pairs: Pairs, dropout: Dropout) -> Tensor:
        hooks = type(self).rotate, type(self).weigh, type(self).mix
        (B, Q, H, _), L = query.shape, keys.shape[1]
        if (
            Q == 1  # nothing is gained
            or hooks != (PositionEncoding.rotate, ContextualEncoding.weigh, PositionEncoding.mix)
            or not (self._only_places(pairs) and self._compiles(pairs, query, query, keys, values))
        ):
            return super().attend(query, keys, values, pairs, dropout)
        rule = self._rule(pairs, product=pairs.scale, factor=dropout.factor if dropout.draws else 1.0)
        kept = dropout.draw(torch.Size((B, H, Q, L))) if dropout.draws else None
        return fused.attend(rule, query, keys, values, **self._given(pairs, B, query.dtype), kept=kept)

    def steps(self, pairs: Pairs, dtype: torch.dtype) -> Tensor | None:
        """(B, H, L) in [0, 1], what an open gate counts where another key follows towards the query; None for one."""
        return None

    def gates(self, logits: Tensor, pairs: Pairs) -> Tensor:
        """logits -> how far each key pushes older items away, (B, H, Q, L) in [0, 1]."""
        gates = torch.sigmoid(pairs.barrier - logits if self.sign < 0 else pairs.barrier + logits)
        steps = self.steps(pairs, logits.dtype)
        return gates if steps is None else gates * towards_query(steps.unsqueeze(2), pairs, self.between)

    def places(self, logits: Tensor, pairs: Pairs) -> Tensor:
        """logits -> p (B, H, Q, L), which `ctr-pe draw` shows."""
        return contextual_positions(self.gates(logits, pairs), pairs, self.between)

    def _place(self, query: Tensor, logits: Tensor, pairs: Pairs, kept: Tensor | None = None, **rule: Any) -> Tensor:
        given = self._given(pairs, len(logits), logits.dtype)
        return fused.place(self._rule(pairs, **rule), logits, query.float(), **given, kept=kept)

    def _rule(self, pairs: Pairs, **others: Any) -> fused.Rule:
        return fused.Rule(self.sign, pairs.among_items, self.scale, **others)

    def _given(self, pairs: Pairs, rows: int, dtype: torch.dtype) -> dict[str, Any]:
        return {
            "table": self.table,
            "allowed": pairs.allowed.expand(rows, -1, -1, -1),
            "gate": None if self.gate is None else (self.gate.weight, self.gate.bias),
            "steps": self.steps(pairs, dtype),
        }

    def _only_places(self, pairs: Pairs) -> bool:
        """Whether ``bias`` does what it does here."""
        return type(self).bias is ContextualEncoding.bias

    def _compiles(self, pairs: Pairs, query: Tensor, *tensors: Tensor) -> bool:
        own = type(self)
        return (
            compiled.suits(*tensors, self.table, *(() if self.gate is None else self.gate.parameters()))
            and query.dtype != torch.float64
            and (pairs.causal or not self.between)
            and (own.gates, own.places) == (ContextualEncoding.gates, ContextualEncoding.places)
        )


def contextual_positions(gates: Tensor, pairs: Pairs, between: bool) -> Tensor:
    """Sum gates over keys: p_ij = sum of g_ik for k from j to the newest allowed key (CAPE paper, equation 2).

    Args:
        gates: (B, H, Q, L) in [0, 1], zero where not allowed; keys in time order.
        between: sum from j to the query i instead, in either direction. The same under a causal mask and in target
            attention, where the query is the newest.

    Returns:
        (B, H, Q, L) positions in [0, L].
    """
    to_newest: Tensor = _SuffixSum.apply(gates)  # type: ignore[no-untyped-call]
    if not between:
        return to_newest
    own = (pairs.offset == 0) & pairs.allowed
    from_own = (to_newest * own).sum(-1, keepdim=True)
    own_gate = (gates * own).sum(-1, keepdim=True)
    return torch.where(pairs.offset >= 0, to_newest - from_own + own_gate, from_own - to_newest + gates)


def towards_query(steps: Tensor, pairs: Pairs, between: bool) -> Tensor:
    """Steps from each key to the next newer one (B, H, 1, L) -> to the next one towards the query, (B, H, Q, L).

    One where none follows: at the newest key, unless it lies before the query, and ``between`` at the query itself.
    """
    if between:
        before = nn.functional.pad(steps[..., :-1], (1, 0))
        return torch.where(pairs.offset > 0, steps, before).masked_fill(pairs.offset == 0, 1)
    followed = nn.functional.pad(pairs.allowed[..., 1:], (0, 1)) | (pairs.offset > 0)
    return torch.where(followed, steps, 1)


def place_scores(query: Tensor, table: Tensor, position: Tensor) -> Tensor:
    """query · e[p], e interpolated between rows of the table (CAPE paper, equations 3 and 5).

    The query is scored against the rows and the scores are interpolated, which is the same and needs no vector per
    pair. Positions count keys, so rows past their number are not scored.

    Args:
        query: (B, H, Q, P). table: (T, P). position: (B, H, Q, L), at most L.

    Returns:
        (B, H, Q, L), float32 at least.
    """
    rows = table[: position.shape[-1] + 1]
    scores = query @ torch.cat([rows, rows[-1:]]).T
    return _interpolate(widen(scores), position, bounded=len(rows) > position.shape[-1])


def interpolate(table: Tensor, position: Tensor) -> Tensor:
    """Linear interpolation of scores per query.

    Args:
        table: (B, H, Q, T) score of each table row under each query.
        position: (B, H, Q, L) fractional rows; those below 0 or past T - 1 take the first or last row.

    Returns:
        (B, H, Q, L).
    """
    return _interpolate(torch.cat([table, table[..., -1:]], -1), position, bounded=False)


def _interpolate(table: Tensor, position: Tensor, bounded: bool) -> Tensor:
    """table (B, H, Q, T + 1), whose last row is there twice; ``bounded``: no position is below 0 or past T - 1."""
    interpolated: Tensor = _Interpolation.apply(table, position, bounded)  # type: ignore[no-untyped-call]
    return interpolated


# Gradients by hand, because autograd would keep and pass over several times as many tensors of the size of the logits.


class _SuffixSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.flip(-1).cumsum(-1).flip(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.cumsum(-1)


class _Interpolation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, position: Tensor, bounded: bool) -> Tensor:
        clamped = position if bounded else position.clamp(0, table.shape[-1] - 2)
        low = clamped.long()
        fraction = clamped.frac()  # a quarter of the time of clamped - low, whose types differ
        value = table.gather(-1, low)
        step = table[..., 1:].gather(-1, low).sub_(value)  # not to the ceiling, which has no gradient at integers
        result = torch.addcmul(value, step, fraction)
        if not bounded:  # below the table nothing depends on the position; past it the step is 0
            step *= position >= 0
        ctx.save_for_backward(low, fraction, step)
        ctx.rows = table.shape[-1]
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        low, fraction, step = ctx.saved_tensors
        upper = grad * fraction
        table = grad.new_zeros(*grad.shape[:-1], ctx.rows)
        table.scatter_add_(-1, low, grad - upper)
        table[..., 1:].scatter_add_(-1, low, upper)
        return table, grad * step, None


def widen(x: Tensor) -> Tensor:
    """Position arithmetic needs float32: a sum of 100 gates is off by 0.15 positions in bfloat16."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def check_span(position_span: str) -> bool:
    """True for ``between``, False for ``end``; anything else is a ValueError."""
    if position_span not in ("end", "between"):
        raise ValueError(f"position_span must be 'end' or 'between', got {position_span!r}")
    return position_span == "between"
