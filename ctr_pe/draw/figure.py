"""Draws panels with Matplotlib: a row of attention by position, then a section for each encoding that has panels."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from ctr_pe.draw.panels import BEFORE, Image, Lines, Panel
from ctr_pe.errors import UserError

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999"]
"""The palette of Okabe and Ito, without yellow, which is hard to see on white."""
COLUMNS, LETTERS = 4, 50  # panels in a row; letters of a note per panel of width
CROWDED = 4.0  # density of keys at which the colour scale ends
WIDTH, HEIGHT, HEADING, INDENT = 3.6, 2.9, 0.35, 0.1  # inches: panel, section heading, left margin
TICKS = {1: "1 s", 60: "1 min", 3600: "1 h", 86_400: "1 d", 30 * 86_400: "30 d", 365 * 86_400: "1 y"}


def draw(out: Path, title: str, notes: Sequence[str], sections: Mapping[str, Sequence[Panel]]) -> None:
    """Write the picture; the notes are below its title, ``sections`` are panels side by side under a heading.

    Raises:
        UserError: the file cannot be written.
    """
    first, *others = map(len, sections.values())
    columns = max(2, min(COLUMNS, max(first, sum(others))))
    rows = _packed(sections, columns)
    heights = [HEADING + HEIGHT * max(math.ceil(len(sections[name]) / columns) for name in row) for row in rows]
    lines = [line for note in notes for line in textwrap.wrap(note, LETTERS * columns)]
    top = 0.5 + 0.2 * len(lines)
    figure = Figure(figsize=(WIDTH * columns, sum(heights) + top), layout="constrained")
    parts: Any = figure.subfigures(len(rows) + 1, 1, height_ratios=[top, *heights])
    head, left = parts[0], INDENT / (WIDTH * columns)
    head.text(left, 1 - 0.1 / top, title, fontsize=14, fontweight="bold", va="top")
    for number, line in enumerate(lines):
        head.text(left, 1 - (0.42 + 0.2 * number) / top, line, fontsize=9, color="#333333", va="top")
    scales = _scales([panel for panels in sections.values() for panel in panels])
    for part, row in zip(parts[1:], rows, strict=True):
        widths = [min(columns, len(sections[name])) for name in row]
        blank = [columns - sum(widths)] if sum(widths) < columns else []
        beside = part.subfigures(1, len(widths + blank), width_ratios=widths + blank, squeeze=False)[0]
        for subfigure, name, width in zip(beside, row, widths, strict=False):
            subfigure.suptitle(name, x=INDENT / (WIDTH * width), ha="left", fontsize=12, fontweight="bold")
            _section(subfigure, sections[name], width, scales)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=130)
    except OSError as error:
        raise UserError(f"{out}: {error.strerror}") from None


def _packed(sections: Mapping[str, Sequence[Panel]], columns: int) -> list[list[str]]:
    """Names of sections in rows: the first alone, then as many as fit side by side."""
    first, *others = sections
    rows, used = [[first]], columns
    for name in others:
        used += len(sections[name])
        if used > columns:
            rows.append([])
            used = len(sections[name])
        rows[-1].append(name)
    return rows


def _section(part: Any, panels: Sequence[Panel], columns: int, scales: dict[str, Normalize]) -> None:
    grid = part.add_gridspec(math.ceil(len(panels) / columns), columns)
    shared: dict[str, Any] = {}
    for index, panel in enumerate(panels):
        cell = grid[divmod(index, columns)]
        if isinstance(panel, Lines):
            other = shared.get(panel.share) if panel.share else None
            shared[panel.share] = axes = part.add_subplot(cell, sharex=other, sharey=other)
            _lines(axes, panel)
        elif isinstance(panel, Image):
            axes = part.add_subplot(cell, projection="polar" if panel.kind == "density" else None)
            image = (_rings if panel.kind == "density" else _heat)(axes, panel, scales[panel.kind])
            low, high = panel.values.min() < image.norm.vmin, panel.values.max() > image.norm.vmax
            extend = "both" if low and high else "min" if low else "max" if high else "neither"
            bar = part.colorbar(image, ax=axes, shrink=0.8, pad=0.02, extend=extend)
            bar.ax.tick_params(labelsize=7)
            bar.set_label("density of keys (1: uniform)" if panel.kind == "density" else "", fontsize=8)
            bar.outline.set_visible(False)
        title = " · ".join(filter(None, [panel.title, panel.unit]))
        axes.set_title("\n".join(filter(None, [title, panel.when])), fontsize=10)
        axes.tick_params(labelsize=8)


def _lines(axes: Any, panel: Lines) -> None:
    if panel.level is not None:
        axes.axhline(panel.level, color="#bbbbbb", linewidth=0.8, zorder=0)
    for curve in panel.curves:
        colour = COLOURS[curve.colour % len(COLOURS)]
        if curve.when == BEFORE:
            axes.plot(curve.x, curve.y, color=colour, linestyle="--", linewidth=1.1)
            continue
        axes.plot(curve.x, curve.y, color=colour, linewidth=1.6, label=curve.label or None)
        if curve.band is not None:
            axes.fill_between(curve.x, *curve.band, color=colour, alpha=0.18, linewidth=0)
    if panel.diagonal:
        end = max(float(curve.x[np.isfinite(curve.y)].max()) for curve in panel.curves)
        axes.plot([0, end], [0, end], color="#bbbbbb", linewidth=0.8, linestyle=":", zorder=0)
    if panel.ages:
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xticks(list(TICKS), list(TICKS.values()))
        axes.minorticks_off()
    axes.set_xlabel("age" if panel.ages else "items before the query", fontsize=9)
    axes.set_ylabel(panel.y, fontsize=9)
    axes.yaxis.get_offset_text().set_fontsize(7)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=7, frameon=False)


def _heat(axes: Any, panel: Image, scale: Normalize) -> Any:
    size = len(panel.values)
    edges = (-0.5, size - 0.5, size - 0.5, -0.5)
    x, y = "distance", "distance"
    if panel.kind == "matrix":
        x, y, ends, names = "to item", "from item", [0, size - 1], ["oldest", "newest"]
        for label, side in zip(axes.set_xticks(ends, names), ("left", "right"), strict=True):
            label.label1.set_horizontalalignment(side)
        for label, side in zip(axes.set_yticks(ends, names, rotation=90), ("top", "bottom"), strict=True):
            label.label1.set_verticalalignment(side)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    return axes.imshow(panel.values, cmap="PuOr", norm=scale, extent=edges, interpolation="nearest")


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
    most = {"cosine": 0.0, "matrix": 0.0, "density": 1.0}
    for panel in panels:
        if isinstance(panel, Image) and panel.kind == "density":
            most["density"] = max(most["density"], min(float(panel.values.max()), CROWDED))
        elif isinstance(panel, Image):
            beside = panel.values[~np.eye(len(panel.values), dtype=bool)]
            most[panel.kind] = max(most[panel.kind], float(np.abs(beside).max()))
    return {kind: Normalize(0 if kind == "density" else -(top or 1.0), top or 1.0) for kind, top in most.items()}
