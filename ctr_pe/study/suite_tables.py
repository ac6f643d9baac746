"""Tables of a suite: one per data set, a row per cell, ours beside the published figures; and one of what each change
of an encoding brings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ctr_pe.data.published.sets import original
from ctr_pe.evaluation.metrics import METRICS
from ctr_pe.evaluation.paired import Difference
from ctr_pe.study.differences import UNKNOWN, Runs, between
from ctr_pe.study.rendering import GAUC, Table, base_rate_note
from ctr_pe.study.store import RunKey, Store
from ctr_pe.study.suite import Cell, Suite
from ctr_pe.study.tables import (
    difference_cells,
    difference_columns,
    difference_notes,
    failure_notes,
    figures,
    mean_cells,
    mean_columns,
    processor_notes,
    published,
    reading_notes,
    seeds_cell,
    unmeasured_notes,
)
from ctr_pe.study.users import UserStatistics, user_statistics
from ctr_pe.utils.errors import counted


def make(suite: Suite, store: Store, keys: Mapping[Cell, Sequence[RunKey]], more: Sequence[str] = ()) -> list[Table]:
    """One table per data set, with every cell, also those that have not been run; ``keys``: the runs of each, by seed;
    ``more`` notes.

    The difference of a cell is to ``none`` under the same settings. Where a suite has an encoding as it is by default
    and with something varied, a second table has the differences to the former. p is corrected for all of a table.
    """
    runs, failed = (
        {cell: {key.seed: results[key] for key in of_cell if key in results} for cell, of_cell in keys.items()}
        for results in (store.read(), store.failures())
    )
    datasets = dict.fromkeys(cell.dataset for cell in keys)
    groups = [_sorted([cell for cell in keys if cell.dataset == dataset]) for dataset in datasets]
    varied = list(dict.fromkeys(key for cells in groups for cell in cells for key, _ in cell.shown))
    tables = [
        table
        for cells in groups
        for table in _tables(suite, {cell: runs[cell] for cell in cells}, failed, keys, varied, store)
    ]
    return [replace(table, notes=[*table.notes, *more]) for table in tables]


def gains(statistics: UserStatistics, runs: Mapping[Cell, Runs]) -> dict[Cell, Difference]:
    """Each cell against ``none`` under the same settings, where there is one, in gAUC; p corrected for their number."""
    pairs = {cell: (runs[cell], runs[none]) for cell in runs if (none := _baseline(cell, runs)) is not None}
    return {cell: of["gAUC"] for cell, of in between(statistics, pairs).items()}


def changes(statistics: UserStatistics, runs: Mapping[Cell, Runs]) -> dict[Cell, Difference]:
    """Each cell with something varied against the same one with nothing varied, where there is one, in gAUC; p
    corrected for their number."""
    plain = {cell: replace(cell, varied=(), chosen=()) for cell in runs}
    defaults = {plain[cell]: cell for cell in runs if not cell.varied}
    pairs = {
        cell: (runs[cell], runs[defaults[plain[cell]]]) for cell in runs if cell.varied and plain[cell] in defaults
    }
    return {cell: of["gAUC"] for cell, of in between(statistics, pairs).items()}


def _tables(
    suite: Suite,
    runs: Mapping[Cell, Runs],
    failed: Mapping[Cell, Runs],
    keys: Mapping[Cell, Sequence[RunKey]],
    varied: Sequence[str],
    store: Store,
) -> list[Table]:
    """``runs``: of the cells of one data set."""
    dagger = "†" if suite.protocol == "paper" else ""
    seeds = max(len(keys[cell]) for cell in runs)
    unfinished = sum(len(of_cell) < seeds for of_cell in runs.values())
    first = keys[next(iter(runs))][0]
    statistics = user_statistics(store, first.data_hash)
    dataset, base = first.dataset, statistics.base_logloss
    differences = gains(statistics, runs)
    changed = changes(statistics, runs)
    comparable = original(dataset) == dataset  # generated content is not that of the published figures
    columns = [key for key in varied if 2 * sum(key in dict(cell.shown) for cell in runs) >= len(runs)]
    lines: list[dict[str, Any]] = []
    cells: list[dict[str, str | None]] = []
    for cell, of_cell in runs.items():
        values = dict(cell.shown)
        printed = {}
        if suite.published and not cell.varied:
            printed = published(dataset, cell.model, suite.published).get(cell.pe, {})
        line: dict[str, Any] = {"dataset": cell.dataset, "model": cell.model} | {key: values.get(key) for key in varied}
        line |= {"pe": cell.pe + dagger, "seeds": len(of_cell)}
        for metric in METRICS:
            figure = printed.get(metric, math.nan)
            line |= mean_columns(of_cell, metric)
            off = line[f"{metric}_mean"] - figure if comparable else math.nan
            line |= {f"{metric}_published": figure, f"{metric}_off": off}
        difference = differences.get(cell, UNKNOWN)
        line |= difference_columns("gAUC", "none", difference)
        lines.append(line | difference_columns("gAUC", "default", changed.get(cell, UNKNOWN)))
        cells.append(
            {
                "model": cell.model,
                **{key: str(values[key]) if key in values else None for key in columns},
                "encoding": cell.pe + dagger,
                "varied": " ".join(f"{key}={value}" for key, value in values.items() if key not in columns) or None,
                **mean_cells(line, base),
                **difference_cells("none", difference),
                "CAPE paper†": figures(line, "published") if printed else None,
                "ours − paper": figures(line, "off", "+.4f") if printed and comparable else None,
                "seeds": seeds_cell(of_cell, failed[cell], seeds),
            }
        )
    notes = [f"{GAUC} Mean ± standard deviation over the seeds.", *base_rate_note(cells, base)]
    notes += unmeasured_notes({str(cell): of_cell for cell, of_cell in runs.items()})
    notes += difference_notes("none", differences.values())
    if unfinished:
        notes.append(f"{counted(unfinished, 'cell')} of {len(runs)} lack runs: the same command makes them.")
    notes += failure_notes({str(cell): failed[cell] for cell in runs if failed[cell]})
    beside = any(row["CAPE paper†"] is not None for row in cells)
    notes += reading_notes(dataset, suite.protocol, beside)
    notes += ["ours − paper: gAUC / AUC / logloss."] * (beside and comparable)
    notes += processor_notes([result for of_cell in runs.values() for result in of_cell.values()])
    title = f"{suite.title}: {dataset}, protocol {suite.protocol}{dagger}, {counted(seeds, 'seed')}"
    names = ["model", *columns, "encoding", "varied", "seeds"]
    named = {cell: {name: row[name] for name in names} for cell, row in zip(runs, cells, strict=True)}
    return [Table(title, lines, cells, notes), *_of_changes(title, named, changed)]


def _of_changes(
    title: str, named: Mapping[Cell, Mapping[str, str | None]], changed: Mapping[Cell, Difference]
) -> list[Table]:
    """``named``: how the first table names a cell; none if nothing has been compared yet."""
    if all(math.isnan(change.value) for change in changed.values()):
        return []
    cells = [{**named[cell], **difference_cells("default", change)} for cell, change in changed.items()]
    notes = ["default: the same encoding with nothing varied.", *difference_notes("default", changed.values())]
    return [Table(f"{title}: differences to the default", [], cells, notes)]


def _sorted(cells: Sequence[Cell]) -> list[Cell]:
    """By model, then by what varies in all cells, then in the order of the suite."""
    common = [key for key, _ in cells[0].varied if all(key in dict(cell.varied) for cell in cells)]
    seen: dict[Any, int] = {}
    for cell in cells:
        for part in (cell.model, *cell.varied):
            seen.setdefault(part, len(seen))
    return sorted(cells, key=lambda cell: [seen[cell.model], *[seen[key, dict(cell.varied)[key]] for key in common]])


def _baseline(cell: Cell, runs: Mapping[Cell, Runs]) -> Cell | None:
    """``none`` under the settings of the cell that ``none`` knows."""
    for other in runs:
        if other.pe == "none" != cell.pe and other.model == cell.model and set(other.varied) <= set(cell.varied):
            return other
    return None
