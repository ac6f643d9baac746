"""Dropout whose mask takes a fraction of the time on a CPU: torch draws a random number per entry, one after the other;
here the random stream gives a seed, and entries are a hash of it and their places, computed side by side.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ctr_pe import compiled

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
        """1 for what is kept, 0 elsewhere, int16 on the CPU. Takes one number of torch's random stream, whatever the
        shape."""
        if self._dropped == CHOICES:
            return torch.zeros(shape, dtype=torch.int16)
        seed, least = torch.empty(1, dtype=torch.int64).random_(-(2**63), None), self._dropped - CHOICES // 2
        if not compiled.suits():
            # No bool, from which torch makes floats ten times as slowly.
            drawn = numbers(seed, shape.numel())
            return torch.ge(drawn, least, out=torch.empty_like(drawn)).view(shape)
        kept = torch.empty(shape, dtype=torch.int16)
        compiled.run("keep", seed.item() % 2**64, kept.numel(), least, kept.data_ptr())
        return kept


def numbers(seed: Tensor, count: int) -> Tensor:
    """Random numbers (count,) int16: four from each of 64 bits, as ``compiled/keep.h`` makes them. seed (1,) int64."""
    mixed = torch.arange(1, -(-count // 4) + 1) * _signed(0x9E3779B97F4A7C15) + seed
    for shift, factor in ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1)):
        high = (mixed >> shift) & (2 ** (64 - shift) - 1)
        mixed = (mixed ^ high) * factor
    return mixed.view(torch.int16)[:count]


def _signed(bits: int) -> int:
    return bits - 2**64
