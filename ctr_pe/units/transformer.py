"""Transformer blocks over the sequence [history; target] (BST, SASRec).

B batch, N real items of the batch, M = N + B with the targets, D item dim. Everything is packed: a block computes real
items only, so there is no padded row for its biases and norms to fill.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from ctr_pe.pe.base import Losses, PositionEncoding, check_width, sum_losses
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

    def forward(self, items: Tensor, positions: Positions, pairs: list[Pairs] | None = None) -> Tensor:
        """packed items (M, D) -> states (M, D)."""
        return self.attend(items, positions, pairs)[0]

    def attend(
        self,
        items: Tensor,
        positions: Positions,
        pairs: list[Pairs] | None = None,
        projected: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Losses]:
        """:meth:`forward`, and in training the encoding's losses. ``projected``: :meth:`project` of the items."""
        normed = self.layer_norm1(items) if self.pre else items
        attended, losses = self.attention.attend(normed, positions, pairs, projected)
        return self._feed(self._join(items, attended, self.layer_norm1)), losses

    def newest(self, items: Tensor, positions: Positions, pairs: list[Pairs] | None = None) -> Tensor:
        """packed items (M, D) -> the state (B, D) of each row's newest item alone."""
        attended = self.attention.newest(self.layer_norm1(items) if self.pre else items, positions, pairs)
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
        encodings: one per block, all of one dim and number of heads, built for a slot more than the history has.
            The model calls ``embed`` of the first.
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
    def prefix_stable(self) -> bool:
        """Whether the states of history items that the target's state is made of do not depend on the target."""
        return self.causal or len(self.blocks) == 1

    @property
    def pe(self) -> PositionEncoding:
        """That of the lowest block, whose ``embed`` the model calls."""
        return self.encodings[0]

    @property
    def encodings(self) -> list[PositionEncoding]:
        """Of the blocks, the lowest first."""
        return [block.attention.pe for block in self.blocks]

    def forward(
        self,
        target: Tensor,
        history: Tensor,
        positions: Positions,
        items: tuple[Items, Items] | None = None,
        projected: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Positions, Losses]:
        """target (B, D), packed history (N, D), after ``pe.embed`` -> packed states (M, D) of [history; target], their
        positions, and in training the encodings' losses.

        ``items``: history and target as looked up; without, they are their own. ``projected``: :meth:`project` of the
        history, if the caller has it.
        """
        states, whole, looked_up = self._joined(target, history, positions, items)
        lowest, *upper = self.blocks
        if projected:
            of_target = lowest.project(gather_rows(states, whole.newest))
            projected = [positions.append(*pair) for pair in zip(projected, of_target, strict=True)]
        pairs = whole.item_pairs(self.causal, looked_up)
        states, losses = lowest.attend(states, whole, pairs, projected)
        states, more = self._through(upper, states, whole, pairs)
        return self.layer_norm(states), whole, sum_losses(losses, more)

    def of_target(
        self, target: Tensor, history: Tensor, positions: Positions, items: tuple[Items, Items] | None = None
    ) -> tuple[Tensor, Losses]:
        """target (B, D), packed history (N, D), after ``pe.embed`` -> the states (B, D) at the targets, and losses.

        The last block computes no other, unless its encoding has losses, which want all of them.
        """
        *lower, last = self.blocks
        if self.training and last.attention.pe.loss_names:
            states, whole, losses = self(target, history, positions, items)
            return gather_rows(states, whole.newest), losses
        states, whole, looked_up = self._joined(target, history, positions, items)
        pairs = whole.item_pairs(self.causal, looked_up) if len(self.blocks) > 1 else []
        states, losses = self._through(lower, states, whole, pairs)
        normed: Tensor = self.layer_norm(last.newest(states, whole, whole.newest_pairs(self.causal, looked_up)))
        return normed, losses

    def of_history(self, history: Tensor, positions: Positions, items: Items | None = None) -> tuple[Tensor, Losses]:
        """packed history (N, D), after ``pe.embed`` and without a target -> its states (N, D), and in training the
        encodings' losses. ``items``: the history as looked up; without, they are their own."""
        check_width(history, self.dim, self.pe)
        pairs = positions.item_pairs(self.causal, Items(history) if items is None else items)
        states, losses = self._through(self.blocks, self.dropout(history), positions, pairs)
        return self.layer_norm(states), losses

    def newest_of_history(self, history: Tensor, positions: Positions, items: Items | None = None) -> Tensor:
        """:meth:`of_history` at the newest item (B, D) of each row, which has one; the last block computes no other."""
        check_width(history, self.dim, self.pe)
        *lower, last = self.blocks
        given = Items(history) if items is None else items
        pairs = positions.item_pairs(self.causal, given) if lower else []
        states, _ = self._through(lower, self.dropout(history), positions, pairs)
        normed: Tensor = self.layer_norm(last.newest(states, positions, positions.newest_pairs(self.causal, given)))
        return normed

    def project(self, history: Tensor) -> list[Tensor]:
        """packed history (N, D) after ``pe.embed`` -> its queries, keys and values (N, D) in the first block."""
        return self.blocks[0].project(history)

    def encode(self, history: Tensor, positions: Positions, items: Items | None = None) -> list[tuple[Tensor, Tensor]]:
        """packed history (N, D) after ``pe.embed`` -> its keys and values (N, D) in every block, if
        :attr:`prefix_stable`: what :meth:`candidates` needs of it, whatever the targets."""
        given = Items(history) if items is None else items
        rows = positions.mask.shape[0]  # each gets a target of zeros, which no item sees
        zeros = Items(
            given.embedding.new_zeros(rows, given.embedding.shape[-1]),
            tuple(x.new_zeros(rows, *x.shape[1:]) for x in given.ids),
        )
        states, whole, looked_up = self._joined(history.new_zeros(rows, self.dim), history, positions, (given, zeros))
        pairs, encoded = whole.item_pairs(self.causal, looked_up), []
        for block in self.blocks:
            encoded.append(block.keys_values(whole.drop_last(states)))
            if block is not self.blocks[-1]:
                states = block(states, whole, pairs)
        return encoded

    def candidates(self, target: Tensor, encoded: list[tuple[Tensor, Tensor]], pairs: Pairs) -> Tensor:
        """The states (B, K, D) at K targets (B, K, D), after ``pe.embed``, of the same history: :meth:`of_target` for
        each of them. ``pairs``: ``positions.candidate_pairs`` of the histories' positions."""
        for block, (keys, values) in zip(self.blocks, encoded, strict=True):
            target = block.candidates(target, keys, values, pairs)
        normed: Tensor = self.layer_norm(target)
        return normed

    def _through(
        self, blocks: Iterable[TransformerBlock], states: Tensor, whole: Positions, pairs: list[Pairs]
    ) -> tuple[Tensor, Losses]:
        losses: Losses = {}
        for block in blocks:
            states, more = block.attend(states, whole, pairs)
            losses = sum_losses(losses, more)
        return states, losses

    def _joined(
        self, target: Tensor, history: Tensor, positions: Positions, items: tuple[Items, Items] | None
    ) -> tuple[Tensor, Positions, Items]:
        """packed (M, D) of [history; target], its positions, and its items as looked up."""
        check_width(history, self.dim, self.pe)
        old, new = items or (Items(history), Items(target))
        chosen = None if old.chosen is None or new.chosen is None else positions.append(old.chosen, new.chosen)
        ids = tuple(positions.append(*pair) for pair in zip(old.ids, new.ids, strict=True))
        looked_up = Items(positions.append(old.embedding, new.embedding), ids, chosen)
        return self.dropout(positions.append(history, target)), positions.with_target(), looked_up
