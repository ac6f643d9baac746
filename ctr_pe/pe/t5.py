"""T5, a learned bias per bucket of offsets (Raffel et al. 2020, arXiv 1910.10683)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ctr_pe.pe.base import About
from ctr_pe.pe.contextual import widen
from ctr_pe.pe.relative import RelativeBias

BUCKETS, FAR = 32, 128


class T5(RelativeBias):
    """β_h(offset) = table[bucket(offset), h]: near offsets have a bucket each, far ones share ever wider ones.

    Where no key lies later, in causal self-attention and in target attention, all 32 buckets are for the past: one each
    for offsets 0 to 15, then 16 that grow geometrically, the last from 128 on. In bidirectional self-attention 16 are
    for the past and the present, 16 for the future, both with 8 of one offset each. Logits keep their 1/sqrt(d), which
    the T5 paper leaves out.

    Parameters: ``table (32, H)``, zeros, so training starts exactly as without positions. Shared by all layers.
    """

    about = About(
        paper="Raffel 2020",
        equation="s_j + B[bucket(D_j)]",
        cost="L, once for all rows",
        extrapolates="the last bucket, from 128 on",
    )
    past: Tensor
    sides: Tensor

    def __init__(self, dim: int, max_len: int, num_heads: int = 1) -> None:
        super().__init__(dim, max_len, num_heads)
        self.table = nn.Parameter(torch.zeros(BUCKETS, num_heads))
        self.register_buffer("past", torch.tensor(starts(BUCKETS)), persistent=False)
        self.register_buffer("sides", torch.tensor(starts(BUCKETS // 2)), persistent=False)

    def bucket(self, offset: Tensor, causal: bool) -> Tensor:
        """Row of the table for each offset, as in :meth:`curve`."""
        if causal:
            return torch.bucketize(offset, self.past, right=True)
        return torch.bucketize(offset.abs(), self.sides, right=True) + (offset < 0) * (BUCKETS // 2)

    def curve(self, offset: Tensor, causal: bool) -> Tensor:
        return widen(nn.functional.embedding(self.bucket(offset, causal), self.table)).T


def starts(buckets: int) -> list[int]:
    """First distance of every bucket but the first: 1, 2, ... buckets / 2, then geometrically up to 128.

    With m = buckets / 2, distance n ≥ m lies in bucket m + floor(m log(n / m) / log(128 / m)). In integers, because a
    rounded logarithm puts distances that begin a bucket into the one below.
    """
    m = buckets // 2
    first, n = list(range(1, m + 1)), m
    for k in range(1, m):
        while n**m * m**k < FAR**k * m**m:
            n += 1
        first.append(n)
    return first
