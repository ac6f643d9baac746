"""A small random log for tests of the pipeline."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

SMALL: dict[str, Any] = {
    "epochs": 1,
    "batch_size": 256,
    "embedding_dim": 8,
    "learning_rate": 0.01,
    "embedding_regularizer": 0.0,
}
"""Hyper-parameters of a quick training in which something is learned."""


def random_log(users: int = 60, items: int = 40, events: int = 900, span: int = 400) -> pl.DataFrame:
    """Events at few distinct times, so that many are tied; the last items are only seen late."""
    draw = np.random.default_rng(7)
    time = np.sort(draw.integers(0, span, events))
    item = draw.integers(0, items - 8 + 8 * time // span, events)
    frame = pl.DataFrame(
        {
            "user_id": draw.integers(100, 100 + users, events),
            "item_id": [f"item {i}" for i in item],
            "timestamp": 1_000_000 + 3600 * time,
            "label": (draw.random(events) < 0.4).astype(np.int8),
        }
    )
    return frame.unique(["user_id", "item_id", "timestamp"], maintain_order=True)
