"""SASRec, self-attentive sequential recommendation (Kang & McAuley 2018, arXiv 1808.09781), as next-item model."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ctr_pe.models.sequential_transformer import SequentialTransformer
from ctr_pe.pe.base import Losses
from ctr_pe.sequence.positions import Items, Positions


class NextItemSASRec(SequentialTransformer):
    """Causal transformer blocks over the history; the state at an item predicts the item after it.

    The paper norms before attention and network (``layer_norm='pre'``), whose hidden layer is as wide as the item.

    Keys are those of :class:`~ctr_pe.models.sequential_transformer.SequentialTransformer`.
    """

    def __init__(self, feature_map: Any, model_id: str = "SASRec", **kwargs: Any) -> None:
        super().__init__(feature_map, model_id, **kwargs)
        self.encoder = self.build_encoder(self.group.dim)
        self.build_items(self.encoder.dim)

    def states(self, items: Items, positions: Positions) -> tuple[Tensor, Losses]:
        return self.encoder.encode(items.embedding, items, positions)

    def newest_states(self, items: Items, positions: Positions) -> Tensor:
        return self.encoder.newest(items.embedding, items, positions)
