"""Dropout's mask in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def keep_mask(seed: Tensor, shape: torch.Size, least: int) -> Tensor:
    """1 where the random number of an entry reaches ``least``, else 0; int16."""
    drawn = numbers(seed, shape.numel())
    return torch.ge(drawn, least, out=torch.empty_like(drawn)).view(shape)


def numbers(seed: Tensor, count: int) -> Tensor:
    """Random numbers (count,) int16, four from each of 64 bits: SplitMix64 (Steele et al. 2014). seed (1,) int64."""
    index = torch.arange(1, -(-count // 4) + 1, device=seed.device)
    mixed = index * _signed(0x9E3779B97F4A7C15) + seed
    for shift, factor in ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1)):
        high = (mixed >> shift) & (2 ** (64 - shift) - 1)
        mixed = (mixed ^ high) * factor
    return mixed.view(torch.int16)[:count]


def _signed(bits: int) -> int:
    return bits - 2**64
