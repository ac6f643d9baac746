"""Tables of a suite: one per data set, a row per cell, ours beside the published figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ctr_pe.errors import counted
from ctr_pe.evaluation.metrics import METRICS
from ctr_pe.evaluation.paired import mean_sd
from ctr_pe.study.rendering import DASH, Cells, csv_text, mean_text
from ctr_pe.study.store import Key, Result, Store
from ctr_pe.study.suite import Cell, Suite
from ctr_pe.study.tables import BASELINE, published, reading_notes


@dataclass(frozen=True)
class Line:
    """One cell: means and standard deviations over ``seeds``, the difference to ``none`` under the same settings and
    seeds, and the published figures. What has not been run is absent."""

    cell: Cell
    seeds: int
    means: dict[str, tuple[float, float]]
    gain: float | None
    published: dict[str, float]

    def off(self, metric: str) -> float | None:
        """Ours minus the published figure."""
        if metric not in self.means or metric not in self.published:
            return None
        return self.means[metric][0] - self.published[metric]


@dataclass(frozen=True)
class SuiteTable:
    title: str
    seeds: int
    varied: tuple[str, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...]
    dagger: str = ""

    def cells(self) -> Cells:
        """Header and rows, as printed."""
        published = any(line.published for line in self.lines)
        unfinished = any(line.seeds < self.seeds for line in self.lines)
        header = ["model", *self.varied, "encoding", *METRICS, "gAUC − none"]
        header += ["CAPE paper†", "ours − paper"] * published
        header += ["seeds"] * unfinished
        rows = []
        for line in self.lines:
            values = dict(line.cell.varied)
            cells = [line.cell.model, *[str(values.get(key, DASH)) for key in self.varied], line.cell.pe + self.dagger]
            cells += [mean_text(*line.means[metric]) if metric in line.means else DASH for metric in METRICS]
            cells.append(DASH if line.gain is None else f"{line.gain:+.4f}")
            if published:
                printed = [f"{line.published[metric]:.4f}" for metric in METRICS if metric in line.published]
                off = [f"{difference:+.4f}" for metric in METRICS if (difference := line.off(metric)) is not None]
                cells += [" / ".join(printed) or DASH, " / ".join(off) or DASH]
            if unfinished:
                cells.append(f"{line.seeds}/{self.seeds}")
            rows.append(cells)
        return header, rows


def make(suite: Suite, protocol: str, store: Store, keys: Mapping[Cell, Sequence[Key]]) -> list[SuiteTable]:
    """One table per data set, with every cell; ``keys``: the runs of each, by seed."""
    results = store.read()
    found = {cell: {key.seed: results[key] for key in of_cell if key in results} for cell, of_cell in keys.items()}
    dagger = "†" if protocol == "paper" else ""
    tables = []
    for dataset in dict.fromkeys(cell.dataset for cell in keys):
        rows = {cell: found[cell] for cell in _sorted([cell for cell in keys if cell.dataset == dataset])}
        seeds = max(len(keys[cell]) for cell in rows)
        name = keys[next(iter(rows))][0].dataset
        source = suite.published
        printed = {cell.model: published(name, cell.model, source) for cell in rows} if source else {}
        lines = [
            Line(
                cell,
                len(runs),
                {metric: mean_sd(values) for metric in METRICS if (values := _values(runs, metric))},
                _gain(cell, rows),
                {} if cell.varied else printed.get(cell.model, {}).get(cell.pe, {}),
            )
            for cell, runs in rows.items()
        ]
        title = f"{suite.title}: {name}, protocol {protocol}{dagger}, {counted(seeds, 'seed')}"
        varied = tuple(dict.fromkeys(key for cell in rows for key, _ in cell.varied))
        notes = _notes(protocol, name, any(line.published for line in lines), sum(line.seeds < seeds for line in lines))
        tables.append(SuiteTable(title, seeds, varied, tuple(lines), tuple(notes), dagger))
    return tables


def as_csv(tables: Sequence[SuiteTable]) -> str:
    """For suite.csv: one line per cell."""
    varied = list(dict.fromkeys(key for table in tables for key in table.varied))
    fields = [f"{metric}_{what}" for metric in METRICS for what in ("mean", "sd", "published", "off")]
    header = ["dataset", "model", *varied, "pe", "seeds", *fields, "gAUC_minus_none"]
    rows = []
    for table in tables:
        for line in table.lines:
            values = dict(line.cell.varied)
            numbers: list[float | None] = []
            for metric in METRICS:
                numbers += line.means.get(metric, (None, None))
                numbers += [line.published.get(metric), line.off(metric)]
            given = [values.get(key) for key in varied]
            pe = line.cell.pe + table.dagger
            rows.append([line.cell.dataset, line.cell.model, *given, pe, line.seeds, *numbers, line.gain])
    return csv_text(header, rows)


def _sorted(cells: Sequence[Cell]) -> list[Cell]:
    """By model, then by what varies in all cells, then in the order of the suite."""
    common = [key for key, _ in cells[0].varied if all(key in dict(cell.varied) for cell in cells)]
    seen: dict[Any, int] = {}
    for cell in cells:
        for part in (cell.model, *cell.varied):
            seen.setdefault(part, len(seen))
    return sorted(cells, key=lambda cell: [seen[cell.model], *[seen[key, dict(cell.varied)[key]] for key in common]])


def _values(runs: Mapping[int, Result], metric: str) -> list[float]:
    return [result.metrics[metric] for result in runs.values() if metric in result.metrics]


def _gain(cell: Cell, rows: Mapping[Cell, Mapping[int, Result]]) -> float | None:
    """gAUC minus that of ``none`` at the same seeds, under the settings of the cell that ``none`` knows."""
    if cell.pe == BASELINE:
        return None
    for other, theirs in rows.items():
        if (other.model, other.pe) == (cell.model, BASELINE) and set(other.varied) <= set(cell.varied):
            ours = rows[cell]
            pairs = [
                (ours[seed].metrics.get("gAUC"), theirs[seed].metrics.get("gAUC"))
                for seed in ours.keys() & theirs.keys()
            ]
            differences = [a - b for a, b in pairs if a is not None and b is not None]
            return float(np.mean(differences)) if differences else None
    return None


def _notes(protocol: str, dataset: str, published: bool, unfinished: int) -> list[str]:
    notes = [
        "Mean ± standard deviation over the seeds; gAUC − none: at the same seeds. Intervals and p values are in "
        "table.md, one table per setting."
    ]
    if unfinished:
        notes.append(f"{unfinished} cells lack runs: the same command makes them.")
    notes += reading_notes(dataset, protocol, published)
    return notes + ["ours − paper: gAUC / AUC / logloss."] * published
