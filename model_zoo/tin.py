"""TIN, temporal interest network (Zhou et al. 2024, arXiv 2308.08487)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ctr_pe.models.rank_model import RankModel
from ctr_pe.pe.base import Losses
from ctr_pe.sequence.positions import Items, Positions
from ctr_pe.units import TargetAttention
from ctr_pe.utils.module_list import ModuleList


class TIN(RankModel):
    """interest = sum of a_j (h̃_j ⊙ t̃) with a = softmax over the history of t̃ · h̃_j / sqrt(D), then the tower.

    ``native`` is the paper's target-aware temporal encoding, ``naive`` here: h̃_j = h_j + P[D_j] and t̃ = t + P[0], a
    learned vector per distance from the target. Other encodings replace it; the product with the target, the paper's
    target-aware representation, stays.

    The tower gets the other fields and this interest, as in the paper. The official code pools u = sum of a_j h̃_j
    without the product, normalises and projects it, and feeds [u, t̃, u ⊙ t̃] to a small sigmoid tower.
    Its keys are those of every model (:class:`~ctr_pe.models.rank_model.RankModel`).
    """

    fillable = True
    native = "naive"

    def __init__(self, feature_map: Any, model_id: str = "TIN", **kwargs: Any) -> None:
        super().__init__(feature_map, model_id, **kwargs)
        encodings = [self.build_encoding(group, group.dim) for group in self.groups]
        self.attentions = ModuleList(TargetAttention(pe.out_dim, "dot", pe) for pe in encodings)
        self.build_tower(pe.out_dim for pe in encodings)

    def interest(self, index: int, target: Items, history: Items, positions: Positions) -> tuple[Tensor, Losses]:
        unit = self.attentions[index]
        query, items = unit.pe.embed(target.embedding, history.embedding, positions)
        pooled, _, losses = unit.attend(query, items, positions, positions.target_pairs(history, target))
        return pooled * query, losses  # the target is the same in every term of the sum

    def of_candidates(self, index: int, target: Items, history: Items, states: Any, positions: Positions) -> Tensor:
        return self.interest(index, target, history, positions)[0]
