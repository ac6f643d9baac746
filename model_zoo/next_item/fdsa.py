"""FDSA, feature-level deeper self-attention network (Zhang et al. 2019, IJCAI, doi 10.24963/ijcai.2019/600).

N real items of the batch, A attributes, D id dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ctr_pe.models.sequential_transformer import SequentialTransformer
from ctr_pe.pe.base import Losses, sum_losses
from ctr_pe.sequence.positions import Items, Positions


class FDSA(SequentialTransformer):
    """Causal transformer blocks over the ids of a history, others over the attributes of its items; the states of both,
    side by side, times a matrix predict items by their ids.

    The attributes a of an item are weighed against each other by the softmax of v · ReLU(W a + b), as RecBole has this
    vanilla attention. Each half of the model has an encoding of its own. An attribute of another width than the id is
    projected.

    Keys are those of :class:`~ctr_pe.models.sequential_transformer.SequentialTransformer`.

    Parameters: those of ``encoder`` and ``attribute_encoder``; ``project.f``, for attributes of another width;
    ``weigh.0 (D, D)`` with bias, ``weigh.2 (1, D)``; ``join (D, 2 D)`` with bias.

    Raises:
        UserError: as SequentialTransformer; items without attributes.
    """

    predicts_by_id = True

    def __init__(self, feature_map: Any, model_id: str = "FDSA", **kwargs: Any) -> None:
        super().__init__(feature_map, model_id, **kwargs)
        self.check_attributes()
        dim = self.item_dim
        self.project = nn.ModuleList(
            nn.Identity() if width == dim else nn.Linear(width, dim) for width in self.group.dims[1:]
        )
        self.weigh = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 1, bias=False))
        self.encoder, self.attribute_encoder = (self.build_encoder(dim) for _ in range(2))
        self.join = nn.Linear(self.encoder.dim + self.attribute_encoder.dim, dim)
        self.build_items(dim)

    def states(self, items: Items, positions: Positions) -> tuple[Tensor, Losses]:
        ids, attributes = self._halves(items)
        of_ids, losses = self.encoder.encode(ids, items, positions)
        of_attributes, more = self.attribute_encoder.encode(attributes, items, positions)
        return self.join(torch.cat([of_ids, of_attributes], -1)), sum_losses(losses, more)

    def newest_states(self, items: Items, positions: Positions) -> Tensor:
        if not positions.no_row_is_empty:
            return super().newest_states(items, positions)
        halves = zip((self.encoder, self.attribute_encoder), self._halves(items), strict=True)
        joined: Tensor = self.join(torch.cat([encoder.newest(half, items, positions) for encoder, half in halves], -1))
        return joined

    def _halves(self, items: Items) -> tuple[Tensor, Tensor]:
        """The vectors of the ids and of the attributes, (N, D) each."""
        ids, *fields = torch.split(items.embedding, list(self.group.dims), -1)
        attributes = torch.stack([to(field) for to, field in zip(self.project, fields, strict=True)], 1)  # (N, A, D)
        return ids, (self.weigh(attributes).softmax(1) * attributes).sum(1)
