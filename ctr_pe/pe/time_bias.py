"""Time bias: a power law and a learned step function of the time between events (no paper; in the spirit of HSTU).

B batch, L history slots, Q queries, H heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ctr_pe.config.schema import Positive
from ctr_pe.ops.time_decay import BUCKETS, time_decay_bias
from ctr_pe.pe.base import About, PositionEncoding
from ctr_pe.pe.vectors import Vectors
from ctr_pe.sequence.positions import Pairs, Where


class TimeBias(PositionEncoding):
    """Logits s_ij + a_h (1 + Δ/u)^(-b_h) + B[bucket(Δ), h], with Δ the seconds between the events, whichever is older.

    In target attention Δ is the age of the item. Bucket 0 holds Δ = 0, bucket k the times from 2^(k-1) to 2^k seconds.
    The power law says what the times between have in common, the buckets what is particular to a minute or a day.

    Args:
        time_unit: u, in seconds.

    Parameters, per head, shared by stacked layers of as many heads: ``amount (H,)`` a, zeros; ``decay (H,)``, of which
    b is the softplus, 1 at first; ``table (32, H)`` B, zeros. Training starts exactly as without positions.

    Raises:
        ValueError: time_unit is not a positive number; when called, positions without ages.
    """

    about = About(
        paper="–",
        equation="s_j + a (1 + age_j / u)^(-b) + B[bucket(age_j)]",
        cost="3 L",
        extrapolates="yes, by time",
        needs_age=True,
    )
    shares_all = True

    def __init__(self, dim: int, max_len: int, num_heads: int = 1, *, time_unit: Positive = 3600.0) -> None:
        super().__init__(dim, max_len, num_heads)
        self.unit = time_unit
        self.amount = nn.Parameter(torch.zeros(num_heads))
        self.decay = nn.Parameter(torch.full((num_heads,), math.log(math.e - 1)))
        self.table = nn.Parameter(torch.zeros(BUCKETS, num_heads))

    def bias(self, logits: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
        decay = nn.functional.softplus(self.decay)
        of_query, of_keys = ages(pairs.query, "time_bias"), ages(pairs.key, "time_bias")
        of_query = of_query.expand(logits.shape[0], 1, logits.shape[2])
        return time_decay_bias(logits, self.amount, decay, self.table, of_query, of_keys, self.unit)


def ages(at: Where, encoding: str) -> Tensor:
    """Seconds from the events to the request, int64.

    Raises:
        ValueError: positions without ages.
    """
    if at.age is None:
        raise ValueError(f"{encoding} needs the ages of the items: Positions.from_mask(mask, age)")
    return at.age
