"""Naive absolute positions, a learned vector added to each item (Vaswani et al. 2017; CAPE paper, section 3.1).

B batch, L history slots, N real items of the batch, D item dim, T table rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ctr_pe.pe.base import About, PositionEncoding, Target
from ctr_pe.pe.tables import look_up, vector_table
from ctr_pe.sequence.jagged import per_target
from ctr_pe.sequence.positions import Positions


class AbsolutePositions(PositionEncoding):
    """t' = t + P[0], h'_j = h_j + P[D_j]: added once, before the network, so queries, keys and values all see it.

    What naive and sinusoidal positions share; they differ in P, the ``vectors``.

    Args:
        position_index: ``distance`` counts from the target (right for CTR: stable when the history is cut);
            ``rank`` counts from the oldest item, h_j + P[r_j - 1] and t + P[n] (right for next-item models).
        on_target: add to the target too.

    Raises:
        ValueError: an unknown position_index.
    """

    def __init__(
        self,
        dim: int,
        max_len: int,
        num_heads: int = 1,
        *,
        position_index: Literal["distance", "rank"] = "distance",
        on_target: bool = True,
    ) -> None:
        super().__init__(dim, max_len, num_heads)
        self.from_oldest = position_index == "rank"
        self.on_target = on_target

    def vectors(self, history: Tensor, positions: Positions) -> Tensor:
        """P (T, D) for this batch, of the history's kind. Positions past it take its last row."""
        raise NotImplementedError

    def embed(self, target: Target, history: Tensor, positions: Positions) -> tuple[Target, Tensor]:
        table = self.vectors(history, positions)
        index = positions.like(history, positions.rank - 1 if self.from_oldest else positions.distance)
        # Padding keeps what it holds: adding a position there would make empty slots look like items.
        history = history + look_up(table, index) * positions.like(history, positions.mask).unsqueeze(-1)
        if target is not None and self.on_target:
            own = positions.lengths if self.from_oldest else torch.zeros_like(positions.lengths)
            target = target + look_up(table, per_target(own, target))
        return target, history

    def next_layer(self, fresh: Callable[[], PositionEncoding]) -> PositionEncoding:
        above = fresh()  # for its sizes: positions are added once, at the input
        return PositionEncoding(above.dim, above.max_len, above.num_heads)


class Naive(AbsolutePositions):
    """Absolute positions with a learned table.

    Args:
        position_index, on_target: see :class:`AbsolutePositions`.

    Parameters: ``table (max_len + 1, D)``, N(0, 0.02). Positions past the table use its last row.
    """

    about = About(
        paper="Vaswani 2017",
        equation="score(t + P[0], h_j + P[D_j])",
        cost="0; D per item, once",
        extrapolates="last row of P",
    )

    def __init__(self, dim: int, max_len: int, num_heads: int = 1, **options: Any) -> None:
        super().__init__(dim, max_len, num_heads, **options)
        self.table = vector_table(max_len + 1, dim)

    def vectors(self, history: Tensor, positions: Positions) -> Tensor:
        return self.table
