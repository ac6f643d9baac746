"""``ctr-pe report``: the results of a benchmark as one HTML file that needs no network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """``results``: OUT of a benchmark. ``out``: the page, by default report.html in there. ``weights``: OUT of a
    benchmark with --keep-weights, by default ``results`` too. ``users``: how many users the explorer has."""

    results: Path
    out: Path | None = None
    weights: Path | None = None
    data_root: Path | None = None
    users: int = 24
