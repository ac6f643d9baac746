"""DIEN, deep interest evolution network (Zhou et al. 2019, arXiv 1809.03672)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ctr_pe.config.schema import Activation, Rate, WeightText, Width, Widths
from ctr_pe.models.next_item import NextItemModel, with_sum
from ctr_pe.pe.base import Losses, sum_losses
from ctr_pe.sequence.positions import Items, Positions
from ctr_pe.units import BilinearScore, DINScore, DotScore, TargetAttention
from ctr_pe.units.gru import GATES, GRU, AttentionGRU, last_state
from ctr_pe.utils.errors import UserError, nearest
from ctr_pe.utils.module_list import ModuleList


class DIEN(NextItemModel):
    """Per field group a GRU makes an interest state of each item, target attention weighs the states, and a second GRU,
    whose steps the weights gate, ends in the interest; then the tower.

    Encodings act on the attention weights alone, which are all that the second GRU takes. Keys are FuxiCTR's; those of
    every model are in :class:`~ctr_pe.models.rank_model.RankModel`.

    Args:
        gru_type: ``AIGRU``, ``AGRU`` or ``AUGRU``.
        enable_sum_pooling: add the sum of the history, and its product with the target, to the tower's input.
        attention_type: ``dot_attention``, ``bilinear_attention``, ``din_attention``, or without ``_attention``.
        attention_hidden_units, attention_activation, attention_dropout: of the DIN score.
        use_attention_softmax: weights are a softmax over the history, else the logits themselves.
        aux_loss_alpha: weight of the auxiliary loss; 0 for none.
        aux_hidden_units, aux_activation: its network, with dropout ``net_dropout``.
        neg_seq_field: per group, items that did not come next, one per history item; without, drawn from the batch.
    """

    fillable = True

    def __init__(
        self,
        feature_map: Any,
        model_id: str = "DIEN",
        embedding_dim: Width = 16,
        dnn_hidden_units: Widths = (200, 80),
        net_dropout: Rate = 0.0,
        batch_norm: bool = True,
        gru_type: str = "AUGRU",
        enable_sum_pooling: bool = False,
        attention_type: str = "bilinear_attention",
        attention_hidden_units: Widths = (80, 40),
        attention_activation: Activation = "Dice",
        attention_dropout: Rate = 0.0,
        use_attention_softmax: bool = True,
        aux_loss_alpha: WeightText = 0.0,
        aux_hidden_units: Widths = (100, 50),
        aux_activation: Activation = "ReLU",
        **kwargs: Any,
    ) -> None:
        tower: dict[str, Any] = {"dnn_hidden_units": dnn_hidden_units, "net_dropout": net_dropout}
        super().__init__(feature_map, model_id, embedding_dim=embedding_dim, batch_norm=batch_norm, **tower, **kwargs)
        if gru_type not in GATES:
            raise UserError(f"gru_type '{gru_type}' is unknown: {nearest(gru_type, GATES)}")
        scores: dict[str, Callable[[int], nn.Module]] = {
            "dot": lambda dim: DotScore(dim, scaled=False),
            "bilinear": BilinearScore,
            "din": lambda dim: DINScore(dim, attention_hidden_units, attention_activation, attention_dropout),
        }
        score = str(attention_type).removesuffix("_attention")
        if score not in scores:
            names = [f"{name}_attention" for name in scores]
            raise UserError(f"attention_type '{attention_type}' is unknown: {nearest(attention_type, names)}")
        encodings = [self.build_encoding(group, group.dim) for group in self.groups]
        widths = [pe.out_dim for pe in encodings]
        self.extractors = ModuleList(GRU(width, width) for width in widths)
        self.attentions = ModuleList(
            TargetAttention(pe.out_dim, scores[score](pe.out_dim), pe, use_attention_softmax) for pe in encodings
        )
        self.evolutions = ModuleList(AttentionGRU(width, width, gru_type) for width in widths)
        self.build_next_item_losses(aux_loss_alpha, widths, aux_hidden_units, aux_activation, dropout_rates=net_dropout)
        self.enable_sum_pooling = enable_sum_pooling
        self.build_tower([*widths, *(2 * group.dim for group in self.groups if enable_sum_pooling)])

    def interest(self, index: int, target: Items, history: Items, positions: Positions) -> tuple[Tensor, Losses]:
        query, items = self.attentions[index].pe.embed(target.embedding, history.embedding, positions)
        states = self.extractors[index](items, positions)
        next_item = self.next_item_loss(index, states, history, positions)
        interest, losses = self._evolved(index, query, states, target, history, positions)
        return interest, sum_losses(next_item, losses)

    def encode_history(self, index: int, history: Items, positions: Positions) -> Any:
        _, items = self.attentions[index].pe.embed(None, history.embedding, positions)
        return self.extractors[index](items, positions)

    def of_candidates(self, index: int, target: Items, history: Items, states: Any, positions: Positions) -> Tensor:
        query, _ = self.attentions[index].pe.embed(target.embedding, history.embedding, positions)
        return self._evolved(index, query, states, target, history, positions)[0]

    def _evolved(
        self, index: int, query: Tensor, states: Tensor, target: Items, history: Items, positions: Positions
    ) -> tuple[Tensor, Losses]:
        """The interest (B, …) of targets ``query`` (B, D) after ``embed``, or of K targets of each history."""
        pairs = positions.target_pairs(history, target)
        _, weights, losses = self.attentions[index].attend(query, states, positions, pairs)
        packed = positions.pack(weights.mT if target.several else weights)
        interest = last_state(self.evolutions[index](states, packed, positions), positions)
        return with_sum(interest, target, history, positions) if self.enable_sum_pooling else interest, losses
