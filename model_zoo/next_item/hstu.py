"""HSTU (Zhai et al. 2024, arXiv 2402.17152) as next-item model: pointwise attention, biased by position and time.

H heads, K offsets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ctr_pe.config.schema import Layers, Rate, Width
from ctr_pe.models.sequential_model import SequentialModel
from ctr_pe.pe.base import Chain, Losses, sum_losses
from ctr_pe.pe.contextual import widen
from ctr_pe.pe.relative import RelativeBias
from ctr_pe.pe.time_bias import TimeBias
from ctr_pe.sequence.positions import Items, Positions
from ctr_pe.units.dropout import Dropout
from ctr_pe.units.hstu import HSTU
from ctr_pe.utils.module_list import ModuleList


class OffsetBias(RelativeBias):
    """Logits s_ij + B[r_i - r_j, h]: a number per offset and head; offsets past the table share its last row.

    Parameters: ``table (max_len, H)``, zeros.
    """

    def __init__(self, dim: int, max_len: int, num_heads: int = 1) -> None:
        super().__init__(dim, max_len, num_heads)
        self.table = nn.Parameter(torch.zeros(max_len, num_heads))

    def curve(self, offset: Tensor, causal: bool) -> Tensor:
        return widen(nn.functional.embedding(offset.clamp(0, self.max_len - 1), self.table)).T


class PositionTimeBias(Chain):
    """rab^{p,t} of equation 2: :class:`OffsetBias`, and the time between events in buckets
    (:class:`~ctr_pe.pe.time_bias.TimeBias`, which has a power law beside). Blocks share both.

    The time is that from the key's event to the query's. The authors' code takes the time to the event after the
    query's, which is the answer's in training and not known where items are recommended.
    """

    def __init__(self, dim: int, max_len: int, num_heads: int = 1) -> None:
        super().__init__([part(dim, max_len, num_heads) for part in (OffsetBias, TimeBias)])


class NextItemHSTU(SequentialModel):
    """HSTU blocks over the history, a last norm; the state at an item predicts the item after it.

    ``native`` is the paper's bias by position and time; other encodings take its place before the SiLU. The authors
    compare normed vectors by sampled softmax; here ``item_loss`` decides. Keys of every next-item model are in
    :class:`~ctr_pe.models.sequential_model.SequentialModel`.

    Args:
        num_blocks: blocks, one above the other; they have no feed-forward network.
        num_heads: of each attention; divides the item dim.
        hidden_dropout: rate on the items and before each output projection.

    Raises:
        UserError: as SequentialModel; heads that do not divide the dim.
    """

    native = PositionTimeBias

    def __init__(
        self,
        feature_map: Any,
        model_id: str = "HSTU",
        num_blocks: Layers = 2,
        num_heads: Width = 1,
        hidden_dropout: Rate = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(feature_map, model_id, **kwargs)
        encodings = self.build_stack(self.group, num_blocks, num_heads)
        self.blocks = ModuleList(HSTU(pe, self.group.max_len, hidden_dropout) for pe in encodings)
        self.layer_norm = nn.LayerNorm(self.blocks[0].dim)
        self.dropout = Dropout(hidden_dropout)
        self.build_items(self.blocks[0].dim)

    def states(self, items: Items, positions: Positions) -> tuple[Tensor, Losses]:
        _, states = self.blocks[0].pe.embed(None, items.embedding, positions)
        states, pairs = self.dropout(states), positions.item_pairs(True, items)
        losses: Losses = {}
        for block in self.blocks:
            states, more = block.attend(states, positions, pairs)
            losses = sum_losses(losses, more)
        return self.layer_norm(states), losses
