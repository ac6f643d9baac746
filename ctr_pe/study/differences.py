"""What each table of a store compares: its runs, and the differences to a baseline with their intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ctr_pe.evaluation.metrics import METRICS
from ctr_pe.evaluation.paired import Difference, compare
from ctr_pe.study.rendering import Table
from ctr_pe.study.store import Key, Result, Store
from ctr_pe.study.tables import RESAMPLES, make_tables


@dataclass(frozen=True)
class Setting:
    """The runs of one table: they differ in encoding and seed only. ``lines``: its lines of table.csv by encoding,
    numbers as floats, NaN for none; ``runs``: encoding → seed → result, in the order of the table."""

    title: str
    notes: tuple[str, ...]
    lines: dict[str, dict[str, Any]]
    runs: dict[str, dict[int, Result]]

    @property
    def results(self) -> list[Result]:
        return [result for of_seed in self.runs.values() for result in of_seed.values()]

    @property
    def key(self) -> Key:
        """The key of the first run."""
        return self.results[0].key

    def differences(self) -> dict[str, dict[str, Difference]]:
        """Encoding → metric → difference to ``none``, as in the table."""
        found = {
            pe: {
                metric: Difference(*(line[f"{metric}_{name}"] for name in ("difference", "low", "high", "p", "p_holm")))
                for metric in METRICS
            }
            for pe, line in self.lines.items()
        }
        return {pe: of for pe, of in found.items() if not all(math.isnan(one.value) for one in of.values())}


def settings(store: Store, tables: Mapping[tuple[str, ...], Table] | None = None) -> list[Setting]:
    """One per table of the store; ``tables``: they, if they have been made already."""
    runs: dict[tuple[str, ...], dict[str, dict[int, Result]]] = {}
    for key, result in store.read().items():
        runs.setdefault(key.setting, {}).setdefault(key.pe, {})[key.seed] = result
    return [_setting(table, runs[setting]) for setting, table in (tables or make_tables(store)).items()]


def differences_to(store: Store, setting: Setting, baseline: str) -> dict[str, dict[str, Difference]]:
    """Encoding → metric → difference to ``baseline`` by the bootstrap of the tables; empty if the scores of a run or
    the labels of the rows are not stored, or the baseline has not been run."""
    test = store.rows(setting.key.data_hash)
    scores = {pe: {s: store.scores(run.key) for s, run in runs.items()} for pe, runs in setting.runs.items()}
    known = {pe: {s: one for s, one in runs.items() if one is not None} for pe, runs in scores.items()}
    if test is None or baseline not in scores or len(scores) < 2:
        return {}
    if any(one is None or len(one) != len(test[0]) for runs in scores.values() for one in runs.values()):
        return {}
    return compare(*test, known, baseline, RESAMPLES)


def _setting(table: Table, runs: Mapping[str, Mapping[int, Result]]) -> Setting:
    lines = {line["pe"].removesuffix("†"): line for line in table.lines}
    return Setting(table.title, tuple(table.notes), lines, {pe: dict(sorted(runs[pe].items())) for pe in lines})
