"""Time bias: a power law and a learned step function of the time between events (no paper; in the spirit of HSTU).

B batch, L history slots, Q queries, H heads.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ctr_pe import compiled
from ctr_pe.pe.base import About, PositionEncoding
from ctr_pe.pe.contextual import widen
from ctr_pe.pe.vectors import Vectors
from ctr_pe.positions import Pairs, Where

BUCKETS = 32
"""Each spans twice the time of the one before, from one second on: the last begins at 34 years."""


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

    def __init__(self, dim: int, max_len: int, num_heads: int = 1, *, time_unit: float = 3600.0) -> None:
        super().__init__(dim, max_len, num_heads)
        self.unit = check_seconds("time_unit", time_unit)
        self.amount = nn.Parameter(torch.zeros(num_heads))
        self.decay = nn.Parameter(torch.full((num_heads,), math.log(math.e - 1)))
        self.table = nn.Parameter(torch.zeros(BUCKETS, num_heads))

    def bias(self, logits: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
        wide = widen(logits)
        of_keys = ages(pairs.key, "time_bias")
        of_query = ages(pairs.query, "time_bias").expand(len(of_keys), 1, -1)
        decay = nn.functional.softplus(self.decay)
        if compiled.suits(wide, self.amount, decay, self.table):
            faded: Tensor = _Faded.apply(wide, self.amount, decay, self.table.T, of_query, of_keys, self.unit)  # type: ignore[no-untyped-call]
            return faded
        seconds = (of_keys.unsqueeze(-2) - of_query.unsqueeze(-1)).abs()
        fading = torch.exp(-decay.to(wide.dtype).view(-1, 1, 1) * torch.log1p(seconds.to(wide.dtype) / self.unit))
        # The exponent of a float64 tells the bucket exactly; a logarithm would round.
        bucket = torch.frexp(seconds.double()).exponent.clamp(max=BUCKETS - 1).long()
        # Gathered from a table per query: the gradient of a plain lookup of all pairs takes ten times as long.
        tables = self.table.to(wide.dtype).T.unsqueeze(1).expand(len(bucket), -1, bucket.shape[2], -1)
        steps = tables.gather(-1, bucket.expand(-1, self.num_heads, -1, -1))
        return wide + self.amount.to(wide.dtype).view(-1, 1, 1) * fading + steps

    def next_layer(self, fresh: Callable[[], PositionEncoding]) -> PositionEncoding:
        above = fresh()
        return self if (above.dim, above.num_heads) == (self.dim, self.num_heads) else above


class _Input(ctypes.Structure):
    """The structure ``Fading`` in compiled/fading.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("B", "H", "Q", "L")),
        *((name, ctypes.c_void_p) for name in ("logits", "query", "key", "amount", "decay", "table")),
        ("unit", ctypes.c_float),
    )


class _Faded(torch.autograd.Function):
    """logits (B, H, Q, L), amount (H,), decay b (H,), table (H, 32), ages of queries (B, 1, Q) and keys (B, 1, L)."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        *tensors, unit = given
        logits, amount, decay, table, *places = (x.contiguous() for x in tensors)
        out, room = torch.empty_like(logits), _room(logits)
        ctx.unit, ctx.shape = unit, logits.shape
        ctx.save_for_backward(amount, decay, table, *places)
        call = _input(logits.shape, logits, amount, decay, table, *places, unit)
        compiled.run("fade_forward", ctypes.byref(call), out.data_ptr(), room.data_ptr())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad, (amount, decay, table, *places) = grad.contiguous(), ctx.saved_tensors
        sums, room = grad.new_zeros(torch.get_num_threads(), len(amount), BUCKETS + 2, 16), _room(grad)
        call = _input(ctx.shape, None, amount, decay, table, *places, ctx.unit)
        compiled.run("fade_backward", ctypes.byref(call), *map(compiled.address, (grad, sums, room)))
        summed = sums.sum((0, 3))
        return grad, summed[:, BUCKETS], -amount * summed[:, BUCKETS + 1], summed[:, :BUCKETS], None, None, None


def _input(shape: torch.Size, logits: Tensor | None, *given: Any) -> _Input:
    amount, decay, table, query, key, unit = given
    return _Input(*shape, *map(compiled.address, (logits, query, key, amount, decay, table)), unit)


def _room(logits: Tensor) -> Tensor:
    """For each thread, to work in."""
    return logits.new_zeros(torch.get_num_threads(), 2, -(-logits.shape[-1] // 16) * 16)


def ages(at: Where, encoding: str) -> Tensor:
    """Seconds from the events to the request, int64.

    Raises:
        ValueError: positions without ages.
    """
    if at.age is None:
        raise ValueError(f"{encoding} needs the ages of the items: Positions.from_mask(mask, age)")
    return at.age


def check_seconds(option: str, value: float) -> float:
    """The value, or a ValueError if it is not a positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{option} must be a positive number of seconds, got {value!r}")
    return float(value)
