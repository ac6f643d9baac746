"""RoPE by order and by time: planes are rotated by the distance of an item and by its age (no paper; after RoPE)."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, Literal

import torch
from torch import Tensor

from ctr_pe.config.schema import Positive
from ctr_pe.pe.base import About
from ctr_pe.pe.rope import RoPE
from ctr_pe.pe.time_bias import ages
from ctr_pe.sequence.positions import Where


class TimeRoPE(RoPE):
    """Rotates planes of coordinates by -distance · f_c as RoPE does, and by -2π age / T_c, once around in T_c seconds.

    The periods T_c = S (L/S)^((c + 1/2) / P), c = 0..P-1, go from minutes to months, so that some plane tells any two
    times apart. A dot product depends on offsets in order and on differences in time. The target has distance and age
    0 and is not rotated, so this too serves any score function of target attention.

    Args:
        rope_time: ``split``: the first half of the planes, rounded down, is rotated by order, a RoPE half as wide;
            the others by time. ``sum``: every plane by both.
        shortest_period, longest_period: S and L, in seconds.
        rope_base, rope_layout: RoPE's.

    Raises:
        ValueError: an unknown rope_time, periods that are not positive or not in this order, or what RoPE refuses;
            when called, positions without ages.
    """

    about = About(paper="–", equation="score(t, R(-D_j, -age_j) h_j)", cost="2 L d", extrapolates="yes", needs_age=True)

    def __init__(
        self,
        dim: int,
        max_len: int,
        num_heads: int = 1,
        *,
        rope_time: Literal["split", "sum"] = "split",
        shortest_period: Positive = 60.0,
        longest_period: Positive = 365 * 86400.0,
        **options: Any,
    ) -> None:
        super().__init__(dim, max_len, num_heads, **options)
        self.shortest, self.longest = shortest_period, longest_period
        if shortest_period > longest_period:
            raise ValueError(f"shortest_period={shortest_period!r} exceeds longest_period={longest_period!r}")
        self.summed = rope_time == "sum"
        planes = self.head_dim // 2
        self.width_by_order = self.head_dim if self.summed else 2 * (planes // 2)
        self.planes_by_time = planes if self.summed else planes - planes // 2

    @property
    def angle_name(self) -> Hashable:
        return TimeRoPE, self.base, self.head_dim, self.summed, self.shortest, self.longest

    def angles(self, at: Where, dtype: torch.dtype) -> Tensor:
        by_order = self.by_order(at, dtype, self.width_by_order)
        by_time = self._by_time(ages(at, "time_rope")).to(dtype)
        if self.summed:
            return by_order + by_time
        return torch.cat((by_order.expand(*by_time.shape[:-1], -1), by_time), dim=-1)

    def _by_time(self, age: Tensor) -> Tensor:
        """(..., planes), in float64 up to the fraction of a period: years in seconds have more digits than float32."""
        plane = torch.arange(self.planes_by_time, device=age.device, dtype=torch.float64)
        period = self.shortest * (self.longest / self.shortest) ** ((plane + 0.5) / self.planes_by_time)
        turns = age.unsqueeze(-1) / period
        return (turns - turns.floor()) * (-2 * math.pi)
