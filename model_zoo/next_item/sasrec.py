"""SASRec, self-attentive sequential recommendation (Kang & McAuley 2018, arXiv 1808.09781), as next-item model."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ctr_pe.config.schema import Activation, Layers, Rate, Width
from ctr_pe.models.sequential_model import SequentialModel
from ctr_pe.pe.base import Losses
from ctr_pe.sequence.positions import Items, Positions
from ctr_pe.units.transformer import Transformer
from ctr_pe.utils.errors import UserError, nearest


class NextItemSASRec(SequentialModel):
    """Causal transformer blocks over the history; the state at an item predicts the item after it.

    Keys of every next-item model are in :class:`~ctr_pe.models.sequential_model.SequentialModel`.

    Args:
        num_blocks: blocks, one above the other.
        num_heads: of each self-attention; divides the item dim.
        ffn_dim: hidden width of the feed-forward networks; the item dim by default, as in the paper.
        ffn_activation: of their hidden layer, a name as in :class:`~ctr_pe.units.DINScore`.
        attention_dropout: rate on the attention weights.
        hidden_dropout: rate on the items and after each attention and feed-forward network.
        layer_norm: ``pre`` norms the input of each, as in the paper, and the last states; ``post`` each sum.
        input_norm: norm the items with their positions, before the dropout, as RecBole does.

    Raises:
        UserError: as SequentialModel; heads that do not divide the dim, an unknown norm or activation.
    """

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
        input_norm: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(feature_map, model_id, **kwargs)
        if layer_norm not in ("pre", "post"):
            raise UserError(f"SASRec: layer_norm '{layer_norm}' is unknown: {nearest(layer_norm, ('pre', 'post'))}")
        self.transformer = Transformer(
            self.build_stack(self.group, num_blocks, num_heads),
            input_dropout=hidden_dropout,
            causal=True,
            hidden_dim=ffn_dim,
            activation=ffn_activation,
            attention_dropout=attention_dropout,
            dropout=hidden_dropout,
            norm=layer_norm,
        )
        self.input_norm = nn.LayerNorm(self.transformer.dim) if input_norm else nn.Identity()
        self.build_items(self.transformer.dim)

    def states(self, items: Items, positions: Positions) -> tuple[Tensor, Losses]:
        _, embedded = self.transformer.pe.embed(None, items.embedding, positions)
        return self.transformer.of_history(self.input_norm(embedded), positions, items)
