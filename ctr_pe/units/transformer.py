"""Transformer blocks over the sequence [history; target] (BST, SASRec).

B batch, N real items of the batch, M = N + B with the targets, D item dim. Everything is packed: a block computes real
items only, so there is no padded row for its biases and norms to fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ctr_pe.pe.base import PositionEncoding
from ctr_pe.sequence.jagged import gather_rows
from ctr_pe.sequence.positions import Items, Pairs, Positions
from ctr_pe.units.activations import make_activation
from ctr_pe.units.dropout import Dropout
from ctr_pe.units.self_attention import SelfAttention
from ctr_pe.utils.module_list import ModuleList


class TransformerBlock(nn.Module):
    """Self-attention, then a feed-forward network of two layers, each with dropout, residual and layer norm.

    Args:
        dim, num_heads, pe, causal, attention_dropout: as in :class:`~ctr_pe.units.SelfAttention`.
        hidden_dim: width of the feed-forward network's hidden layer; D by default.
        activation: after the hidden layer, a name as in :class:`~ctr_pe.units.DINScore`.
        dropout: rate after the attention and after the feed-forward network.
        norm: ``post`` norms each sum of input and output, ``pre`` the input of attention and network (a stack then
            needs a norm after its last block), None neither.
        residual: add the input of attention and network to their outputs.

    Raises:
        ValueError: an unknown norm or activation, or what SelfAttention refuses.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 1,
        pe: PositionEncoding | None = None,
        causal: bool = False,
        hidden_dim: int | None = None,
        activation: str = "LeakyReLU",
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
        norm: str | None = "post",
        residual: bool = True,
    ) -> None:
        super().__init__()
        if norm not in ("post", "pre", None):
            raise ValueError(f"norm must be 'post', 'pre' or None, got {norm!r}")
        hidden = hidden_dim or dim
        self.attention = SelfAttention(dim, num_heads, pe, causal, attention_dropout)
        self.ffn = nn.Sequential(nn.Linear(dim, hidden), make_activation(activation, hidden), nn.Linear(hidden, dim))
        self.layer_norm1, self.layer_norm2 = (nn.LayerNorm(dim) if norm else nn.Identity() for _ in range(2))
        self.dropout = Dropout(dropout)
        self.pre, self.residual = norm == "pre", residual

    def forward(self, items: Tensor, positions: Positions, projected: Sequence[Tensor] | None = None) -> Tensor:
        """packed items (M, D) -> states (M, D). ``projected``: :meth:`project` of the items, if known."""
        attended = self.attention(self.layer_norm1(items) if self.pre else items, positions, projected)
        return self._feed(self._join(items, attended, self.layer_norm1))

    def newest(self, items: Tensor, positions: Positions) -> Tensor:
        """packed items (M, D) -> the state (B, D) of each row's newest item alone."""
        attended = self.attention.newest(self.layer_norm1(items) if self.pre else items, positions)
        return self._feed(self._join(gather_rows(items, positions.newest), attended, self.layer_norm1))

    def project(self, items: Tensor) -> list[Tensor]:
        """packed items (M, D) -> their queries, keys and values (M, D)."""
        return self.attention.project(self.layer_norm1(items) if self.pre else items)

    def keys_values(self, items: Tensor) -> tuple[Tensor, Tensor]:
        """packed items (M, D) -> their keys and values (M, D)."""
        return self.attention.keys_values(self.layer_norm1(items) if self.pre else items)

    def candidates(self, target: Tensor, keys: Tensor, values: Tensor, pairs: Pairs) -> Tensor:
        """K targets (B, K, D) after the same history -> their states (B, K, D), as SelfAttention's."""
        attended = self.attention.candidates(self.layer_norm1(target) if self.pre else target, keys, values, pairs)
        return self._feed(self._join(target, attended, self.layer_norm1))

    def _feed(self, x: Tensor) -> Tensor:
        return self._join(x, self.ffn(self.layer_norm2(x) if self.pre else x), self.layer_norm2)

    def _join(self, x: Tensor, y: Tensor, norm: nn.Module) -> Tensor:
        y = self.dropout(y)
        if self.residual:
            y = x + y
        return y if self.pre else norm(y)


class Transformer(nn.Module):
    """Transformer blocks over [history; target].

    Args:
        encodings: one per block, all of one dim and number of heads, built for a slot more than the history has;
            ``embed`` is called on the first.
        input_dropout: rate on the items, after ``embed``.
        block: the other arguments of :class:`TransformerBlock`. With ``norm="pre"`` a last norm follows the last block.

    Raises:
        ValueError: no encoding, or what TransformerBlock refuses.
    """

    def __init__(self, encodings: Sequence[PositionEncoding], input_dropout: float = 0.0, **block: Any) -> None:
        super().__init__()
        if not encodings:
            raise ValueError("a transformer needs at least one block")
        self.dim = encodings[0].out_dim
        self.dropout = Dropout(input_dropout)
        self.blocks = ModuleList(TransformerBlock(self.dim, pe.num_heads, pe, **block) for pe in encodings)
        self.layer_norm = nn.LayerNorm(self.dim) if block.get("norm") == "pre" else nn.Identity()
        self.causal = bool(block.get("causal"))

    @property
    def apart(self) -> bool:
        """Whether what the state at a target needs of the history does not depend on the target."""
        return self.causal or len(self.blocks) == 1

    @property
    def encodings(self) -> list[PositionEncoding]:
        """Of the blocks, the lowest first."""
        return [block.attention.pe for block in self.blocks]

    def forward(
        self, target: Tensor, history: Tensor, positions: Positions, projected: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Positions]:
        """target (B, D), packed history (N, D) -> packed states (M, D) of [history; target], their positions.

        ``projected``: :meth:`project` of the history, if known.
        """
        states, whole = self._embedded(target, history, positions)
        lowest, *upper = self.blocks
        if projected:
            own = lowest.project(gather_rows(states, whole.newest))
            projected = [positions.append(*pair) for pair in zip(projected, own, strict=True)]
        states = lowest(states, whole, projected)
        for block in upper:
            states = block(states, whole)
        return self.layer_norm(states), whole

    def of_target(self, target: Tensor, history: Tensor, positions: Positions) -> Tensor:
        """target (B, D), packed history (N, D) -> the states (B, D) at the targets.

        The last block computes no other, unless its encoding has losses, which want all of them.
        """
        states, whole = self._embedded(target, history, positions)
        *lower, last = self.blocks
        for block in lower:
            states = block(states, whole)
        if self.training and last.attention.pe.loss_names:
            states = gather_rows(last(states, whole), whole.newest)
        else:
            states = last.newest(states, whole)
        normed: Tensor = self.layer_norm(states)
        return normed

    def project(self, history: Tensor, positions: Positions) -> list[Tensor]:
        """packed history (N, D) -> its queries, keys and values (N, D) in the first block, whatever the target."""
        _, embedded = self.encodings[0].embed(None, history, positions)
        return self.blocks[0].project(embedded)

    def encode(self, history: Tensor, positions: Positions) -> list[tuple[Tensor, Tensor]]:
        """packed history (N, D) -> its keys and values (N, D) in every block, if :attr:`apart`: what
        :meth:`candidates` needs of it, whatever the targets."""
        nobody = history.new_zeros(positions.mask.shape[0], history.shape[-1])  # a target that no item sees
        if positions.items is not None:
            ids = tuple(field.new_zeros(nobody.shape[0]) for field in positions.items.ids)
            positions = replace(positions, target=Items(nobody, ids))
        states, whole = self._embedded(nobody, history, positions)
        found = []
        for block in self.blocks:
            found.append(block.keys_values(whole.drop_last(states)))
            if block is not self.blocks[-1]:
                states = block(states, whole)
        return found

    def candidates(
        self, target: Tensor, history: Tensor, encoded: list[tuple[Tensor, Tensor]], positions: Positions
    ) -> Tensor:
        """The states (B, K, D) at K targets (B, K, D) of the same history: :meth:`of_target` for each of them."""
        states, _ = self.encodings[0].embed(target, history, positions)
        assert states is not None
        pairs = positions.candidate_pairs(target.shape[1], self.causal)
        for block, (keys, values) in zip(self.blocks, encoded, strict=True):
            states = block.candidates(states, keys, values, pairs)
        normed: Tensor = self.layer_norm(states)
        return normed

    def _embedded(self, target: Tensor, history: Tensor, positions: Positions) -> tuple[Tensor, Positions]:
        """packed (M, D) of [history; target] and its positions."""
        lowest, *upper = self.encodings
        embedded, history = lowest.embed(target, history, positions)
        positions.embedded.update(dict.fromkeys(upper))  # positions are in what they get
        assert embedded is not None
        return self.dropout(positions.append(history, embedded)), positions.with_target()
