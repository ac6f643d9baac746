"""Biases by offset: T5 (Raffel et al. 2020, arXiv 1910.10683), ALiBi (Press et al. 2022, arXiv 2108.12409) and KERPLE
(Chi et al. 2022, arXiv 2205.09921).

B batch, L keys, Q queries, H heads, K offsets.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ctr_pe.config.schema import Positive
from ctr_pe.pe.base import About, PositionEncoding
from ctr_pe.pe.contextual import widen
from ctr_pe.pe.vectors import Vectors
from ctr_pe.sequence.positions import Pairs


class RelativeBias(PositionEncoding):
    """Logits s_ij + β_h(r_i - r_j): one number per head and offset, whatever the items are.

    The same for any score function and shared by all layers with the same heads.
    """

    shares_all = True

    def curve(self, offset: Tensor, causal: bool) -> Tensor:
        """β (H, K) at offsets (K,) int64: items that the key lies before the query, negative for later keys.

        In float32 at least, whatever the parameters are. ``causal``: no key lies later.
        """
        raise NotImplementedError

    def bias(self, logits: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
        return logits + self._by_query(pairs)

    def plain_bias(self, vectors: Vectors, pairs: Pairs) -> Tensor | None:
        return self._by_query(pairs) if self._has_hooks_of(RelativeBias) else None

    def _by_query(self, pairs: Pairs) -> Tensor:
        """β (H, Q, L)."""
        offset = pairs.offset[0, 0]  # (Q, L), of every row, and one less from key to key
        largest = offset.shape[1] - pairs.query.distance[0, 0, -1]  # of the last query and the oldest key
        distinct = largest - torch.arange(sum(offset.shape) - 1, device=offset.device)  # from the largest on
        place = largest - offset  # among the distinct ones
        curve = self.curve(distinct, pairs.causal)
        return torch.unflatten(curve.index_select(-1, place.flatten()), -1, offset.shape)


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


PUBLISHED = 2.0**-8


class ALiBi(RelativeBias):
    """β_h(offset) = -m_h |offset|, m_h = 2^(-8h/H) for h = 1..H. Nothing is learned.

    Where H is no power of two: the slopes for the power below, then every other of those for the power above.

    Args:
        alibi_slope: m in m_h = m^(h/H), so the slope itself where there is one head. The published 2^-8 is almost flat
            over the history of one user.

    Buffer: ``slopes (H,)``.

    Raises:
        ValueError: alibi_slope is not a positive number.
    """

    about = About(paper="Press 2022", equation="s_j - m D_j", cost="L, once for all rows", extrapolates="yes")
    slopes: Tensor

    def __init__(self, dim: int, max_len: int, num_heads: int = 1, *, alibi_slope: Positive = PUBLISHED) -> None:
        super().__init__(dim, max_len, num_heads)
        slopes = slope_per_head(num_heads, alibi_slope)
        self.register_buffer("slopes", torch.tensor(slopes))

    def curve(self, offset: Tensor, causal: bool) -> Tensor:
        return -widen(self.slopes).unsqueeze(1) * offset.abs()


def slope_per_head(heads: int, last: float = PUBLISHED) -> list[float]:
    """Slopes of the heads, the last of a power of two being ``last``."""
    power = 2 ** (heads.bit_length() - 1)
    of_power = [last ** (h / power) for h in range(1, power + 1)]
    return of_power + [last ** (h / (2 * power)) for h in range(1, 2 * (heads - power), 2)]


SMALLEST = 1e-2
"""The authors' lower bound; here of the initial values only."""


class KerpleLog(RelativeBias):
    """β_h(offset) = -a_h log(1 + b_h |offset|) with learned a_h, b_h > 0.

    Parameters, shared by all layers: ``r1 (H,)``, ``r2 (H,)``, with a = softplus(r1), b = softplus(r2): clamped at a
    bound, as the authors have it, they would stop learning there. They are drawn so that a ~ U(0, 2) and b ~ U(0, 1).
    """

    about = About(paper="Chi 2022", equation="s_j - a log(1 + b D_j)", cost="L, once for all rows", extrapolates="yes")

    def __init__(self, dim: int, max_len: int, num_heads: int = 1) -> None:
        super().__init__(dim, max_len, num_heads)
        self.r1 = nn.Parameter(_before_softplus(2.0 * torch.rand(num_heads)))
        self.r2 = nn.Parameter(_before_softplus(torch.rand(num_heads)))

    def curve(self, offset: Tensor, causal: bool) -> Tensor:
        a, b = nn.functional.softplus(widen(self.r1)), nn.functional.softplus(widen(self.r2))
        return -a.unsqueeze(1) * torch.log1p(b.unsqueeze(1) * offset.abs())


class KerplePower(RelativeBias):
    """β_h(offset) = -a_h |offset|^b_h with learned a_h > 0 and 0 < b_h < 2: beyond 2 it is no kernel.

    Parameters, shared by all layers: ``r1 (H,)``, ``r2 (H,)``, with a = softplus(r1), b = 2 σ(r2). They are drawn so
    that a ~ U(0, 1) and b ~ U(0, 2).
    """

    about = About(
        paper="Chi 2022", equation="s_j - a D_j^b, 0 < b < 2", cost="L, once for all rows", extrapolates="yes"
    )

    def __init__(self, dim: int, max_len: int, num_heads: int = 1) -> None:
        super().__init__(dim, max_len, num_heads)
        self.r1 = nn.Parameter(_before_softplus(torch.rand(num_heads)))
        self.r2 = nn.Parameter(torch.rand(num_heads).logit(SMALLEST))

    def curve(self, offset: Tensor, causal: bool) -> Tensor:
        a, b = nn.functional.softplus(widen(self.r1)), 2 * torch.sigmoid(widen(self.r2))
        distance = offset.abs()
        # 0^b is 0, but its gradient is 0 · log 0.
        power = distance.clamp(min=1).to(b.dtype) ** b.unsqueeze(1) * (distance > 0)
        return -a.unsqueeze(1) * power


def _before_softplus(x: Tensor) -> Tensor:
    return x.clamp(min=SMALLEST).expm1().log()
