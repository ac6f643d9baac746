"""Biases by offset, what T5, ALiBi and KERPLE share.

B batch, L keys, Q queries, H heads, K offsets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ctr_pe.pe.base import PositionEncoding
from ctr_pe.pe.vectors import Vectors
from ctr_pe.sequence.positions import Pairs


class RelativeBias(PositionEncoding):
    """Logits s_ij + β_h(r_i - r_j): one number per head and offset, whatever the items are.

    The same for any score function and shared by all layers with the same heads.
    """

    shares_all = True

    def curve(self, offset: Tensor, causal: bool) -> Tensor:
        """β (H, K) at offsets (K,) int64: items that the key lies before the query, negative for later keys.

        In float32 at least, whatever the parameters are. ``causal``: no key lies later.
        """
        raise NotImplementedError

    def bias(self, logits: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
        return logits + self._by_query(pairs)

    def plain_bias(self, vectors: Vectors, pairs: Pairs) -> Tensor | None:
        return self._by_query(pairs) if self._has_hooks_of(RelativeBias) else None

    def _by_query(self, pairs: Pairs) -> Tensor:
        """β (H, Q, L)."""
        offset = pairs.offset[0, 0]  # (Q, L), of every row, and one less from key to key
        largest = offset.shape[1] - pairs.query.distance[0, 0, -1]  # of the last query and the oldest key
        distinct = largest - torch.arange(sum(offset.shape) - 1, device=offset.device)  # from the largest on
        place = largest - offset  # among the distinct ones
        curve = self.curve(distinct, pairs.causal)
        return torch.unflatten(curve.index_select(-1, place.flatten()), -1, offset.shape)
