"""What is drawn: measurements of encodings as curves and images.

B requests, H heads, K offsets, k of these, A angles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ctr_pe.reporting.figures.measure import Attention, Effects
from ctr_pe.reporting.figures.trial import AGES, identity
from ctr_pe.utils.errors import counted

Values = npt.NDArray[Any]
USERS, RINGS, HEADS = 8, 10, 8
FEWEST = 20
"""A mean over fewer requests is not shown."""
INITIAL, BEFORE, AFTER = "as initialised", "before training", "after training"
MEAN = "mean"
"""The label of a bias that depends on the items."""
OF_LOGITS: dict[str, Any] = {"y": "added to the logit", "least": (-0.5, 0.5)}
"""Half a logit, the least height of the axis, changes a weight by two thirds."""
OF_PRODUCTS: dict[str, Any] = {"y": "product with itself", "least": (0.0, 1.0), "level": 1.0, "share": True}
OF_WEIGHTS: dict[str, Any] = {"y": "added to the weight", "least": (-0.05, 0.05)}


@dataclass(frozen=True, kw_only=True)
class Panel:
    """``when``: before or after training, if the panel shows only one; ``unit``: its name, if a model has several;
    ``name``: its kind, of ``KINDS``."""

    title: str
    name: str = ""
    when: str = ""
    unit: str = ""


@dataclass(frozen=True)
class Curve:
    """``colour``: number of the head, layer or user; ``band``: low and high, over requests or, once merged, over seeds.
    Before training a curve is dashed and has neither label nor band."""

    when: str
    x: Values
    y: Values
    label: str = ""
    colour: int = 0
    band: tuple[Values, Values] | None = None


@dataclass(frozen=True, kw_only=True)
class Lines(Panel):
    """``level``: a horizontal reference; ``ages``: x is in seconds; ``share``: the panels of a row have common
    limits of y; ``least``: what the axis of y shows at the least; ``requests``: how many have an item at each x."""

    y: str
    curves: Sequence[Curve]
    level: float | None = None
    ages: bool = False
    diagonal: bool = False
    share: bool = False
    least: tuple[float, float] | None = None
    requests: Values | None = None


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


def attention(moments: Sequence[tuple[str, Sequence[Attention]]]) -> Lines:
    """Mean weight by offset, times the number of items: 1 is uniform attention, whatever the history's length."""
    curves, softmax = [], True
    for when, units in moments:
        for index, unit in enumerate(units):
            softmax = unit.softmax
            weights = unit.weights * unit.items.unsqueeze(1) if softmax else unit.weights
            x, mean, _ = _means(weights.unsqueeze(1))
            curves.append(Curve(when, x, mean[0], unit.label, index))
    requests = (~moments[0][1][0].weights.isnan()).sum(0)[torch.from_numpy(curves[0].x)].numpy()
    axes: dict[str, Any] = {"title": "attention, no softmax", "y": "mean weight"}
    if softmax:
        axes = {"title": "attention relative to uniform", "y": "weight × items", "level": 1.0, "least": (0.5, 1.5)}
    return Lines(name="attention", curves=curves, share=True, requests=requests, **axes)


def merged(by_seed: Sequence[Sequence[Panel]]) -> list[Panel]:
    """The panels of an encoding's runs as one run's: means over the seeds, of curves with ± one standard deviation as a
    band. A band over requests is averaged too. Phases stay those of the first seed: planes of two seeds have nothing in
    common."""
    return [_merge(panels) for panels in _alike(chain(*by_seed), "name", "title", "unit", "when")]


def _alike(values: Iterable[Any], *attributes: str) -> list[list[Any]]:
    """Those with equal attributes together."""
    found: dict[Any, list[Any]] = {}
    for value in values:
        found.setdefault(attrgetter(*attributes)(value), []).append(value)
    return list(found.values())


def _merge(panels: Sequence[Any]) -> Panel:
    first: Panel = panels[0]
    if isinstance(first, Lines):
        curves = chain.from_iterable(panel.curves for panel in panels)
        return replace(first, curves=[_mean_curve(of) for of in _alike(curves, "when", "label", "colour")])
    if isinstance(first, Image) and first.kind != "density":
        return replace(first, values=np.mean([one.values for one in panels], axis=0))
    return first


def _mean_curve(curves: Sequence[Curve]) -> Curve:
    first, y = curves[0], np.stack([curve.y for curve in curves])
    bands = [curve.band for curve in curves if curve.band is not None]
    mean, band = y.mean(0), None
    if bands:
        low, high = np.mean(bands, axis=0)
        band = (low, high)
    elif len(curves) > 1 and first.when != BEFORE:
        spread = y.std(0, ddof=1)
        band = (mean - spread, mean + spread)
    return replace(first, y=mean, band=band)


def of_links(moments: Sequence[tuple[str, Sequence[Attention]]]) -> list[Panel]:
    """All effects of one encoding, kind by kind, unit by unit; once if all units show the same."""
    found: list[Panel] = []
    units = moments[0][1]
    for name, kind in KINDS.items():
        if kind is None:
            continue
        for link in range(max(len(unit.effects) for unit in units)):
            by_unit: dict[str, list[Panel]] = {}
            for index, unit in enumerate(units):
                of_unit = [(when, at[index].effects[link]) for when, at in moments if link < len(unit.effects)]
                panels = list(kind([(when, effects) for when, effects in of_unit if effects is not None]))
                if panels and not any(_values(panels) == _values(others) for others in by_unit.values()):
                    by_unit[unit.label] = panels
            for label, panels in by_unit.items():
                named = label if len(by_unit) > 1 else ""
                found += [replace(panel, name=name, unit=named) for panel in panels]
    return found


def _values(panels: Sequence[Panel]) -> list[list[Any]]:
    images = [panel.values for panel in panels if isinstance(panel, Image)]
    curves = [curve.y for panel in panels if isinstance(panel, Lines) for curve in panel.curves]
    return [values.tolist() for values in images + curves]


def _known(name: str, moments: Moments) -> list[tuple[str, Effects, Tensor]]:
    """The moments at which the encoding has the effect ``name``, and that effect."""
    return [(when, of, values) for when, of in moments if (values := getattr(of, name)) is not None]


def _bias(moments: Moments) -> Iterator[Panel]:
    """By distance. A bias that depends on the items: its mean over requests and heads, the range of the middle 80 %,
    and the bias of zero vectors."""
    curves = []
    for when, _, added in _known("added", moments):
        x, mean, band = _means(added)
        curves.append(Curve(when, x, mean.mean(0), MEAN, 0, band))
    if not curves:
        for panel in _by_distance("bias", "bias by distance", moments, **OF_LOGITS):
            named = [replace(curve, label=curve.label or "content-free") for curve in panel.curves]
            yield replace(panel, curves=named)
        return
    for when, effects, bias in _known("bias", moments):
        if when != BEFORE:
            curves.append(Curve(when, _offsets(effects, bias), bias.mean(0).numpy(), "content-free", 1))
    yield Lines(title="bias by distance", curves=curves, **OF_LOGITS)


def _by_distance(name: str, title: str, moments: Moments, **axes: Any) -> Iterator[Lines]:
    """A curve per head, unless all are constant."""
    curves, ages = [], name.endswith("by_age")
    for when, effects, values in _known(name, moments):
        x = np.asarray(AGES, float) if ages else _offsets(effects, values)
        curves += [Curve(when, x, own, head, index) for index, (head, own) in enumerate(_heads(values))]
    if any(np.ptp(curve.y) > 1e-6 for curve in curves):
        yield Lines(title=title, curves=curves, ages=ages, **axes)


def _vectors(moments: Moments) -> Iterator[Panel]:
    for when, _, cosines in _known("similar", moments):
        yield Image(title="position vectors: cosine", when=when, kind="cosine", values=cosines.numpy())


def _contextual_positions(moments: Moments) -> Iterator[Panel]:
    """A curve per user with a long history; the same users in all pictures of the data set."""
    for when, _, by_head in _known("positions", moments):
        positions = by_head.mean(1)
        counts = (~positions.isnan()).sum(1)
        longest = counts.argsort(descending=True, stable=True)[: max(USERS, len(counts) // 4)]
        users, x = longest[:: max(1, len(longest) // USERS)][:USERS], np.arange(positions.shape[1])
        curves = [Curve("", x, positions[row].numpy(), "", index) for index, row in enumerate(users)]
        title, y = f"contextual positions of {counted(len(curves), 'user')}", "position"
        yield Lines(title=title, when=when, y=y, curves=curves, diagonal=True, share=True)


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
                title = f"key phases, plane {plane + 1} of {planes}"
                yield Image(title=title, when=when, kind="density", values=density)


KINDS: dict[str, Callable[[Moments], Iterator[Panel]] | None] = {
    "attention": None,  # of units, not of encodings
    "bias": _bias,
    "bias_by_age": partial(_by_distance, "bias_by_age", "bias by age", **OF_LOGITS),
    "rotation": partial(_by_distance, "rotated", "rotation by distance", **OF_PRODUCTS),
    "rotation_by_age": partial(_by_distance, "rotated_by_age", "rotation by age", **OF_PRODUCTS),
    "added_weights": partial(_by_distance, "pooled", "added weights by distance", **OF_WEIGHTS),
    "vectors": _vectors,
    "positions": _contextual_positions,
    "u": partial(_matrices, "upper", "U: logits"),
    "l": partial(_matrices, "lower", "L: values"),
    "phases": _phases,
}
"""The kinds of panels, in the order of the picture's rows; each yields none if the encoding has no such effect."""


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
