"""Draws panels with Matplotlib: a row of attention by position, then a section for each encoding that has panels."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from ctr_pe.draw.panels import BACK, Heat, Lines, Panel, Rings
from ctr_pe.errors import UserError

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999"]
"""The palette of Okabe and Ito, without yellow, which is hard to see on white."""
SIGNED, DENSITIES = "PuOr", "cividis"
COLUMNS, LETTERS = 4, 50  # panels in a row; letters of a note per panel of width
CROWDED = 4.0  # density of keys at which the colour scale ends
WIDTH, HEIGHT, HEADING, INDENT = 3.6, 2.9, 0.35, 0.1  # inches: panel, section heading, left margin
TICKS = {1: "1 s", 60: "1 min", 3600: "1 h", 86_400: "1 d", 30 * 86_400: "30 d", 365 * 86_400: "1 y"}


@dataclass(frozen=True)
class Section:
    """Panels next to each other under a heading."""

    name: str
    panels: Sequence[Panel]


def draw(out: Path, title: str, notes: Sequence[str], sections: Sequence[Section]) -> None:
    """Write the picture; the notes are below its title.

    Raises:
        UserError: the file cannot be written.
    """
    first, *others = (len(section.panels) for section in sections)
    columns = max(2, min(COLUMNS, max(first, sum(others))))
    rows = _packed(sections, columns)
    heights = [HEADING + HEIGHT * max(math.ceil(len(section.panels) / columns) for section in row) for row in rows]
    lines = [line for note in notes for line in textwrap.wrap(note, LETTERS * columns)]
    top = 0.5 + 0.2 * len(lines)
    figure = Figure(figsize=(WIDTH * columns, sum(heights) + top), layout="constrained")
    parts: Any = figure.subfigures(len(rows) + 1, 1, height_ratios=[top, *heights])
    _head(parts[0], title, lines, top, INDENT / (WIDTH * columns))
    scales = _scales([panel for section in sections for panel in section.panels])
    for part, row in zip(parts[1:], rows, strict=True):
        widths = [min(columns, len(section.panels)) for section in row]
        blank = [columns - sum(widths)] if sum(widths) < columns else []
        beside = part.subfigures(1, len(widths) + len(blank), width_ratios=[*widths, *blank], squeeze=False)[0]
        for subfigure, section, width in zip(beside, row, widths, strict=False):
            subfigure.suptitle(section.name, x=INDENT / (WIDTH * width), ha="left", fontsize=12, fontweight="bold")
            _section(subfigure, section, width, scales)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=130)
    except OSError as error:
        raise UserError(f"{out}: {error.strerror}") from None


def _packed(sections: Sequence[Section], columns: int) -> list[list[Section]]:
    """Sections in rows: the first alone, then as many as fit side by side."""
    rows: list[list[Section]] = []
    for section in sections:
        used = sum(len(other.panels) for other in rows[-1]) if len(rows) > 1 else columns
        if used + len(section.panels) > columns:
            rows.append([])
        rows[-1].append(section)
    return rows


def _head(part: Any, title: str, lines: Sequence[str], height: float, left: float) -> None:
    part.text(left, 1 - 0.1 / height, title, fontsize=14, fontweight="bold", va="top")
    for number, line in enumerate(lines):
        part.text(left, 1 - (0.42 + 0.2 * number) / height, line, fontsize=9, color="#333333", va="top")


def _section(part: Any, section: Section, columns: int, scales: dict[str, Any]) -> None:
    grid = part.add_gridspec(math.ceil(len(section.panels) / columns), columns)
    shared: dict[str, Any] = {}
    for index, panel in enumerate(section.panels):
        cell = grid[divmod(index, columns)]
        if isinstance(panel, Rings):
            axes = part.add_subplot(cell, projection="polar")
            _rings(part, axes, panel, scales)
        elif isinstance(panel, Heat):
            axes = part.add_subplot(cell)
            _heat(part, axes, panel, scales)
        elif isinstance(panel, Lines):
            other = shared.get(panel.share) if panel.share else None
            axes = part.add_subplot(cell, sharex=other, sharey=other)
            shared[panel.share] = axes
            _lines(axes, panel)
        title = " · ".join(filter(None, [panel.title, panel.unit]))
        axes.set_title("\n".join(filter(None, [title, panel.when])), fontsize=10)
        axes.tick_params(labelsize=8)


def _lines(axes: Any, panel: Lines) -> None:
    if panel.level is not None:
        axes.axhline(panel.level, color="#bbbbbb", linewidth=0.8, zorder=0)
    for curve in panel.curves:
        colour = COLOURS[curve.colour % len(COLOURS)]
        style = {"linestyle": "--", "linewidth": 1.1} if curve.dashed else {"linestyle": "-", "linewidth": 1.6}
        axes.plot(curve.x, curve.y, color=colour, label=curve.label or None, **style)
        if curve.band is not None and not curve.dashed:
            axes.fill_between(curve.x, *curve.band, color=colour, alpha=0.18, linewidth=0)
    if panel.diagonal:
        end = max(float(curve.x[np.isfinite(curve.y)].max()) for curve in panel.curves)
        axes.plot([0, end], [0, end], color="#bbbbbb", linewidth=0.8, linestyle=":", zorder=0)
    if panel.ages:
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xticks(list(TICKS), list(TICKS.values()))
        axes.minorticks_off()
    axes.set_xlabel("age" if panel.ages else BACK, fontsize=9)
    axes.set_ylabel(panel.y, fontsize=9)
    axes.yaxis.get_offset_text().set_fontsize(7)
    axes.spines[["top", "right"]].set_visible(False)
    if any(curve.label for curve in panel.curves):
        axes.legend(fontsize=7, frameon=False)


def _heat(part: Any, axes: Any, panel: Heat, scales: dict[str, Any]) -> None:
    size = len(panel.matrix)
    edges = (-0.5, size - 0.5, size - 0.5, -0.5)
    image = axes.imshow(panel.matrix, cmap=SIGNED, norm=scales[panel.scale], extent=edges, interpolation="nearest")
    if panel.oldest_first:
        ends = [0, size - 1]
        axes.set_xticks(ends, ["oldest", "newest"])
        axes.set_yticks(ends, ["oldest", "newest"], rotation=90)
        for label, side in zip(axes.get_yticklabels(), ("top", "bottom"), strict=True):
            label.set_verticalalignment(side)
        for label, side in zip(axes.get_xticklabels(), ("left", "right"), strict=True):
            label.set_horizontalalignment(side)
    axes.set_xlabel(panel.x, fontsize=9)
    axes.set_ylabel(panel.y, fontsize=9)
    _bar(part, axes, image)


def _rings(part: Any, axes: Any, panel: Rings, scales: dict[str, Any]) -> None:
    rings, angles = panel.density.shape
    hole = rings / 3
    theta, radius = np.linspace(0, 2 * np.pi, angles + 1), np.arange(rings + 1) + hole
    image = axes.pcolormesh(theta, radius, panel.density, cmap=DENSITIES, norm=scales["rings"])
    axes.set_ylim(0, rings + hole)
    axes.set_yticks([])
    axes.set_xticks([0, np.pi / 2, np.pi, 3 * np.pi / 2], ["0", "π/2", "π", "3π/2"])
    axes.grid(False)
    _bar(part, axes, image, "density of keys (1: uniform)")


def _bar(part: Any, axes: Any, image: Any, label: str = "") -> None:
    low, high = image.norm.vmin, image.norm.vmax
    values = np.asarray(image.get_array())
    beyond = {(True, True): "both", (True, False): "min", (False, True): "max"}
    extend = beyond.get((bool(values.min() < low), bool(values.max() > high)), "neither")
    bar = part.colorbar(image, ax=axes, shrink=0.8, pad=0.02, extend=extend)
    bar.ax.tick_params(labelsize=7)
    bar.set_label(label, fontsize=8)
    bar.outline.set_visible(False)


def _scales(panels: Sequence[Panel]) -> dict[str, Any]:
    """One colour scale for all panels of a kind.

    The scale of matrices covers the entries off the diagonal: ones on the diagonal would hide all others.
    """
    most: dict[str, float] = {}
    for panel in panels:
        if isinstance(panel, Heat):
            beside = panel.matrix[~np.eye(len(panel.matrix), dtype=bool)]
            most[panel.scale] = max(most.get(panel.scale, 0.0), float(np.abs(beside).max()))
        elif isinstance(panel, Rings):
            most["rings"] = max(most.get("rings", 1.0), min(float(panel.density.max()), CROWDED))
    found = {scale: Normalize(-(value or 1.0), value or 1.0) for scale, value in most.items()}
    if "rings" in found:
        found["rings"] = Normalize(0, most["rings"])
    return found
