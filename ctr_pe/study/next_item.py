"""Tables of next-item runs: metrics of full ranking, differences with intervals for users and seeds, published figures.

What a store keeps as a run's scores is here the rank of each test row's item, from which every metric but COV follows.

R runs, n test rows, U users.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ctr_pe.config.yaml import packaged_yaml, parse_yaml
from ctr_pe.evaluation.metrics import METRICS, Floats
from ctr_pe.evaluation.paired import Difference, UserSpread, corrected, difference, influences, squared_distances
from ctr_pe.evaluation.ranking import parts_of, row_values
from ctr_pe.study.differences import BASELINES, UNKNOWN, Runs, by_setting, having
from ctr_pe.study.marks import marks
from ctr_pe.study.rendering import Table, as_latex, number, p_text, texts, write_texts
from ctr_pe.study.store import Result, RunKey, Store
from ctr_pe.study.suite import Cell, Suite
from ctr_pe.study.tables import failure_notes, mean_columns, processor_notes, seeds_cell
from ctr_pe.study.users import UserStatistics, user_statistics
from ctr_pe.utils.errors import counted

LEAD = "NDCG@10"
"""The metric of differences, where it was measured."""
SUFFIXES = ("_next", "_temporal")
"""Of data sets that recipes make of one log."""
PUBLISHED = "next_item"


def of_next_items(results: Iterable[Result]) -> bool:
    """Whether the runs of a setting are of next-item models: no metric of clicks was measured."""
    return not any(metric in result.metrics for result in results for metric in METRICS)


def metrics_of(results: Iterable[Result]) -> list[str]:
    """Those that were measured, the one of differences first."""
    names = list(dict.fromkeys(name for result in results for name in result.metrics))
    return sorted(names, key=lambda name: name != LEAD)


@dataclass(frozen=True)
class RankStatistics:
    """Users of the test rows of one data set, and the ranks of each run, read once."""

    store: Store
    data_hash: str
    _ranks: dict[RunKey, npt.NDArray[np.float32] | None] = field(default_factory=dict)

    def ranks(self, key: RunKey) -> npt.NDArray[np.float32] | None:
        """(n,) of a run, or None if they are gone."""
        if key not in self._ranks:
            self._ranks[key] = self.store.scores(key)
        return self._ranks[key]

    def difference(self, ours: Runs, theirs: Runs, metric: str) -> Difference:
        """The runs of one encoding minus those of another, for other users and newly trained runs; of COV, which no
        user has a value of, for newly trained runs alone."""
        runs = [*ours.values(), *theirs.values()]
        spread = UserSpread(0.0, 0.0, 2) if parts_of(metric)[0] == "COV" else self._spread(runs, len(ours), metric)
        values, others = ([run.metrics[metric] for run in of.values()] for of in (ours, theirs))
        return difference(values, others, spread)

    @cached_property
    def users(self) -> npt.NDArray[np.int64]:
        """(U,) test rows of each; empty if they are not known."""
        about = self.store.rows(self.data_hash)
        return self._kept.users.rows if about is None else np.bincount(about[1])

    def distances(self, keys: Sequence[RunKey], metric: str) -> Floats:
        """Squared distances between what users add to these runs (R, R); NaN where that is not known."""
        about, ranks = self.store.rows(self.data_hash), [self.ranks(key) for key in keys]
        if about is None or any(one is None or len(one) != len(about[1]) for one in ranks):
            return self._kept.published.among([key.name for key in keys], metric)
        of_users = [np.bincount(about[1], row_values(one, metric)) for one in ranks if one is not None]
        values = np.stack(of_users) / np.maximum(self.users, 1)
        return squared_distances(influences(values, self.users / self.users.sum()))

    def _spread(self, runs: Sequence[Result], first: int, metric: str) -> UserSpread:
        distances = self.distances([run.key for run in runs], metric)
        return UserSpread.of(distances, first, int(np.count_nonzero(self.users)))

    @cached_property
    def _kept(self) -> UserStatistics:
        """What is left where a store was published without ranks."""
        return user_statistics(self.store, self.data_hash)


@dataclass(frozen=True)
class TableRow:
    """A row of a table: its ``labels`` by column, the runs that it is the mean of, and those of its baseline."""

    labels: Mapping[str, str | None]
    dataset: str
    model: str
    pe: str
    runs: Runs
    failed: Runs
    baseline: Runs | None
    published: bool = True


def write_tables(
    store: Store, suite: Suite | None, keys: Mapping[Cell, Sequence[RunKey]], protocols: Mapping[str, str]
) -> list[Table]:
    """Write the tables of everything in the store, and of a suite; those of the cells in ``keys``.

    ``protocols``: of the data sets, by their names. Raises UserError if a file cannot be written.
    """
    results, failures = store.read(), store.failures()
    runs, failed = by_setting(results), by_setting(failures)
    requested = {key.setting for of_cell in keys.values() for key in of_cell}
    every, shown = list[Table](), list[Table]()
    for setting in sorted({**runs, **failed}):
        of_pe, lost = runs.get(setting, {}), failed.get(setting, {})
        every.append(setting_table(store, setting, of_pe, lost, protocols.get(setting[1], "")))
        shown += every[-1:] * (setting in requested)
    of_suite = _suite_tables(store, suite, keys, results, failures, protocols) if suite is not None else []
    files = {
        **texts(every),
        "table.tex": as_latex(every, marked=True),
        **(texts(of_suite, "suite") if of_suite else {}),
    }
    write_texts(store.path, files)
    return of_suite or shown


def setting_table(
    store: Store, setting: tuple[str, ...], runs: Mapping[str, Runs], failed: Mapping[str, Runs], protocol: str
) -> Table:
    """A row per encoding; ``protocol``: of the data set."""
    base = next((name for name in BASELINES if name in runs), None)
    model, dataset, _, config, data, _ = setting
    rows = []
    for pe in {**runs, **failed}:
        against = runs[base] if base not in (pe, None) else None
        rows.append(TableRow({"encoding": pe}, dataset, model, pe, runs.get(pe, {}), failed.get(pe, {}), against))
    title = f"{model} on {dataset}, hyper-parameters {config}"
    return make_table(title, rows, RankStatistics(store, data), protocol, base)


def _suite_tables(
    store: Store,
    suite: Suite,
    keys: Mapping[Cell, Sequence[RunKey]],
    results: Mapping[RunKey, Result],
    failures: Mapping[RunKey, Result],
    protocols: Mapping[str, str],
) -> list[Table]:
    """One per data set, with every cell; differences are to the baseline with the same values of what varies."""
    tables = []
    for dataset in dict.fromkeys(cell.dataset for cell in keys):
        cells = [cell for cell in keys if cell.dataset == dataset]
        runs, lost = (
            {cell: {key.seed: found[key] for key in keys[cell] if key in found} for cell in cells}
            for found in (results, failures)
        )
        base = next((name for name in BASELINES if any(cell.pe == name for cell in cells)), None)
        rows = []
        for cell in cells:
            alike = [one for one in cells if one.pe == base and (one.model, one.varied) == (cell.model, cell.varied)]
            labels = {
                "model": cell.model,
                **{name: str(value) for name, value in cell.shown.items()},
                "encoding": cell.pe,
            }
            against = runs[alike[0]] if alike and cell.pe != base and runs[alike[0]] else None
            name = keys[cell][0].dataset
            rows.append(TableRow(labels, name, cell.model, cell.pe, runs[cell], lost[cell], against, not cell.varied))
        columns = dict.fromkeys(name for row in rows for name in row.labels)
        rows = [replace(row, labels={name: row.labels.get(name) for name in columns}) for row in rows]
        first = keys[cells[0]][0]
        statistics = RankStatistics(store, first.data_hash)
        tables.append(make_table(f"{suite.title}: {dataset}", rows, statistics, protocols[first.dataset], base))
    return tables


def make_table(
    title: str, rows: Sequence[TableRow], statistics: RankStatistics, protocol: str, base: str | None
) -> Table:
    """Mean and standard deviation of every metric, the difference to the baseline, and the published figures."""
    every = [run for row in rows for run in [*row.runs.values()]]
    seeds = {seed for row in rows for seed in [*row.runs, *row.failed]}
    metrics = list(dict.fromkeys(name for run in every for name in run.metrics))
    lead = LEAD if LEAD in metrics or not metrics else metrics[0]
    differences = {
        number_: statistics.difference(having(row.runs, lead), having(row.baseline, lead), lead)
        for number_, row in enumerate(rows)
        if row.baseline and having(row.runs, lead) and having(row.baseline, lead)
    }
    differences = corrected(differences)
    figures = [published(row.dataset, protocol, row.model) if row.published else {} for row in rows]
    lines: list[dict[str, Any]] = []
    cells: list[dict[str, str | None]] = []
    for place, row in enumerate(rows):
        line: dict[str, Any] = {
            "dataset": row.dataset,
            "model": row.model,
            **row.labels,
            "pe": row.pe,
            "seeds": len(row.runs),
        }
        cell: dict[str, str | None] = dict(row.labels)
        printed = figures[place].get("figures", {}).get(row.pe, {})
        for metric in metrics:
            line |= mean_columns(row.runs, metric) | {f"{metric}_published": printed.get(metric, math.nan)}
            mean, sd = line[f"{metric}_mean"], line[f"{metric}_sd"]
            cell[metric] = number(mean) if math.isnan(sd) else f"{mean:.4f} ± {sd:.4f}"
        found = differences.get(place, UNKNOWN)
        against = base or "none"
        line |= {
            f"{lead}_minus_{against}" + ("" if name == "value" else f"_{name}"): value
            for name, value in found._asdict().items()
        }
        if not math.isnan(found.value):
            interval = "" if math.isnan(found.low) else f" [{found.low:+.4f}, {found.high:+.4f}]"
            cell[f"{lead} − {against} [95 % interval]"] = f"{found.value:+.4f}{interval}"
            cell["p"] = p_text(found.p_holm)
        if printed:
            cell["published"] = " / ".join(f"{name} {value:.4f}" for name, value in printed.items())
            off = [(name, line[f"{name}_mean"] - value) for name, value in printed.items() if f"{name}_mean" in line]
            cell["ours − published"] = " / ".join(f"{value:+.4f}" for _, value in off)
        cell["seeds"] = seeds_cell(row.runs, row.failed, len(seeds))
        lines.append(line)
        cells.append(cell)
    names = dict.fromkeys(name for cell in cells for name in cell)
    order = [name for name in names if name != "seeds"] + ["seeds"]
    cells = [{name: cell.get(name) for name in order} for cell in cells]
    notes = [
        "Full ranking over all items of the training rows; of equal scores the more frequent item is first. Mean ± "
        "standard deviation over the seeds. COV@k: share of all items in some list of k.",
        *_missing_note(statistics, every),
    ]
    if differences:
        notes.append(
            f"{lead} − {base}: difference of the means, with a 95 % interval for other users and newly trained runs; p "
            f"two-sided, corrected (Holm) for {counted(len(differences), 'comparison')}."
        )
    sources = {(row.dataset, row.model): one for row, one in zip(rows, figures, strict=True) if one.get("figures")}
    notes += [f"published: {one['source']}. Their set-up: {one['setup']}." for one in sources.values()]
    notes += failure_notes({row.pe: row.failed for row in rows})
    users = statistics.users
    about = f"{users.sum():,} test rows of {np.count_nonzero(users):,} users" if len(users) else ""
    return Table(
        ", ".join(part for part in (title, protocol, counted(len(seeds), "seed"), about) if part),
        lines,
        cells,
        notes + processor_notes(every),
        **marks(lines, metrics, base or "none", ["model"]),
    )


def _missing_note(statistics: RankStatistics, runs: Sequence[Result]) -> list[str]:
    ranks = statistics.ranks(runs[0].key) if runs else None
    missing = 0 if ranks is None else int(np.isinf(ranks).sum())
    return [f"{counted(missing, 'test answer')} no training row has: misses."] if missing else []


def published(dataset: str, protocol: str, model: str) -> dict[str, Any]:
    """``source``, ``setup`` and ``figures`` by encoding and metric, of a data set of this name or of a recipe for it;
    nothing where none are known."""
    figures: Mapping[str, Any] = parse_yaml(packaged_yaml("published")[PUBLISHED], f"config/published/{PUBLISHED}.yaml")
    name = next((dataset.removesuffix(suffix) for suffix in SUFFIXES if dataset.endswith(suffix)), dataset)
    found = figures.get(name, {}).get(protocol, {})
    return {**found, "figures": found.get("figures", {}).get(model, {})}
