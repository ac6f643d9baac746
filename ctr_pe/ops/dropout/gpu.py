"""Dropout's mask by Triton, the same as the CPU's (``../triton/mask.py``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ctr_pe.ops import accelerator
from ctr_pe.ops.operator import operator


def _keep_mask(seed: Tensor, shape: Sequence[int], least: int) -> Tensor:
    from ctr_pe.ops.triton.mask import keep_mask

    kept = _keep_mask_fake(seed, shape, least)
    count, programs = kept.numel(), -(-kept.numel() // accelerator.ENTRIES)
    accelerator.launch(keep_mask, programs, seed, kept, count, least, ENTRIES=accelerator.ENTRIES)
    return kept


def _keep_mask_fake(seed: Tensor, shape: Sequence[int], least: int) -> Tensor:
    return seed.new_empty(shape, dtype=torch.int16)


keep_mask = operator(
    "keep_mask_gpu(Tensor seed, SymInt[] shape, int least) -> Tensor",
    _keep_mask,
    _keep_mask_fake,
    devices=accelerator.DEVICES,
)
