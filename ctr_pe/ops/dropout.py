"""Which entries dropout keeps: a hash of a seed and their indices, computed side by side. torch draws one random number
after the other. The kernels are ``csrc/dropout.h`` and ``triton/mask.py``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ctr_pe.ops import accelerator, native
from ctr_pe.ops.operator import operator
from ctr_pe.ops.step_seeds import mixed
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
    if torch._C._functorch.is_batchedtensor(seed):  # of modules that are computed as one
        return (numbers(seed, shape.numel()) >= least(rate)).to(torch.int16).view(shape)
    compiled = native.LIBRARY is not None and seed.is_cpu
    run = keep_mask_gpu if accelerator.runs_on(seed.device) else keep_mask_cpu if compiled else in_torch
    mask: Tensor = run(seed, shape, least(rate))
    return mask


def mask_on(device: torch.device, seed: Tensor, shape: torch.Size, rate: float) -> Tensor:
    """:func:`keep_mask` on a device, of a seed there or on the CPU. With one on the CPU a device that has no kernel for
    it draws numbers of its own, in one call."""
    if device.type == "cpu" or accelerator.runs_on(device) or not seed.is_cpu:
        return keep_mask(to_device(seed, device), shape, rate)
    return torch.empty(shape, dtype=torch.int16, device=device).bernoulli_(1 - dropped(rate) / CHOICES)


def in_torch(seed: Tensor, shape: torch.Size, least: int) -> Tensor:
    """1 where the random number of an entry reaches ``least``, else 0; int16."""
    drawn = numbers(seed, shape.numel())
    return torch.ge(drawn, least, out=torch.empty_like(drawn)).view(shape)


def numbers(seed: Tensor, count: int) -> Tensor:
    """Random numbers (count,) int16, four from each of 64 bits: SplitMix64 (Steele et al. 2014). seed (1,) int64."""
    return mixed(seed, -(-count // 4)).view(torch.int16)[:count]


def _on_cpu(seed: Tensor, shape: Sequence[int], least: int) -> Tensor:
    kept = torch.empty(shape, dtype=torch.int16)
    native.call("keep_mask", seed, kept.numel(), least, kept)
    return kept


def _on_gpu(seed: Tensor, shape: Sequence[int], least: int) -> Tensor:
    from ctr_pe.ops.triton.mask import keep_mask

    kept = _fake(seed, shape, least)
    count, programs = kept.numel(), -(-kept.numel() // accelerator.ENTRIES)
    accelerator.launch(keep_mask, programs, seed, kept, count, least, ENTRIES=accelerator.ENTRIES)
    return kept


def _fake(seed: Tensor, shape: Sequence[int], least: int) -> Tensor:
    return seed.new_empty(shape, dtype=torch.int16)


_ARGUMENTS = "(Tensor seed, SymInt[] shape, int least) -> Tensor"
keep_mask_cpu = operator(f"keep_mask{_ARGUMENTS}", _on_cpu, _fake)
keep_mask_gpu = operator(f"keep_mask_gpu{_ARGUMENTS}", _on_gpu, _fake, devices=accelerator.DEVICES)
