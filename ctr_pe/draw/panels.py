"""What is drawn: measurements of encodings as curves, heat maps and rings.

B requests, H heads, K offsets, k of these, A angles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ctr_pe.draw.measure import Attention, Effects
from ctr_pe.draw.trial import AGES, identity

Values = npt.NDArray[Any]
USERS, RINGS, HEADS = 8, 10, 8
FEWEST = 20
"""A mean over fewer requests is not shown."""
INITIAL, BEFORE, AFTER = "as initialised", "before training", "after training"
BACK, LOGIT = "items before the query", "added to the logit"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """``when``: before or after training, if the panel shows only one; ``unit``: its name, if a model has several."""

    title: str
    when: str = ""
    unit: str = ""


@dataclass(frozen=True)
class Curve:
    """``colour``: number of the head, layer or user; ``dashed``: before training; ``band``: low and high."""

    x: Values
    y: Values
    label: str = ""
    colour: int = 0
    dashed: bool = False
    band: tuple[Values, Values] | None = None


@dataclass(frozen=True, kw_only=True)
class Lines(Panel):
    """``level``: a horizontal reference; ``ages``: x is in seconds; ``share``: panels of a section with the same value
    have common axis limits."""

    y: str
    curves: tuple[Curve, ...]
    level: float | None = None
    ages: bool = False
    diagonal: bool = False
    share: str = ""


@dataclass(frozen=True, kw_only=True)
class Heat(Panel):
    """Panels with the same ``scale`` have one colour scale, which is symmetric about 0."""

    x: str
    y: str
    matrix: Values
    scale: str
    oldest_first: bool = False


@dataclass(frozen=True, kw_only=True)
class Rings(Panel):
    """``density (K, A)`` of keys by angle, one ring per distance from the inside out; 1 everywhere is uniform."""

    density: Values


Moments = Sequence[tuple[str, Effects]]
"""("before training", …) and the encoding's effects then."""


def attention(title: str, moments: Sequence[tuple[str, Sequence[Attention]]]) -> Lines:
    """Mean weight by offset, times the number of items: 1 is uniform attention, whatever the history's length."""
    curves, softmax = [], True
    for when, units in moments:
        for index, unit in enumerate(units):
            softmax = unit.softmax
            weights = unit.weights * unit.items.unsqueeze(1) if softmax else unit.weights
            x, mean, _ = _means(weights.unsqueeze(1))
            curves.append(Curve(x, mean[0], "" if when == BEFORE else unit.label, index, when == BEFORE))
    y, level = ("weight × items (1: even)", 1.0) if softmax else ("mean weight, no softmax", None)
    return Lines(title=title, y=y, curves=tuple(curves), level=level, share="attention")


def of_links(moments: Sequence[tuple[str, Sequence[Attention]]]) -> list[Panel]:
    """All effects of one encoding, kind by kind, unit by unit; once if all units show the same."""
    found: list[Panel] = []
    units = moments[0][1]
    for kind in KINDS:
        for link in range(max(len(unit.effects) for unit in units)):
            by_unit: dict[str, list[Panel]] = {}
            for index, unit in enumerate(units):
                of_unit = [(when, at[index].effects[link]) for when, at in moments if link < len(unit.effects)]
                panels = list(kind([(when, effects) for when, effects in of_unit if effects is not None]))
                if panels and not any(_equal(panels, others) for others in by_unit.values()):
                    by_unit[unit.label] = panels
            for label, panels in by_unit.items():
                found += [replace(panel, unit=label if len(by_unit) > 1 else "") for panel in panels]
    return found


def notes(panels: Sequence[Panel]) -> list[str]:
    """Explanations that these panels need."""
    lines = []
    if any(isinstance(panel, Lines) and panel.diagonal for panel in panels):
        lines.append("Contextual positions: a line per user; dotted: plain distance.")
    if any(isinstance(panel, Rings) for panel in panels):
        lines.append(f"Phases: where the keys of up to {RINGS} items back are, the nearest on the innermost ring.")
    return lines


def _equal(panels: Sequence[Panel], others: Sequence[Panel]) -> bool:
    """Whether they show the same values."""
    ours, theirs = ([values for panel in some for values in _values(panel)] for some in (panels, others))
    return len(ours) == len(theirs) and all(map(np.array_equal, ours, theirs))


def _values(panel: Panel) -> list[Values]:
    if isinstance(panel, Lines):
        return [curve.y for curve in panel.curves]
    assert isinstance(panel, Heat | Rings)
    return [panel.matrix if isinstance(panel, Heat) else panel.density]


def _bias(moments: Moments) -> Iterator[Panel]:
    """By distance. A bias that depends on the items: its mean over requests and heads, the range of the middle 80 %,
    and the bias of zero vectors."""
    if all(effects.added is None for _, effects in moments):
        yield from _by_distance("bias", "Bias by distance", LOGIT, None, moments)
        return
    curves = []
    for when, effects in moments:
        if effects.added is not None:
            x, mean, band = _means(effects.added)
            curves.append(Curve(x, mean.mean(0), "" if when == BEFORE else "mean, 80 %", 0, when == BEFORE, band))
        if effects.bias is not None and when != BEFORE:
            x = np.arange(effects.first, effects.first + effects.bias.shape[1])
            curves.append(Curve(x, effects.bias.mean(0).numpy(), "of zero vectors", 1))
    yield Lines(title="Bias by distance", y=LOGIT, curves=tuple(curves))


def _by_distance(
    name: str, title: str, y: str, level: float | None, moments: Moments, ages: bool = False
) -> Iterator[Panel]:
    """A curve per head, unless all are constant."""
    curves = []
    for when, effects in moments:
        values = getattr(effects, name)
        heads = [] if values is None else _distinct(values)
        for index, head in enumerate(heads):
            x = np.asarray(AGES, float) if ages else np.arange(effects.first, effects.first + values.shape[1])
            label = f"head {head + 1}" if len(heads) > 1 and when != BEFORE else ""
            curves.append(Curve(x, values[head].numpy(), label, index, when == BEFORE))
    if any(np.ptp(curve.y) > 1e-6 for curve in curves):
        yield Lines(title=title, y=y, curves=tuple(curves), level=level, ages=ages)


def _vectors(moments: Moments) -> Iterator[Panel]:
    for when, effects in moments:
        if effects.similar is not None:
            matrix = effects.similar.numpy()
            yield Heat(
                title="Position vectors: cosine", when=when, x="distance", y="distance", matrix=matrix, scale="cosine"
            )


def _contextual_positions(moments: Moments) -> Iterator[Panel]:
    """A curve per user; the same users in all pictures of the data set."""
    for when, effects in moments:
        if effects.positions is not None:
            positions = effects.positions.mean(1)
            x = np.arange(positions.shape[1])
            curves = [Curve(x, positions[row].numpy(), "", index) for index, row in enumerate(_users(positions))]
            yield Lines(
                title=f"Positions of {len(curves)} users",
                when=when,
                y="contextual position",
                curves=tuple(curves),
                diagonal=True,
                share="positions",
            )


def _matrices(name: str, title: str, moments: Moments) -> Iterator[Panel]:
    known = [(when, getattr(effects, name)) for when, effects in moments if getattr(effects, name) is not None]
    if len(known) > 1 and identity(known[0][1]) and not identity(known[1][1]):
        del known[0]  # not worth a panel
    for when, matrix in known:
        heads = _distinct(matrix)
        for head in heads:
            yield Heat(
                title=f"{title}, head {head + 1}" if len(heads) > 1 else title,
                when=when,
                x="to item",
                y="from item",
                matrix=matrix[head].numpy(),
                scale="matrix",
                oldest_first=True,
            )


def _phases(moments: Moments) -> Iterator[Panel]:
    known = [(when, effects.phases) for when, effects in moments if effects.phases is not None]
    planes = len(known[0][1]) if known else 0
    for plane in sorted({0, planes // 2} if planes else ()):
        for when, phases in known:
            counts = phases[plane, 1 : 1 + RINGS]
            counts = counts[counts.sum(-1) >= FEWEST]
            if len(counts):
                density = (counts / counts.mean(-1, keepdim=True)).numpy()
                yield Rings(title=f"Key phases, plane {plane + 1} of {planes}", when=when, density=density)


KINDS: tuple[Callable[[Moments], Iterator[Panel]], ...] = (
    _bias,
    partial(_by_distance, "bias_by_age", "Bias by age", LOGIT, None, ages=True),
    partial(_by_distance, "rotated", "Rotation by distance", "product with itself", 1.0),
    partial(_by_distance, "rotated_by_age", "Rotation by age", "product with itself", 1.0, ages=True),
    partial(_by_distance, "pooled", "Added weights by distance", "added to the weight", None),
    _vectors,
    _contextual_positions,
    partial(_matrices, "upper", "U: logits"),
    partial(_matrices, "lower", "L: values"),
    _phases,
)
"""The kinds of effects; each yields no panel if the encoding has no such effect."""


def _means(table: Tensor) -> tuple[Values, Values, tuple[Values, Values]]:
    """(B, H, K), NaN where there is no item -> offsets that enough requests have (k,), means (H, k), and the 10 % and
    90 % quantiles (k,)."""
    known = (~table[:, 0].isnan()).sum(0)
    x = (known >= max(1, min(FEWEST, int(known.max())))).nonzero().squeeze(1)
    kept = table[:, :, x]
    low, high = torch.nanquantile(kept.flatten(0, 1), torch.tensor([0.1, 0.9]), dim=0)
    return x.numpy(), kept.nanmean(0).numpy(), (low.numpy(), high.numpy())


def _users(positions: Tensor) -> list[int]:
    """Rows of some users with long histories."""
    counts = (~positions.isnan()).sum(1)
    longest = counts.argsort(descending=True, stable=True)[: max(USERS, len(counts) // 4)]
    return [int(row) for row in longest[:: max(1, len(longest) // USERS)][:USERS]]


def _distinct(values: Tensor) -> list[int]:
    """The first head if all heads (first axis) have the same values, else up to HEADS of them."""
    alike = all(torch.allclose(values[0], other, atol=1e-6) for other in values)
    return [0] if alike else list(range(min(len(values), HEADS)))
