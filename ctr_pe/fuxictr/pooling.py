"""Several categories of one field as one vector."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Pooling(nn.Module):
    """The sum, or the ``mean`` over those that are there, of embeddings (…, M, D) -> (…, D); padding is zeros.

    FuxiCTR's ``MaskedSumPooling`` and ``MaskedAveragePooling``, for any leading axes: history items, candidates.
    """

    def __init__(self, mean: bool) -> None:
        super().__init__()
        self.mean = mean

    def forward(self, embedded: Tensor) -> Tensor:
        total = embedded.sum(dim=-2)
        if not self.mean:
            return total
        there = (embedded.abs().sum(dim=-1, keepdim=True) > 0).sum(dim=-2)
        return total / there.clamp(min=1)  # not FuxiCTR's + 1e-12, which ONNX's optimiser takes for 0


class AttentionPooling(nn.Module):
    """The mean of embeddings (…, M, D) -> (…, D), weighted by a softmax of their products with a learned query; those
    of zeros are padding. It begins as the mean."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(dim))

    def forward(self, embedded: Tensor) -> Tensor:
        there = embedded.abs().sum(dim=-1, keepdim=True) > 0
        logits = (embedded * self.query).sum(dim=-1, keepdim=True)
        weights = logits.masked_fill(~there, torch.finfo(logits.dtype).min).softmax(dim=-2)
        return (weights * embedded).sum(dim=-2)
