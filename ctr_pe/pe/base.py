"""No position encoding: the base class, whose hooks change nothing.

B batch, L history slots, N real items of the batch, Q queries, H heads, D item dim, d = D / H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ctr_pe.config.schema import Validated
from ctr_pe.pe.vectors import Attended, Vectors
from ctr_pe.sequence.positions import Pairs, Positions, Where
from ctr_pe.utils.module_list import ModuleList


@dataclass(frozen=True)
class About:
    """What ``docs/encodings.md`` says of an encoding and its class cannot show.

    ``paper``: author and year. ``equation``: s = logit, t = target, h = item, D_j = its distance.
    ``cost``: multiply-adds per query and head, with L keys and T table rows. ``extrapolates``: what happens to
    histories longer than any in training. ``needs_age``: it reads the ages of items; data without times are refused.
    """

    paper: str
    equation: str
    cost: str
    extrapolates: str
    needs_age: bool = False


Target = TypeVar("Target", Tensor, None)
"""Targets, or None where a history is encoded whatever its targets."""
Losses = dict[str, Tensor]
"""Scalars by name that training minimises beside the loss of the task."""


class Contextual(NamedTuple):
    """A bias of contextual positions as the operands of :mod:`ctr_pe.ops.contextual`: what is summed, and the table."""

    table: Tensor
    gate: tuple[Tensor, Tensor] | None
    gate_weights: Tensor | None
    sign: int
    scale: float


class PositionEncoding(Validated, nn.Module):
    """A position encoding overrides the hooks it needs; units and models call all of them and know none by name.

    ``out_dim``: width of the items after ``embed``, D unless it concatenates. ``loss_names``: names of the losses that
    ``losses`` gives; () for none. ``shared``: names of the parameters that stacked layers share where shapes match;
    ``shares_all``: layers of equal dim and heads share the encoding itself.

    Args:
        dim: item dim D.
        max_len: items of the longest history; tables have ``max_len + 1`` rows and longer histories use the last one.
        num_heads: heads H of the attention it joins; target attention has one.

    Raises:
        ValueError: a size is not a positive integer, or heads do not divide dim.
    """

    about: About = About(paper="–", equation="s_j", cost="0", extrapolates="yes")
    loss_names: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    shares_all = False

    def __init__(self, dim: int, max_len: int, num_heads: int = 1) -> None:
        super().__init__()
        for name, value in (("dim", dim), ("max_len", max_len), ("num_heads", num_heads)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if dim % num_heads:
            raise ValueError(f"dim={dim} is not divisible by num_heads={num_heads}")
        self.dim, self.max_len, self.num_heads, self.head_dim = dim, max_len, num_heads, dim // num_heads
        self.out_dim = dim

    def embed(self, target: Target, history: Tensor, positions: Positions) -> tuple[Target, Tensor]:
        """Before the network: target (B, D) or None, history (B, L, D) or packed (N, D) -> the same, ``out_dim`` wide.

        ``positions.like(history, x)`` gives x per slot in the layout of the history. Models call it, once per
        batch; units do not.
        """
        return target, history

    def rotate(self, query: Tensor, keys: Tensor, query_at: Where, keys_at: Where) -> tuple[Tensor, Tensor]:
        """Before the score: query (..., d) and keys (..., d), and where they stand, which broadcasts against their
        leading axes.

        Any layout is possible: target attention has (N, d) for the N real items of a batch, self-attention
        (N, H, 1, d), a plot (B, H, L, d). So encodings work on the last axis alone. Values are never rotated.
        """
        return query, keys

    def rotate_packed(
        self, query: Tensor, keys: Tensor, at: Callable[[], tuple[Where, Where]]
    ) -> tuple[Tensor, Tensor]:
        """:meth:`rotate` for all heads of packed queries (M, D) and keys (N, D), before they are padded. ``at``: where
        they stand, (M,) or (1,), and (N,); not asked for where nothing is rotated."""
        if not self.has_rotation:
            return query, keys
        of_query, of_keys = (
            torch.unflatten(x, -1, (self.num_heads, -1)).unsqueeze(-2) for x in (query, keys)
        )  # (N, H, 1, d)
        rotated = self.rotate(of_query, of_keys, *(where.per_vector for where in at()))
        return rotated[0].flatten(1), rotated[1].flatten(1)

    def bias(self, logits: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
        """After the score: logits (B, H, Q, L) of the unit's own score -> logits with position in them. Pairs that are
        not allowed are masked afterwards."""
        return logits

    def mix(self, weights: Tensor, vectors: Vectors, pairs: Pairs) -> tuple[Tensor, Vectors]:
        """Before pooling: attention weights (B, H, Q, L) and vectors -> the weights, and the values that they pool. In
        target attention the weights alone count."""
        return weights, vectors

    def losses(self, attended: Sequence[Attended]) -> Losses:
        """In training, after a unit has attended: its blocks, which together have every row with items -> scalars by
        name that are to be minimised too. Called if there are ``loss_names``; then all queries are computed."""
        return {}

    def next_layer(self, fresh: Callable[[], PositionEncoding]) -> PositionEncoding:
        """The encoding of the layer stacked on this one's: ``fresh()``, with those parameters of this one that are
        ``shared``. No encoding if the method acts on the input only; ``self`` if layers share all of it."""
        above = fresh()
        if self.shares_all and (above.dim, above.num_heads) == (self.dim, self.num_heads):
            return self
        for name in self.shared:
            own = getattr(self, name)
            if getattr(above, name).shape == own.shape:
                setattr(above, name, own)
        return above

    def contextual(self, pairs: Pairs) -> Contextual | None:
        """The whole effect on self-attention as operands of one operator, if it is a bias of contextual positions and
        nothing else: then that operator replaces the hooks."""
        return None

    def plain_bias(self, vectors: Vectors, pairs: Pairs) -> Tensor | float | None:
        """What ``bias`` adds to the logits of self-attention, (B or 1, H or 1, Q, L), if it adds the same to any and
        ``mix`` changes nothing: then one operator replaces the two."""
        return 0.0 if self._has_hooks_of(PositionEncoding) else None

    @property
    def has_rotation(self) -> bool:
        """Whether ``rotate`` changes anything."""
        return type(self).rotate is not PositionEncoding.rotate

    @property
    def only_rotates(self) -> bool:
        """Whether nothing but ``rotate`` reads the queries and keys of a unit."""
        return self._has_hooks_of(PositionEncoding) and not self.loss_names

    def _has_hooks_of(self, owner: type[PositionEncoding]) -> bool:
        """Whether no subclass has given ``bias`` or ``mix`` another meaning."""
        return type(self).bias is owner.bias and type(self).mix is owner.mix


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
        self.encodings = ModuleList(encodings)
        self.out_dim = self.dim + sum(pe.out_dim - pe.dim for pe in encodings)
        self.about = About("–", "one after the other", "the sum", "–", any(pe.about.needs_age for pe in encodings))
        self.loss_names = tuple(name for pe in encodings for name in pe.loss_names)

    def embed(self, target: Target, history: Tensor, positions: Positions) -> tuple[Target, Tensor]:
        for pe in self.encodings:
            target, history = pe.embed(target, history, positions)
        return target, history

    def rotate(self, query: Tensor, keys: Tensor, query_at: Where, keys_at: Where) -> tuple[Tensor, Tensor]:
        for pe in self.encodings:
            query, keys = pe.rotate(query, keys, query_at, keys_at)
        return query, keys

    def bias(self, logits: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
        for pe in self.encodings:
            logits = pe.bias(logits, vectors, pairs)
        return logits

    def mix(self, weights: Tensor, vectors: Vectors, pairs: Pairs) -> tuple[Tensor, Vectors]:
        for pe in self.encodings:
            weights, vectors = pe.mix(weights, vectors, pairs)
        return weights, vectors

    @property
    def has_rotation(self) -> bool:
        return any(pe.has_rotation for pe in self.encodings)

    def plain_bias(self, vectors: Vectors, pairs: Pairs) -> Tensor | float | None:
        total: Tensor | float | None = 0.0 if self._has_hooks_of(Chain) else None
        for pe in self.encodings:
            own = pe.plain_bias(vectors, pairs)
            total = None if total is None or own is None else total + own
        return total

    def losses(self, attended: Sequence[Attended]) -> Losses:
        return sum_losses(*(pe.losses(attended) for pe in self.encodings))

    def next_layer(self, fresh: Callable[[], PositionEncoding]) -> PositionEncoding:
        above = fresh()
        assert isinstance(above, Chain)
        links = zip(self.encodings, above.encodings, strict=True)
        return Chain([pe.next_layer(lambda new=new: new) for pe, new in links])  # type: ignore[misc]


def sum_losses(*losses: Losses) -> Losses:
    """Losses by name, those of one name added up."""
    total: Losses = {}
    for name, loss in (item for some in losses for item in some.items()):
        total[name] = total[name] + loss if name in total else loss
    return total


def check_width(items: Tensor, dim: int, pe: PositionEncoding) -> None:
    """Raise a ValueError if items (..., any) are not as wide as a unit of ``dim`` takes: where ``pe`` widens them, the
    caller has left ``pe.embed`` out."""
    if items.shape[-1] != dim:
        missing = ": call pe.embed(target, history, positions) first" if items.shape[-1] == pe.dim != pe.out_dim else ""
        raise ValueError(f"items of width {items.shape[-1]}, the attention unit takes {dim}{missing}")


class PositionLinear(nn.Linear):
    """A linear layer that belongs to an encoding: Xavier weights, zero bias.

    A class of its own, because FuxiCTR re-draws every plain ``nn.Linear`` from the backbone's random stream: an
    encoding that took part would change the backbone's weights, and runs of one seed could not be paired.
    """

    def reset_parameters(self) -> None:
        nn.init.xavier_normal_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def check_fields(field_dims: Sequence[int] | None, dim: int) -> list[int]:
    """Widths of the fields of items as looked up, one field of all if they are not given; or a ValueError if neither
    all fields are dim wide, nor the first alone, in an attention among ids."""
    fields = [dim] if field_dims is None else list(field_dims)
    if dim not in (sum(fields), *fields[:1]):
        raise ValueError(f"field_dims={fields} add up to {sum(fields)}, not to dim={dim}")
    return fields
