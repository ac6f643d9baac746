"""Dropout whose mask is a hash of one random number, computed in a fraction of torch's time on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ctr_pe.ops import step_seeds
from ctr_pe.ops.dropout import CHOICES, dropped, factor_of, mask_on

HERE = torch.device("cpu")


class Dropout(nn.Dropout):
    """As ``torch.nn.Dropout``, with the rate rounded to a multiple of 2^-16; what is kept is scaled accordingly.

    ``fast``: False for torch's own random numbers, unless a step has seeds (:mod:`ctr_pe.ops.step_seeds`).
    """

    def __init__(self, p: float = 0.5, fast: bool = True) -> None:
        super().__init__(p)
        self.fast = fast

    def forward(self, x: Tensor) -> Tensor:
        """Any shape and floating type."""
        if not self.is_active:
            return x
        if step_seeds.active() is None and not (self.fast and x.is_cpu):
            return super().forward(x)
        return x * self.draw(x.shape, x.device).to(x.dtype).mul_(self.factor)

    @property
    def is_active(self) -> bool:
        """Whether anything is dropped now."""
        return self.training and dropped(self.p) > 0

    @property
    def factor(self) -> float:
        """Of what is kept."""
        return factor_of(self.p)

    def seed(self) -> Tensor:
        """(1,) int64: the step's next seed, or on the CPU one number of torch's random stream, or any where all is
        dropped."""
        if (seeds := step_seeds.active()) is not None:
            return seeds.next()
        seed = torch.empty(1, dtype=torch.int64)
        return seed.random_(-(2**63), None) if dropped(self.p) < CHOICES else seed

    def draw(self, shape: torch.Size, device: torch.device = HERE) -> Tensor:
        """1 for what is kept, 0 elsewhere, int16."""
        return mask_on(device, self.seed(), shape, self.p)
