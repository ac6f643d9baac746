"""Absolute positions, a vector added to each item: learned or fixed waves (Vaswani et al. 2017, arXiv 1706.03762; CAPE
paper, section 3.1).

B batch, L history slots, N real items of the batch, D item dim, T table rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ctr_pe.config.schema import Positive
from ctr_pe.pe.base import About, PositionEncoding, Target, look_up, vector_table
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


class Sinusoidal(AbsolutePositions):
    """Absolute positions with P[p, 2c] = sin(p w_c), P[p, 2c + 1] = cos(p w_c), w_c = 10000^(-2c/D).

    Nothing is learned, and there is no longest history: rows are made for the slots that a batch has. An odd D has one
    more sine than cosines.

    Args:
        position_index, on_target: see :class:`~ctr_pe.pe.naive.AbsolutePositions`.
        sinusoidal_scale: factor of P. Embeddings that start small, as FuxiCTR's N(0, 1e-4), are lost beside waves of 1.

    Raises:
        ValueError: an unknown position_index, or a scale that is no number above 0.
    """

    about = About(
        paper="Vaswani 2017",
        equation="score(t + P[0], h_j + P[D_j]), P[p] = (sin p w_c, cos p w_c), w_c = 10000^(-2c/D)",
        cost="0; D per item, once",
        extrapolates="yes",
    )

    def __init__(
        self, dim: int, max_len: int, num_heads: int = 1, *, sinusoidal_scale: Positive = 1.0, **options: Any
    ) -> None:
        super().__init__(dim, max_len, num_heads, **options)
        self.scale = sinusoidal_scale

    def vectors(self, history: Tensor, positions: Positions) -> Tensor:
        sin, cos = waves(torch.arange(positions.mask.shape[1] + 1, device=history.device), self.dim, history.dtype)
        pairs = torch.stack([sin[:, : cos.shape[1]], cos], -1).flatten(1)
        return torch.cat([pairs, sin[:, cos.shape[1] :]], 1) * self.scale


def waves(position: Tensor, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """sin(p w_c) and cos(p w_c) of positions p (T,), w_c = 10000^(-2c/D): (T, D/2 rounded up), (T, D/2 rounded down).

    In ``dtype``, computed in float32 at least: in half precision the fastest waves are off after a few positions.
    """
    wave = torch.arange((dim + 1) // 2, device=position.device, dtype=torch.promote_types(dtype, torch.float32))
    angle = position.unsqueeze(-1) * 10000.0 ** (wave * (-2.0 / dim))
    return angle.sin().to(dtype), angle[:, : dim // 2].cos().to(dtype)
