"""Tables of a store: one per model, data set, protocol and hyper-parameters, one row per encoding."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from ctr_pe.config import packaged_yaml, parse_yaml
from ctr_pe.errors import counted
from ctr_pe.evaluation.metrics import METRICS
from ctr_pe.evaluation.paired import Difference, compare, mean_sd, seeds_won
from ctr_pe.pe import available_pes
from ctr_pe.study.rendering import DASH, GAUC, Table, base_rate_note, mean_text, number, p_text
from ctr_pe.study.store import Key, Result, Store

BASELINE = "none"
RESAMPLES = 1000
FIELDS = ["mean", "sd", "difference", "low", "high", "p", "p_holm", "seeds_won", "seeds_compared", "published"]
"""Of each metric, in table.csv. Differences are to ``none`` at the same seeds."""
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
Runs = Mapping[int, Result]
"""Of one encoding under one setting, by seed."""


def make_tables(store: Store) -> dict[tuple[str, ...], Table]:
    """Tables of all runs in the store, by their setting (:attr:`Key.setting`)."""
    settings: dict[tuple[str, ...], dict[str, dict[int, Result]]] = {}
    for key, result in sorted(store.read().items(), key=lambda item: _order(item[0])):
        settings.setdefault(key.setting, {}).setdefault(key.pe, {})[key.seed] = result
    alike = Counter(setting[:3] for setting in settings)
    return {setting: _table(store, setting, runs, alike[setting[:3]] > 1) for setting, runs in settings.items()}


def published(dataset: str, model: str, source: str = "cape_table2") -> dict[str, dict[str, float]]:
    """Encoding -> metric -> figure in a file of ``config/published``; empty for other data sets and models."""
    figures: Mapping[str, Any] = parse_yaml(packaged_yaml("published")[source], f"config/published/{source}.yaml")
    runs = figures.get(dataset, {}).get(model, {})
    return {pe: dict(zip(METRICS, values, strict=True)) for pe, values in runs.items()}


def reading_notes(dataset: str, protocol: str, published: bool) -> list[str]:
    """What a reader must know of the protocol, the published figures and the data set."""
    notes = [PAPER] * (protocol == "paper") + [PUBLISHED] * published
    return [*notes, *([DATASET_NOTES[dataset]] if dataset in DATASET_NOTES else [])]


def measured(runs: Runs, metric: str) -> dict[int, float]:
    """The metric at each seed that has it."""
    return {seed: result.metrics[metric] for seed, result in runs.items() if metric in result.metrics}


def gain(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    """Ours minus theirs at the same seeds, averaged; NaN without a common seed."""
    common = sorted(ours.keys() & theirs.keys())
    return float(np.mean([ours[seed] - theirs[seed] for seed in common])) if common else math.nan


def figures(line: Mapping[str, Any], field: str, form: str = ".4f") -> str:
    """One field of all metrics, those that have a number."""
    values = [line[f"{metric}_{field}"] for metric in METRICS]
    return " / ".join(format(value, form) for value in values if not math.isnan(value)) or DASH


def _order(key: Key) -> tuple[Any, ...]:
    names = available_pes()
    return (key.setting, names.index(key.pe) if key.pe in names else len(names), key.pe, key.seed)


def _table(store: Store, setting: tuple[str, ...], runs: Mapping[str, Runs], ambiguous: bool) -> Table:
    identity = dict(zip(("model", "dataset", "protocol", "config_hash", "data_hash", "device"), setting, strict=True))
    model, dataset, protocol, config_hash, data_hash, device = setting
    dagger = "†" if protocol == "paper" else ""
    printed = published(dataset, model)
    reading = reading_notes(dataset, protocol, not printed.keys().isdisjoint(runs))
    base = {"logloss": store.base_logloss(data_hash)}
    bootstrap, missing = _bootstrap(store, data_hash, runs)
    lines: list[dict[str, Any]] = []
    cells: list[dict[str, str | None]] = []
    for pe, of_seed in runs.items():
        line: dict[str, Any] = {**identity, "pe": pe + dagger, "seeds": len(of_seed)}
        compared = False
        for metric in METRICS:
            ours, theirs = measured(of_seed, metric), measured(runs.get(BASELINE, {}), metric)
            found: dict[str, float] = dict.fromkeys(FIELDS, math.nan)
            found["mean"], found["sd"] = mean_sd(ours.values())
            if pe != BASELINE and ours.keys() & theirs.keys():
                compared = True
                if pe in bootstrap:
                    found |= bootstrap[pe][metric]._asdict()
                found["difference"] = gain(ours, theirs)
                found["seeds_won"], found["seeds_compared"] = seeds_won(ours, theirs, metric)
            found["published"] = printed.get(pe, {}).get(metric, math.nan)
            line |= {f"{metric}_{name}": found[name] for name in FIELDS}
        lines.append({**line, "logloss_base_rate": base["logloss"], "notes": " ".join(reading)})
        won, of = line["gAUC_seeds_won"], line["gAUC_seeds_compared"]
        difference = {
            "gAUC − none [95 % interval]": _with_interval(*(line[f"gAUC_{name}"] for name in FIELDS[2:5])),
            "won": DASH if math.isnan(of) else f"{won}/{of}",
            "p": p_text(line["gAUC_p_holm"]),
        }
        cells.append(
            {
                "encoding": line["pe"],
                **{
                    metric: mean_text(line[f"{metric}_mean"], line[f"{metric}_sd"], base.get(metric, math.inf))
                    for metric in METRICS
                },
                **(difference if compared else dict.fromkeys(difference)),
                "CAPE paper†": figures(line, "published") if pe in printed else None,
            }
        )
    others = sum(row["won"] is not None for row in cells)
    notes = [
        f"{GAUC} gAUC, AUC: higher is better; logloss: lower is better. Mean ± standard deviation over the seeds.",
        *base_rate_note(cells, base["logloss"]),
    ]
    if others:
        of_one = any(p_text(p) == DASH for line in lines if not math.isnan(p := line["gAUC_p_holm"]))
        notes.append(
            f"gAUC − none: at the same seeds, averaged, with the interval and p of a user-level paired bootstrap "
            f"({RESAMPLES:,} resamples). won: seeds at which gAUC is higher. p: two-sided, corrected (Holm) for "
            f"{counted(others, 'comparison')}{f', {DASH} where it is 1' * of_one}. "
            "Interval and p speak of other users, won of other seeds: look at both."
        )
    if BASELINE not in runs:
        notes.append(f"No differences: they are taken to '{BASELINE}', which has not been run.")
    if missing:
        notes.append(f"No intervals: the test scores of {counted(missing, 'run')} are not in scores/.")
    notes += reading
    makers = sorted({str(result.revision)[:12] for of_seed in runs.values() for result in of_seed.values()})
    if len(makers) > 1:
        notes.append(f"The runs were made by different revisions: {', '.join(makers)}.")
    seeds = {seed for of_seed in runs.values() for seed in of_seed}
    title = f"{model} on {dataset}, protocol {protocol}{dagger}, {counted(len(seeds), 'seed')}"
    if (test := store.rows(data_hash)) is not None:
        title += f", {len(test[0]):,} test rows of {len(np.unique(test[1])):,} users"
    title += f", on {device}" * (device != "cpu")
    title += f", hyper-parameters {config_hash}, data {data_hash[:8]}" * ambiguous
    return Table(title, lines, cells, notes)


def _bootstrap(store: Store, data_hash: str, runs: Mapping[str, Runs]) -> tuple[dict[str, dict[str, Difference]], int]:
    """Every encoding against none, and how many runs have no stored scores, which rules it out."""
    if len(runs) < 2 or BASELINE not in runs:
        return {}, 0
    test = store.rows(data_hash)
    scores = {
        pe: {seed: score for seed, run in of_seed.items() if (score := store.scores(run.key)) is not None}
        for pe, of_seed in runs.items()
    }
    rows = -1 if test is None else len(test[0])
    missing = sum(len(scores[pe].get(seed, ())) != rows for pe, of_seed in runs.items() for seed in of_seed)
    if test is None or missing:
        return {}, missing
    return compare(*test, scores, BASELINE, RESAMPLES), 0


def _with_interval(value: float, low: float, high: float) -> str:
    return number(value, "+.4f") + ("" if math.isnan(value + low) else f" [{low:+.4f}, {high:+.4f}]")
