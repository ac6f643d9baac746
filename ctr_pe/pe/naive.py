"""Naive absolute positions, a learned vector added to each item (Vaswani et al. 2017; CAPE paper, section 3.1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ctr_pe.pe.base import PositionEncoding
from ctr_pe.positions import Positions


class Naive(PositionEncoding):
    """t' = t + P[0], h'_j = h_j + P[D_j]: added once, before the network, so queries, keys and values all see it.

    Args:
        position_index: ``distance`` counts from the target (right for CTR: stable when the history is cut);
            ``rank`` counts from the oldest item, h_j + P[r_j - 1] and t + P[n] (right for next-item models).
        on_target: add to the target too.

    Parameters: ``table (max_len + 1, D)``, N(0, 0.02). Positions past the table use its last row.

    Raises:
        ValueError: an unknown position_index.
    """

    def __init__(
        self,
        dim: int,
        max_len: int,
        num_heads: int = 1,
        *,
        position_index: str = "distance",
        on_target: bool = True,
    ) -> None:
        super().__init__(dim, max_len, num_heads)
        if position_index not in ("distance", "rank"):
            raise ValueError(f"position_index must be 'distance' or 'rank', got {position_index!r}")
        self.from_oldest = position_index == "rank"
        self.on_target = on_target
        self.table = nn.Parameter(torch.empty(max_len + 1, dim))
        nn.init.normal_(self.table, std=0.02)

    def embed(self, target: Tensor | None, history: Tensor, positions: Positions) -> tuple[Tensor | None, Tensor]:
        index = positions.of(history, positions.rank - 1 if self.from_oldest else positions.distance)
        # Padding keeps what it holds: adding a position there would make empty slots look like items.
        history = history + self._row(index) * positions.of(history, positions.mask).unsqueeze(-1)
        if target is not None and self.on_target:
            target = target + self._row(positions.count if self.from_oldest else torch.zeros_like(positions.count))
        return target, history

    def next_layer(self, fresh: Callable[[], PositionEncoding]) -> PositionEncoding:
        above = fresh()  # for its sizes: positions are added once, at the input
        return PositionEncoding(above.dim, above.max_len, above.num_heads)

    def _row(self, index: Tensor) -> Tensor:
        return nn.functional.embedding(index.clamp(0, self.max_len), self.table)
