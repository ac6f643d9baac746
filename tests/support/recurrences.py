"""Random recurrences for the tests of their operator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ctr_pe.ops.recurrence import attention_gru
from ctr_pe.ops.recurrence.reference import attention_step, recur


@dataclass(frozen=True)
class Case:
    """Steps of ``sizes`` rows. ``parts``: 3 with an update gate, 2 without. ``targets`` of each history, which share
    the terms of the items unless these are their ``own``."""

    parts: int
    state_dim: int
    sizes: tuple[int, ...]
    targets: int | None = None
    own: bool = False

    def operands(self, dtype: torch.dtype) -> list[Tensor]:
        """Item terms, attention, U, its bias."""
        torch.manual_seed(0)
        entries, width = sum(self.sizes), self.parts * self.state_dim
        axes = [] if self.targets is None else [self.targets]
        of_items = torch.randn(entries, *(axes if self.own else [1] * len(axes)), width)
        weight_hh = torch.randn(width, self.state_dim) / self.state_dim**0.5
        given = of_items, torch.rand(entries, *axes, 1), weight_hh, torch.randn(width)
        return [x.to(dtype) for x in given]

    def whole(self, of_items: Tensor, weights: Tensor, weight_hh: Tensor, bias_hh: Tensor) -> Tensor:
        return attention_gru(of_items, weights, [*self.sizes], weight_hh, bias_hh)

    def by_loop(self, of_items: Tensor, weights: Tensor, weight_hh: Tensor, bias_hh: Tensor) -> Tensor:
        return recur(attention_step(weight_hh), of_items, weights, [*self.sizes], weight_hh, bias_hh)


CASES = [
    Case(parts, *shape)
    for parts in (2, 3)
    for shape in (
        (5, (5, 4, 4, 1)),
        (1, (1,)),
        (20, (37, 33, 16, 2)),
        (40, (17, 1, 1)),
        (5, (3, 3, 1), 4),
        (5, (9, 3, 1), 4, True),
        (7, (2, 1), 1),
    )
]
