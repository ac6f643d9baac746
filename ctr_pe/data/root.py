"""The data root: where data sets live. Without pydantic, for ``ctr-pe list`` and the help of commands."""

from __future__ import annotations

import json
import os
from pathlib import Path

REPORT = "report.json"


def data_root(given: Path | None = None) -> Path:
    """Directory of data sets: ``given`` (--data-root), else $CTR_PE_DATA, else ./data."""
    return Path(given or os.environ.get("CTR_PE_DATA") or "data")


def list_datasets(root: Path | None = None) -> list[tuple[str, dict[str, int]]]:
    """Name and rows per split of every complete set below the data root."""
    found = []
    for report in sorted(data_root(root).glob(f"*/{REPORT}")):
        try:
            found.append((report.parent.name, dict(json.loads(report.read_text(encoding="utf-8"))["rows"])))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # open_dataset raises an error with the reason
    return found
