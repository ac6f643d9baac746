"""What is drawn: measurements of encodings as curves and images.

B requests, H heads, K offsets, k of these, A angles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

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
LOGIT, PRODUCT = "added to the logit", "product with itself"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """``when``: before or after training, if the panel shows only one; ``unit``: its name, if a model has several."""

    title: str
    when: str = ""
    unit: str = ""


@dataclass(frozen=True)
class Curve:
    """``colour``: number of the head, layer or user; ``band``: low and high. Before training a curve is dashed and has
    neither label nor band."""

    when: str
    x: Values
    y: Values
    label: str = ""
    colour: int = 0
    band: tuple[Values, Values] | None = None


@dataclass(frozen=True, kw_only=True)
class Lines(Panel):
    """``level``: a horizontal reference; ``ages``: x is in seconds; ``share``: panels of a section with the same value
    have common axis limits."""

    y: str
    curves: Sequence[Curve]
    level: float | None = None
    ages: bool = False
    diagonal: bool = False
    share: str = ""


@dataclass(frozen=True, kw_only=True)
class Image(Panel):
    """Panels of one kind have one colour scale.

    ``cosine``: by distance and distance; ``matrix``: from items to items, the oldest first; ``density (K, A)`` of keys
    by angle, one ring per distance from the inside out, 1 everywhere if uniform.
    """

    kind: Literal["cosine", "matrix", "density"]
    values: Values


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
            curves.append(Curve(when, x, mean[0], unit.label, index))
    y, level = ("weight × items (1: even)", 1.0) if softmax else ("mean weight, no softmax", None)
    return Lines(title=title, y=y, curves=curves, level=level, share="attention")


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
                if panels and not any(_values(panels) == _values(others) for others in by_unit.values()):
                    by_unit[unit.label] = panels
            for label, panels in by_unit.items():
                found += [replace(panel, unit=label if len(by_unit) > 1 else "") for panel in panels]
    return found


def _values(panels: Sequence[Panel]) -> list[list[Any]]:
    """All that these panels show."""
    images = [panel.values for panel in panels if isinstance(panel, Image)]
    curves = [curve.y for panel in panels if isinstance(panel, Lines) for curve in panel.curves]
    return [values.tolist() for values in images + curves]


def _known(name: str, moments: Moments) -> list[tuple[str, Effects, Tensor]]:
    """The moments at which the encoding has the effect ``name``, and that effect."""
    effects_of = [(when, effects, getattr(effects, name)) for when, effects in moments]
    return [moment for moment in effects_of if moment[2] is not None]


def _bias(moments: Moments) -> Iterator[Panel]:
    """By distance. A bias that depends on the items: its mean over requests and heads, the range of the middle 80 %,
    and the bias of zero vectors."""
    curves = []
    for when, _, added in _known("added", moments):
        x, mean, band = _means(added)
        curves.append(Curve(when, x, mean.mean(0), "mean, 80 %", 0, band))
    if not curves:
        yield from _by_distance("bias", "Bias by distance", LOGIT, moments)
        return
    for when, effects, bias in _known("bias", moments):
        if when != BEFORE:
            curves.append(Curve(when, _offsets(effects, bias), bias.mean(0).numpy(), "of zero vectors", 1))
    yield Lines(title="Bias by distance", y=LOGIT, curves=curves)


def _by_distance(name: str, title: str, y: str, moments: Moments, level: float | None = None) -> Iterator[Panel]:
    """A curve per head, unless all are constant."""
    curves, ages = [], name.endswith("by_age")
    for when, effects, values in _known(name, moments):
        x = np.asarray(AGES, float) if ages else _offsets(effects, values)
        curves += [Curve(when, x, own, head, index) for index, (head, own) in enumerate(_heads(values))]
    if any(np.ptp(curve.y) > 1e-6 for curve in curves):
        yield Lines(title=title, y=y, curves=curves, level=level, ages=ages)


def _vectors(moments: Moments) -> Iterator[Panel]:
    for when, _, cosines in _known("similar", moments):
        yield Image(title="Position vectors: cosine", when=when, kind="cosine", values=cosines.numpy())


def _contextual_positions(moments: Moments) -> Iterator[Panel]:
    """A curve per user with a long history; the same users in all pictures of the data set."""
    for when, _, by_head in _known("positions", moments):
        positions = by_head.mean(1)
        counts = (~positions.isnan()).sum(1)
        longest = counts.argsort(descending=True, stable=True)[: max(USERS, len(counts) // 4)]
        users, x = longest[:: max(1, len(longest) // USERS)][:USERS], np.arange(positions.shape[1])
        curves = [Curve("", x, positions[row].numpy(), "", index) for index, row in enumerate(users)]
        title, y = f"Positions of {len(curves)} users", "contextual position"
        yield Lines(title=title, when=when, y=y, curves=curves, diagonal=True, share="positions")


def _matrices(name: str, title: str, moments: Moments) -> Iterator[Panel]:
    known = _known(name, moments)
    if len(known) > 1 and identity(known[0][2]) and not identity(known[1][2]):
        del known[0]  # not worth a panel
    for when, _, matrix in known:
        for head, values in _heads(matrix):
            yield Image(title=f"{title}, {head}" if head else title, when=when, kind="matrix", values=values)


def _phases(moments: Moments) -> Iterator[Panel]:
    known = _known("phases", moments)
    planes = len(known[0][2]) if known else 0
    for plane in sorted({0, planes // 2} if planes else ()):
        for when, _, phases in known:
            counts = phases[plane, 1 : 1 + RINGS]
            counts = counts[counts.sum(-1) >= FEWEST]
            if len(counts):
                density = (counts / counts.mean(-1, keepdim=True)).numpy()
                title = f"Key phases, plane {plane + 1} of {planes}"
                yield Image(title=title, when=when, kind="density", values=density)


KINDS: tuple[Callable[[Moments], Iterator[Panel]], ...] = (
    _bias,
    partial(_by_distance, "bias_by_age", "Bias by age", LOGIT),
    partial(_by_distance, "rotated", "Rotation by distance", PRODUCT, level=1.0),
    partial(_by_distance, "rotated_by_age", "Rotation by age", PRODUCT, level=1.0),
    partial(_by_distance, "pooled", "Added weights by distance", "added to the weight"),
    _vectors,
    _contextual_positions,
    partial(_matrices, "upper", "U: logits"),
    partial(_matrices, "lower", "L: values"),
    _phases,
)
"""The kinds of effects; each yields no panel if the encoding has no such effect."""


def _offsets(effects: Effects, values: Tensor) -> Values:
    """The offsets (n,) of ``values (H, n)``."""
    return np.arange(effects.first, effects.first + values.shape[1])


def _means(table: Tensor) -> tuple[Values, Values, tuple[Values, Values]]:
    """(B, H, K), NaN where there is no item -> offsets that enough requests have (k,), means (H, k), and the 10 % and
    90 % quantiles (k,)."""
    known = (~table[:, 0].isnan()).sum(0)
    x = (known >= max(1, min(FEWEST, int(known.max())))).nonzero().squeeze(1)
    kept = table[:, :, x]
    low, high = torch.nanquantile(kept.flatten(0, 1), torch.tensor([0.1, 0.9]), dim=0)
    return x.numpy(), kept.nanmean(0).numpy(), (low.numpy(), high.numpy())


def _heads(values: Tensor) -> list[tuple[str, Values]]:
    """Names and values of up to HEADS heads (first axis); of the first, without a name, if all have the same values."""
    if all(torch.allclose(values[0], other, atol=1e-6) for other in values):
        return [("", values[0].numpy())]
    return [(f"head {number}", head.numpy()) for number, head in enumerate(values[:HEADS], 1)]
