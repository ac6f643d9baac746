"""Next-item models of transformer blocks: the keys that they share, and the encoder of a history.

N real items of the batch, D item dim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ctr_pe.config.schema import Activation, Layers, Rate, Width
from ctr_pe.models.sequential_model import SequentialModel
from ctr_pe.pe.base import Losses
from ctr_pe.sequence.positions import Items, Positions
from ctr_pe.units.transformer import Transformer
from ctr_pe.utils.errors import UserError, nearest

NORMS = ("pre", "post")


class HistoryEncoder(nn.Module):
    """Positions, a norm if wanted, and transformer blocks over a history.

    Args:
        transformer: the blocks, whose lowest encoding adds positions.
        input_norm: norm the items with their positions.
    """

    def __init__(self, transformer: Transformer, input_norm: bool = False) -> None:
        super().__init__()
        self.transformer, self.dim = transformer, transformer.dim
        self.input_norm = nn.LayerNorm(self.dim) if input_norm else nn.Identity()

    def encode(self, vectors: Tensor, items: Items, positions: Positions) -> tuple[Tensor, Losses]:
        """packed vectors (N, any) of ``items`` as looked up -> states (N, ``dim``), and in training the encodings'
        losses."""
        return self.transformer.of_history(self._embedded(vectors, positions), positions, items)

    def newest(self, vectors: Tensor, items: Items, positions: Positions) -> Tensor:
        """The states of :meth:`encode` at each row's newest item (B, ``dim``), zeros for an empty history."""
        if not positions.no_row_is_empty:
            return positions.newest_of(self.encode(vectors, items, positions)[0])
        return self.transformer.newest_of_history(self._embedded(vectors, positions), positions, items)

    def _embedded(self, vectors: Tensor, positions: Positions) -> Tensor:
        normed: Tensor = self.input_norm(self.transformer.pe.embed(None, vectors, positions)[1])
        return normed


class SequentialTransformer(SequentialModel):
    """A next-item model of transformer blocks; a subclass builds them by ``build_encoder``.

    Keys of every next-item model are in :class:`~ctr_pe.models.sequential_model.SequentialModel`.

    Args:
        num_blocks: blocks, one above the other.
        num_heads: of each self-attention; divides the dim of the encoder.
        ffn_dim: hidden width of the feed-forward networks; that dim by default.
        ffn_activation: of their hidden layer, a name as in :class:`~ctr_pe.units.DINScore`.
        attention_dropout: rate on the attention weights.
        hidden_dropout: rate on the items and after each attention and feed-forward network.
        layer_norm: ``pre`` norms the input of each, and the last states; ``post`` each sum.
        input_norm: norm the items with their positions, before the dropout, as RecBole does.

    Raises:
        UserError: as SequentialModel; heads that do not divide the dim, an unknown norm or activation.
    """

    native = "naive"

    def __init__(
        self,
        feature_map: Any,
        model_id: str = "SequentialTransformer",
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
        if layer_norm not in NORMS:
            name = self.registered_name
            raise UserError(f"{name}: layer_norm '{layer_norm}' is unknown: {nearest(layer_norm, NORMS)}")
        self.num_blocks, self.num_heads, self.input_norm = num_blocks, num_heads, input_norm
        self.block: dict[str, Any] = {
            "input_dropout": hidden_dropout,
            "hidden_dim": ffn_dim,
            "activation": ffn_activation,
            "attention_dropout": attention_dropout,
            "dropout": hidden_dropout,
            "norm": layer_norm,
            "causal": self.causal,
        }

    def build_encoder(self, dim: int, extra_slots: int = 0, encoding: str | None = None) -> HistoryEncoder:
        """Blocks of width ``dim``; ``extra_slots``: 1 if a slot follows the history; ``encoding``: None for the
        group's. Raises UserError as ``build_stack``."""
        group = replace(self.group, encoding=encoding or self.group.encoding)
        encodings = self.build_stack(group, self.num_blocks, self.num_heads, extra_slots, dim)
        return HistoryEncoder(Transformer(encodings, **self.block), self.input_norm)
