"""DMIN, deep multi-interest network (Xiao et al. 2020, CIKM).

B batch, N real items of the batch, D item dim, H heads, d = D / H head dim, P position dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ctr_pe.config.schema import Activation, Rate, WeightText, Width, Widths
from ctr_pe.models.groups import SizedGroup
from ctr_pe.models.next_item import NextItemModel, with_sum
from ctr_pe.pe.base import Losses, PositionEncoding, PositionLinear, sum_losses
from ctr_pe.sequence.positions import Items, Pairs, Positions, Where
from ctr_pe.units import DINScore, SelfAttention, TargetAttention
from ctr_pe.units.dropout import Dropout
from ctr_pe.units.stacked_modules import each
from ctr_pe.utils.module_list import ModuleList


class QueryPositions(PositionEncoding):
    """DMIN's own: the query of item j is W [t; p_j] + c, with a vector p_j per distance.

    W acts on t and p_j apart: ``rotate`` makes the query W_t t + c and puts W_p p_j beside the key, where
    :class:`QueryScore` finds it.

    Parameters: ``table (max_len, P)``, P ``position_dim``, zeros, row 0 for the newest item; ``project``, D + P to D.
    """

    def __init__(self, dim: int, max_len: int, num_heads: int = 1, *, position_dim: int) -> None:
        super().__init__(dim, max_len, num_heads)
        self.table = nn.Parameter(torch.zeros(max_len, position_dim))
        self.project = PositionLinear(dim + position_dim, dim)

    def rotate(self, query: Tensor, keys: Tensor, query_at: Where, keys_at: Where) -> tuple[Tensor, Tensor]:
        of_target, of_position = self.project.weight.tensor_split([self.dim], dim=1)
        index = (keys_at.distance - 1).clamp(0, self.max_len - 1)
        shift = nn.functional.embedding(index, self.table @ of_position.T)
        return nn.functional.linear(query, of_target, self.project.bias), torch.cat([keys, shift], -1)


class QueryScore(DINScore):
    """The DIN score, also with a query of its own for each item: items (N, 2 D) bring what to add to the target."""

    def forward(self, target: Tensor, items: Tensor, rows: Tensor | None, real: Tensor | None = None) -> Tensor:
        if items.shape[-1] == target.shape[-1]:
            return super().forward(target, items, rows, real)
        items, shift = items.chunk(2, dim=-1)
        return super().forward(target[rows] + shift, items, None, real)

    def candidates(self, target: Tensor, items: Tensor, shift: Tensor | None = None) -> Tensor:
        if items.shape[-1] != target.shape[-1]:
            items, shift = items.chunk(2, dim=-1)
        return super().candidates(target, items, shift)


class AfterAttention(nn.Module):
    """x = norm(items + dropout(attended)), then x + FFN(x); packed (N, D), the hidden layer has 2 D units."""

    def __init__(self, dim: int, dropout: float, layer_norm: bool) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.norm = nn.LayerNorm(dim) if layer_norm else nn.Identity()
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, attended: Tensor, items: Tensor) -> Tensor:
        x: Tensor = self.norm(items + self.dropout(attended))
        states: Tensor = x + self.ffn(x)
        return states


class Interests(nn.Module):
    """H interests of one history: behaviour refiner, then multi-interest extractor.

    The refiner (None leaves it out) is a causal self-attention with ``make_after()`` after it. The extractor is another
    one; its H heads are not summed: each has a ``make_after()`` and a target attention (``units``). A head's
    projection from d to D is its columns of ``output``, which multi-head attention would sum over the heads.
    """

    def __init__(
        self,
        refiner: SelfAttention | None,
        extractor: SelfAttention,
        units: Sequence[TargetAttention],
        make_after: Callable[[], AfterAttention],
    ) -> None:
        super().__init__()
        self.refiner, self.extractor, self.units = refiner, extractor, ModuleList(units)
        self.after_refiner = make_after() if refiner else None
        self.after_heads = ModuleList(make_after() for _ in units)

    @property
    def pe(self) -> PositionEncoding:
        """That of the lowest self-attention, whose ``embed`` the model calls."""
        return (self.refiner or self.extractor).pe

    def forward(self, target: Items, history: Items, positions: Positions) -> tuple[Tensor, Tensor, Losses]:
        """target (B, D), packed history (N, D) -> interests (B, H D), refined history (N, D), losses of encodings."""
        query, items = self.pe.embed(target.embedding, history.embedding, positions)
        refined, states, losses = self.encode(items, history, positions)
        interests, more = self.attend(query, states, positions, positions.target_pairs(history, target))
        return interests, refined, sum_losses(losses, more)

    def encode(self, items: Tensor, history: Items, positions: Positions) -> tuple[Tensor, list[Tensor], Losses]:
        """items (N, D) after ``embed`` -> the refined history (N, D), the states (N, D) of its items per head, and
        losses."""
        pairs, losses = positions.item_pairs(True, history), Losses()
        if self.refiner and self.after_refiner:
            attended, losses = self.refiner.attend(items, positions, pairs)
            items = self.after_refiner(attended, items)
        heads, more = self.extractor.heads(items, positions, pairs)
        output = self.extractor.output

        def after(module: AfterAttention, head: Tensor, columns: Tensor) -> Tensor:
            states: Tensor = module(nn.functional.linear(head, columns, output.bias), items)
            return states

        states = each(after, self.after_heads, heads.unbind(1), output.weight.chunk(heads.shape[1], dim=1))
        return items, states, sum_losses(losses, more)

    def attend(self, query: Tensor, states: list[Tensor], positions: Positions, pairs: Pairs) -> tuple[Tensor, Losses]:
        """targets (B, D) after ``embed``, states of ``encode`` -> interests (B, H D) and losses; of K targets
        (B, K, …) each."""
        if self.training and self.units[0].pe.loss_names:
            attended = [
                unit.attend(query, of_head, positions, pairs) for unit, of_head in zip(self.units, states, strict=True)
            ]
            found = [interest for interest, _, _ in attended]
            return torch.cat(found, dim=-1), sum_losses(*(losses for _, _, losses in attended))

        def interest(unit: TargetAttention, of_head: Tensor) -> Tensor:
            return unit.attend(query, of_head, positions, pairs)[0]

        return torch.cat(each(interest, self.units, states), dim=-1), {}


class DMIN(NextItemModel):
    """Refined histories, several interests from each, then the tower.

    Keys are FuxiCTR's; those of every model are in :class:`~ctr_pe.models.rank_model.RankModel`. Encodings act in both
    self-attentions and in the target attention of every interest; ``native`` in the latter alone.

    Args:
        dnn_activations, batch_norm: of the tower, with FuxiCTR's defaults for this model.
        aux_hidden_units, aux_activation, aux_loss_lambda: network of the auxiliary loss on the refined history, with
            the tower's dropout and batch norm, and the loss's weight; 0 for none.
        net_dropout: rate after each self-attention, and in the tower.
        num_heads: H, of both self-attentions, and the number of interests.
        enable_sum_pooling: the tower also gets the sum of the history, and target ⊙ sum.
        attention_hidden_units, attention_activation: the score of the target attentions.
        attention_dropout: rate in the score and on the weights of the self-attentions.
        pos_emb_dim: P of ``native``.
        use_pos_emb: FuxiCTR's switch of ``native``: True without position_encoding means native.
        use_behavior_refiner: False leaves the refiner out.
        layer_norm: of refiner and extractor.

    Raises:
        UserError: heads that do not divide the item dim.
    """

    fillable = True

    def __init__(
        self,
        feature_map: Any,
        model_id: str = "DMIN",
        dnn_activations: Activation = "Dice",
        aux_hidden_units: Widths = (100, 50),
        aux_activation: Activation = "ReLU",
        net_dropout: Rate = 0.0,
        num_heads: Width = 4,
        enable_sum_pooling: bool = False,
        attention_hidden_units: Widths = (80, 40),
        attention_activation: Activation = "ReLU",
        attention_dropout: Rate = 0.0,
        use_pos_emb: bool | None = None,
        pos_emb_dim: Width = 8,
        use_behavior_refiner: bool = True,
        aux_loss_lambda: WeightText = 0.0,
        batch_norm: bool = True,
        bn_only_once: bool = False,
        layer_norm: bool = True,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("position_encoding", "native" if use_pos_emb else "none")
        norms: dict[str, Any] = {"batch_norm": batch_norm, "bn_only_once": bn_only_once}
        tower = {"dnn_activations": dnn_activations, "net_dropout": net_dropout, **norms}
        super().__init__(feature_map, model_id, **tower, **kwargs)
        self.native_options = {"position_dim": pos_emb_dim}
        self.enable_sum_pooling = enable_sum_pooling

        def interests(group: SizedGroup) -> Interests:
            first = self.build_encoding(group, group.dim, num_heads)
            dim = first.out_dim

            def unit() -> TargetAttention:
                pe = self.build_encoding(group, dim, below=first, native=QueryPositions)
                score = QueryScore(dim, attention_hidden_units, attention_activation, attention_dropout)
                return TargetAttention(dim, score, pe)

            attention = partial(SelfAttention, dim, num_heads, causal=True, dropout=attention_dropout)
            refiner, second = None, first
            if use_behavior_refiner:
                refiner, second = attention(first), self.build_encoding(group, dim, num_heads, below=first)
            after = partial(AfterAttention, dim, net_dropout, layer_norm)
            return Interests(refiner, attention(second), [unit() for _ in range(num_heads)], after)

        self.interests = ModuleList(interests(group) for group in self.groups)
        dims = [unit.units[0].pe.out_dim for unit in self.interests]
        mlp = {"dropout_rates": net_dropout, **norms}
        self.build_next_item_losses(aux_loss_lambda, dims, aux_hidden_units, aux_activation, **mlp)
        self.build_tower([num_heads * sum(dims), *(2 * group.dim for group in self.groups if enable_sum_pooling)])

    def interest(self, index: int, target: Items, history: Items, positions: Positions) -> tuple[Tensor, Losses]:
        interests, refined, losses = self.interests[index](target, history, positions)
        losses = sum_losses(self.next_item_loss(index, refined, history, positions), losses)
        return self._with_sum(interests, target, history, positions), losses

    def encode_history(self, index: int, history: Items, positions: Positions) -> Any:
        unit = self.interests[index]
        return unit.encode(unit.pe.embed(None, history.embedding, positions)[1], history, positions)[1]

    def of_candidates(self, index: int, target: Items, history: Items, states: Any, positions: Positions) -> Tensor:
        unit = self.interests[index]
        query, _ = unit.pe.embed(target.embedding, history.embedding, positions)
        interests, _ = unit.attend(query, states, positions, positions.target_pairs(history, target))
        return self._with_sum(interests, target, history, positions)

    def _with_sum(self, interests: Tensor, target: Items, history: Items, positions: Positions) -> Tensor:
        return with_sum(interests, target, history, positions) if self.enable_sum_pooling else interests
