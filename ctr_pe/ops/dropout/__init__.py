"""Which entries dropout keeps: a hash of a seed and their indices, computed side by side. torch draws one random number
after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from ctr_pe.ops import native
from ctr_pe.ops.dropout import cpu, reference

CHOICES = 2**16
"""Rates are multiples of 1 / CHOICES."""


def dropped(rate: float) -> int:
    """The rate as a number of CHOICES."""
    return round(rate * CHOICES)


def keep_mask(seed: Tensor, shape: torch.Size, rate: float) -> Tensor:
    """1 where dropout keeps an entry, 0 elsewhere, int16: torch makes floats of a bool ten times as slowly.

    Args:
        seed: (1,) int64; the mask is on its device, the same on each.
        shape: of the mask.
        rate: share of entries that are dropped, rounded to a multiple of 2^-16.
    """
    if dropped(rate) == CHOICES:
        return torch.zeros(shape, dtype=torch.int16, device=seed.device)
    least = dropped(rate) - CHOICES // 2
    if native.LIBRARY is not None and seed.is_cpu:
        mask: Tensor = cpu.keep_mask(seed, shape, least)
        return mask
    return reference.keep_mask(seed, shape, least)
