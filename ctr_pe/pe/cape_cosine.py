"""CAPE whose gates have logits of their own, a cosine of projected item embeddings (ours, no paper; after CAPE).

B batch, N items, Q queries, L keys, D item dim, V dim of the projection, F fields of an item.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ctr_pe.config.schema import Width
from ctr_pe.pe.base import About, PositionEncoding, check_fields
from ctr_pe.pe.cape import CAPE
from ctr_pe.pe.contextual import widen
from ctr_pe.sequence.positions import Pairs
from ctr_pe.utils.autograd import apply

SHORTEST = 1e-5
"""A vector much shorter than this is like nothing: it has no direction, and a gradient would blow it up. Embeddings
start about 1e-3 long in FuxiCTR's recipe."""


class CosineGates(PositionEncoding):
    """Gate logits a (cos(U x, U h_j) - c) of the items as they were looked up: what ``cape_cosine`` and ``likeness``
    share. A subclass calls :meth:`add_gates` after its other parameters.
    """

    shared: tuple[str, ...] = ("projection", "steepness", "middle")

    def add_gates(
        self, field_dims: Sequence[int] | None, likeness_dim: int, likeness_of: Literal["item", "fields"]
    ) -> None:
        """Make the parameters, as :class:`CosineCAPE` describes them."""
        fields = check_fields(field_dims, self.dim)
        self.widths = fields if likeness_of == "fields" else [sum(fields)]
        self.projection = nn.Parameter(nn.init.xavier_normal_(torch.empty(likeness_dim, sum(fields))))
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


class CosineCAPE(CosineGates, CAPE):
    """CAPE with gates g_j = 1 - σ(a (cos(U x, U h_j) - c)), x the target, or in self-attention the item that asks.

    CAPE makes its gates of the attention logit, which has to weigh items at the same time. Gate logits of their own are
    free to say which items count as distance. And it is informed from the start: items that share embeddings, as those
    of one category do, have a large cosine before anything is learned, however small embeddings start.

    The cosine is a weighted mean of one per field. Where one field says what is alike, its weight grows; one cosine of
    whole items would have to learn it in all directions of the others.

    x and h_j are the items as they were looked up (``pairs.items``), because states of layers have others mixed in. So
    all heads and all layers share their gate logits.

    The plain distance beside it is a chain: ``cape_constant+cape_cosine``. What this encoding gains above distance can
    be the match with the target, which a model may lack, and no context: ``cape_constant+likeness`` is the control.

    Args:
        field_dims: width of each field of an item as looked up, side by side; None for one field. The attention may
            be among ids alone, as wide as the first.
        likeness_dim: V.
        likeness_of: ``fields``, a weighted mean of a cosine per field; ``item``, one cosine of whole items.
        position_dim, position_span: CAPE's.

    Parameters: CAPE's; ``projection (V, D)``, U or those of the fields side by side, D wide together, Xavier;
    ``steepness ()``, a, 10; ``middle ()``, c, the cosine of a gate that is half open, .5 for whole items, .5 / F for
    fields: half of what items have that share one field alone; for several fields ``field_weights (F,)``, zeros, before
    their softmax. Stacked layers share these four.

    Raises:
        ValueError: likeness_dim is not a positive integer, an unknown likeness_of, field_dims of which neither all
            nor the first are dim wide, or what CAPE refuses.
    """

    about = About(
        paper="ours, no paper",
        equation="s_j + SiLU(W t + b) · e[p_j], p_j = Σ_{k=j..n} (1 - σ(a (mean over fields cos(U t, U h_k) - c)))",
        cost="d P + T P + L; V L for all heads and V D per item, once for all layers, V = likeness_dim = 32",
        extrapolates="last row, after that many unlike items",
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
        **options: Any,
    ) -> None:
        super().__init__(dim, max_len, num_heads, **options)
        self.add_gates(field_dims, likeness_dim, likeness_of)


def direction(x: Tensor) -> Tensor:
    """Vectors x (..., V) at length 1."""
    found: Tensor = apply(_Direction, x, (x.square().sum(-1, keepdim=True) + SHORTEST**2).rsqrt())
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
