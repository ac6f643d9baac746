"""Which entries dropout keeps: a hash of a seed and their indices, computed side by side. torch draws one random number
after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from ctr_pe.ops import accelerator, native
from ctr_pe.ops.dropout import cpu, gpu, reference
from ctr_pe.sequence.transfer import to_device

CHOICES = 2**16
"""Rates are multiples of 1 / CHOICES."""


def dropped(rate: float) -> int:
    """The rate as a number of CHOICES."""
    return round(rate * CHOICES)


def least(rate: float) -> int:
    """The lowest of the random numbers, which are int16, that keeps an entry."""
    return dropped(rate) - CHOICES // 2


def factor_of(rate: float) -> float:
    """Of what is kept."""
    return CHOICES / (CHOICES - dropped(rate)) if dropped(rate) < CHOICES else 0.0


def keep_mask(seed: Tensor, shape: torch.Size, rate: float) -> Tensor:
    """1 where dropout keeps an entry, 0 elsewhere, int16: torch makes floats of a bool ten times as slowly.

    Args:
        seed: (1,) int64; the mask is on its device, the same on each.
        shape: of the mask.
        rate: share of entries that are dropped, rounded to a multiple of 2^-16.
    """
    if dropped(rate) == CHOICES:
        return torch.zeros(shape, dtype=torch.int16, device=seed.device)
    compiled = native.LIBRARY is not None and seed.is_cpu
    run = gpu.keep_mask if accelerator.runs_on(seed.device) else cpu.keep_mask if compiled else reference.keep_mask
    mask: Tensor = run(seed, shape, least(rate))
    return mask


def mask_on(device: torch.device, seed: Tensor, shape: torch.Size, rate: float) -> Tensor:
    """:func:`keep_mask` on a device, of a seed on the CPU. A device without a kernel for it draws numbers of its own,
    in one call."""
    if device.type == "cpu" or accelerator.runs_on(device):
        return keep_mask(to_device(seed, device), shape, rate)
    return torch.empty(shape, dtype=torch.int16, device=device).bernoulli_(1 - dropped(rate) / CHOICES)
