"""The page of ``ctr-pe monitor``: numbers, bars and a figure in one HTML file without a script."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ctr_pe
from ctr_pe.reporting.html.rendering import render, write
from ctr_pe.serving.monitor import MonitorReport
from ctr_pe.study.rendering import DASH
from ctr_pe.utils.errors import UserError

SIZE = 260.0  # of the figure's axes, in its own unit


def check_installed() -> None:
    """Raises UserError if Jinja2 is not installed."""
    try:
        import jinja2  # noqa: F401
    except ImportError:
        raise UserError("a page needs Jinja2: pip install 'ctr_pe[report]'") from None


def write_page(report: MonitorReport, out: Path) -> None:
    """Raises UserError if it cannot be written."""
    write(page(report), out)


def page(report: MonitorReport) -> str:
    """HTML."""
    return render(
        "monitor",
        title=f"Drift: {report.model.resolve().name}",
        report=report,
        tables=[table.shown() for table in report.tables()],
        points=points(report),
        size=SIZE,
        dash=DASH,
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC by ctr_pe {ctr_pe.__version__}",
    )


def points(report: MonitorReport) -> list[dict[str, Any]]:
    """Of the figure of calibration: where each bin stands, and its text. Both axes go from 0 to the largest value."""
    if report.calibration is None:
        return []
    bins = report.calibration.bins
    most = max(*bins.predicted, *bins.observed, 1e-12)
    return [
        {"x": SIZE * x / most, "y": SIZE * (1 - y / most), "text": f"predicted {x:.4f}, clicked {y:.4f}, {rows:,} rows"}
        for x, y, rows in zip(bins.predicted, bins.observed, bins.rows, strict=True)
    ]
