"""DIN, deep interest network (Zhou et al. 2018, arXiv 1706.06978)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ctr_pe.config.schema import Activation, Rate, Widths
from ctr_pe.models.rank_model import RankModel
from ctr_pe.pe.base import Losses
from ctr_pe.sequence.positions import Items, Positions
from ctr_pe.units import DINScore, TargetAttention
from ctr_pe.utils.module_list import ModuleList


class DIN(RankModel):
    """One target attention with an MLP score per field group, then the tower.

    Keys are FuxiCTR's; those of every model are in :class:`~ctr_pe.models.rank_model.RankModel`.

    Args:
        attention_hidden_units: hidden layers of the score.
        attention_hidden_activations, attention_output_activation: names as in :class:`~ctr_pe.units.DINScore`.
        attention_dropout: rate after each hidden layer of the score.
        din_use_softmax: weights are a softmax over the history; False as in the DIN paper.
    """

    fillable = True
    pairs_at_once = 2**17  # its score computes fewer at a time by itself

    def __init__(
        self,
        feature_map: Any,
        model_id: str = "DIN",
        attention_hidden_units: Widths = (64,),
        attention_hidden_activations: Activation = "Dice",
        attention_output_activation: Activation | None = None,
        attention_dropout: Rate = 0.0,
        din_use_softmax: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(feature_map, model_id, **kwargs)
        mlp = (attention_hidden_units, attention_hidden_activations, attention_dropout, attention_output_activation)
        encodings = [self.build_encoding(group, group.dim) for group in self.groups]
        scores = [DINScore(pe.out_dim, *mlp) for pe in encodings]
        units = zip(scores, encodings, strict=True)
        self.attentions = ModuleList(TargetAttention(pe.out_dim, score, pe, din_use_softmax) for score, pe in units)
        self.build_tower(pe.out_dim for pe in encodings)

    def interest(self, index: int, target: Items, history: Items, positions: Positions) -> tuple[Tensor, Losses]:
        unit = self.attentions[index]
        query, items = unit.pe.embed(target.embedding, history.embedding, positions)
        interest, _, losses = unit.attend(query, items, positions, positions.target_pairs(history, target))
        return interest, losses

    def of_candidates(self, index: int, target: Items, history: Items, states: Any, positions: Positions) -> Tensor:
        return self.interest(index, target, history, positions)[0]
