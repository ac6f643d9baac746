"""The forest plot: differences in gAUC to ``none``, and to ``naive`` where it was run, with their 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctr_pe.evaluation.paired import Difference
from ctr_pe.study.differences import BASELINES, Setting
from ctr_pe.study.store import Store
from ctr_pe.utils.errors import say
from ctr_pe.utils.files import file_errors

FILES = ("forest.png", "forest.pdf")
ROW, HEAD, WIDTH, LARGEST = 0.26, 1.1, 4.6, 300.0  # inches: a difference, what is around a panel, a panel, a picture
OURS, ZERO = "#1f4e79", "#9aa0a6"


@dataclass(frozen=True)
class ForestPanel:
    """``differences``: of one table to ``baseline``, by encoding."""

    title: str
    baseline: str
    differences: Mapping[str, Difference]


def write_forest(store: Store, settings: Sequence[Setting]) -> list[str]:
    """Write forest.png and forest.pdf beside the tables, one row of panels per setting that has differences.

    Returns:
        The names of what was written: nothing without differences, or without Matplotlib, which a line on stderr says.

    Raises:
        UserError: a file cannot be written.
    """
    rows = panels(settings)
    if not rows:
        return []
    try:
        from matplotlib.figure import Figure
    except ImportError:
        say("forest.png and forest.pdf need Matplotlib: pip install 'ctr_pe[draw]'")
        return []
    columns = max(map(len, rows))
    heights = [HEAD + ROW * max(len(panel.differences) for panel in row) for row in rows]
    figure = Figure(figsize=(WIDTH * columns, sum(heights)), layout="constrained")
    figure.get_layout_engine().set(wspace=0.06)  # type: ignore[union-attr,call-arg]
    grid = figure.add_gridspec(len(rows), columns, height_ratios=heights)
    for index, row in enumerate(rows):
        for column, panel in enumerate(row):
            _draw(figure.add_subplot(grid[index, column]), panel)
    dpi = min(200.0, LARGEST * 200 / max(LARGEST, sum(heights)))  # the picture's sides have a limit in pixels
    for name in FILES:
        with file_errors(store.path / name):  # without a date in it, equal results are equal files
            figure.savefig(store.path / name, dpi=dpi, metadata={"CreationDate": None} if name.endswith("pdf") else {})
    return list(FILES)


def panels(settings: Sequence[Setting]) -> list[list[ForestPanel]]:
    """One row of panels per setting that has differences."""
    rows = []
    for setting in settings:
        found = {baseline: setting.differences(baseline) for baseline in BASELINES}
        gauc = {base: {pe: of["gAUC"] for pe, of in all_.items()} for base, all_ in found.items()}
        known = {base: {pe: one for pe, one in of.items() if not math.isnan(one.value)} for base, of in gauc.items()}
        rows.append([ForestPanel(setting.title, base, of) for base, of in known.items() if of])
    return [row for row in rows if row]


def _draw(axes: Any, panel: ForestPanel) -> None:
    axes.axvline(0, color=ZERO, linewidth=1, zorder=0)
    for place, found in enumerate(panel.differences.values()):
        axes.plot([found.low, found.high], [place, place], color=OURS, linewidth=2, solid_capstyle="butt")
        axes.plot([found.value], [place], marker="s", markersize=6, color=OURS)
        interval = "" if math.isnan(found.low) else f"  [{found.low:+.4f}, {found.high:+.4f}]"
        text = f"{found.value:+.4f}{interval}".replace("-", "−")
        axes.annotate(text, (1.02, place), xycoords=("axes fraction", "data"), va="center", fontsize=8)
    axes.set_yticks(range(len(panel.differences)), list(panel.differences), fontsize=9)
    axes.set_ylim(len(panel.differences) - 0.5, -0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.locator_params(axis="x", nbins=4)
    axes.margins(x=0.06)
    axes.set_xlabel(f"gAUC − {panel.baseline}, 95 % interval\n(other users, newly trained runs)", fontsize=9)
    title, further = panel.title.split(", ")[:3], panel.title.split(", ")[3:]  # rows and users are on a second line
    axes.set_title("\n".join(", ".join(part) for part in (title, further) if part), fontsize=9, loc="left")
