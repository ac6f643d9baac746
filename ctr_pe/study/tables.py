"""Tables of a store and their files. Of a setting: a row per encoding with its means and its difference to ``none``,
and one to ``naive``. Of a suite: one per data set, a row per cell, ours beside the published figures; and one of what
each change of an encoding brings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ctr_pe.config.yaml import packaged_yaml, parse_yaml
from ctr_pe.data.published.sets import original
from ctr_pe.evaluation.metrics import METRICS
from ctr_pe.evaluation.paired import Difference, mean_sd
from ctr_pe.study.differences import BASELINES, UNKNOWN, Runs, Setting, between, having
from ctr_pe.study.forest import write_forest
from ctr_pe.study.marks import marks
from ctr_pe.study.rendering import (
    DASH,
    FAILED,
    GAUC,
    WORSE,
    Table,
    as_latex,
    base_rate_note,
    number,
    p_text,
    texts,
    write_texts,
)
from ctr_pe.study.store import Result, RunKey, Store
from ctr_pe.study.suite import Cell, Suite
from ctr_pe.study.users import UserStatistics, user_statistics
from ctr_pe.utils.errors import counted

PAPER = (
    "† trained on train + validation rows, and the epoch selected on the test rows: optimistic, and comparable only "
    "with results made the same way, such as the published ones."
)
PUBLISHED = (
    "CAPE paper: the figures printed in its Table 2 (gAUC / AUC / logloss), made by its authors' code, trained on all "
    "other rows and the epoch selected on the test rows (†)."
)
GENERATED = (
    "generated data: drawn from a seed in the form and size of {like}, to run the whole path. Only times mean "
    "anything: no figure here is a result on {like}, and none is to be compared with the published ones."
)
DATASET_NOTES = {
    "kuaivideo_x1": "kuaivideo_x1 keeps the first 100 of the items that precede a row. For active users the lists end "
    "long before the request, so their last item is not the most recent one: read differences between position "
    "encodings on this set with care.",
}


def make_tables(setting: Setting) -> list[Table]:
    """The table of a setting, and if ``naive`` was run, one with the differences to it."""
    key, base = setting.key, setting.statistics.base_logloss
    dagger = "†" * (key.protocol == "paper")
    printed = published(key.dataset, key.model)
    reading = reading_notes(key.dataset, key.protocol, not printed.keys().isdisjoint(setting.runs))
    identity = {name: value for name, value in key._asdict().items() if name not in ("pe", "seed")}
    to_none, to_naive = (setting.differences(baseline) for baseline in BASELINES)
    incomplete = incomplete_notes(setting.runs, setting.failed, setting.seeds)
    others = other_metrics(setting.results)
    lines: list[dict[str, Any]] = []
    cells: list[dict[str, str | None]] = []
    for pe in {**setting.runs, **setting.failed}:
        runs: Runs = setting.runs.get(pe, {})
        line: dict[str, Any] = {**identity, "pe": pe + dagger, "seeds": len(runs)}
        for metric in METRICS:
            line |= mean_columns(runs, metric)
            for baseline, found in zip(BASELINES, (to_none, to_naive), strict=True):
                line |= difference_columns(metric, baseline, found[pe][metric] if pe in found else UNKNOWN)
            line[f"{metric}_published"] = printed.get(pe, {}).get(metric, math.nan)
        line |= {key: value for name in others for key, value in mean_columns(runs, name).items()}
        lines.append({**line, "logloss_base_rate": base, "notes": " ".join([*reading, *incomplete])})
        difference = to_none[pe]["gAUC"] if pe in to_none else UNKNOWN
        seeds = seeds_cell(runs, setting.failed.get(pe, {}), len(setting.seeds))
        cells.append(
            {"encoding": pe + dagger, **row_cells(line, others, base, difference, pe in printed), "seeds": seeds}
        )
    notes = [
        f"{GAUC} gAUC, AUC: higher is better; logloss: lower is better. Mean ± standard deviation over the seeds.",
        *unmeasured_notes(setting.runs),
        *base_rate_note(cells, base),
        *difference_notes("none", [of["gAUC"] for of in to_none.values()]),
    ]
    notes += ["No differences: they are taken to 'none', which has not been run."] * ("none" not in setting.runs)
    notes += incomplete + reading
    makers = sorted({str(result.revision)[:12] for result in setting.results})
    if len(makers) > 1:
        notes.append(f"The runs were made by different revisions: {', '.join(makers)}.")
    notes += processor_notes(setting.results)
    tables = [Table(setting.title, lines, cells, notes, **marks(lines, [*METRICS, *others], "none"))]
    if to_naive:
        cells = [{"encoding": pe, **difference_cells("naive", of["gAUC"])} for pe, of in to_naive.items()]
        notes = difference_notes("naive", [of["gAUC"] for of in to_naive.values()]) + incomplete
        tables.append(Table(f"{setting.title}: differences to naive", [], cells, notes))
    return tables


def write_files(store: Store, settings: Sequence[Setting], suite: Sequence[Table] = ()) -> list[str]:
    """Write them beside the store's results; their names.

    Raises:
        UserError: a file cannot be written.
    """
    tables = [table for setting in settings for table in make_tables(setting)]
    files = {**texts(tables), "table.tex": as_latex(tables, marked=True), **(texts(suite, "suite") if suite else {})}
    return [*write_texts(store.path, files), *write_forest(store, settings)]


def published(dataset: str, model: str, source: str = "cape_table2") -> dict[str, dict[str, float]]:
    """Encoding -> metric -> figure in a file of ``config/published``; empty for other data sets and models. A generated
    set has those of the set that it is like."""
    figures: Mapping[str, Any] = parse_yaml(packaged_yaml("published")[source], f"config/published/{source}.yaml")
    runs = figures.get(original(dataset), {}).get(model, {})
    return {pe: dict(zip(METRICS, values, strict=True)) for pe, values in runs.items()}


def reading_notes(dataset: str, protocol: str, published: bool) -> list[str]:
    """What a reader must know of the protocol, the published figures and the data set."""
    like = original(dataset)
    notes = [GENERATED.format(like=like)] * (like != dataset)
    notes += [PAPER] * (protocol == "paper") + [PUBLISHED] * published
    return [*notes, *([DATASET_NOTES[like]] if like in DATASET_NOTES else [])]


def seeds_cell(runs: Runs, failed: Runs, seeds: int) -> str | None:
    """How many of the seeds a mean is of, where it is not of all."""
    marked = f", {FAILED} {len(failed)} failed" if failed else ""
    return None if len(runs) == seeds else f"{len(runs)}/{seeds}{marked}"


def incomplete_notes(runs: Mapping[str, Runs], failed: Mapping[str, Runs], seeds: Collection[int]) -> list[str]:
    """Which means are not of all seeds, and why."""
    fewer = [f"{name} {len(runs.get(name, {}))}" for name in {**runs, **failed} if len(runs.get(name, {})) < len(seeds)]
    notes = [f"Not of all {counted(len(seeds), 'seed')} are the means of {', '.join(fewer)}."] if fewer else []
    return notes + failure_notes(failed)


def failure_notes(failed: Mapping[Any, Runs]) -> list[str]:
    """Which trainings failed, and why the first of each row did."""
    notes = []
    for name, of_seed in failed.items():
        if of_seed:
            seeds, why = ", ".join(map(str, of_seed)), next(iter(of_seed.values())).failed
            notes.append(f"{FAILED} {name}: the training of seed{'s' * (len(of_seed) > 1)} {seeds} failed: {why}.")
    return notes


def processor_notes(results: Collection[Result]) -> list[str]:
    """Which processors runs were made on, where those were of several kinds."""
    made = Counter(result.processor or "one that is not recorded" for result in results)
    if len(made) < 2:
        return []
    kinds = ", ".join(f"{name} ({counted(runs, 'run')})" for name, runs in made.items())
    return [f"Runs on different processors differ as if by their seed, for each rounds differently: {kinds}."]


def measured(runs: Runs, metric: str) -> list[float]:
    """The metric of each run that has it."""
    return [result.metrics[metric] for result in having(runs, metric).values()]


def unmeasured_notes(named: Mapping[Any, Runs]) -> list[str]:
    """Of how many runs a mean is, where others have no number: they are in no mean and in no difference."""
    notes = []
    for name, runs in named.items():
        without: dict[str, list[str]] = {}
        for metric in METRICS:
            lacking = [seed for seed in runs.keys() - having(runs, metric).keys() if metric in runs[seed].metrics]
            if lacking:
                gone = f"no number for {counted(len(lacking), 'seed')} ({', '.join(map(str, sorted(lacking)))})"
                of = f"of {len(runs) - len(lacking)} of {len(runs)} seeds; {gone}"
                without.setdefault(of, []).append(metric)
        notes += [f"{name}: {' and '.join(metrics)} {of}." for of, metrics in without.items()]
    return notes


def figures(line: Mapping[str, Any], field: str, form: str = ".4f") -> str:
    """One field of all metrics, those that have a number."""
    values = [line[f"{metric}_{field}"] for metric in METRICS]
    return " / ".join(format(value, form) for value in values if not math.isnan(value)) or DASH


def mean_columns(runs: Runs, metric: str) -> dict[str, float]:
    """For the CSV: mean and standard deviation over the seeds."""
    return dict(zip((f"{metric}_mean", f"{metric}_sd"), mean_sd(measured(runs, metric)), strict=True))


def row_cells(
    line: Mapping[str, Any], others: Iterable[str], base: float, to_none: Difference, printed: bool
) -> dict[str, str | None]:
    """As text, from a line of the CSV: metrics, a logloss above that of a constant marked, difference, and figures that
    are published."""
    cells: dict[str, str | None] = {}
    for name in (*METRICS, *others):
        mean, sd = line[f"{name}_mean"], line[f"{name}_sd"]
        cells[name] = number(mean) if math.isnan(sd) else f"{mean:.4f} ± {sd:.4f}"
    if line["logloss_mean"] > base:
        cells["logloss"] = f"{cells['logloss']} {WORSE}"
    published = figures(line, "published") if printed else None
    return {**cells, **difference_cells("none", to_none), "CAPE paper†": published}


def other_metrics(results: Iterable[Result]) -> list[str]:
    """Those that runs have beside the default ones, such as NDCG@5."""
    return list(dict.fromkeys(name for run in results for name in run.metrics if name not in METRICS))


def difference_columns(metric: str, baseline: str, found: Difference) -> dict[str, float]:
    """For the CSV: ``gAUC_minus_none`` and, after that name, the other fields."""
    name = f"{metric}_minus_{baseline}"
    return {name if field == "value" else f"{name}_{field}": one for field, one in found._asdict().items()}


def difference_cells(baseline: str, found: Difference) -> dict[str, str | None]:
    """As text: difference with interval, smallest detectable difference, p; nothing where there is no difference."""
    columns = [f"gAUC − {baseline} [95 % interval]", "detectable", "p"]
    if math.isnan(found.value):
        return dict.fromkeys(columns)
    interval = "" if math.isnan(found.low) else f" [{found.low:+.4f}, {found.high:+.4f}]"
    texts = [f"{found.value:+.4f}{interval}", number(found.detectable), p_text(found.p_holm)]
    return dict(zip(columns, texts, strict=True))


def difference_notes(baseline: str, found: Collection[Difference]) -> list[str]:
    """What the columns of :func:`difference_cells` mean, and why they may be empty."""
    known = [one for one in found if not math.isnan(one.value)]
    if not known:
        return []
    of_one = any(p_text(one.p_holm) == DASH for one in known if not math.isnan(one.p_holm))
    least = sorted(number(one.least_detectable) for one in known if not math.isnan(one.least_detectable))
    ends = " to ".join(dict.fromkeys([least[0], least[-1]])) if least else ""
    any_runs = f"; with any number of seeds about {ends}, for these users" if least else ""
    notes = [
        f"gAUC − {baseline}: difference of the means. Interval and p hold for other users and newly trained runs. p: "
        f"two-sided, corrected (Holm) for {counted(len(known), 'comparison')}{f', {DASH} where it is 1' * of_one}. "
        "detectable: the smallest true difference that as many runs and users would show (p < 0.05, uncorrected) four "
        f"times in five (80 % power){any_runs}."
    ]
    if any(math.isnan(one.low) for one in known):
        notes.append(
            "No interval where an encoding has a single run, for nothing is known then of newly trained ones, or where "
            "the test scores of a run are in neither users/ nor scores/."
        )
    return notes


def make_suite_tables(
    suite: Suite, store: Store, keys: Mapping[Cell, Sequence[RunKey]], more: Sequence[str] = ()
) -> list[Table]:
    """One table per data set, with every cell, also those that have not been run; ``keys``: the runs of each, by seed;
    ``more`` notes.

    The difference of a cell is to ``none`` under the same settings. Where a suite has an encoding as it is by default
    and with something varied, a second table has the differences to the former. p is corrected for all of a table.
    """
    runs, failed = (
        {cell: {key.seed: results[key] for key in of_cell if key in results} for cell, of_cell in keys.items()}
        for results in (store.read(), store.failures())
    )
    groups = [_sorted([cell for cell in keys if cell.dataset == one]) for one in {cell.dataset: None for cell in keys}]
    varied = list(dict.fromkeys(key for cells in groups for cell in cells for key in cell.shown))
    found = [_suite_tables(suite, {one: runs[one] for one in cells}, failed, keys, varied, store) for cells in groups]
    return [replace(table, notes=[*table.notes, *more]) for tables in found for table in tables]


def gains(statistics: UserStatistics, runs: Mapping[Cell, Runs]) -> dict[Cell, Difference]:
    """Each cell against ``none`` under the same settings, where there is one, in gAUC; p corrected for their number."""
    pairs = {cell: (runs[cell], runs[none]) for cell in runs if (none := _baseline(cell, runs)) is not None}
    return {cell: of["gAUC"] for cell, of in between(statistics, pairs).items()}


def changes(statistics: UserStatistics, runs: Mapping[Cell, Runs]) -> dict[Cell, Difference]:
    """Each cell with something varied against the same one with nothing varied, where there is one, in gAUC; p
    corrected for their number."""
    plain = {cell: replace(cell, varied={}, chosen={}) for cell in runs}
    defaults = {plain[cell]: of_cell for cell, of_cell in runs.items() if not cell.varied}
    pairs = {cell: (runs[cell], defaults[plain[cell]]) for cell in runs if cell.varied and plain[cell] in defaults}
    return {cell: of["gAUC"] for cell, of in between(statistics, pairs).items()}


def _suite_tables(
    suite: Suite,
    runs: Mapping[Cell, Runs],
    failed: Mapping[Cell, Runs],
    keys: Mapping[Cell, Sequence[RunKey]],
    varied: Sequence[str],
    store: Store,
) -> list[Table]:
    """``runs``: of the cells of one data set."""
    dagger = "†" * (suite.protocol == "paper")
    seeds = max(len(keys[cell]) for cell in runs)
    unfinished = sum(len(of_cell) < seeds for of_cell in runs.values())
    first = keys[next(iter(runs))][0]
    statistics = user_statistics(store, first.data_hash)
    dataset, base = first.dataset, statistics.base_logloss
    differences = gains(statistics, runs)
    changed = changes(statistics, runs)
    comparable = original(dataset) == dataset  # generated content is not that of the published figures
    columns = [key for key in varied if 2 * sum(key in cell.shown for cell in runs) >= len(runs)]
    others = other_metrics(result for of_cell in runs.values() for result in of_cell.values())
    lines: list[dict[str, Any]] = []
    cells: list[dict[str, str | None]] = []
    for cell, of_cell in runs.items():
        values, printed = cell.shown, {}
        if suite.published and not cell.varied:
            printed = published(dataset, cell.model, suite.published).get(cell.pe, {})
        line: dict[str, Any] = {"dataset": cell.dataset, "model": cell.model} | {key: values.get(key) for key in varied}
        line |= {"pe": cell.pe + dagger, "seeds": len(of_cell)}
        for metric in METRICS:
            figure = printed.get(metric, math.nan)
            line |= mean_columns(of_cell, metric)
            off = line[f"{metric}_mean"] - figure if comparable else math.nan
            line |= {f"{metric}_published": figure, f"{metric}_off": off}
        line |= {key: value for name in others for key, value in mean_columns(of_cell, name).items()}
        difference = differences.get(cell, UNKNOWN)
        line |= difference_columns("gAUC", "none", difference)
        lines.append(line | difference_columns("gAUC", "default", changed.get(cell, UNKNOWN)))
        cells.append(
            {
                "model": cell.model,
                **{key: str(values[key]) if key in values else None for key in columns},
                "encoding": cell.pe + dagger,
                "varied": " ".join(f"{key}={value}" for key, value in values.items() if key not in columns) or None,
                **row_cells(line, others, base, difference, bool(printed)),
                "ours − paper": figures(line, "off", "+.4f") if printed and comparable else None,
                "seeds": seeds_cell(of_cell, failed[cell], seeds),
            }
        )
    notes = [f"{GAUC} Mean ± standard deviation over the seeds.", *base_rate_note(cells, base)]
    notes += unmeasured_notes(runs)
    notes += difference_notes("none", differences.values())
    if unfinished:
        notes.append(f"{counted(unfinished, 'cell')} of {len(runs)} lack runs: the same command makes them.")
    notes += failure_notes({cell: failed[cell] for cell in runs})
    beside = any(row["CAPE paper†"] is not None for row in cells)
    notes += reading_notes(dataset, suite.protocol, beside)
    notes += ["ours − paper: gAUC / AUC / logloss."] * (beside and comparable)
    notes += processor_notes([result for of_cell in runs.values() for result in of_cell.values()])
    title = f"{suite.title}: {dataset}, protocol {suite.protocol}{dagger}, {counted(seeds, 'seed')}"
    marked = marks(lines, [*METRICS, *others], "none", ["model", *columns])
    tables = [Table(title, lines, cells, notes, **marked)]
    if any(not math.isnan(change.value) for change in changed.values()):
        names = ["model", *columns, "encoding", "varied", "seeds"]
        named = {cell: {name: row[name] for name in names} for cell, row in zip(runs, cells, strict=True)}
        cells = [named[cell] | difference_cells("default", change) for cell, change in changed.items()]
        notes = ["default: the same encoding with nothing varied.", *difference_notes("default", changed.values())]
        tables.append(Table(f"{title}: differences to the default", [], cells, notes))
    return tables


def _sorted(cells: Sequence[Cell]) -> list[Cell]:
    """By model, then by what varies in all cells, then in the order of the suite."""
    common = [key for key in cells[0].varied if all(key in cell.varied for cell in cells)]
    seen: dict[str, int] = {}
    for cell in cells:
        for part in (cell.model, *map(str, cell.varied.items())):
            seen.setdefault(part, len(seen))
    return sorted(cells, key=lambda one: [seen[one.model], *[seen[str((key, one.varied[key]))] for key in common]])


def _baseline(cell: Cell, runs: Mapping[Cell, Runs]) -> Cell | None:
    """``none`` under the settings of the cell that ``none`` knows."""
    alike = (one for one in runs if one.model == cell.model and one.varied.items() <= cell.varied.items())
    return None if cell.pe == "none" else next((one for one in alike if one.pe == "none"), None)
