"""Popularity: every history is followed by the items that most training rows have. A baseline without learning."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ctr_pe.models.sequential_model import SequentialModel
from ctr_pe.pe.base import Losses
from ctr_pe.sequence.positions import Items, Positions
from ctr_pe.utils.errors import UserError


class Popularity(SequentialModel):
    """The state at an item is 1, and the vector of an item the logarithm of how often it is an answer in training.

    Keys of every next-item model are in :class:`~ctr_pe.models.sequential_model.SequentialModel`.

    Raises:
        UserError: as SequentialModel; a position encoding, a tied item table.
    """

    def __init__(self, feature_map: Any, model_id: str = "Popularity", **kwargs: Any) -> None:
        if kwargs.setdefault("item_table", "untied") == "tied":
            raise UserError("Popularity: item_table 'tied': it has no vectors of items: untied")
        super().__init__(feature_map, model_id, **kwargs)
        if self.group.encoding not in ("none", "native"):
            raise UserError(f"Popularity: position encoding '{self.group.encoding}': it has no attention: none")
        self.one = nn.Parameter(torch.ones(1))  # so that an optimiser has something to hold
        self.build_items(1)
        assert self.output_table is not None
        self.output_table.weight.requires_grad_(False)

    def states(self, items: Items, positions: Positions) -> tuple[Tensor, Losses]:
        return self.one.detach().expand(len(items.embedding), 1) + 0 * self.one, {}

    def newest_states(self, items: Items, positions: Positions) -> Tensor:
        """The same after an empty history."""
        return torch.ones(positions.lengths.shape[0], 1, device=positions.lengths.device)

    def set_catalogue(self, attributes: Any, frequency: Tensor) -> None:
        super().set_catalogue(attributes, frequency)
        assert self.output_table is not None
        self.output_table.weight.data.copy_((frequency + 1e-6).log().unsqueeze(1))
