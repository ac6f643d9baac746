"""What encodings do inside a model: their hooks recorded on real requests, and called on artificial items.

B requests, H heads, d head dim, n items, K = longest + 1 offsets, C planes, A angles. The offset of
an item is its distance from the query, the newest of the sequence: the target, where that is part of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ctr_pe.draw.trial import Trial, Unit, flat, identity, mixed_weights
from ctr_pe.pe.base import Chain, PositionEncoding
from ctr_pe.pe.contextual import ContextualEncoding
from ctr_pe.pe.vectors import Vectors
from ctr_pe.positions import Pairs, Positions, Where
from ctr_pe.units import SelfAttention, TargetAttention

UNITS = 3
"""Attention units of a model that are shown: the lowest."""
ANGLES = 24


@dataclass
class Effects:
    """What one encoding (or link of a chain) does in one unit. None or empty: no such effect.

    On artificial items, by offset (``first`` is the smallest): ``bias (H, n)`` added to logits; ``pooled (H, n)`` added
    to the attention weights; ``rotated (H, n)``: product of a vector with itself after rotation, 1 without;
    ``bias_by_age``, ``rotated_by_age (H, len(AGES))``; ``similar (n + 1, n + 1)``: cosines of the vectors added to the
    input, from the target to the oldest item; ``upper``, ``lower`` (H, n, n): matrices that logits and weights are
    multiplied with from the right, the oldest item first.

    On real requests: ``added (B, H, K)`` to logits, if it depends on the items; ``positions (B, H, K)``: contextual
    positions; NaN where there is no item; ``phases (C, K, A)``: number of keys by angle.
    """

    pe: PositionEncoding
    first: int
    bias: Tensor | None = None
    bias_by_age: Tensor | None = None
    pooled: Tensor | None = None
    rotated: Tensor | None = None
    rotated_by_age: Tensor | None = None
    similar: Tensor | None = None
    upper: Tensor | None = None
    lower: Tensor | None = None
    added: Tensor | None = None
    positions: Tensor | None = None
    phases: Tensor | None = None

    @property
    def visible(self) -> bool:
        """Whether the encoding changes anything."""
        lines = (self.bias, self.bias_by_age, self.rotated, self.rotated_by_age)
        factors = (self.upper, self.lower)
        return (
            any(part is not None for part in (self.pooled, self.similar, self.added))
            or any(part is not None and not flat(part) for part in lines)
            or any(part is not None and not identity(part) for part in factors)
        )


@dataclass
class Attention:
    """One unit: ``weights (B, K)`` with which it pools the items, mean of the heads, NaN where there is no item;
    ``items (B,)``: a request's number of items, also beyond K; ``softmax``: false if ``weights`` are logits."""

    label: str
    weights: Tensor
    items: Tensor
    softmax: bool
    effects: list[Effects | None] = field(default_factory=list)  # per link; None if it is shared with an earlier unit


@torch.inference_mode()
def measure(model: Any, batch: Mapping[str, Tensor], longest: int) -> list[Attention]:
    """Record the units of a model on a batch and measure their encodings, up to offset ``longest``."""
    model.eval()
    units = units_of(model)
    rows = len(next(iter(batch.values())))
    watched: dict[str, list[Watched]] = {}
    before = {label: unit.pe for label, unit in units.items()}
    try:
        for label, unit in units.items():
            links = list(unit.pe.encodings) if isinstance(unit.pe, Chain) else [unit.pe]
            watched[label] = [Watched(link, rows, longest) for link in links]
            unit.pe = Chain(watched[label]) if len(links) > 1 else watched[label][0]
        model(batch)
    finally:
        for label, unit in units.items():
            unit.pe = before[label]
    found, tried = [], set()
    for label, unit in units.items():
        last = watched[label][-1]
        weights = last.weights if pools(model, unit, batch) else last.softmaxed
        seen = Attention(label, weights.mean(1), last.items, getattr(unit, "softmax", True))
        for link in watched[label]:
            seen.effects.append(None if link.pe in tried else _effects(unit, link, longest))
            tried.add(link.pe)
        found.append(seen)
    return found


def all_units(model: nn.Module) -> list[Unit]:
    """Attention units, the lowest first."""
    return [unit for unit in model.modules() if isinstance(unit, Unit)]


def units_of(model: nn.Module) -> dict[str, Unit]:
    """The lowest attention units by name; a single unit has an empty name."""
    every = all_units(model)
    if len(every) == 1:
        return {"": every[0]}
    named, count = {}, {SelfAttention: 0, TargetAttention: 0}
    for unit in every[:UNITS]:
        kind = SelfAttention if isinstance(unit, SelfAttention) else TargetAttention
        count[kind] += 1
        named[f"{'layer' if kind is SelfAttention else 'target attention'} {count[kind]}"] = unit
    return named


@torch.inference_mode(False)
def pools(model: Any, unit: Unit, batch: Mapping[str, Tensor]) -> bool:
    """Whether the model reads the unit's pooled vector: DIEN reads only its softmax weights."""
    if isinstance(unit, SelfAttention):
        return True
    kept: list[Tensor] = []
    handle = unit.register_forward_hook(lambda _, __, out: kept.append(out[0]))
    try:
        with torch.enable_grad():
            score = model({name: values[:8] for name, values in batch.items()})["y_pred"].sum()
            return torch.autograd.grad(score, kept[0], allow_unused=True)[0] is not None
    finally:
        handle.remove()


class Watched(PositionEncoding):
    """Calls an encoding and records what its hooks receive and return for the newest query of each row."""

    def __init__(self, pe: PositionEncoding, rows: int, longest: int) -> None:
        super().__init__(pe.dim, pe.max_len)
        self.pe, self.num_heads, self.head_dim = pe, pe.num_heads, pe.head_dim
        self.out_dim, self.about = pe.out_dim, pe.about
        nothing = torch.full((rows, pe.num_heads, longest + 1), math.nan)
        self.added, self.positions, self.softmaxed, self.weights = (nothing.clone() for _ in range(4))
        self.items = torch.zeros(rows, dtype=torch.int64)
        self.phases = torch.zeros(0)
        self.longest = longest

    def embed(self, target: Tensor | None, history: Tensor, positions: Positions) -> tuple[Tensor | None, Tensor]:
        return self.pe.embed(target, history, positions)

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
        angle = ((torch.atan2(b, a) / (2 * math.pi) % 1) * ANGLES).long().clamp(max=ANGLES - 1)
        plane = torch.arange(a.shape[-1]).expand(a.shape)
        size = (a.shape[-1], self.longest + 1, ANGLES)
        real = ((a != 0) | (b != 0)) & (distance <= self.longest)
        index = ((plane * size[1] + distance) * ANGLES + angle)[real]
        counts = torch.bincount(index, minlength=math.prod(size)).view(size)
        self.phases = self.phases + counts if len(self.phases) else counts.float()


def planes(pe: PositionEncoding, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """The two coordinates (..., C) of each plane that an encoding rotates."""
    if getattr(pe, "full", False) and vectors.dim() == 4:  # planes are formed before the split into heads
        vectors = vectors.transpose(1, 2).flatten(2)
    half = vectors.shape[-1] // 2
    if getattr(pe, "interleaved", False):
        return vectors[..., 0 : 2 * half : 2], vectors[..., 1 : 2 * half : 2]
    return vectors[..., :half], vectors[..., half : 2 * half]


def _effects(unit: Unit, watched: Watched, longest: int) -> Effects:
    trial = Trial(unit, watched.pe, longest)
    effects = Effects(watched.pe, first=int(not trial.own))
    if trial.overrides("embed"):
        effects.similar = trial.similar()
    if trial.overrides("rotate"):
        effects.rotated = trial.rotated(trial.by_order)
        effects.rotated_by_age = trial.rotated(trial.by_age) if watched.about.needs_age else None
        effects.phases = watched.phases if len(watched.phases) else None
    if trial.overrides("bias"):
        effects.upper = trial.matrix(trial.added)
        effects.bias = trial.of_newest(trial.added(trial.by_order))
        effects.bias_by_age = trial.of_newest(trial.added(trial.by_age)) if watched.about.needs_age else None
        effects.added = watched.added if trial.reads_items() else None
        effects.positions = watched.positions if not watched.positions.isnan().all() else None
    if trial.overrides("mix"):
        effects.lower = trial.matrix(trial.mixed)
        pooled = trial.of_newest(trial.mixed(trial.by_order))
        effects.pooled = None if effects.lower is not None or flat(pooled) else pooled
    return effects
