"""CAPE, context-aware position encoding for sequential recommendation (Yuan et al. 2025, WWW Companion), and variants.

Additive fusion is the "naive fusion" of its ablation (section 5.4.2, Figure 4); the others have other gates: of a
cosine, by time, all one half, or given (no paper).

B batch, N items, L keys, Q queries, H heads, D item dim, V dim of the projection, F fields of an item.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ctr_pe.config.schema import Positive, Width
from ctr_pe.pe.base import About, Contextual, PositionLinear, check_fields
from ctr_pe.pe.contextual import ContextualEncoding, widen
from ctr_pe.pe.time import ages
from ctr_pe.pe.vectors import TargetVectors, Vectors
from ctr_pe.sequence.jagged import as_numbers
from ctr_pe.sequence.positions import Items, Pairs


class CAPE(ContextualEncoding):
    """Items unlike the target push older items further away; items like it leave them where they are.

    Equations 1 to 5 of the paper, on the unit's own logits s (any score function):
    g_j = 1 - σ(s_j), p_j = sum of g_k for k = j..newest, t' = SiLU(W t + b), logits s_j + t' · e[p_j]; e between two
    rows of the table is interpolated.

    Args:
        position_dim: P, width of the position table.
        position_span: ``end`` or ``between``, see :class:`~ctr_pe.pe.contextual.ContextualEncoding`.

    Parameters: ``gate.weight (P, d)``, ``gate.bias (P,)``, shared by the heads; ``table (max_len + 1, P)``, zeros, so
    training starts as without positions. A position can reach max_len, hence the extra row.

    Raises:
        ValueError: position_dim is not a positive integer, or an unknown position_span.
    """

    about = About(
        paper="Yuan 2025",
        equation="s_j + SiLU(W t + b) · e[p_j], p_j = Σ_{k=j..n} (1 - σ(s_k))",
        cost="d P + T P + L",
        extrapolates="last row, after that many unlike items",
    )
    sign = -1

    def __init__(self, dim: int, max_len: int, num_heads: int = 1, *, position_dim: Width = 16, **options: Any) -> None:
        super().__init__(dim, max_len, num_heads, **options)
        self.gate = PositionLinear(self.head_dim, position_dim)
        self.table = nn.Parameter(torch.zeros(max_len + 1, position_dim))


class AdditiveCAPE(ContextualEncoding):
    """CAPE's positions p_j, but the vector e[p_j] is added to the item: logits sim(t, h_j + e[p_j]), values h_j.

    Target attention scores the moved items once more, whatever its score; in self-attention the score is a dot
    product, and q · (k_j + e[p_ij]) needs no vector per pair: the query is scored against the table.

    Parameters: ``table (max_len + 1, d)``, zeros, so training starts as without positions.
    """

    about = About(
        paper="Yuan 2025, ablation",
        equation="score(t, h_j + e[p_j]), p_j as in cape",
        cost="a second score; T d in self-attention",
        extrapolates="last row",
    )
    sign = -1

    def __init__(self, dim: int, max_len: int, num_heads: int = 1) -> None:
        super().__init__(dim, max_len, num_heads)
        self.scale = self.head_dim**-0.5
        self.table = nn.Parameter(torch.zeros(max_len + 1, self.head_dim))

    def bias(self, logits: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
        if not isinstance(vectors, TargetVectors):
            return super().bias(logits, vectors, pairs)
        places = pairs.block.real_pairs(logits.shape[2])
        position = self.fractional_positions(logits, pairs)[:, 0][places].clamp(max=self.max_len)
        low, table = position.detach().floor().long(), widen(self.table)
        vector = torch.lerp(table[low], table[(low + 1).clamp(max=self.max_len)], (position - low).unsqueeze(1))
        return vectors.rescore(vector.to(self.table.dtype))

    def contextual(self, pairs: Pairs) -> Contextual:
        return self.operands(pairs)


SHORTEST = 1e-5
"""A vector much shorter than this is like nothing: it has no direction, and a gradient would blow it up. Embeddings
start about 1e-3 long in FuxiCTR's recipe."""


class CosineCAPE(CAPE):
    """CAPE with gates g_j = 1 - σ(a (cos(U x, U h_j) - c)), x the target, or in self-attention the item that asks.

    CAPE makes its gates of the attention logit, which has to weigh items at the same time. Gate logits of their own are
    free to say which items count as distance. And it is informed from the start: items that share embeddings, as those
    of one category do, have a large cosine before anything is learned, however small embeddings start.

    The cosine is a weighted mean of one per field. Where one field says what is alike, its weight grows; one cosine of
    whole items would have to learn it in all directions of the others.

    x and h_j are the items as they were looked up (``pairs.items``), because states of layers have others mixed in. So
    all heads and all layers share their gate logits.

    The plain distance beside it is a chain: ``cape_constant+cape_cosine``. What this encoding gains above distance can
    be the match with the target, which a model may lack, and no context: ``benchmark/likeness.py`` is the control.

    Args:
        field_dims: width of each field of an item, side by side; None for one field.
        likeness_dim: V.
        likeness_of: ``fields``, a weighted mean of a cosine per field; ``item``, one cosine of whole items.
        position_dim, position_span: CAPE's.

    Parameters: CAPE's; ``projection (V, D)``, U or those of the fields side by side, Xavier; ``steepness ()``, a, 10;
    ``middle ()``, c, the cosine of a gate that is half open, .5 for whole items, .5 / F for fields: half of what items
    have that share one field alone; for several fields ``field_weights (F,)``, zeros, before their softmax. Stacked
    layers share these four.

    Raises:
        ValueError: likeness_dim is not a positive integer, an unknown likeness_of, field_dims that do not add up to
            dim, or what CAPE refuses.
    """

    about = About(
        paper="ours, no paper",
        equation="s_j + SiLU(W t + b) · e[p_j], p_j = Σ_{k=j..n} (1 - σ(a (mean over fields cos(U t, U h_k) - c)))",
        cost="d P + T P + L; V L for all heads and V D per item, once for all layers, V = likeness_dim = 32",
        extrapolates="last row, after that many unlike items",
    )
    shared: tuple[str, ...] = ("projection", "steepness", "middle")

    def __init__(
        self,
        dim: int,
        max_len: int,
        num_heads: int = 1,
        *,
        field_dims: Sequence[int] | None = None,
        likeness_dim: Width = 32,
        likeness_of: Literal["item", "fields"] = "fields",
        **options: Any,
    ) -> None:
        super().__init__(dim, max_len, num_heads, **options)
        self.widths = check_fields(field_dims if likeness_of == "fields" else None, dim)
        self.projection = nn.Parameter(nn.init.xavier_normal_(torch.empty(likeness_dim, dim)))
        self.steepness = nn.Parameter(torch.tensor(10.0))
        self.middle = nn.Parameter(torch.tensor(0.5 / len(self.widths)))
        self.field_weights: nn.Parameter | None = None
        if len(self.widths) > 1:
            self.field_weights = nn.Parameter(torch.zeros(len(self.widths)))
            self.shared += ("field_weights",)

    def gate_logits(self, pairs: Pairs) -> Tensor:
        """Computed once for all layers that share it."""
        return pairs.once(self.projection, self._gate_logits)

    def _gate_logits(self, pairs: Pairs) -> Tensor:
        weights = None if self.field_weights is None else widen(self.field_weights).softmax(0).sqrt()

        def directions(items: Tensor) -> Tensor:
            """(N, F V): U x of length 1, whose products are cosines, each times the root of its weight."""
            fields = (torch.split(x, self.widths, -1) for x in (items, self.projection))
            projected = [field @ projection.T for field, projection in zip(*fields, strict=True)]
            found = direction(widen(torch.stack(projected, -2)))
            return (found if weights is None else found * weights.unsqueeze(-1)).flatten(-2)

        cosine = widen(pairs.products(self.projection, directions))
        return self.steepness * (cosine - self.middle)


def direction(x: Tensor) -> Tensor:
    """Vectors x (..., V) at length 1."""
    found: Tensor = _Direction.apply(x, (x.square().sum(-1, keepdim=True) + SHORTEST**2).rsqrt())  # type: ignore[no-untyped-call]
    return found


class _Direction(torch.autograd.Function):
    """By hand, at a third of the operations of autograd's. The inverse length is an argument, so that a second
    derivative, which goes through it, is right too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, inverse: Tensor) -> Tensor:
        return x * inverse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        inverse, output = ctx.saved_tensors
        along = (grad * output).sum(-1, keepdim=True)
        return torch.addcmul(grad, along, output, value=-1) * inverse, None


class ConstantCAPE(CAPE):
    """CAPE with gates g = 1/2 in place of 1 - σ(s): p_j is half the number of items from j on, like the query or not.

    All else is CAPE's: what CAPE gains over it, it gains from context. A learned constant would move along the same
    table and could express nothing more.

    Args:
        position_dim, position_span: CAPE's.

    Parameters: CAPE's.
    """

    about = About(
        paper="–",
        equation="s_j + SiLU(W t + b) · e[p_j], p_j = D_j / 2",
        cost="as cape",
        extrapolates="last row, from distance 2 K on",
    )
    sign = 0


SURE = 40.0
"""The gate logit of an open or a closed gate: σ(-40) is 4e-18."""


class OracleCAPE(CAPE):
    """CAPE with gates that are given: 0 where the last field of item and query has one id, 1 elsewhere.

    The last field is the category where items have one. On data whose labels depend on how many unlike items lie
    between, no gates can be better: what CAPE lacks to it, CAPE has not learned.

    Args:
        field_sizes: ids of each field of an item, 0 for a field of vectors.
        position_dim, position_span: CAPE's.

    Parameters: CAPE's.

    Raises:
        ValueError: the last field has no ids, or what CAPE refuses; when called, items without ids.
    """

    about = About(
        paper="–",
        equation="s_j + SiLU(W t + b) · e[p_j], p_j = Σ_{k=j..n} [category_k ≠ category_t]",
        cost="as cape",
        extrapolates="last row, after that many unlike items",
    )

    def __init__(
        self, dim: int, max_len: int, num_heads: int = 1, *, field_sizes: Sequence[int] | None = None, **options: Any
    ) -> None:
        super().__init__(dim, max_len, num_heads, **options)
        if field_sizes is not None and not field_sizes[-1]:
            raise ValueError(f"the last field of an item must have ids, got field_sizes={list(field_sizes)}")

    def gate_logits(self, pairs: Pairs) -> Tensor:
        query, keys = (of("category", category) for of in (pairs.of_queries, pairs.of_keys))
        alike = query.unsqueeze(-1) == keys.unsqueeze(-2)
        return (SURE * (2 * as_numbers(alike) - 1)).unsqueeze(1)


def category(items: Items) -> Tensor:
    """Ids of the last field.

    Raises:
        ValueError: items without ids.
    """
    if not items.ids:
        raise ValueError("cape_oracle needs ids: give the unit positions.target_pairs(Items(embedding, ids), target)")
    return items.ids[-1]


class TimeCAPE(CAPE):
    """CAPE with gates g_ij (1 - exp(-Δ_j / τ_h)), Δ_j the seconds between item j and the next one towards the query.

    Items of one session are seconds or minutes apart and add next to nothing, a pause of days adds a whole gate: a
    session counts as one item. In target attention the next item after the newest is the target, at age 0. Where no
    item follows, as after the query itself under a causal mask, the gate counts in full. If all pauses are long
    against τ, this is CAPE exactly. An event that seems to follow the next one has Δ = 0.

    Args:
        session_gap: τ at the start, in seconds.
        position_dim, position_span: CAPE's.

    Parameters: those of CAPE, and ``stretch (H,)``, zeros: τ_h is session_gap times its exponential.

    Raises:
        ValueError: session_gap is not a positive number, or what CAPE refuses; when called, positions without ages.
    """

    about = About(
        paper="–",
        equation="s_j + SiLU(W t + b) · e[p_j], p_j = Σ_{k=j..n} (1 - σ(s_k)) (1 - exp(-(age_k - age_{k+1}) / τ))",
        cost="d P + T P + 2 L",
        extrapolates="last row of e",
        needs_age=True,
    )

    def __init__(
        self, dim: int, max_len: int, num_heads: int = 1, *, session_gap: Positive = 3600.0, **options: Any
    ) -> None:
        super().__init__(dim, max_len, num_heads, **options)
        self.session_gap = session_gap
        self.stretch = nn.Parameter(torch.zeros(num_heads))

    def gate_weights(self, pairs: Pairs) -> Tensor:
        """(B, H, L) in [0, 1]: the part of a gate that counts between each key and the next newer one."""
        gap = widen(self.stretch).exp().view(-1, 1) * -self.session_gap
        return -torch.expm1(pairs.once("pauses", pauses) / gap)


def pauses(pairs: Pairs) -> Tensor:
    """(B, 1, L) int64: seconds between each key and the next newer one."""
    age = ages(pairs.key, "cape_time")
    return (age - nn.functional.pad(age[..., 1:], (0, 1))).clamp(min=0)
