"""A small log, and a ranker that was fitted on it."""

from __future__ import annotations

import polars as pl
import pytest

from ctr_pe import CTRRanker
from tests.support.fuzz.small_log import SMALL, random_log


@pytest.fixture(scope="session")
def impressions() -> pl.DataFrame:
    """Shown items with labels."""
    return random_log()


@pytest.fixture(scope="session")
def clicks(impressions: pl.DataFrame) -> pl.DataFrame:
    """A log of clicks only."""
    return impressions.drop("label")


@pytest.fixture(scope="session")
def items() -> pl.DataFrame:
    """The items of the log and five that it lacks."""
    return pl.DataFrame({"item_id": [f"item {i}" for i in range(45)], "cate_id": [f"c{i % 6}" for i in range(45)]})


@pytest.fixture(scope="session")
def ranker(clicks: pl.DataFrame, items: pl.DataFrame) -> CTRRanker:
    """Fitted on the clicks; tests do not change it."""
    return CTRRanker("DIN", "cape", **SMALL).fit(clicks, items=items)
