"""Where each item lies, counted from the target. The only place that looks at padding.

B batch, L history slots, Q queries, N real items of the batch.

Histories come as (B, L, D) with padding anywhere, or packed as (N, D): the real items alone, row by row. Most slots of
a batch are padding, so models look up, score and pool packed items.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Places:
    """Distances (and ages) of queries or keys; the axes broadcast against the leading axes of their vectors.

    ``distance`` int64: 0 = the target, 1 = the most recent item, n = the oldest, 0 also at padding (which is masked).
    ``age`` int64: seconds from the event to the request, or None when the data have no times.
    """

    distance: Tensor
    age: Tensor | None = None


@dataclass(frozen=True)
class Pairs:
    """The (query, key) pairs of one attention: who stands where and who may look at whom.

    ``query`` places (B, 1, Q), ``key`` places (B, 1, L): the axis of one is for the heads.
    ``allowed`` (B, 1, Q, L) bool: True where a real query may attend to a real key.
    ``rescore``: in target attention, gives the logits (B, 1, 1, L) again with vectors (N, D) added to the packed keys.
    """

    query: Places
    key: Places
    allowed: Tensor
    rescore: Callable[[Tensor], Tensor] | None = None

    @cached_property
    def offset(self) -> Tensor:
        """(B, 1, Q, L) int64: how many places the key lies before the query; negative for later keys."""
        return self.key.distance.unsqueeze(-2) - self.query.distance.unsqueeze(-1)


@dataclass(frozen=True)
class Positions:
    """Positions of a batch of histories, independent of the amount and the side of their padding.

    ``distance`` (B, L) int64: 1 = most recent real item, n = oldest of n, 0 = padding.
    ``mask`` (B, L) bool: True = real item. Real items are in time order, oldest first; padding may lie anywhere.
    ``age`` (B, L) int64 or None: seconds from the event to the request, 0 at padding.
    """

    distance: Tensor
    mask: Tensor
    age: Tensor | None = None

    @classmethod
    def from_mask(cls, mask: Tensor, age: Tensor | None = None) -> Positions:
        """Count positions from a mask.

        Args:
            mask: (B, L) bool, True = real item, any padding side.
            age: (B, L) integers, seconds from each event to the request.

        Raises:
            ValueError: mask is not a (B, L) bool tensor, or age is not an integer tensor of its shape.
        """
        if mask.dim() != 2 or mask.dtype != torch.bool:
            raise ValueError(f"mask must be a (B, L) bool tensor, got {tuple(mask.shape)} {mask.dtype}")
        if age is not None:
            if age.shape != mask.shape or age.is_floating_point() or age.is_complex() or age.dtype == torch.bool:
                raise ValueError(
                    f"age must be integers (seconds) of shape {tuple(mask.shape)}, got {tuple(age.shape)} {age.dtype}"
                )
            age = age.long().masked_fill(~mask, 0)
        newer = mask.sum(1, keepdim=True) - mask.cumsum(1)
        return cls(distance=(newer + 1).masked_fill(~mask, 0), mask=mask, age=age)

    def with_target(self) -> Positions:
        """Positions of the sequence [history; target], one slot more: the target is its newest item, of age 0."""
        age = None if self.age is None else torch.nn.functional.pad(self.age, (0, 1))
        return Positions.from_mask(torch.nn.functional.pad(self.mask, (0, 1), value=True), age)

    @cached_property
    def real(self) -> tuple[Tensor, Tensor]:
        """Row and slot (N,), (N,) int64 of every real item, row by row."""
        rows, slots = self.mask.nonzero(as_tuple=True)
        return rows, slots

    def pack(self, x: Tensor) -> Tensor:
        """(B, L, ...) -> (N, ...): the real items."""
        return x[self.real]

    def spread(self, packed: Tensor) -> Tensor:
        """(N, ...) -> (B, L, ...): real items in their slots, zero at padding."""
        empty = packed.new_zeros(*self.mask.shape, *packed.shape[1:])
        return empty.index_put(self.real, packed)

    def of(self, history: Tensor, per_slot: Tensor) -> Tensor:
        """Values per slot (B, L) in the layout of ``history``: as they are for (B, L, D), packed for (N, D)."""
        return per_slot if history.dim() == 3 else self.pack(per_slot)

    @property
    def count(self) -> Tensor:
        """(B,) int64: real items per row."""
        return self.mask.sum(1)

    @property
    def rank(self) -> Tensor:
        """(B, L) int64: 1 = oldest real item, n = most recent, 0 = padding."""
        return (self.count.unsqueeze(1) + 1 - self.distance).masked_fill(~self.mask, 0)

    def from_target(self) -> Pairs:
        """One query, the target at distance 0, over the whole history."""
        here = self.distance.new_zeros(self.distance.shape[0], 1, 1)
        query = Places(here, None if self.age is None else here)
        return Pairs(query, self._keys(), self.mask[:, None, None, :])

    def from_items(self, causal: bool) -> Pairs:
        """Every item is a query over all items, or with ``causal`` over itself and the items before it."""
        keys = self._keys()
        allowed = self.mask[:, None, :, None] & self.mask[:, None, None, :]
        pairs = Pairs(keys, keys, allowed)
        return Pairs(keys, keys, allowed & (pairs.offset >= 0)) if causal else pairs

    def _keys(self) -> Places:
        return Places(self.distance.unsqueeze(1), None if self.age is None else self.age.unsqueeze(1))
