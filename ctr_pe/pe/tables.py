"""Tables of vectors that encodings learn, a row per position."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """Rows of a table (T, ...); an index past it takes its last row."""
    return nn.functional.embedding(index.clamp(0, table.shape[0] - 1), table)


def vector_table(rows: int, dim: int) -> nn.Parameter:
    """Learned vectors of positions (rows, dim), N(0, 0.02)."""
    return nn.Parameter(nn.init.normal_(torch.empty(rows, dim), std=0.02))


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(..., L, D) -> (..., H, L, d)."""
    return x.view(*x.shape[:-1], num_heads, x.shape[-1] // num_heads).transpose(-3, -2)
