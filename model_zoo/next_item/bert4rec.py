"""BERT4Rec, bidirectional transformer by a cloze task (Sun et al. 2019, arXiv 1904.06690).

B rows, N items of their histories, P questions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ctr_pe.config.schema import Chance
from ctr_pe.models.sequential_transformer import SequentialTransformer
from ctr_pe.pe.base import Losses
from ctr_pe.sequence.positions import Items, Positions


class BERT4Rec(SequentialTransformer):
    """Bidirectional transformer blocks over [history; mask]: the state at the mask predicts the item that comes next.

    In training items of the history are masked, too, and their states predict them (equation 8); the answer after the
    newest is masked in every row, as where items are recommended, which the authors have in rows of their own. An
    encoding sees a masked item as one without values. Every encoding can be used, also those that do not keep
    causality. After an empty history the mask stands alone.

    Keys are those of :class:`~ctr_pe.models.sequential_transformer.SequentialTransformer`.

    Args:
        mask_rate: ρ, the share of masked items of histories.

    Parameters: those of the blocks; ``mask (D,)``, N(0, 0.02); ``project (D, D)`` with bias, before states are compared
    with items (equation 7).
    """

    causal = False

    def __init__(self, feature_map: Any, model_id: str = "BERT4Rec", mask_rate: Chance = 0.2, **kwargs: Any) -> None:
        super().__init__(feature_map, model_id, **kwargs)
        self.mask_rate = mask_rate
        self.encoder = self.build_encoder(self.group.dim, extra_slots=1)
        self.mask = nn.Parameter(nn.init.normal_(torch.empty(self.group.dim), std=0.02))
        self.project = nn.Sequential(nn.Linear(self.encoder.dim, self.encoder.dim), nn.GELU())
        self.build_items(self.encoder.dim)

    def questions(self, items: Items, positions: Positions, following: Tensor) -> tuple[Tensor, Tensor, Losses]:
        draw = torch.rand(len(following), generator=self.generators.next())
        masked = (draw < self.mask_rate).to(following.device)
        ids = tuple(of.masked_fill(masked.view(-1, *[1] * (of.dim() - 1)), 0) for of in items.ids)
        seen = replace(items, embedding=torch.where(masked.unsqueeze(1), self.mask, items.embedding), ids=ids)
        states, _, losses = self.encoder.transformer(*self._embedded(seen, positions))
        own = self.item_numbers[items.ids[0]].masked_fill(~masked, -1)
        answers = positions.append(own, positions.newest_of(following + 1) - 1)
        has_answer = answers >= 0
        return self.project(states[has_answer]), answers[has_answer], losses

    def newest_states(self, items: Items, positions: Positions) -> Tensor:
        """In evaluation: the state at the mask after the history (B, D)."""
        states: Tensor = self.project(self.encoder.transformer.of_target(*self._embedded(items, positions))[0])
        return states

    def _embedded(self, items: Items, positions: Positions) -> tuple[Tensor, Tensor, Positions, tuple[Items, Items]]:
        """The masks after the histories (B, D), the packed histories (N, D), and both as looked up."""
        rows = positions.lengths.shape[0]
        masks = Items(self.mask.expand(rows, -1), tuple(of.new_zeros(rows, *of.shape[1:]) for of in items.ids))
        last, history = self.encoder.transformer.pe.embed(masks.embedding, items.embedding, positions)
        return self.encoder.input_norm(last), self.encoder.input_norm(history), positions, (items, masks)
