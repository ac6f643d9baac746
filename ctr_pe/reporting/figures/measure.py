"""What encodings do inside a model: their hooks recorded on real requests, and called on artificial items.

B requests, H heads, d head dim, n items, K = longest + 1 offsets, C planes, A angles. The offset of
an item is its distance from the query, the newest of the sequence: the target, where that is part of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ctr_pe.pe.base import Chain, PositionEncoding
from ctr_pe.pe.contextual import ContextualEncoding
from ctr_pe.pe.vectors import Vectors
from ctr_pe.reporting.figures.trial import Trial, Unit, flat, identity, mixed_weights
from ctr_pe.sequence.positions import Pairs, Where
from ctr_pe.units import SelfAttention

UNITS = 3
"""Attention units of a model that are shown: the lowest."""
ANGLES = 24


@dataclass
class Effects:
    """What one encoding (or link of a chain) does in one unit. None: no such effect."""

    pe: PositionEncoding
    first: int  # the smallest offset
    # On artificial items, by offset, the newest item first, or by age (H, len(AGES)):
    bias: Tensor | None = None  # (H, n), added to logits
    bias_by_age: Tensor | None = None
    pooled: Tensor | None = None  # (H, n), added to the attention weights
    rotated: Tensor | None = None  # (H, n), product of a vector with itself after rotation, 1 without
    rotated_by_age: Tensor | None = None
    similar: Tensor | None = None  # (n + 1, n + 1), cosines of the vectors added to the input, the target's first
    # On artificial items, the oldest first: matrices (H, n, n) by which the row of logits or weights is multiplied
    upper: Tensor | None = None
    lower: Tensor | None = None
    # On real requests, NaN where there is no item:
    added: Tensor | None = None  # (B, H, K), to logits, if it depends on the items
    positions: Tensor | None = None  # (B, H, K), contextual
    phases: Tensor | None = None  # (C, K, A), number of keys by angle

    @property
    def visible(self) -> bool:
        """Whether the encoding changes anything."""
        curves = (self.bias, self.bias_by_age, self.rotated, self.rotated_by_age)
        return (
            any(part is not None for part in (self.pooled, self.similar, self.added))
            or any(curve is not None and not flat(curve) for curve in curves)
            or any(matrix is not None and not identity(matrix) for matrix in (self.upper, self.lower))
        )


@dataclass
class Attention:
    """One unit: ``weights (B, K)`` with which it pools the items, mean of the heads, NaN where there is no item;
    ``items (B,)``: a request's number of items, also beyond K; ``softmax``: false if ``weights`` are logits."""

    label: str
    weights: Tensor
    items: Tensor
    softmax: bool
    effects: list[Effects | None]  # per link; None if it is shared with an earlier unit


@torch.inference_mode()
def measure(model: Any, batch: Mapping[str, Tensor], longest: int) -> list[Attention]:
    """Record the units of a model on a batch and measure their encodings, up to offset ``longest``."""
    model.eval()
    rows = len(next(iter(batch.values())))
    watched: list[tuple[str, Unit, PositionEncoding, list[ObservedEncoding]]] = []
    for label, unit in list(units_of(model).items())[:UNITS]:
        encodings = unit.pe.encodings if isinstance(unit.pe, Chain) else [unit.pe]
        watched.append((label, unit, unit.pe, [ObservedEncoding(pe, rows, longest) for pe in encodings]))
    try:
        for _, unit, _, links in watched:
            unit.pe = Chain(links)
        model(batch)
    finally:
        for _, unit, pe, _ in watched:
            unit.pe = pe
    found, tried = [], set[PositionEncoding]()
    for label, unit, _, links in watched:
        last = links[-1]
        weights = last.weights if pools(model, unit, batch) else last.softmaxed
        effects = [None if link.pe in tried else _effects(unit, link, longest) for link in links]
        tried.update(link.pe for link in links)
        found.append(Attention(label, weights.mean(1), last.items, getattr(unit, "softmax", True), effects))
    return found


def units_of(model: nn.Module) -> dict[str, Unit]:
    """Attention units by name, the lowest first; a single unit has an empty name."""
    named, count = {}, Counter[str]()
    for unit in model.modules():
        if isinstance(unit, Unit):
            kind = "layer" if isinstance(unit, SelfAttention) else "target attention"
            count[kind] += 1
            named[f"{kind} {count[kind]}"] = unit
    return named if len(named) > 1 else {"": next(iter(named.values()))}


@torch.inference_mode(False)
def pools(model: Any, unit: Unit, batch: Mapping[str, Tensor]) -> bool:
    """Whether the model reads the unit's pooled vector: DIEN reads only its softmax weights."""
    if isinstance(unit, SelfAttention):
        return True
    kept: list[Tensor] = []
    attend = unit.attend

    def keeping(*given: Any) -> Any:
        kept.append((attended := attend(*given))[0])
        return attended

    vars(unit)["attend"] = keeping
    try:
        with torch.enable_grad():
            score = model({name: values[:8] for name, values in batch.items()})["y_pred"].sum()
            return torch.autograd.grad(score, kept[0], allow_unused=True)[0] is not None
    finally:
        del vars(unit)["attend"]


class ObservedEncoding(Chain):
    """A chain of one encoding: records what its hooks receive and return for the newest query of each row."""

    def __init__(self, pe: PositionEncoding, rows: int, longest: int) -> None:
        super().__init__([pe])
        self.pe, self.longest = pe, longest
        empty = torch.full((rows, pe.num_heads, longest + 1), math.nan)
        self.added, self.positions, self.softmaxed, self.weights = (empty.clone() for _ in range(4))
        self.items = torch.zeros(rows, dtype=torch.int64)
        self.phases: Tensor | None = None

    def rotate(self, query: Tensor, keys: Tensor, query_at: Where, keys_at: Where) -> tuple[Tensor, Tensor]:
        query, rotated = self.pe.rotate(query, keys, query_at, keys_at)
        if rotated.shape == keys.shape and not torch.equal(rotated, keys):
            self._keep_phases(rotated, keys_at.distance)
        return query, rotated

    def bias(self, logits: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
        out = self.pe.bias(logits, vectors, pairs)
        self._keep(self.added, out - logits, pairs)
        if isinstance(self.pe, ContextualEncoding):
            self._keep(self.positions, self.pe.fractional_positions(logits, pairs), pairs)
        return out

    def mix(self, weights: Tensor, vectors: Vectors, pairs: Pairs) -> tuple[Tensor, Vectors]:
        self.items[pairs.block.rows] = pairs.allowed[:, 0, -1].sum(-1)
        self._keep(self.softmaxed, weights, pairs)
        self._keep(self.weights, mixed_weights(self.pe, weights, vectors, pairs), pairs)
        return self.pe.mix(weights, vectors, pairs)

    def _keep(self, table: Tensor, values: Tensor, pairs: Pairs) -> None:
        """Scatter the last query's entries of ``values (R, H, Q, L)`` into ``table`` by offset."""
        offset = pairs.offset[0, 0, -1]
        near = offset < table.shape[-1]
        known = values[:, :, -1].masked_fill(~pairs.allowed[:, :, -1], math.nan).to(table.dtype)
        heads = torch.arange(self.num_heads)[:, None]
        table[pairs.block.rows[:, None, None], heads, offset[near]] = known[..., near]

    def _keep_phases(self, keys: Tensor, distance: Tensor) -> None:
        a, b = planes(self.pe, keys)
        distance = distance[:, 0] if a.dim() < keys.dim() else distance.expand(keys.shape[:-1])
        distance = distance.unsqueeze(-1).expand(a.shape)
        angle = ((torch.atan2(b, a) / math.tau % 1) * ANGLES).long().clamp(max=ANGLES - 1)
        plane = torch.arange(a.shape[-1]).expand(a.shape)
        if self.phases is None:
            self.phases = torch.zeros(a.shape[-1], self.longest + 1, ANGLES)
        near = ((a != 0) | (b != 0)) & (distance <= self.longest)
        self.phases.index_put_((plane[near], distance[near], angle[near]), torch.ones(()), accumulate=True)


def planes(pe: PositionEncoding, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """The two coordinates (..., C) of each plane that an encoding rotates."""
    if getattr(pe, "full", False) and vectors.dim() == 4:  # planes are formed before the split into heads
        vectors = vectors.transpose(1, 2).flatten(2)
    half = vectors.shape[-1] // 2
    if getattr(pe, "interleaved", False):
        return vectors[..., 0 : 2 * half : 2], vectors[..., 1 : 2 * half : 2]
    return vectors[..., :half], vectors[..., half : 2 * half]


def _effects(unit: Unit, watched: ObservedEncoding, longest: int) -> Effects:
    pe, trial, timed = watched.pe, Trial(unit, watched.pe, longest), watched.about.needs_age
    mix = partial(mixed_weights, pe)
    lower, pooled = trial.matrix(mix), trial.curve(mix, trial.by_order)
    return Effects(
        pe,
        first=0 if isinstance(unit, SelfAttention) else 1,
        similar=trial.similar(),
        rotated=trial.rotated(trial.by_order),
        rotated_by_age=trial.rotated(trial.by_age) if timed else None,
        bias=trial.curve(pe.bias, trial.by_order),
        bias_by_age=trial.curve(pe.bias, trial.by_age) if timed else None,
        pooled=None if lower is not None or flat(pooled) else pooled,
        upper=trial.matrix(pe.bias),
        lower=lower,
        added=watched.added if trial.reads_items() else None,
        positions=None if watched.positions.isnan().all() else watched.positions,
        phases=watched.phases,
    )
