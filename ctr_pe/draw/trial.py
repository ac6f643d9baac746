"""Calls the hooks of encodings on artificial items.

B rows, H heads, n items, D item dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ctr_pe.pe.base import PositionEncoding
from ctr_pe.pe.vectors import ItemVectors, TargetVectors, Vectors
from ctr_pe.positions import Items, Pairs, Positions, Where
from ctr_pe.units import SelfAttention, TargetAttention

AGES = [0, *(2**k for k in range(27))]  # seconds, up to two years
SAME = 1e-6
"""Differences below are rounding."""

Unit = TargetAttention | SelfAttention


class Trial:
    """Calls an encoding's hooks as its unit does, on artificial rows.

    ``by_order``: one row of n items, all of age 0. ``by_age``: rows of one item (in self-attention of one more, the
    query) with the ages of AGES. ``own``: queries are items themselves.
    """

    def __init__(self, unit: Unit, pe: PositionEncoding, longest: int) -> None:
        self.unit, self.pe, self.own = unit, pe, isinstance(unit, SelfAttention)
        self.by_order = self._rows(1, longest + self.own)
        age = torch.tensor(AGES).unsqueeze(1)
        if self.own:
            age = torch.cat([age, torch.zeros_like(age)], dim=1)
        self.by_age = Positions.from_mask(torch.ones(age.shape, dtype=torch.bool), age)
        self.draw = torch.Generator().manual_seed(0)

    def overrides(self, hook: str) -> bool:
        return getattr(type(self.pe), hook) is not getattr(PositionEncoding, hook)

    def _rows(self, rows: int, items: int, gap: int = 0) -> Positions:
        age = torch.arange(items, 0, -1).expand(rows, -1) * gap
        return Positions.from_mask(torch.ones(rows, items, dtype=torch.bool), age)

    def _pairs(self, positions: Positions, random: bool) -> tuple[Pairs, Vectors]:
        rows, items = positions.mask.shape
        dim, heads, width = self.pe.dim, self.pe.num_heads, self.pe.head_dim
        packed, target = self._random(random, rows * items, dim), self._random(random, rows, dim)
        positions = positions.carrying(Items(packed), Items(target))
        if isinstance(self.unit, SelfAttention):
            (pairs,) = positions.item_pairs(self.unit.causal, positions.whole)
            query, keys = (self._random(random, rows, heads, items, width) for _ in range(2))
            return pairs, ItemVectors(query, width**-0.5, keys, keys)
        pairs, score = positions.target_pairs(), self.unit.score
        query, keys = self._random(random, rows, 1, 1, dim), self._random(random, rows * items, dim)

        def rescored(shift: Tensor) -> Tensor:
            moved: Tensor = score(query[:, 0, 0], keys + shift, positions.real[0])
            return pairs.block.pad(moved)[:, None, None, :]

        scale, project = getattr(score, "scale", 1.0), getattr(score, "project", None)
        return pairs, TargetVectors(query, scale, keys, pairs.block, rescored, project)

    def _random(self, random: bool, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.draw) if random else torch.zeros(shape)

    def added(self, positions: Positions, last: Tensor | None = None, random: bool = False) -> Tensor:
        """Logits after ``bias`` for the newest query (B, H, n), from logits ``last (B, n)`` or 0.

        ``random``: queries, keys and items are random vectors, not 0.
        """
        rows, items = positions.mask.shape
        pairs, vectors = self._pairs(positions, random)
        logits = torch.zeros(rows, self.pe.num_heads, pairs.allowed.shape[2], items)
        if last is not None:
            logits[:, :, -1] = last.unsqueeze(1)
        return self.pe.bias(logits, vectors, pairs)[:, :, -1]

    def mixed(self, positions: Positions, last: Tensor | None = None) -> Tensor:
        """The same for attention weights and ``mix``."""
        rows, items = positions.mask.shape
        pairs, vectors = self._pairs(positions, False)
        weights = torch.zeros(rows, self.pe.num_heads, pairs.allowed.shape[2], items)
        if last is not None:
            weights[:, :, -1] = last.unsqueeze(1)
        return mixed_weights(self.pe, weights, vectors, pairs)[:, :, -1]

    def of_newest(self, by_row: Tensor) -> Tensor:
        """(1, H, n), oldest first -> (H, n), newest first; (len(AGES), H, 1 or 2) -> (H, len(AGES))."""
        return by_row[0].flip(-1) if len(by_row) == 1 else by_row[:, :, 0].T

    def reads_items(self) -> bool:
        """Whether what ``bias`` adds depends on the items."""
        days = self._rows(1, self.by_order.mask.shape[1], gap=86_400)
        return (self.added(days, random=True) - self.added(days)).abs().max().item() > SAME

    def matrix(self, respond: Callable[..., Tensor]) -> Tensor | None:
        """(H, n, n) if ``respond`` multiplies its input with a matrix, found from its response to unit vectors."""
        items = self.by_order.mask.shape[1]
        positions, single = self._rows(items, items), torch.eye(items)
        nothing = respond(positions, torch.zeros(items, items))
        once, twice = (respond(positions, factor * single) - nothing for factor in (1, 2))
        if (twice - 2 * once).abs().max().item() > SAME * items:
            return None
        found: Tensor = once.transpose(0, 1)
        return None if identity(found) and not hasattr(self.pe, "matrix") else found

    def rotated(self, positions: Positions) -> Tensor | None:
        """Mean dot product of equal random queries and keys after rotation, relative to that before; None if the hook
        changes their dim and is no rotation."""
        many, heads, dim = 256, self.pe.num_heads, self.pe.head_dim
        rows, items = positions.mask.shape
        if self.own:
            vector = torch.randn(many, 1, 1, 1, dim, generator=self.draw).expand(-1, rows, heads, items, -1)
            at = self._pairs(positions, False)[0].key
            at = Where(at.distance, at.age.repeat(many, 1, 1))  # type: ignore[union-attr]
            here = at
        else:
            vector = torch.randn(many, 1, dim, generator=self.draw).expand(-1, rows * items, -1)
            at = Where(positions.distance.flatten().repeat(many), positions.age.flatten().repeat(many))  # type: ignore[union-attr]
            here = Where(torch.zeros_like(at.distance), torch.zeros_like(at.distance))
        vectors = vector.flatten(0, 1)
        query, keys = self.pe.rotate(vectors, vectors, here, at)
        if not query.shape == keys.shape == vectors.shape:
            return None
        products = ((query[..., -1:, :] if self.own else query) * keys).sum(-1).view(many, rows, heads, items)
        return self.of_newest(products.mean(0) / vector.square().sum(-1).mean())

    def similar(self) -> Tensor | None:
        """(n + 1, n + 1) cosines of the vectors that ``embed`` returns for a zero target and zero items."""
        dim, items = self.pe.dim, self.by_order.mask.shape[1]
        target, history = self.pe.embed(torch.zeros(1, dim), torch.zeros(items, dim), self._rows(1, items))
        vectors = torch.cat([target, history.flip(0)]) if target is not None else history.flip(0)
        length = vectors.norm(dim=-1, keepdim=True)
        return None if not length.any() else vectors @ vectors.T / (length * length.T).clamp(min=1e-12)


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
