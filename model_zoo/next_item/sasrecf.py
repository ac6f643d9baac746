"""SASRecF, SASRec on items fused with their attributes (the baseline of DIF-SR, Xie et al. 2022, arXiv 2204.11046, and
of RecBole).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ctr_pe.models.sequential_transformer import SequentialTransformer
from ctr_pe.pe.base import Losses
from ctr_pe.sequence.positions import Items, Positions


class SASRecF(SequentialTransformer):
    """The id and the attributes of an item, side by side, times a matrix are its vector, as wide as the id's; causal
    transformer blocks follow, whose states predict items by their ids.

    :class:`~ctr_pe.model_zoo.next_item.sasrec.NextItemSASRec` takes the same fields without the matrix, and predicts by
    all of them. Keys are those of :class:`~ctr_pe.models.sequential_transformer.SequentialTransformer`.

    Parameters: ``fuse (id dim, D)`` with bias, and those of the blocks.

    Raises:
        UserError: as SequentialTransformer; items without attributes.
    """

    predicts_by_id = True

    def __init__(self, feature_map: Any, model_id: str = "SASRecF", **kwargs: Any) -> None:
        super().__init__(feature_map, model_id, **kwargs)
        self.check_attributes()
        self.fuse = nn.Linear(self.group.dim, self.item_dim)
        self.encoder = self.build_encoder(self.item_dim)
        self.build_items(self.encoder.dim)

    def states(self, items: Items, positions: Positions) -> tuple[Tensor, Losses]:
        return self.encoder.encode(self.fuse(items.embedding), items, positions)

    def newest_states(self, items: Items, positions: Positions) -> Tensor:
        return self.encoder.newest(self.fuse(items.embedding), items, positions)
