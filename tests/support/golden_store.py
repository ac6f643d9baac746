"""The benchmark whose finished store is kept in store/: its command, and what its tables say."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

STORE = Path(__file__).parents[1] / "golden" / "store"
PARAMS: dict[str, Any] = {
    "epochs": 2,
    "batch_size": 64,
    "embedding_dim": 4,
    "embedding_init": 0.8,
    "attention_hidden_units": [6],
    "dnn_hidden_units": [8],
    "learning_rate": 0.02,
}


DEFAULTS = {"learning_rate": 1e-3, "embedding_regularizer": 1e-4}
"""Of the revision that made the store, as far as PARAMS leave them to the model."""


def arguments(dataset: Path, out: Path) -> list[Any]:
    """``ctr-pe`` with these trains DIN with two encodings and two seeds each."""
    options = [part for key, value in (DEFAULTS | PARAMS).items() for part in ("--set", f"{key}={json.dumps(value)}")]
    asked = ("--model", "DIN", "--pe", "none,naive", "--repeats", 2, "--jobs", 1)
    return ["benchmark", "--dataset", dataset, *asked, "--out", out, *options]


def rows_of_markdown(folder: Path) -> list[str]:
    """The lines of table.md that are rows of the table."""
    return [line for line in (folder / "table.md").read_text().splitlines() if line.startswith("|")]


def rows_of_csv(folder: Path) -> list[dict[str, str]]:
    """The lines of table.csv, by column."""
    with open(folder / "table.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
