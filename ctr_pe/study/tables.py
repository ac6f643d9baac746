"""Tables of a store: one per model, data set, protocol and hyper-parameters, one row per encoding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from ctr_pe.config import packaged_yaml, parse_yaml
from ctr_pe.errors import counted
from ctr_pe.evaluation.metrics import METRICS
from ctr_pe.evaluation.paired import Difference, compare, mean_sd, seeds_won
from ctr_pe.pe import available_pes
from ctr_pe.study.rendering import DASH, Cells, csv_text, mean_text
from ctr_pe.study.store import Key, Result, Store

BASELINE = "none"
RESAMPLES = 1000
PAPER = (
    "† trained on train + validation rows, and the epoch selected on the test rows: optimistic, and comparable only "
    "with results made the same way, such as the published ones."
)
PUBLISHED = (
    "CAPE paper: the figures printed in its Table 2 (gAUC / AUC / logloss), made by its authors' code, trained on all "
    "other rows and the epoch selected on the test rows (†)."
)
DATASET_NOTES = {
    "kuaivideo_x1": "kuaivideo_x1 keeps the first 100 of the items that precede a row. For active users the lists end "
    "long before the request, so their last item is not the most recent one: read differences between position "
    "encodings on this set with care.",
}


@dataclass(frozen=True)
class Row:
    """One encoding. Differences are to ``none`` at the same seeds: absent without it, NaN where undefined."""

    pe: str
    seeds: tuple[int, ...]
    means: dict[str, tuple[float, float]]  # mean, standard deviation
    differences: dict[str, Difference]
    won: dict[str, tuple[int, int]]  # seeds at which it is better, of the seeds compared
    published: dict[str, float]


@dataclass(frozen=True)
class Table:
    """``identity`` is the key of its runs without encoding and seed."""

    identity: tuple[str, ...]
    title: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    @property
    def dagger(self) -> str:
        """Marks encodings under protocol paper."""
        return "†" if self.identity[2] == "paper" else ""

    def cells(self) -> Cells:
        """Header and rows, as printed."""
        compared = any(row.differences for row in self.rows)
        published = any(row.published for row in self.rows)
        header = ["encoding", *METRICS, *["gAUC − none [95 % interval]", "won", "p"] * compared]
        header += ["CAPE paper†"] * published
        rows = []
        for row in self.rows:
            cells = [row.pe + self.dagger]
            cells += [mean_text(*row.means[metric]) if metric in row.means else DASH for metric in METRICS]
            if compared:
                found = row.differences.get("gAUC")
                cells += [_signed(found), "{}/{}".format(*row.won["gAUC"]), _p(found.p_holm)] if found else [DASH] * 3
            if published:
                figures = [f"{row.published[metric]:.4f}" for metric in METRICS if metric in row.published]
                cells.append(" / ".join(figures) or DASH)
            rows.append(cells)
        return header, rows


def make_tables(store: Store) -> list[Table]:
    """Tables of all runs in the store."""
    results = sorted(store.read().values(), key=_order)
    groups = [(identity, list(group)) for identity, group in groupby(results, _identity)]
    short = [identity[:3] for identity, _ in groups]
    return [_table(store, identity, group, ambiguous=short.count(identity[:3]) > 1) for identity, group in groups]


def as_csv(tables: Sequence[Table]) -> str:
    """For table.csv: everything, one line per encoding."""
    fields = ["mean", "sd", "difference", "low", "high", "p", "p_holm", "seeds_won", "seeds_compared", "published"]
    identity = ("model", "dataset", "protocol", "config_hash", "data_hash", "device")
    header = [*identity, "pe", "seeds", *[f"{metric}_{name}" for metric in METRICS for name in fields], "notes"]
    rows = []
    for table in tables:
        marks = " ".join(note for note in table.notes if note in (PAPER, PUBLISHED, *DATASET_NOTES.values()))
        for row in table.rows:
            numbers: list[float | None] = []
            for metric in METRICS:
                numbers += row.means.get(metric, (None, None))
                numbers += row.differences.get(metric, [None] * 5)
                numbers += row.won.get(metric, (None, None))
                numbers.append(row.published.get(metric))
            rows.append([*table.identity, row.pe + table.dagger, len(row.seeds), *numbers, marks])
    return csv_text(header, rows)


def published(dataset: str, model: str, source: str = "cape_table2") -> dict[str, dict[str, float]]:
    """Encoding -> metric -> figure in a file of ``config/published``; empty for other data sets and models."""
    figures: Mapping[str, Any] = parse_yaml(packaged_yaml("published")[source], f"config/published/{source}.yaml")
    runs = figures.get(dataset, {}).get(model, {})
    return {pe: dict(zip(METRICS, values, strict=True)) for pe, values in runs.items()}


def reading_notes(dataset: str, protocol: str, published: bool) -> list[str]:
    """What a reader must know of the protocol, the published figures and the data set."""
    notes = [PAPER] * (protocol == "paper") + [PUBLISHED] * published
    return [*notes, *([DATASET_NOTES[dataset]] if dataset in DATASET_NOTES else [])]


def _identity(result: Result) -> tuple[str, ...]:
    key = result.key
    return tuple(str(part) for part in (*key[: Key._fields.index("pe")], key.device))


def _order(result: Result) -> tuple[Any, ...]:
    names = available_pes()
    known = names.index(result.pe) if result.pe in names else len(names)
    return (*_identity(result), known, result.pe, result.seed)


def _table(store: Store, identity: tuple[str, ...], results: Sequence[Result], ambiguous: bool) -> Table:
    model, dataset, protocol, config_hash, data_hash, device = identity
    runs = {pe: {result.seed: result for result in group} for pe, group in groupby(results, lambda result: result.pe)}
    differences, missing = _compare(store, data_hash, runs)
    printed = published(dataset, model)
    rows = []
    for pe, of_seed in runs.items():
        values = {
            metric: {s: result.metrics[metric] for s, result in of_seed.items() if metric in result.metrics}
            for metric in METRICS
        }
        base = {
            metric: {s: result.metrics[metric] for s, result in runs.get(BASELINE, {}).items() if s in values[metric]}
            for metric in METRICS
        }
        compared = [metric for metric in METRICS if base[metric] and pe != BASELINE]
        rows.append(
            Row(
                pe=pe,
                seeds=tuple(of_seed),
                means={metric: mean_sd(list(values[metric].values())) for metric in METRICS if values[metric]},
                differences={
                    metric: _recorded(values[metric], base[metric], differences.get(pe, {}).get(metric))
                    for metric in compared
                },
                won={metric: seeds_won(values[metric], base[metric], metric) for metric in compared},
                published=printed.get(pe, {}),
            )
        )
    seeds = sorted({result.seed for result in results})
    dagger = "†" if protocol == "paper" else ""
    title = f"{model} on {dataset}, protocol {protocol}{dagger}, {counted(len(seeds), 'seed')}"
    if (test := store.rows(data_hash)) is not None:
        title += f", {len(test[0]):,} test rows of {len(np.unique(test[1])):,} users"
    if device != "cpu":
        title += f", on {device}"
    if ambiguous:
        title += f", hyper-parameters {config_hash}, data {data_hash[:8]}"
    return Table(identity, title, tuple(rows), tuple(_notes(identity, results, rows, missing)))


def _compare(
    store: Store, data_hash: str, runs: Mapping[str, Mapping[int, Result]]
) -> tuple[dict[str, dict[str, Difference]], int]:
    """Bootstrap of every encoding against none, and how many runs have no stored scores, which rules it out."""
    if len(runs) < 2 or BASELINE not in runs:
        return {}, 0
    test = store.rows(data_hash)
    count = 0 if test is None else len(test[0])
    scores = {pe: {s: store.scores(result.key) for s, result in of_seed.items()} for pe, of_seed in runs.items()}
    usable = {
        pe: {s: score for s, score in of_seed.items() if score is not None and len(score) == count}
        for pe, of_seed in scores.items()
    }
    missing = sum(len(runs[pe]) - len(usable[pe]) for pe in runs)
    if test is None or missing:
        return {}, missing
    return compare(*test, usable, BASELINE, RESAMPLES), 0


def _recorded(ours: Mapping[int, float], theirs: Mapping[int, float], found: Difference | None) -> Difference:
    """The difference of the recorded metrics, with the interval and p values of the bootstrap if there is one."""
    value = float(np.mean([ours[s] - theirs[s] for s in sorted(ours.keys() & theirs.keys())]))
    return Difference(value, *(found[1:] if found else [float("nan")] * 4))


def _notes(identity: Sequence[str], results: Sequence[Result], rows: Sequence[Row], missing: int) -> list[str]:
    others = sum(bool(row.differences) for row in rows)
    notes = ["gAUC, AUC: higher is better; logloss: lower is better. Mean ± standard deviation over the seeds."]
    if others:
        notes.append(
            f"gAUC − none: at the same seeds, averaged, with the interval and p of a user-level paired bootstrap "
            f"({RESAMPLES:,} resamples). won: seeds at which gAUC is higher. p: two-sided, corrected (Holm) for "
            f"{counted(others, 'comparison')}. Interval and p speak of other users, won of other seeds: look at both."
        )
    if BASELINE not in [row.pe for row in rows]:
        notes.append(f"No differences: they are taken to '{BASELINE}', which has not been run.")
    if missing:
        notes.append(f"No intervals: the test scores of {counted(missing, 'run')} are not in scores/.")
    notes += reading_notes(identity[1], identity[2], any(row.published for row in rows))
    makers = sorted({str(result.revision)[:12] for result in results})
    if len(makers) > 1:
        notes.append(f"The runs were made by different revisions: {', '.join(makers)}.")
    return notes


def _signed(found: Difference) -> str:
    if math.isnan(found.value):
        return DASH
    interval = "" if math.isnan(found.low) else f" [{found.low:+.4f}, {found.high:+.4f}]"
    return f"{found.value:+.4f}{interval}"


def _p(p: float) -> str:
    return DASH if math.isnan(p) else f"{p:.3f}"
