"""SASRec, self-attentive sequential recommendation (Kang & McAuley 2018, arXiv 1808.09781), as CTR ranker."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ctr_pe.config.schema import Activation, Layers, Rate, Width
from ctr_pe.models.rank_model import RankModel
from ctr_pe.pe.base import Losses
from ctr_pe.sequence.positions import Items, Positions
from ctr_pe.units.transformer import Transformer
from ctr_pe.utils.errors import UserError, nearest
from ctr_pe.utils.module_list import ModuleList


class SASRec(RankModel):
    """Causal transformer blocks over [history; target] per field group; the states at the targets join the tower.

    Its authors publish no ranker. This is the form of the CAPE paper, whose encodings act on "the concatenation of
    context and target item". Keys of every model are in :class:`~ctr_pe.models.rank_model.RankModel`.

    Args:
        num_blocks: blocks, one above the other.
        num_heads: of each self-attention; divides the item dim.
        ffn_dim: hidden width of the feed-forward networks; the item dim by default, as in the paper.
        ffn_activation: of their hidden layer, a name as in :class:`~ctr_pe.units.DINScore`.
        attention_dropout: rate on the attention weights.
        hidden_dropout: rate on the items and after each attention and feed-forward network.
        layer_norm: ``pre`` norms the input of each, as in the paper, and the last states; ``post`` each sum.

    Raises:
        UserError: heads that do not divide the dim, no block, an unknown norm or activation.
    """

    fillable = True
    native = "naive"

    def __init__(
        self,
        feature_map: Any,
        model_id: str = "SASRec",
        num_blocks: Layers = 2,
        num_heads: Width = 1,
        ffn_dim: Width | None = None,
        ffn_activation: Activation = "ReLU",
        attention_dropout: Rate = 0.0,
        hidden_dropout: Rate = 0.0,
        layer_norm: str = "pre",
        **kwargs: Any,
    ) -> None:
        super().__init__(feature_map, model_id, **kwargs)
        if layer_norm not in ("pre", "post"):
            raise UserError(f"SASRec: layer_norm '{layer_norm}' is unknown: {nearest(layer_norm, ('pre', 'post'))}")
        self.transformers = ModuleList(
            Transformer(
                self.build_stack(group, num_blocks, num_heads),
                input_dropout=hidden_dropout,
                causal=True,
                hidden_dim=ffn_dim,
                activation=ffn_activation,
                attention_dropout=attention_dropout,
                dropout=hidden_dropout,
                norm=layer_norm,
            )
            for group in self.groups
        )
        self.build_tower(unit.dim for unit in self.transformers)

    def interest(self, index: int, target: Items, history: Items, positions: Positions) -> tuple[Tensor, Losses]:
        unit = self.transformers[index]
        query, items = unit.pe.embed(target.embedding, history.embedding, positions)
        state, losses = unit.of_target(query, items, positions, (history, target))
        return state, losses

    def encode_history(self, index: int, history: Items, positions: Positions) -> Any:
        unit = self.transformers[index]
        return unit.encode(unit.pe.embed(None, history.embedding, positions)[1], positions, history)

    def of_candidates(self, index: int, target: Items, history: Items, states: Any, positions: Positions) -> Tensor:
        unit = self.transformers[index]
        queries, _ = unit.pe.embed(target.embedding, history.embedding, positions)
        interests: Tensor = unit.candidates(queries, states, positions.candidate_pairs(True, history, target))
        return interests
