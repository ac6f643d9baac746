"""Several categories of one field as one vector."""

from __future__ import annotations

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
        return total / (there + 1e-12)
