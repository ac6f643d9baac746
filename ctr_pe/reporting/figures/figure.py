"""Draws panels with Matplotlib: a grid with an encoding per column and a kind of panel per row."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from ctr_pe.reporting.figures.panels import BEFORE, INITIAL, KINDS, Image, Lines, Panel
from ctr_pe.utils.errors import UserError

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999"]
"""The palette of Okabe and Ito, without yellow, which is hard to see on white."""
NARROWEST = 0.85  # inches of a panel's width: more encodings go into a second band below
LABELS = 0.62  # inches: what the labels on the left take
LOW, HIGH = 0.85, 1.2  # inches: heights of a panel
NAMES = 0.17  # inches: the row with the names of the encodings
STRIP = 0.4  # inches: the row with the number of requests
TITLE, TEXT, SMALL = 8.5, 7.0, 6.0  # points
LINE = 0.125  # inches: a line of the notes
CROWDED = 4.0  # density of keys at which the colour scale ends
LEAST = {"cosine": 1.0, "matrix": 0.1, "density": 1.0}
"""Where the colour scales end at the least, so that noise does not look like signal."""
TICKS = {1: "1 s", 60: "1 min", 3600: "1 h", 86_400: "1 d", 30 * 86_400: "30 d", 365 * 86_400: "1 y"}


@dataclass(frozen=True)
class Row:
    """``cells``: an encoding's panel, those before and after training, or none; ``label``: to the left of the row;
    ``limits``: of y, if its panels share them; ``strip``: the number of requests below."""

    label: str
    cells: list[list[Panel]]
    limits: tuple[float, float] | None = None
    strip: bool = False


@dataclass(frozen=True)
class Band:
    """Columns side by side, under their names. ``inner``: inches of a column."""

    names: list[str]
    rows: list[Row]
    inner: float

    def height(self, row: Row) -> float:
        """Inches, without the strip."""
        pictured = any(isinstance(panel, Image) for cell in row.cells for panel in cell)
        return min(max(0.8 * self.inner, LOW), HIGH) + 0.26 + 0.12 * pictured

    @property
    def heights(self) -> list[float]:
        """Of the rows of the grid: the names, then the rows; a row's strip is one of its own."""
        return [NAMES, *[part for row in self.rows for part in [self.height(row), *[STRIP] * row.strip]]]


def draw(
    out: Path, title: str, notes: Sequence[str], columns: Mapping[str, Sequence[Panel]], width: float, dpi: int
) -> None:
    """Write the picture, ``width`` inches wide; the notes are below its title. ``dpi``: pixels of an inch, of a PNG.

    Raises:
        UserError: the file cannot be written.
    """
    scales = _scales([panel for panels in columns.values() for panel in panels])
    bands = _bands(columns, width)
    letters = int(width * 72 / (SMALL * 0.54))
    lines = [line for note in notes for line in textwrap.wrap(note, letters)]
    top = 0.24 + LINE * len(lines)
    heights = [sum(band.heights) for band in bands]
    layout = ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02, wspace=0.03, hspace=0.0)
    figure = Figure(figsize=(width, top + sum(heights)), layout=layout)
    parts: Any = figure.subfigures(1 + len(bands), 1, height_ratios=[top, *heights], squeeze=False)[:, 0]
    parts[0].text(0.01, 1 - 0.04 / top, title, fontsize=TITLE, fontweight="bold", va="top")
    for number, line in enumerate(lines):
        parts[0].text(0.01, 1 - (0.21 + LINE * number) / top, line, fontsize=SMALL, color="#333333", va="top")
    for part, band in zip(parts[1:], bands, strict=True):
        _draw_band(part, band, scales)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=dpi)
    except OSError as error:
        raise UserError(f"{out}: {error.strerror}") from None


def _bands(columns: Mapping[str, Sequence[Panel]], width: float) -> list[Band]:
    """As many encodings side by side as are wide enough, the others below, in bands of equal size. The panels of a
    single encoding stand side by side."""
    if len(columns) == 1:
        ((name, panels),) = columns.items()
        number = max(1, min(len(panels), int((width - LABELS) / (2 * NARROWEST))))
        cells = [[panel] for panel in panels] + [[]] * (-len(panels) % number)
        rows = [Row("", cells[start : start + number]) for start in range(0, len(cells), number)]
        return [Band([name], rows, (width - LABELS) / number)]
    most = max(1, int((width - LABELS) / NARROWEST))
    size = math.ceil(len(columns) / math.ceil(len(columns) / most))
    inner = (width - LABELS) / size
    limits = _limits([panel for panels in columns.values() for panel in panels])
    names = list(columns)
    return [
        Band(some, _rows([columns[name] for name in some], size, limits, inner > 2 * NARROWEST), inner)
        for some in (names[start : start + size] for start in range(0, len(names), size))
    ]


def _rows(
    columns: Sequence[Sequence[Panel]], size: int, limits: Mapping[str, tuple[float, float]], pairs: bool
) -> list[Row]:
    """Kind by kind, each with ``size`` cells. ``pairs``: before and after training stand in one cell."""

    def key(panel: Panel) -> tuple[str, ...]:
        return (panel.name, panel.title, panel.unit, *([] if pairs else [panel.when]))

    kinds = list(KINDS)
    rows = []
    for of_row in sorted(dict.fromkeys(map(key, chain(*columns))), key=lambda one: kinds.index(one[0])):
        cells = [[panel for panel in panels if key(panel) == of_row] for panels in columns]
        panel = next(chain(*cells))
        when = "" if pairs else panel.when.replace(INITIAL, "")  # which the notes say
        parts = [panel.title, panel.unit, when, panel.y if isinstance(panel, Lines) else ""]
        label = "\n".join(line for part in parts for line in textwrap.wrap(part, 24))
        cells += [[]] * (size - len(cells))
        shared = limits[panel.name] if isinstance(panel, Lines) and panel.share else None
        strip = isinstance(panel, Lines) and panel.requests is not None
        rows.append(Row(label, cells, shared, strip))
    return rows


def _limits(panels: Sequence[Panel]) -> dict[str, tuple[float, float]]:
    """By the kind of panel: limits of y in which all panels of the kind have room."""
    found: dict[str, tuple[float, float]] = {}
    for panel in panels:
        if isinstance(panel, Lines):
            (low, high), (least, most) = _extent(panel), found.get(panel.name, (math.inf, -math.inf))
            found[panel.name] = min(low, least), max(high, most)
    return found


def _extent(panel: Lines) -> tuple[float, float]:
    """Limits of y: all curves and bands, and at the least what the panel wants, so that noise does not look like
    signal."""
    parts = [part for curve in panel.curves for part in (curve.y, *(curve.band or ()))]
    values = np.append(np.concatenate(parts), [_farthest(panel)] * panel.diagonal)
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    margin = 0.04 * (high - low)
    least = panel.least or (0.0, 0.0)
    return min(low - margin, least[0]), max(high + margin, least[1])


def _farthest(panel: Lines) -> float:
    return max(float(curve.x[np.isfinite(curve.y)].max()) for curve in panel.curves)


def _draw_band(part: Any, band: Band, scales: Mapping[str, Normalize]) -> None:
    grid = part.add_gridspec(len(band.heights), len(band.rows[0].cells), height_ratios=band.heights)
    where: dict[str, Any] = {"x": 0.5, "ha": "center"} if band.rows[0].label else {"x": 0.0, "ha": "left"}
    for column, name in enumerate(band.names):
        axes = part.add_subplot(grid[0, column])
        axes.axis("off")
        axes.text(y=0.2, s=name, fontsize=TEXT, fontweight="bold", transform=axes.transAxes, **where)
    at = 1
    for row in band.rows:
        texts: set[str] = set()  # of legends: the same is not said twice in a row
        images: list[tuple[Any, Any, Image]] = []
        first = next(panel for cell in row.cells for panel in cell)
        for column, cell in enumerate(row.cells):
            inside = grid[at, column].subgridspec(1, len(cell)) if len(cell) > 1 else [grid[at, column]]
            for number, panel in enumerate(cell):
                polar = isinstance(panel, Image) and panel.kind == "density"
                axes = part.add_subplot(inside[number], projection="polar" if polar else None)
                if isinstance(panel, Image):
                    picture = (_rings if polar else _heat)(axes, panel, scales[panel.kind])
                    images.append((axes, picture, panel))
                else:
                    assert isinstance(panel, Lines)
                    _lines(axes, panel, row.limits or _extent(panel), texts)
                    axes.tick_params(labelleft=row.limits is None or first is panel)
                if row.strip and isinstance(panel, Lines):
                    axes.tick_params(labelbottom=False)
                    axes.set_xlabel("")
                    _strip(part.add_subplot(grid[at + 1, column], sharex=axes), panel, first=column == 0)
                if not row.label or len(cell) > 1:
                    said = [panel.when] if row.label else [panel.title, panel.unit, panel.when.replace(INITIAL, "")]
                    axes.set_title("\n".join(filter(None, said)), fontsize=SMALL, pad=3)
                if not row.label and isinstance(panel, Lines):
                    axes.set_ylabel(panel.y, fontsize=SMALL)
                elif column + number == 0 and row.label:
                    axes.set_ylabel(row.label, fontsize=SMALL)
                axes.tick_params(labelsize=SMALL, length=2, pad=1.5)
            if not cell:
                axes = part.add_subplot(grid[at, column], xticks=[], yticks=[])
                axes.set_ylabel(row.label if column == 0 else "", fontsize=SMALL)
                axes.spines[:].set_visible(False)
                if column < len(band.names):  # the encoding has no such effect
                    axes.text(0.5, 0.5, "–", ha="center", va="center", color="#999999", transform=axes.transAxes)
        if images:
            _colour_bar(part, images)
        at += 1 + row.strip


def _lines(axes: Any, panel: Lines, limits: tuple[float, float], texts: set[str]) -> None:
    """``texts``: of the legends that stand in the row already."""
    if panel.level is not None:
        axes.axhline(panel.level, color="#bbbbbb", linewidth=0.6, zorder=0)
    for curve in panel.curves:
        colour = COLOURS[curve.colour % len(COLOURS)]
        if curve.when == BEFORE:
            axes.plot(curve.x, curve.y, color=colour, linestyle="--", linewidth=0.7)
            continue
        axes.plot(curve.x, curve.y, color=colour, linewidth=1.0, label=curve.label or None)
        if curve.band is not None:
            axes.fill_between(curve.x, *curve.band, color=colour, alpha=0.2, linewidth=0)
    if panel.diagonal:
        ends = [0, _farthest(panel)]
        axes.plot(ends, ends, color="#bbbbbb", linewidth=0.8, linestyle=":", zorder=0)
    axes.set_ylim(*limits)
    if panel.ages:
        shown = dict(list(TICKS.items())[::2])
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xticks(list(shown), list(shown.values()))
        axes.minorticks_off()
    else:
        axes.locator_params(axis="x", nbins=4, integer=True)
    axes.locator_params(axis="y", nbins=4)
    axes.set_xlabel("age" if panel.ages else "items back", fontsize=SMALL, labelpad=1)
    axes.yaxis.get_offset_text().set_fontsize(SMALL)
    axes.spines[["top", "right"]].set_visible(False)
    new = {curve.label for curve in panel.curves if curve.label and curve.when != BEFORE}
    if new - texts:
        style = {"fontsize": SMALL - 0.5, "frameon": False, "handlelength": 1, "labelspacing": 0.2}
        axes.legend(ncols=1 + (len(new) > 4), **style).set_in_layout(False)
        texts |= new


def _strip(axes: Any, panel: Lines, first: bool) -> None:
    """How many requests have an item at each place."""
    axes.fill_between(panel.curves[0].x, panel.requests, color="#bbbbbb", step="mid", linewidth=0)
    most = int(np.max(panel.requests))  # type: ignore[arg-type]
    axes.set_ylim(0, most)
    axes.set_yticks([0, most], ["0", f"{most:,}"])
    axes.tick_params(labelsize=SMALL, length=2, pad=1.5, labelleft=first)
    axes.set_xlabel("items back", fontsize=SMALL, labelpad=1)
    if first:
        axes.set_ylabel("requests", fontsize=SMALL)
    axes.spines[["top", "right"]].set_visible(False)


def _colour_bar(part: Any, images: Sequence[tuple[Any, Any, Image]]) -> None:
    """One for the images of a row, which have the same scale."""
    image = images[0][1]
    low = any(panel.values.min() < image.norm.vmin for _, _, panel in images)
    high = any(panel.values.max() > image.norm.vmax for _, _, panel in images)
    extend = "both" if low and high else "min" if low else "max" if high else "neither"
    bar = part.colorbar(image, ax=images[-1][0], shrink=0.9, pad=0.03, aspect=12, extend=extend)
    bar.ax.tick_params(labelsize=SMALL - 0.5, length=2, pad=1)
    bar.locator = MaxNLocator(4)
    if images[0][2].kind == "density":
        bar.set_label("density (1: uniform)", fontsize=SMALL - 0.5)
    bar.outline.set_visible(False)


def _heat(axes: Any, panel: Image, scale: Normalize) -> Any:
    if panel.kind == "matrix":
        ends, names = [0, len(panel.values) - 1], ["oldest", "newest"]
        for label, side in zip(axes.set_xticks(ends, names), ("left", "right"), strict=True):
            label.label1.set_horizontalalignment(side)
        for label, side in zip(axes.set_yticks(ends, names, rotation=90), ("top", "bottom"), strict=True):
            label.label1.set_verticalalignment(side)
    else:
        axes.locator_params(nbins=4, integer=True)
    axes.set_xlabel("to item" if panel.kind == "matrix" else "distance", fontsize=SMALL, labelpad=1)
    return axes.imshow(panel.values, cmap="PuOr", norm=scale, interpolation="nearest")


def _rings(axes: Any, panel: Image, scale: Normalize) -> Any:
    rings, angles = panel.values.shape
    hole = rings / 3
    theta, radius = np.linspace(0, 2 * np.pi, angles + 1), np.arange(rings + 1) + hole
    image = axes.pcolormesh(theta, radius, panel.values, cmap="cividis", norm=scale)
    axes.set_ylim(0, rings + hole)
    axes.set_yticks([])
    axes.set_xticks([0, np.pi / 2, np.pi, 3 * np.pi / 2], ["0", "π/2", "π", "3π/2"])
    axes.grid(False)
    return image


def _scales(panels: Sequence[Panel]) -> dict[str, Normalize]:
    """One colour scale for all panels of a kind.

    The scale of matrices covers the entries off the diagonal: ones on the diagonal would hide all others.
    """
    most = dict(LEAST)
    for panel in panels:
        if isinstance(panel, Image) and panel.kind == "density":
            most["density"] = max(most["density"], min(float(panel.values.max()), CROWDED))
        elif isinstance(panel, Image):
            beside = panel.values[~np.eye(len(panel.values), dtype=bool)]
            most[panel.kind] = max(most[panel.kind], float(np.abs(beside).max()))
    return {kind: Normalize(0 if kind == "density" else -top, top) for kind, top in most.items()}
