"""Softmax over the entries that are allowed."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_softmax(logits: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over the last axis; zero where not ``allowed``, all zeros in a row without any allowed entry."""
    # Added, because filling by a mask that broadcasts takes longer than the softmax. The lowest finite number, not
    # -inf: a row of -inf would give NaN, in the gradient too.
    barrier = torch.zeros_like(allowed, dtype=logits.dtype).masked_fill_(~allowed, torch.finfo(logits.dtype).min)
    return (logits + barrier).softmax(-1) * allowed.any(-1, keepdim=True).to(logits.dtype)
