"""What papers print in tables: the best figures in bold, stars for p, published figures in columns of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ctr_pe.data.published.sets import original
from ctr_pe.study.rendering import Mark, Table, number

STARS = {0.01: "**", 0.05: "*"}
"""Below which p, as it is printed."""
IN_ONE = ("CAPE paper†", "ours − paper", "published", "ours − published")
"""Columns that have the published figures of all metrics."""
LOWER_IS_BETTER = ("logloss", "binary_crossentropy")


def marks(
    lines: Sequence[Mapping[str, Any]], metrics: Sequence[str], baseline: str, by: Sequence[str] = ()
) -> dict[str, Any]:
    """``marks`` and ``legend`` of a table.

    The best mean of each metric, and those that are printed like it, unless all are; and stars where the corrected p of
    the difference to the baseline is small, of the metrics that have one.

    Args:
        lines: of the table, with ``<metric>_mean`` and ``<metric>_minus_<baseline>_p_holm``.
        by: columns; the best is looked for among the rows that have the same values in them.
    """
    groups = [tuple(line.get(name) for name in by) for line in lines]
    found: dict[tuple[int, str], Mark] = {}
    for metric in metrics:
        means = [line[f"{metric}_mean"] for line in lines]
        pick = min if metric.startswith(LOWER_IS_BETTER) else max
        for row, (mean, group, line) in enumerate(zip(means, groups, lines, strict=True)):
            alike = [one for one, of in zip(means, groups, strict=True) if of == group and not math.isnan(one)]
            best = len({*map(number, alike)}) > 1 and number(mean) == number(pick(alike))
            p = line.get(f"{metric}_minus_{baseline}_p_holm", math.nan)
            stars = next((sign for level, sign in STARS.items() if p < level), "")
            if best or stars:
                found[row, metric] = Mark(best, stars)
    legend = []
    if any(one.best for one in found.values()):
        among = f", among rows of the same {' and '.join(by)}" * (len(set(groups)) > 1)
        legend.append(f"Bold: the best mean of its column{among}.")
    if any(one.stars for one in found.values()):
        levels = ", ".join(f"{sign} p < {level}" for level, sign in reversed(STARS.items()))
        legend.append(f"{levels}: of the difference to {baseline}, two-sided, corrected (Holm) within a metric.")
    return {"marks": found, "legend": tuple(legend)}


def beside_published(table: Table) -> Table:
    """The table with a column of published figures after each metric that has any, and one of ours minus them, in
    place of the column that has the published figures of all metrics. Generated data are not compared."""
    cells = []
    for line, row in zip(table.lines, table.cells, strict=False):
        cell: dict[str, str | None] = {}
        for name, text in row.items():
            if name not in IN_ONE:
                cell[name] = text
            if f"{name}_published" in line:
                figure = line[f"{name}_published"]
                cell[f"{name} published"] = None if math.isnan(figure) else number(figure)
                comparable = original(line["dataset"]) == line["dataset"]
                off = line[f"{name}_mean"] - figure if comparable else math.nan
                cell[f"{name} ours − published"] = None if math.isnan(off) else number(off, "+.4f")
        cells.append(cell)
    return replace(table, cells=cells or table.cells)
