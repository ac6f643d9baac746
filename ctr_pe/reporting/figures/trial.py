"""The hooks of an encoding, called on artificial items.

B rows, H heads, n items, D item dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from ctr_pe.pe.base import PositionEncoding
from ctr_pe.pe.vectors import ItemVectors, TargetVectors, Vectors
from ctr_pe.sequence.positions import Items, Pairs, Positions, Where
from ctr_pe.units import SelfAttention, TargetAttention

AGES = [0, *(2**k for k in range(27))]  # seconds, up to two years
SAME = 1e-6
"""Smaller differences are rounding errors."""

Unit = TargetAttention | SelfAttention
Hook = Callable[[Tensor, Vectors, Pairs], Tensor]
"""``bias``, or ``mix`` as :func:`mixed_weights`."""


class Trial:
    """Calls an encoding's hooks as its unit does, on artificial rows.

    ``by_order``: one row of n items, all of age 0. ``by_age``: a row for each of AGES, of one item, in self-attention
    followed by the query.
    """

    def __init__(self, unit: Unit, pe: PositionEncoding, longest: int) -> None:
        self.unit, self.pe, self.items = unit, pe, longest + isinstance(unit, SelfAttention)
        self.by_order = _aged(torch.zeros(1, self.items, dtype=torch.int64))
        self.by_age = _aged(nn.functional.pad(torch.tensor(AGES).unsqueeze(1), (0, self.items - longest)))
        self.draw = torch.Generator().manual_seed(0)

    def curve(self, hook: Hook, positions: Positions) -> Tensor:
        """(H, n) or (H, len(AGES)): what ``hook`` adds to 0, if all vectors are 0."""
        return _of_newest(self._respond(hook, positions))

    def reads_items(self) -> bool:
        """Whether what ``bias`` adds depends on the items."""
        days = _aged(torch.arange(self.items, 0, -1).unsqueeze(0) * 86_400)
        random, zero = (self._respond(self.pe.bias, days, random=random) for random in (True, False))
        return (random - zero).abs().max().item() > SAME

    def matrix(self, hook: Hook) -> Tensor | None:
        """(H, n, n) if ``hook`` multiplies its input with a matrix, found from its response to unit vectors."""
        positions, single = _aged(torch.zeros(self.items, self.items, dtype=torch.int64)), torch.eye(self.items)
        base, once, twice = (self._respond(hook, positions, factor * single) for factor in (0, 1, 2))
        once, twice = once - base, twice - base
        if (twice - 2 * once).abs().max().item() > SAME * self.items:
            return None
        found = once.transpose(0, 1)
        return None if identity(found) and not hasattr(self.pe, "matrix") else found

    def rotated(self, positions: Positions) -> Tensor | None:
        """(H, n) or (H, len(AGES)): mean dot product of equal random queries and keys after rotation, relative to that
        before; None if the hook changes their dim and is no rotation."""
        many, heads, dim = 256, self.pe.num_heads, self.pe.head_dim
        rows, items = positions.mask.shape
        vector = torch.randn(many, 1, 1, 1, dim, generator=self.draw)
        vectors = vector.expand(-1, rows, heads, items, -1).flatten(0, 1)
        pairs, _ = self._pairs(positions)
        assert pairs.key.age is not None
        there = Where(pairs.key.distance, pairs.key.age.repeat(many, 1, 1))
        query, keys = self.pe.rotate(vectors, vectors, there if pairs.self_attention else pairs.query, there)
        if not query.shape == keys.shape == vectors.shape:
            return None
        products = (query[..., -1:, :] * keys).sum(-1).view(many, rows, heads, items)
        return _of_newest(products.mean(0) / vector.square().sum(-1).mean())

    def similar(self) -> Tensor | None:
        """(n + 1, n + 1) cosines of the vectors that ``embed`` returns for a zero target and zero items."""
        dim = self.pe.dim
        target, history = self.pe.embed(torch.zeros(1, dim), torch.zeros(self.items, dim), self.by_order)
        vectors = torch.cat([target, history.flip(0)]) if target is not None else history.flip(0)
        length = vectors.norm(dim=-1, keepdim=True)
        return vectors @ vectors.T / (length * length.T).clamp(min=1e-12) if length.any() else None

    def _respond(self, hook: Hook, positions: Positions, last: Tensor | None = None, random: bool = False) -> Tensor:
        """What ``hook`` makes of the newest query's logits or weights ``last (B, n)``, by default 0: (B, H, n)."""
        pairs, vectors = self._pairs(positions, random)
        given = torch.zeros(len(positions.mask), self.pe.num_heads, *pairs.allowed.shape[2:])
        if last is not None:
            given[:, :, -1] = last.unsqueeze(1)
        return hook(given, vectors, pairs)[:, :, -1]

    def _pairs(self, positions: Positions, random: bool = False) -> tuple[Pairs, Vectors]:
        """As the unit has them, with queries, keys and items that are random vectors or 0."""

        def some(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=self.draw) if random else torch.zeros(shape)

        rows, items = positions.mask.shape
        dim, heads, width = self.pe.dim, self.pe.num_heads, self.pe.head_dim
        old, new = torch.arange(rows * items) + 1, torch.zeros(rows, dtype=torch.int64)  # no two are one
        looked_up, target = Items(some(rows * items, dim), (old,)), Items(some(rows, dim), (new,))
        if isinstance(self.unit, SelfAttention):
            (pairs,) = positions.item_pairs(self.unit.causal, looked_up, positions.whole)
            query, keys = (some(rows, heads, items, width) for _ in range(2))
            return pairs, ItemVectors(query, width**-0.5, keys, keys)
        pairs, score = positions.target_pairs(looked_up, target), self.unit.score
        query, keys = some(rows, 1, 1, dim), some(rows * items, dim)

        def rescored(shift: Tensor) -> Tensor:
            moved: Tensor = score(query[:, 0, 0], keys + shift, positions.item_rows)
            return pairs.block.pad(moved)[:, None, None, :]

        scale, project = getattr(score, "scale", 1.0), getattr(score, "project", None)
        return pairs, TargetVectors(query, scale, keys, pairs.block, rescored, project)


def _aged(age: Tensor) -> Positions:
    """Full rows of items with these ages (B, n)."""
    return Positions.from_mask(torch.ones_like(age, dtype=torch.bool), age)


def _of_newest(by_row: Tensor) -> Tensor:
    """(1, H, n), oldest first -> (H, n), newest first; (len(AGES), H, 1 or 2) -> (H, len(AGES))."""
    return by_row[0].flip(-1) if len(by_row) == 1 else by_row[:, :, 0].T


def identity(matrix: Tensor) -> bool:
    """Whether ``matrix (H, n, n)`` is the identity."""
    return bool((matrix - torch.eye(matrix.shape[-1])).abs().max().item() <= SAME * matrix.shape[-1])


def flat(curve: Tensor) -> bool:
    """Whether ``curve`` is constant: such a bias does not change attention."""
    return bool((curve - curve[:, :1]).abs().max().item() <= SAME)


def mixed_weights(pe: PositionEncoding, weights: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
    """The final pooling weights (B, H, Q, L), whether ``mix`` changes weights or values."""
    if not isinstance(vectors, ItemVectors):
        return pe.mix(weights, vectors, pairs)[0]
    every_item = torch.eye(weights.shape[-1]).expand(*weights.shape[:2], -1, -1)
    weights, mixed = pe.mix(weights, replace(vectors, value=every_item), pairs)
    return weights @ mixed.values
