"""CORE, representation-consistent encoder and robust distance measuring (Hou et al. 2022, arXiv 2204.11067)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import normalize

from ctr_pe.config.schema import Positive, Rate
from ctr_pe.models.sequential_transformer import SequentialTransformer
from ctr_pe.pe.base import Losses
from ctr_pe.sequence.positions import Items, Positions
from ctr_pe.units.dropout import Dropout
from ctr_pe.utils.errors import UserError


class CORE(SequentialTransformer):
    """The state at an item is a weighted mean of the items up to it, so that states and items are in one space.

    h_i = Σ_{j ≤ i} α_ij e_j, α_i the softmax of w · f_j over j ≤ i, f_j the state at item j of causal transformer
    blocks over the items and their positions; what is averaged has neither (the paper's representation-consistent
    encoder, its variant CORE-trm). Scores are cos(h, e) / τ, in training with dropout on the items' vectors (robust
    distance measuring).

    Keys are those of :class:`~ctr_pe.models.sequential_transformer.SequentialTransformer`.

    Args:
        temperature: τ.
        item_dropout: rate on the normed vectors of the items that states are compared with.
        session_dropout: rate on the items of the history, for the blocks and the mean alike.

    Parameters: those of the blocks; ``weigh (1, D)`` without bias, w.

    Raises:
        UserError: as SequentialTransformer; an untied item table.
    """

    def __init__(
        self,
        feature_map: Any,
        model_id: str = "CORE",
        temperature: Positive = 0.07,
        item_dropout: Rate = 0.0,
        session_dropout: Rate = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(feature_map, model_id, **kwargs)
        if not self.tied:
            raise UserError("CORE: item_table 'untied': its states are means of the items that they predict: tied")
        self.temperature, self.item_dropout = temperature, Dropout(item_dropout)
        self.session_dropout = Dropout(session_dropout)
        self.encoder = self.build_encoder(self.group.dim)
        self.weigh = nn.Linear(self.encoder.dim, 1, bias=False)
        self.build_items(self.group.dim)

    def states(self, items: Items, positions: Positions) -> tuple[Tensor, Losses]:
        vectors = self.session_dropout(items.embedding)
        states, losses = self.encoder.encode(vectors, items, positions)
        if not len(vectors):
            return vectors, losses
        pairs = positions.item_pairs(True, items)
        blocks = pairs[0].blocks
        padded = zip(pairs, blocks.pad(self.weigh(states)), blocks.pad(vectors), strict=True)
        means = blocks.pack([one.softmax(logits.mT.unsqueeze(1))[:, 0] @ of for one, logits, of in padded])
        return normalize(means, dim=-1) / self.temperature, losses

    def item_vectors(self, embedded: Mapping[str, Tensor]) -> Tensor:
        dropped: Tensor = self.item_dropout(normalize(super().item_vectors(embedded), dim=-1))
        return dropped
