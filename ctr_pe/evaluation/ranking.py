"""Metrics of next-item ranking: of the rank, from 1, that the one right item has among all items.

Recall@k  1 if the rank is k or better; HR@k is another name of it
NDCG@k    1 / log2(1 + rank) within k, else 0
MRR@k     1 / rank within k, else 0; MRR: at any rank
COV@k     share of all items that are among the first k of some row

The first three are means over rows. A right item that no training row has is in no ranking: its rank is infinite and
the row counts 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from ctr_pe.utils.errors import UserError, nearest

NEXT_ITEM_METRICS = ("Recall@10", "NDCG@10", "MRR@10", "COV@10")
"""The default."""
NAME = re.compile(r"(Recall|HR|NDCG|MRR|COV)@([1-9]\d{0,8})|MRR")

Floats = npt.NDArray[np.float64]


def is_ranking_metric(name: object) -> bool:
    return NAME.fullmatch(str(name)) is not None


def parts_of(name: str) -> tuple[str, float]:
    """``("Recall", 10)`` of ``Recall@10``; k is infinite without one.

    Raises:
        UserError: no metric of next-item ranking.
    """
    found = NAME.fullmatch(str(name))
    if found is None:
        k = re.sub(r"\D", "", str(name))[:9].lstrip("0") or "10"
        near = nearest(name, [*(f"{kind}@{k}" for kind in ("Recall", "HR", "NDCG", "MRR", "COV")), "MRR"])
        raise UserError(f"'{name}' is no metric of next-item ranking: {near}")
    kind, k = found.groups()
    return kind or "MRR", int(k) if k else math.inf


def list_lengths(names: Iterable[str]) -> list[int]:
    """The k of each COV@k among the metrics: whose lists of items have to be made."""
    return sorted({int(k) for kind, k in map(parts_of, names) if kind == "COV"})


def row_values(ranks: npt.ArrayLike, name: str) -> Floats:
    """What each row counts in a metric that is a mean over rows: ranks (n,) -> (n,)."""
    rank = np.asarray(ranks, np.float64)
    kind, k = parts_of(name)
    if kind == "COV":
        raise UserError(f"{name} is no mean over rows")
    within = (rank <= k) & np.isfinite(rank)
    safe = np.where(within, rank, 1.0)
    gain = {"NDCG": 1 / np.log2(1 + safe), "MRR": 1 / safe}.get(kind, np.ones_like(safe))
    return np.where(np.isnan(rank), np.nan, np.where(within, gain, 0.0))


def ranking_metrics(ranks: npt.ArrayLike, names: Iterable[str], coverage: Mapping[int, float]) -> dict[str, float]:
    """The metrics of these names, from the ranks (n,) and the ``coverage`` at each k of :func:`list_lengths`.

    Raises:
        UserError: an unknown metric, or no rows.
    """
    rank = np.asarray(ranks, np.float64)
    if not len(rank):
        raise UserError("no rows to evaluate")
    found = {}
    for name in names:
        kind, k = parts_of(name)
        found[name] = coverage[int(k)] if kind == "COV" else float(row_values(rank, name).mean())
    return found
