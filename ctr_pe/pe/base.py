"""No position encoding: the base class, whose hooks change nothing.

B batch, L history slots, N real items of the batch, Q queries, H heads, D item dim, d = D / H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from ctr_pe.positions import Pairs, Places, Positions

if TYPE_CHECKING:
    from ctr_pe.units.dropout import Dropout


@dataclass(frozen=True)
class About:
    """What ``docs/encodings.md`` says of an encoding and its class cannot show.

    ``paper``: author and year. ``equation``: s = logit, t = target, h = item, D_j = its distance.
    ``cost``: multiply-adds per query and head, with L keys and T table rows. ``extrapolates``: what happens to
    histories longer than any in training.
    """

    paper: str
    equation: str
    cost: str
    extrapolates: str


class PositionEncoding(nn.Module):
    """A position encoding overrides the hooks it needs; units and models call all of them and know none by name.

    Args:
        dim: item dim D.
        max_len: items of the longest history; tables have ``max_len + 1`` rows and longer histories use the last one.
        num_heads: heads H of the attention it joins; target attention has one.

    Raises:
        ValueError: a size is not a positive integer, or heads do not divide dim.
    """

    about: ClassVar[About] = About(paper="–", equation="s_j", cost="0", extrapolates="yes")

    needs_vectors: bool = False
    """Whether ``bias`` and ``mix`` read keys and values. Otherwise target attention spares itself to lay them out."""

    auxiliary: str = ""
    """What ``auxiliary_loss`` is, a few words for the log."""

    needs_age: bool = False
    """Whether it reads the ages of items; data without event times are refused."""

    added_dim: int = 0
    """Dims that ``embed`` appends to each item; units of a concatenating encoding are built for ``dim + added_dim``."""

    def __init__(self, dim: int, max_len: int, num_heads: int = 1) -> None:
        super().__init__()
        for name, value in (("dim", dim), ("max_len", max_len), ("num_heads", num_heads)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if dim % num_heads:
            raise ValueError(f"dim={dim} is not divisible by num_heads={num_heads}")
        self.dim, self.max_len, self.num_heads, self.head_dim = dim, max_len, num_heads, dim // num_heads
        self._losses: list[Tensor] = []

    def embed(self, target: Tensor | None, history: Tensor, positions: Positions) -> tuple[Tensor | None, Tensor]:
        """Before the network: target (B, D) or None, history (B, L, D) or packed (N, D) -> the same, or D + added_dim
        wide. ``positions.of(history, x)`` gives x per slot in the layout of the history."""
        return target, history

    def side(self, items: Tensor) -> dict[PositionEncoding, Tensor]:
        """Before self-attention: packed items (N, D) as they were looked up -> what ``bias`` wants to know of each,
        (N, any), under this encoding. It finds that in ``pairs.side``, laid out (R, W, any)."""
        return {}

    def rotate(self, query: Tensor, keys: Tensor, query_at: Places, keys_at: Places) -> tuple[Tensor, Tensor]:
        """Before the score: query (..., d) and keys (..., d), each with places that broadcast against its leading axes.

        Any layout is possible, (B, H, L, d) as well as (N, d) for the N real items of a batch, so encodings work on
        the last axis alone. Values are never rotated.
        """
        return query, keys

    def bias(self, query: Tensor, keys: Tensor, logits: Tensor, pairs: Pairs) -> Tensor:
        """After the score: query (B, H, Q, d) and keys (B, H, L, d) as before ``rotate``, logits (B, H, Q, L) of the
        unit's own score -> logits with position in them. Entries that are not allowed are masked afterwards. Without
        ``needs_vectors`` keys may be empty, (B, H, 0, d)."""
        return logits

    def weigh(
        self, query: Tensor, keys: Tensor, logits: Tensor, pairs: Pairs, dropout: Dropout | None = None
    ) -> Tensor:
        """The softmax of what ``bias`` gives, and dropout: (B, H, Q, L). Overridden to do it in one pass."""
        weights = pairs.softmax(self.bias(query, keys, logits, pairs))
        return weights if dropout is None else dropout(weights)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, pairs: Pairs, dropout: Dropout) -> Tensor:
        """All of self-attention, by the hooks: query (B, Q, H, d), keys and values (B, L, H, d) -> what is pooled,
        (B, Q, H, d). Overridden to do it in one pass."""
        query, keys, values = (x.transpose(1, 2).contiguous() for x in (query, keys, values))  # (B, H, L, d)
        turned_query, turned_keys = self.rotate(query, keys, pairs.query, pairs.key)
        turned_query = turned_query * pairs.scale  # not the products: there are more of them
        logits = turned_query @ turned_keys.transpose(-1, -2)
        weights = self.weigh(query, keys, logits, pairs, dropout)
        weights, mixed = self.mix(weights, values, pairs)
        pooled: Tensor = weights.to(mixed.dtype) @ mixed
        return pooled.transpose(1, 2)

    def mix(self, weights: Tensor, values: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Before pooling: weights (B, H, Q, L) after the softmax and values (B, H, L, d), zero at padding -> those that
        are pooled. In target attention the weights alone count, and without ``needs_vectors`` values may be empty,
        (B, H, 0, d)."""
        return weights, values

    def auxiliary_loss(self) -> Tensor:
        """Scalar that training adds to the loss: what hooks gave to ``learn`` since the last call, 0 without."""
        losses, self._losses = self._losses, []
        return torch.stack(losses).sum() if losses else torch.zeros(())

    def learn(self, loss: Tensor) -> None:
        """For hooks, in training: add a scalar to the auxiliary loss."""
        self._losses.append(loss)

    def next_layer(self, fresh: Callable[[], PositionEncoding]) -> PositionEncoding:
        """The encoding of the layer stacked on this one's: ``fresh()``, with parameters of its own, unless the method
        acts on the input only (then no encoding) or shares its parameters (then ``self``)."""
        return fresh()


class Chain(PositionEncoding):
    """Several encodings, one after the other: ``Chain([rope, cape])`` rotates, then adds CAPE's bias to the result.

    Raises:
        ValueError: no encoding, or encodings of different dim, max_len or num_heads.
    """

    def __init__(self, encodings: Sequence[PositionEncoding]) -> None:
        sizes = {(pe.dim, pe.max_len, pe.num_heads) for pe in encodings}
        if len(sizes) != 1:
            raise ValueError(f"a chain needs encodings of one (dim, max_len, num_heads), got {sorted(sizes)}")
        super().__init__(*sizes.pop())
        self.encodings = nn.ModuleList(encodings)
        self.added_dim = sum(pe.added_dim for pe in encodings)
        self.needs_vectors = any(pe.needs_vectors for pe in encodings)
        self.needs_age = any(pe.needs_age for pe in encodings)
        self.auxiliary = ", ".join(pe.auxiliary for pe in encodings if pe.auxiliary)

    def _links(self) -> list[PositionEncoding]:
        return [pe for pe in self.encodings if isinstance(pe, PositionEncoding)]

    def embed(self, target: Tensor | None, history: Tensor, positions: Positions) -> tuple[Tensor | None, Tensor]:
        for pe in self._links():
            target, history = pe.embed(target, history, positions)
        return target, history

    def side(self, items: Tensor) -> dict[PositionEncoding, Tensor]:
        return {pe: wanted for link in self._links() for pe, wanted in link.side(items).items()}

    def rotate(self, query: Tensor, keys: Tensor, query_at: Places, keys_at: Places) -> tuple[Tensor, Tensor]:
        for pe in self._links():
            query, keys = pe.rotate(query, keys, query_at, keys_at)
        return query, keys

    def bias(self, query: Tensor, keys: Tensor, logits: Tensor, pairs: Pairs) -> Tensor:
        for pe in self._links():
            logits = pe.bias(query, keys, logits, pairs)
        return logits

    def weigh(
        self, query: Tensor, keys: Tensor, logits: Tensor, pairs: Pairs, dropout: Dropout | None = None
    ) -> Tensor:
        *others, last = self._links()
        for pe in others:
            logits = pe.bias(query, keys, logits, pairs)
        return last.weigh(query, keys, logits, pairs, dropout)

    def mix(self, weights: Tensor, values: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        for pe in self._links():
            weights, values = pe.mix(weights, values, pairs)
        return weights, values

    def next_layer(self, fresh: Callable[[], PositionEncoding]) -> PositionEncoding:
        above = fresh()
        assert isinstance(above, Chain)
        return Chain(
            [pe.next_layer(partial(_same, new)) for pe, new in zip(self._links(), above._links(), strict=True)]
        )

    def auxiliary_loss(self) -> Tensor:
        return torch.stack([pe.auxiliary_loss() for pe in self._links()]).sum()


def _same(pe: PositionEncoding) -> PositionEncoding:
    return pe


class PositionLinear(nn.Linear):
    """A linear layer that belongs to an encoding: Xavier weights, zero bias.

    A class of its own, because FuxiCTR re-draws every plain ``nn.Linear`` from the backbone's random stream: an
    encoding that took part would change the backbone's weights, and runs of one seed could not be paired.
    """

    def reset_parameters(self) -> None:
        nn.init.xavier_normal_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
