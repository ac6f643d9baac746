"""Dropout whose mask is a hash of one random number, computed in a fraction of torch's time on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ctr_pe.ops.dropout import CHOICES, dropped, keep_mask


class Dropout(nn.Dropout):
    """As ``torch.nn.Dropout``, with the rate rounded to a multiple of 2^-16; what is kept is scaled accordingly."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape and floating type."""
        if not self.draws:
            return x
        return x * self.draw(x.shape).to(x.dtype).mul_(self.factor) if x.is_cpu else super().forward(x)

    @property
    def draws(self) -> bool:
        """Whether anything is dropped now."""
        return self.training and dropped(self.p) > 0

    @property
    def factor(self) -> float:
        """Of what is kept."""
        return CHOICES / (CHOICES - dropped(self.p)) if dropped(self.p) < CHOICES else 0.0

    def draw(self, shape: torch.Size, device: torch.device | None = None) -> Tensor:
        """1 for what is kept, 0 elsewhere, int16. On the CPU (default) it takes one number of torch's random stream,
        whatever the shape, and none where all is dropped; elsewhere one per element of the device's."""
        if device is not None and device.type != "cpu":
            return torch.empty(shape, dtype=torch.int16, device=device).bernoulli_(1 - dropped(self.p) / CHOICES)
        seed = torch.empty(1, dtype=torch.int64)
        return keep_mask(seed.random_(-(2**63), None) if dropped(self.p) < CHOICES else seed, shape, self.p)
