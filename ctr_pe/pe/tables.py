"""Tables of vectors that encodings learn, a row per position."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ctr_pe.sequence.positions import Pairs, Where


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """Rows of a table (T, ...); an index past it takes its last row."""
    return nn.functional.embedding(index.clamp(0, table.shape[0] - 1), table)


def places(at: Where, pairs: Pairs, from_oldest: bool) -> Tensor:
    """Where queries or keys stand, as rows of a table: distances from the target (Q,), the same in every row, or
    (R, Q) places from the oldest item, 0, on, which later items do not change."""
    distance = at.distance.flatten()
    return pairs.block.lengths.unsqueeze(1) - distance if from_oldest else distance


def vector_table(rows: int, dim: int) -> nn.Parameter:
    """Learned vectors of positions (rows, dim), N(0, 0.02)."""
    return nn.Parameter(nn.init.normal_(torch.empty(rows, dim), std=0.02))


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(..., L, D) -> (..., H, L, d)."""
    return x.view(*x.shape[:-1], num_heads, x.shape[-1] // num_heads).transpose(-3, -2)
