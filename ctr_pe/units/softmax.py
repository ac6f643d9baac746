"""Softmax over the entries that are allowed."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_softmax(logits: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over the last axis; zero where not ``allowed``, all zeros in a row without any allowed entry."""
    # The lowest finite number, not -inf: a row of -inf would give NaN, in the gradient too.
    lowest = torch.finfo(logits.dtype).min
    return logits.masked_fill(~allowed, lowest).softmax(-1).masked_fill(~allowed, 0.0)
