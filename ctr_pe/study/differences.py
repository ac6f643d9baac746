"""What each table of a store compares: its runs, and their differences to a baseline with intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from ctr_pe.evaluation.metrics import METRICS
from ctr_pe.evaluation.paired import Difference, corrected
from ctr_pe.pe import available_pes
from ctr_pe.study.store import Result, RunKey, Store
from ctr_pe.study.users import UserStatistics, user_statistics
from ctr_pe.utils.errors import counted

BASELINES = ("none", "naive")
UNKNOWN = Difference(*[math.nan] * len(Difference._fields))
Runs = Mapping[int, Result]
"""Of one encoding under one setting, by seed."""
Name = TypeVar("Name")


class Compares(Protocol):
    """Statistics of test rows, by which runs are compared."""

    def difference(self, ours: Runs, theirs: Runs, metric: str) -> Difference:
        """The runs of one encoding minus those of another."""


@dataclass(frozen=True)
class Setting:
    """The runs of one table: they differ in encoding and seed only. ``runs``: encoding -> seed -> result, in the order
    of the table; ``statistics``: of the users they were tested on; ``failed``: as ``runs``, of what diverged."""

    title: str
    runs: dict[str, dict[int, Result]]
    statistics: UserStatistics
    failed: dict[str, dict[int, Result]] = field(default_factory=dict)

    @property
    def results(self) -> list[Result]:
        return [result for of_seed in self.runs.values() for result in of_seed.values()]

    @property
    def key(self) -> RunKey:
        """The key of the first run."""
        of_seed = next(iter({**self.failed, **self.runs}.values()))
        return next(iter(of_seed.values())).key

    @property
    def seeds(self) -> set[int]:
        """Of all encodings."""
        return {seed for of_seed in [*self.runs.values(), *self.failed.values()] for seed in of_seed}

    def differences(
        self, baseline: str, statistics: Compares | None = None, metrics: Sequence[str] = METRICS
    ) -> dict[str, dict[str, Difference]]:
        """Encoding -> metric -> difference to ``baseline``; empty if that has not been run. What has been compared with
        an earlier one of ``BASELINES`` as a baseline is left out. ``statistics``: where they are others than those of
        clicks."""
        if baseline not in self.runs:
            return {}
        earlier = BASELINES[: BASELINES.index(baseline) + 1]
        others = [pe for pe in self.runs if pe not in earlier]
        pairs = {pe: (self.runs[pe], self.runs[baseline]) for pe in others}
        return between(statistics or self.statistics, pairs, metrics)


def settings(store: Store) -> list[Setting]:
    """One per model, data set, protocol, hyper-parameters and device; encodings in the order of ``ctr-pe list``."""
    runs, failed = by_setting(store.read()), by_setting(store.failures())
    alike = Counter(setting[:3] for setting in {**runs, **failed})
    statistics = {data: user_statistics(store, data) for data in {setting[4] for setting in {**runs, **failed}}}
    found = {
        name: Setting("", runs.get(name, {}), statistics[name[4]], failed.get(name, {}))
        for name in sorted({**runs, **failed})
    }
    return [replace(one, title=_title(one, alike[name[:3]] > 1)) for name, one in found.items()]


def by_setting(results: Mapping[RunKey, Result]) -> dict[tuple[str, ...], dict[str, dict[int, Result]]]:
    found: dict[tuple[str, ...], dict[str, dict[int, Result]]] = {}
    for key, result in sorted(results.items(), key=lambda item: _order(item[0])):
        found.setdefault(key.setting, {}).setdefault(key.pe, {})[key.seed] = result
    return found


def between(
    statistics: Compares, pairs: Mapping[Name, tuple[Runs, Runs]], metrics: Sequence[str] = METRICS
) -> dict[Name, dict[str, Difference]]:
    """Each pair's difference, first minus second, by metric; p corrected for the number of pairs."""
    found: dict[Name, dict[str, Difference]] = {name: dict.fromkeys(metrics, UNKNOWN) for name in pairs}
    for metric in metrics:
        known = {name: (having(ours, metric), having(theirs, metric)) for name, (ours, theirs) in pairs.items()}
        of_metric = {name: statistics.difference(*pair, metric) for name, pair in known.items() if all(pair)}
        for name, one in corrected(of_metric).items():
            found[name][metric] = one
    return found


def having(runs: Runs, metric: str) -> Runs:
    """The runs that have the metric, as a number."""
    return {seed: run for seed, run in runs.items() if math.isfinite(run.metrics.get(metric, math.nan))}


def _order(key: RunKey) -> tuple[object, ...]:
    names = available_pes()
    return (key.setting, names.index(key.pe) if key.pe in names else len(names), key.pe, key.seed)


def _title(setting: Setting, ambiguous: bool) -> str:
    key, rows = setting.key, setting.statistics.users.rows
    dagger = "†" * (key.protocol == "paper")
    title = f"{key.model} on {key.dataset}, protocol {key.protocol}{dagger}, {counted(len(setting.seeds), 'seed')}"
    title += f", {rows.sum():,} test rows of {len(rows):,} users" * bool(len(rows))
    title += f", on {key.device}" * (key.device != "cpu")
    return title + f", hyper-parameters {key.config_hash}, data {key.data_hash[:8]}" * ambiguous
