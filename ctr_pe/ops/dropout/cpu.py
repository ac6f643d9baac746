"""Dropout's mask by the kernel (``csrc/dropout.h``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ctr_pe.ops import native
from ctr_pe.ops.operator import operator


def _keep_mask(seed: Tensor, shape: Sequence[int], least: int) -> Tensor:
    kept = torch.empty(shape, dtype=torch.int16)
    native.call("keep_mask", seed, kept.numel(), least, kept)
    return kept


def _keep_mask_fake(seed: Tensor, shape: Sequence[int], least: int) -> Tensor:
    return seed.new_empty(shape, dtype=torch.int16)


keep_mask = operator("keep_mask(Tensor seed, SymInt[] shape, int least) -> Tensor", _keep_mask, _keep_mask_fake)
