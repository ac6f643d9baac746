"""The vectors of an attention, which hooks get beside :class:`~ctr_pe.sequence.positions.Pairs`: queries, keys and
values.

B batch, N real items of the batch, Q queries, L keys, H heads, D item dim, d = D / H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ctr_pe.sequence.jagged import Jagged
from ctr_pe.sequence.positions import Pairs


@dataclass(frozen=True, eq=False)
class Vectors:
    """Queries and keys as before ``rotate``, and values.

    ``query`` (B, H, Q, d). ``scale``: factor of the unit's products, logit = scale · query · key; 1 for scores of
    another kind.
    """

    query: Tensor
    scale: float

    @property
    def keys(self) -> Tensor:
        """(B, H, L, d)."""
        raise NotImplementedError

    @property
    def values(self) -> Tensor:
        """(B, H, L, d), zero at padding; in target attention the keys."""
        return self.keys

    def key_products(self, weight: Tensor) -> Tensor:
        """weight (H, d) -> its products with the keys of its head (B, H, L)."""
        raise NotImplementedError

    def in_key_space(self, query: Tensor) -> Tensor:
        """query (..., d) -> the vector that the score multiplies keys with: W t for a bilinear score hᵀ W t."""
        return query


@dataclass(frozen=True, eq=False)
class ItemVectors(Vectors):
    """Of self-attention: projections of the items, ``key`` and ``value`` (B, H, L, d)."""

    key: Tensor
    value: Tensor

    @property
    def keys(self) -> Tensor:
        return self.key

    @property
    def values(self) -> Tensor:
        return self.value

    def key_products(self, weight: Tensor) -> Tensor:
        return (self.key @ weight.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True, eq=False)
class TargetVectors(Vectors):
    """Of target attention, whose one query is the target (B, 1, 1, D), and whose items are keys and values.

    ``packed`` (N, D): the items, which are padded only when asked for. ``rescore``: gives the logits (B, 1, 1, L) again
    with vectors (N, D) added to the items. ``project``: see :meth:`in_key_space`, None for other scores.
    """

    packed: Tensor
    block: Jagged
    rescore: Callable[[Tensor], Tensor]
    project: Callable[[Tensor], Tensor] | None = None

    @property
    def keys(self) -> Tensor:
        return self.block.pad(self.packed).unsqueeze(1)

    def key_products(self, weight: Tensor) -> Tensor:
        return self.block.pad(self.packed @ weight[0]).unsqueeze(1)

    def in_key_space(self, query: Tensor) -> Tensor:
        return query if self.project is None else self.project(query)


@dataclass(frozen=True, eq=False)
class Attended:
    """One attention over a block, after the fact: what losses are computed from.

    ``logits`` (B, H, Q, L): after ``bias``. ``pooled`` (B, H, Q, d): what the unit gives; undefined at queries that are
    padding, which ``pairs.block.pack`` leaves out.
    """

    logits: Tensor
    pooled: Tensor
    vectors: Vectors
    pairs: Pairs
