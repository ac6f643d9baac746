"""Tables of a suite: one per data set, a row per cell, ours beside the published figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ctr_pe.errors import counted
from ctr_pe.evaluation.metrics import METRICS
from ctr_pe.evaluation.paired import mean_sd
from ctr_pe.study.rendering import GAUC, Table, base_rate_note, mean_text, number
from ctr_pe.study.store import Key, Store
from ctr_pe.study.suite import Cell, Suite
from ctr_pe.study.tables import BASELINE, Runs, figures, gain, measured, published, reading_notes


def make(suite: Suite, store: Store, keys: Mapping[Cell, Sequence[Key]]) -> list[Table]:
    """One table per data set, with every cell, also those that have not been run; ``keys``: the runs of each, by seed.

    The difference of a cell is to ``none`` under the same settings and at the same seeds.
    """
    results = store.read()
    runs = {cell: {key.seed: results[key] for key in of_cell if key in results} for cell, of_cell in keys.items()}
    datasets = dict.fromkeys(cell.dataset for cell in keys)
    groups = [_sorted([cell for cell in keys if cell.dataset == dataset]) for dataset in datasets]
    varied = list(dict.fromkeys(key for cells in groups for cell in cells for key, _ in cell.varied))
    return [_table(suite, {cell: runs[cell] for cell in cells}, keys, varied, store) for cells in groups]


def _table(
    suite: Suite, runs: Mapping[Cell, Runs], keys: Mapping[Cell, Sequence[Key]], varied: Sequence[str], store: Store
) -> Table:
    """``runs``: of the cells of one data set."""
    dagger = "†" if suite.protocol == "paper" else ""
    seeds = max(len(keys[cell]) for cell in runs)
    unfinished = sum(len(of_cell) < seeds for of_cell in runs.values())
    first = keys[next(iter(runs))][0]
    dataset, base = first.dataset, {"logloss": store.base_logloss(first.data_hash)}
    lines: list[dict[str, Any]] = []
    cells: list[dict[str, str | None]] = []
    for cell, of_cell in runs.items():
        values = dict(cell.varied)
        printed = {}
        if suite.published and not cell.varied:
            printed = published(dataset, cell.model, suite.published).get(cell.pe, {})
        line: dict[str, Any] = {"dataset": cell.dataset, "model": cell.model} | {key: values.get(key) for key in varied}
        line |= {"pe": cell.pe + dagger, "seeds": len(of_cell)}
        for metric in METRICS:
            mean, sd = mean_sd(measured(of_cell, metric).values())
            figure = printed.get(metric, math.nan)
            line |= {f"{metric}_mean": mean, f"{metric}_sd": sd}
            line |= {f"{metric}_published": figure, f"{metric}_off": mean - figure}
        lines.append(line | {"gAUC_minus_none": _gain(cell, runs)})
        cells.append(
            {
                "model": cell.model,
                **{key: str(values[key]) if key in values else None for key in varied},
                "encoding": cell.pe + dagger,
                **{
                    metric: mean_text(line[f"{metric}_mean"], line[f"{metric}_sd"], base.get(metric, math.inf))
                    for metric in METRICS
                },
                "gAUC − none": number(lines[-1]["gAUC_minus_none"], "+.4f"),
                "CAPE paper†": figures(line, "published") if printed else None,
                "ours − paper": figures(line, "off", "+.4f") if printed else None,
                "seeds": f"{len(of_cell)}/{seeds}" if unfinished else None,
            }
        )
    notes = [
        f"{GAUC} Mean ± standard deviation over the seeds; gAUC − none: at the same seeds. Intervals and p values are "
        "in table.md, one table per setting.",
        *base_rate_note(cells, base["logloss"]),
    ]
    if unfinished:
        notes.append(f"{unfinished} cells lack runs: the same command makes them.")
    compared = any(row["CAPE paper†"] is not None for row in cells)
    notes += reading_notes(dataset, suite.protocol, compared)
    notes += ["ours − paper: gAUC / AUC / logloss."] * compared
    title = f"{suite.title}: {dataset}, protocol {suite.protocol}{dagger}, {counted(seeds, 'seed')}"
    return Table(title, lines, cells, notes)


def _sorted(cells: Sequence[Cell]) -> list[Cell]:
    """By model, then by what varies in all cells, then in the order of the suite."""
    common = [key for key, _ in cells[0].varied if all(key in dict(cell.varied) for cell in cells)]
    seen: dict[Any, int] = {}
    for cell in cells:
        for part in (cell.model, *cell.varied):
            seen.setdefault(part, len(seen))
    return sorted(cells, key=lambda cell: [seen[cell.model], *[seen[key, dict(cell.varied)[key]] for key in common]])


def _gain(cell: Cell, runs: Mapping[Cell, Runs]) -> float:
    """gAUC minus that of ``none`` at the same seeds, under the settings of the cell that ``none`` knows."""
    for other, theirs in runs.items():
        same = other.model == cell.model and set(other.varied) <= set(cell.varied)
        if same and other.pe == BASELINE != cell.pe:
            return gain(measured(runs[cell], "gAUC"), measured(theirs, "gAUC"))
    return math.nan
