"""Trials: what a row of a table may tune is chosen on the validation rows, by as many trainings for one row as another.

A row is trained once with every combination of its values, and takes the one whose best epoch has the best monitor on
the validation rows. Trials are runs of a store of their own, ``OUT/trials``, at a seed that no run of the table has and
by the protocol ``heldout``, whatever the table's is: no test row and no run of the table takes part in the choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ctr_pe.evaluation.metrics import monitor_mode, monitored
from ctr_pe.study.rendering import FAILED, Table, number
from ctr_pe.study.runner import Job
from ctr_pe.study.store import Result, RunKey, Store
from ctr_pe.study.suite import Cell
from ctr_pe.utils.errors import UserError, counted

FOLDER = "trials"
SEED = 10_000
"""Of every trial; a benchmark has fewer seeds."""


@dataclass(frozen=True)
class Trials:
    """Of the rows of a benchmark that tune something. ``jobs``: row -> trial -> its run."""

    store: Store
    jobs: Mapping[Cell, Mapping[Cell, Job]]

    @property
    def done(self) -> dict[RunKey, Result]:
        """Those that need not be run again: one that diverged has an answer too."""
        return {**self.store.failures(), **self.store.read()}

    @property
    def to_do(self) -> list[Job]:
        done = self.done
        return [job for of_row in self.jobs.values() for job in of_row.values() if job.key not in done]

    @property
    def by_cell(self) -> dict[Cell, list[Job]]:
        """Trial -> its run."""
        return {trial: [job] for of_row in self.jobs.values() for trial, job in of_row.items()}

    def choose(self, row: Cell) -> Cell:
        """The best trial of a row; the row itself where it tunes nothing, or while one of its trials is missing.

        Raises:
            UserError: the training of every trial diverged.
        """
        done, of_row = self.done, self.jobs.get(row, {})
        if not of_row or any(job.key not in done for job in of_row.values()):
            return row
        found = {trial: done[job.key] for trial, job in of_row.items() if not done[job.key].failed}
        if not found:
            first = next(done[job.key].failed for job in of_row.values())
            raise UserError(f"{row}: the training of each of {counted(len(of_row), 'trial')} failed; the first {first}")
        return max(found, key=lambda trial: _goodness(found[trial]))

    def table(self) -> Table:
        """A row per trial, with its monitor on the validation rows."""
        done, names = self.done, list(dict.fromkeys(name for trial in self.by_cell for name in trial.shown))
        lines: list[dict[str, Any]] = []
        cells: list[dict[str, str | None]] = []
        for row, of_row in self.jobs.items():
            best = self.choose(row)
            for trial, job in of_row.items():
                values, value = trial.shown, on_validation(done[job.key])
                line: dict[str, Any] = {"dataset": trial.dataset, "model": trial.model}
                line |= {name: values.get(name) for name in names} | {"encoding": trial.pe}
                lines.append(line | {"validation": value, "chosen": trial == best})
                cells.append(
                    {name: None if one is None else str(one) for name, one in line.items()}
                    | {"validation": FAILED if done[job.key].failed else number(value)}
                    | {"chosen": "✓" if trial == best else None}
                )
        notes = [self.note(), "validation: the monitor on the validation rows after the best epoch."]
        return Table("Trials", lines, cells, notes)

    def note(self) -> str:
        """What was tuned, and how."""
        names = ", ".join(dict.fromkeys(name for row in self.jobs for name in row.tune))
        counts = {len(of_row) for of_row in self.jobs.values()}
        trials = " to ".join(map(str, sorted({min(counts), max(counts)})))
        return (
            f"{names}: of each row the best of {trials} combinations on the validation rows, one training each, "
            f"protocol heldout, seed {SEED} ({FOLDER}/table.md)."
        )


def on_validation(result: Result) -> float:
    """The monitor after the best epoch; NaN if it has a number after none."""
    good = _goodness(result)
    return _sign(result) * good if math.isfinite(good) else math.nan


def _goodness(result: Result) -> float:
    """Of the best epoch, more is better; -inf if the monitor has a number after none."""
    found = []
    for epoch in result.history:
        metrics = {name: math.nan if value is None else value for name, value in epoch["metrics"].items()}
        found.append(monitored(result.params.get("monitor", "AUC"), metrics))
    return max((_sign(result) * value for value in found if math.isfinite(value)), default=-math.inf)


def _sign(result: Result) -> int:
    return 1 if monitor_mode(result.params.get("monitor", "AUC")) == "max" else -1
