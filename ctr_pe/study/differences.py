"""What each table of a store compares: its runs, and their differences to a baseline with intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from ctr_pe.errors import counted
from ctr_pe.evaluation.metrics import METRICS
from ctr_pe.evaluation.paired import Difference, compared
from ctr_pe.pe import available_pes
from ctr_pe.study.store import Key, Result, Store
from ctr_pe.study.users import UserStatistics, user_statistics

BASELINES = ("none", "naive")
UNKNOWN = Difference(*[math.nan] * len(Difference._fields))
Runs = Mapping[int, Result]
"""Of one encoding under one setting, by seed."""
Name = TypeVar("Name")


@dataclass(frozen=True)
class Setting:
    """The runs of one table: they differ in encoding and seed only. ``runs``: encoding -> seed -> result, in the order
    of the table; ``statistics``: of the users they were tested on."""

    title: str
    runs: dict[str, dict[int, Result]]
    statistics: UserStatistics

    @property
    def results(self) -> list[Result]:
        return [result for of_seed in self.runs.values() for result in of_seed.values()]

    @property
    def key(self) -> Key:
        """The key of the first run."""
        return self.results[0].key

    def differences(self, baseline: str) -> dict[str, dict[str, Difference]]:
        """Encoding -> metric -> difference to ``baseline``; empty if that has not been run. What has been compared with
        an earlier one of ``BASELINES`` as a baseline is left out."""
        if baseline not in self.runs:
            return {}
        earlier = BASELINES[: BASELINES.index(baseline) + 1]
        others = [pe for pe in self.runs if pe not in earlier]
        return between(self.statistics, {pe: (self.runs[pe], self.runs[baseline]) for pe in others})


def settings(store: Store) -> list[Setting]:
    """One per model, data set, protocol, hyper-parameters and device; encodings in the order of ``ctr-pe list``."""
    by_setting: dict[tuple[str, ...], dict[str, dict[int, Result]]] = {}
    for key, result in sorted(store.read().items(), key=lambda item: _order(item[0])):
        by_setting.setdefault(key.setting, {}).setdefault(key.pe, {})[key.seed] = result
    alike = Counter(setting[:3] for setting in by_setting)
    statistics = {data: user_statistics(store, data) for data in {setting[4] for setting in by_setting}}
    found = []
    for setting, runs in by_setting.items():
        of_users = statistics[setting[4]]
        found.append(Setting(_title(runs, of_users, alike[setting[:3]] > 1), runs, of_users))
    return found


def between(statistics: UserStatistics, pairs: Mapping[Name, tuple[Runs, Runs]]) -> dict[Name, dict[str, Difference]]:
    """Each pair's difference, first minus second, by metric; p corrected for the number of pairs."""
    found: dict[Name, dict[str, Difference]] = {name: dict.fromkeys(METRICS, UNKNOWN) for name in pairs}
    for metric in METRICS:
        known = {name: [having(runs, metric) for runs in pair] for name, pair in pairs.items()}
        arms = {
            name: (statistics.arm(ours, metric), statistics.arm(theirs, metric))
            for name, (ours, theirs) in known.items()
            if ours and theirs
        }
        for name, one in compared(arms).items():
            found[name][metric] = one
    return found


def having(runs: Runs, metric: str) -> Runs:
    """The runs that have the metric, as a number."""
    return {seed: run for seed, run in runs.items() if math.isfinite(run.metrics.get(metric, math.nan))}


def _order(key: Key) -> tuple[object, ...]:
    names = available_pes()
    return (key.setting, names.index(key.pe) if key.pe in names else len(names), key.pe, key.seed)


def _title(runs: Mapping[str, Runs], statistics: UserStatistics, ambiguous: bool) -> str:
    key = next(iter(next(iter(runs.values())).values())).key
    dagger = "†" * (key.protocol == "paper")
    seeds = {seed for of_seed in runs.values() for seed in of_seed}
    title = f"{key.model} on {key.dataset}, protocol {key.protocol}{dagger}, {counted(len(seeds), 'seed')}"
    rows = statistics.users.rows
    title += f", {rows.sum():,} test rows of {len(rows):,} users" * bool(len(rows))
    title += f", on {key.device}" * (key.device != "cpu")
    return title + f", hyper-parameters {key.config_hash}, data {key.data_hash[:8]}" * ambiguous
