"""BST, behaviour sequence transformer (Chen et al. 2019, arXiv 1905.06874).

B batch, N real items of the batch, M = N + B with the targets, D item dim, P position dim, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ctr_pe.config.schema import Layers, Positive, Rate, Width
from ctr_pe.models import candidates
from ctr_pe.models.rank_model import RankModel
from ctr_pe.pe.base import Losses, PositionEncoding, Target
from ctr_pe.sequence.positions import Items, Positions
from ctr_pe.units.transformer import Transformer
from ctr_pe.utils.errors import UserError, nearest
from ctr_pe.utils.module_list import ModuleList


class ConcatenatedPositions(PositionEncoding):
    """[h_j; e[D_j]] and [t; e[0]]: a learned vector beside each item, once, before the network.

    The paper takes the time from event to request for a position, FuxiCTR's model the slot of the padded history; here
    it is the distance from the target, whatever the padding.

    Heads need not divide the item dim D: they split D + P, P ``position_dim``. ``max_len``: slots of [history; target].
    Parameters: ``table (max_len, P)``, row 0 for the target; starts as sines and cosines of the distance, times
    ``scale``.
    """

    def __init__(self, dim: int, max_len: int, num_heads: int = 1, *, position_dim: int, scale: float = 1.0) -> None:
        super().__init__(dim, max_len)
        self.num_heads, self.out_dim = num_heads, dim + position_dim
        column = torch.arange(position_dim)
        angle = torch.arange(max_len).unsqueeze(1) * 10000.0 ** (-(column - column % 2) / position_dim)
        self.table = nn.Parameter(scale * torch.where(column % 2 == 0, angle.sin(), angle.cos()))

    def embed(self, target: Target, history: Tensor, positions: Positions) -> tuple[Target, Tensor]:
        index = positions.like(history, positions.distance).clamp(max=self.max_len - 1)
        if target is not None:
            target = torch.cat([target, self.table[0].expand(target.shape[0], -1)], -1)
        return target, torch.cat([history, nn.functional.embedding(index, self.table)], -1)

    def next_layer(self, fresh: Callable[[], PositionEncoding]) -> PositionEncoding:
        return PositionEncoding(self.out_dim, self.max_len, self.num_heads)  # it is in the items already


class BST(RankModel):
    """Transformer blocks over [history; target] per field group, pooled, then the tower.

    Keys are FuxiCTR's; those of every model are in :class:`~ctr_pe.models.rank_model.RankModel`.

    Args:
        num_heads: of each self-attention; divides the item dim, or with ``native`` that of item and position.
        stacked_transformer_layers: blocks.
        attention_dropout: rate on the attention weights.
        net_dropout: rate after attention and feed-forward network, and in the tower.
        layer_norm, use_residual: of each block; norms come after the sums.
        seq_pooling_type: ``mean`` or ``sum`` over history and target, the state at the ``target``, or ``concat``: all
            states, oldest first, each in the slot of its distance from the target.
        use_causal_mask: each item sees itself and the items before it.
        native_scale: of the waves that the vectors of ``native`` start as. FuxiCTR's 1 drowns item embeddings, which
            start at 1e-4; of a model that is to use them it is best as large as trained embeddings, .02 or so.
        use_position_emb: FuxiCTR's switch of ``native``: True without position_encoding means native.

    Raises:
        UserError: heads that do not divide the dim, an unknown pooling.
    """

    fillable = True
    native = ConcatenatedPositions

    def __init__(
        self,
        feature_map: Any,
        model_id: str = "BST",
        num_heads: Width = 2,
        stacked_transformer_layers: Layers = 1,
        attention_dropout: Rate = 0.0,
        net_dropout: Rate = 0.0,
        layer_norm: bool = True,
        use_residual: bool = True,
        seq_pooling_type: str = "mean",
        use_causal_mask: bool = False,
        native_scale: Positive = 1.0,
        use_position_emb: bool | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("position_encoding", "native" if use_position_emb else "none")
        super().__init__(feature_map, model_id, net_dropout=net_dropout, **kwargs)
        self.native_options = {"position_dim": self.embedding_dim, "scale": native_scale}
        pooling = seq_pooling_type
        if pooling not in POOLINGS:
            raise UserError(f"BST: seq_pooling_type '{pooling}' is unknown: {nearest(pooling, POOLINGS)}")
        self.pool = POOLINGS[pooling]
        self.transformers = ModuleList(
            Transformer(
                self.build_stack(group, stacked_transformer_layers, num_heads),
                causal=use_causal_mask,
                attention_dropout=attention_dropout,
                dropout=net_dropout,
                norm="post" if layer_norm else None,
                residual=use_residual,
            )
            for group in self.groups
        )
        slots = [group.max_len + 1 if pooling == "concat" else 1 for group in self.groups]
        self.build_tower(n * unit.dim for n, unit in zip(slots, self.transformers, strict=True))

    def interest(
        self,
        index: int,
        target: Items,
        history: Items,
        positions: Positions,
        projected: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Losses]:
        unit, items = self.transformers[index], (history, target)
        query, embedded = unit.pe.embed(target.embedding, history.embedding, positions)
        if self.pool is None:
            state, losses = unit.of_target(query, embedded, positions, items)
            return state, losses
        states, whole, losses = unit(query, embedded, positions, items, projected)
        return self.pool(states, whole, self.groups[index].max_len + 1), losses

    def _prefix_stable(self, index: int) -> bool:
        return self.pool is None and self.transformers[index].prefix_stable

    def encode_history(self, index: int, history: Items, positions: Positions) -> Any:
        unit = self.transformers[index]
        _, embedded = unit.pe.embed(None, history.embedding, positions)
        return unit.encode(embedded, positions, history) if self._prefix_stable(index) else unit.project(embedded)

    def of_candidates(self, index: int, target: Items, history: Items, states: Any, positions: Positions) -> Tensor:
        unit = self.transformers[index]
        if self._prefix_stable(index):
            queries, _ = unit.pe.embed(target.embedding, history.embedding, positions)
            found: Tensor = unit.candidates(queries, states, positions.candidate_pairs(unit.causal, history, target))
            return found
        each, copies, at, projected = candidates.copied(target, history, positions, states)
        return self.interest(index, each, copies, at, projected)[0].view(*target.embedding.shape[:2], -1)


def _concat(states: Tensor, positions: Positions, slots: int) -> Tensor:
    """The target's state in the last slot, the most recent item's before it; zeros where the history is short.
    A history longer than the model was built for loses its oldest items."""
    return positions.in_last(states, slots).flatten(1)


# Packed states (M, D) of [history; target], their positions, slots S -> (B, D) or (B, S · D).
POOLINGS: dict[str, Callable[[Tensor, Positions, int], Tensor] | None] = {
    "mean": lambda states, positions, slots: positions.total(states) / positions.lengths.unsqueeze(-1),
    "sum": lambda states, positions, slots: positions.total(states),
    "target": None,  # no other state is computed
    "concat": _concat,
}
