"""Dropout whose mask takes a fifth of the time on a CPU: torch draws a random number per entry, this one per four."""

from __future__ import annotations

import torch
from torch import Tensor, nn

CHOICES = 2**16


class Dropout(nn.Dropout):
    """As ``torch.nn.Dropout``, with the rate rounded to a multiple of 2^-16; what is kept is scaled accordingly."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape and floating type."""
        if x.device.type != "cpu":
            return super().forward(x)
        return x * self.draw(x.shape).to(x.dtype).mul_(self.factor) if self.draws else x

    @property
    def draws(self) -> bool:
        """Whether anything is dropped now."""
        return self.training and self._dropped > 0

    @property
    def factor(self) -> float:
        """Of what is kept."""
        return CHOICES / (CHOICES - self._dropped) if self._dropped < CHOICES else 0.0

    @property
    def _dropped(self) -> int:
        return round(self.p * CHOICES)

    def draw(self, shape: torch.Size) -> Tensor:
        """1 for what is kept, 0 elsewhere, int16 on the CPU. Pieces of a tensor drawn one after the other are as drawn
        at once, if their sizes are multiples of 4."""
        if self._dropped == CHOICES:
            return torch.zeros(shape, dtype=torch.int16)
        count = shape.numel()
        # Four numbers of 16 bits from each of 64; no bool, from which torch makes floats ten times as slowly.
        drawn = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
        return torch.ge(drawn, self._dropped - CHOICES // 2, out=torch.empty_like(drawn))[:count].view(shape)
