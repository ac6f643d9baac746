"""CAPE whose gates know which items are of one category: a control for data made so (no paper; after CAPE).

B batch, Q queries, L keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ctr_pe.pe.base import About
from ctr_pe.pe.cape import CAPE
from ctr_pe.sequence.jagged import as_numbers
from ctr_pe.sequence.positions import Items, Pairs

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
