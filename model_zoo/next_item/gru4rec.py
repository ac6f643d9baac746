"""GRU4Rec, session-based recommendation with recurrent networks (Hidasi et al. 2016, arXiv 1511.06939)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ctr_pe.config.schema import Layers, Rate, Width
from ctr_pe.models.sequential_model import SequentialModel
from ctr_pe.pe.base import Losses
from ctr_pe.sequence.positions import Items, Positions
from ctr_pe.units.dropout import Dropout
from ctr_pe.units.gru import GRU
from ctr_pe.utils.errors import UserError


class GRU4Rec(SequentialModel):
    """GRU layers over the history, then a projection to the item dim; no attention, so no position encoding.

    The authors rank losses over sampled items; here ``item_loss`` decides, by default the softmax over all items.
    Keys of every next-item model are in :class:`~ctr_pe.models.sequential_model.SequentialModel`.

    Args:
        num_layers: GRUs, one above the other.
        state_dim: width of their states; the item dim by default.
        hidden_dropout: rate on the items.

    Raises:
        UserError: as SequentialModel; a position encoding.
    """

    def __init__(
        self,
        feature_map: Any,
        model_id: str = "GRU4Rec",
        num_layers: Layers = 1,
        state_dim: Width | None = None,
        hidden_dropout: Rate = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(feature_map, model_id, **kwargs)
        if self.group.encoding not in ("none", "native"):
            raise UserError(f"GRU4Rec: position encoding '{self.group.encoding}': it has no attention: none")
        dim, width = self.group.dim, state_dim or self.group.dim
        self.layers = nn.ModuleList(GRU(width if layer else dim, width) for layer in range(num_layers))
        self.project = nn.Linear(width, dim)
        self.dropout = Dropout(hidden_dropout)
        self.build_items(dim)

    def states(self, items: Items, positions: Positions) -> tuple[Tensor, Losses]:
        states = self.dropout(items.embedding)
        for layer in self.layers:
            states = layer(states, positions)
        return self.project(states), {}
