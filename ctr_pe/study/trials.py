"""Trials: what a row of a table may tune is chosen on the validation rows, by as many trainings for one row as another.

A row is trained once with every combination of its values, and takes the one whose best epoch has the best monitor on
the validation rows; or it is searched by successive halving around its own settings (:mod:`ctr_pe.study.halving`).
Trials are runs of a store of their own, ``OUT/trials``, at a seed that no run of the table has and by the protocol
``heldout``, whatever the table's is: no test row and no run of the table takes part in the choice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctr_pe.evaluation.metrics import monitor_mode
from ctr_pe.study import halving
from ctr_pe.study.rendering import FAILED, Table, number
from ctr_pe.study.runner import Job
from ctr_pe.study.store import Result, RunKey, Store
from ctr_pe.study.suite import Cell
from ctr_pe.utils.errors import UserError, counted

FOLDER = "trials"
SEED = 10_000
"""Of every trial; a benchmark has fewer seeds."""
Trial = tuple[Cell, Job]


@dataclass(frozen=True)
class Trials:
    """Of the ``rows`` of a benchmark that tune something. ``params``: hyper-parameters of a row as it stands; ``job``:
    the run of a trial, which is a row with something chosen."""

    store: Store
    rows: Sequence[Cell]
    params: Callable[[Cell], Mapping[str, Any]]
    job: Callable[[Cell], Job]

    @property
    def done(self) -> dict[RunKey, Result]:
        """Those that need not be run again: one that diverged has an answer too."""
        return {**self.store.failures(), **self.store.read()}

    @property
    def rungs(self) -> dict[Cell, tuple[list[list[Trial]], Cell]]:
        """Of each row its trials, those of each rung, and the row with what was chosen; the row itself while a trial is
        missing. Later rungs then have the trials that they would have if all were equally good.

        Raises:
            UserError: the training of every trial of a rung diverged.
        """
        done = self.done
        return {row: self._rungs(row, done) for row in self.rows}

    def _rungs(self, row: Cell, done: Mapping[RunKey, Result]) -> tuple[list[list[Trial]], Cell]:
        found, complete = list[list[Trial]](), True
        search = halving.rungs(self.params(row), row.search, SEED) if row.search else _grid(row.combinations())
        wanted = next(search)
        while True:
            trials = [row.with_chosen(one) for one in wanted]
            found.append([(trial, self.job(trial)) for trial in trials])
            results = [done[job.key] for _, job in found[-1] if job.key in done]
            complete &= len(results) == len(trials)
            if complete and all(one.failed for one in results):
                what = f"the training of each of {counted(len(results), 'trial')} failed"
                raise UserError(f"{row}: {what}; the first {results[0].failed}")
            try:
                wanted = search.send([_goodness(one) for one in results] if complete else [0.0] * len(trials))
            except StopIteration as end:
                return found, row.with_chosen(end.value) if complete else row

    @property
    def to_do(self) -> list[Job]:
        """Trials that can be run now: those of a rung wait for the rung before."""
        done, found = self.done, list[Job]()
        for rungs, _ in self.rungs.values():
            missing = ([job for _, job in rung if job.key not in done] for rung in rungs)
            found += next(filter(None, missing), [])
        return found

    @property
    def jobs(self) -> list[Job]:
        """The runs of all trials, as far as they are known."""
        return [job for rungs, _ in self.rungs.values() for rung in rungs for _, job in rung]

    @property
    def by_cell(self) -> dict[Cell, list[Job]]:
        """The runs of trials that take as long as each other: of a search, those of a rung."""
        found: dict[Cell, list[Job]] = {}
        for row, (rungs, _) in self.rungs.items():
            for trial, job in itertools.chain(*rungs):
                alike = row.with_chosen({"epochs": trial.chosen["epochs"]}) if row.search else trial
                found.setdefault(alike, []).append(job)
        return found

    def table(self) -> Table:
        """A row per trial, with its monitor on the validation rows."""
        done, found = self.done, self.rungs.values()
        trials = [trial for rungs, _ in found for trial, _ in itertools.chain(*rungs)]
        names = list(dict.fromkeys(name for trial in trials for name in trial.shown))
        lines: list[dict[str, Any]] = []
        cells: list[dict[str, str | None]] = []
        for rungs, best in found:
            for trial, job in itertools.chain(*rungs):
                values, value = trial.shown, on_validation(done[job.key])
                line: dict[str, Any] = {"dataset": trial.dataset, "model": trial.model}
                line |= {name: values.get(name) for name in names} | {"encoding": trial.pe}
                last = (trial, job) in rungs[-1]
                line |= {"validation": value, "chosen": last and best.chosen.items() <= trial.chosen.items()}
                lines.append(line)
                cells.append(
                    {name: None if one is None else str(one) for name, one in line.items()}
                    | {"validation": FAILED if done[job.key].failed else number(value)}
                    | {"chosen": "✓" if line["chosen"] else None}
                )
        notes = [self.note(), "validation: the monitor on the validation rows after the best epoch."]
        return Table("Trials", lines, cells, notes)

    def note(self) -> str:
        """What was tuned, and how."""
        first, (rungs, _) = next(iter(self.rungs.items()))
        counts = {len(row.combinations()) for row in self.rows}
        trials = " to ".join(map(str, sorted({min(counts), max(counts)})))
        how = f"{', '.join(dict.fromkeys(name for row in self.rows for name in row.tune))}: of each row the best of "
        how += f"{trials} combinations on the validation rows, one training each"
        if first.search:
            of_rungs = [f"{len(rung)} of {rung[0][0].chosen['epochs']} epochs" for rung in rungs]
            how = f"Of each row the best of {first.search} settings on the validation rows, by successive halving, "
            how += f"trainings of the first row: {', '.join(of_rungs)}"
        return f"{how}, protocol heldout, seed {SEED} ({FOLDER}/table.md)."


def _grid(settings: Sequence[halving.Setting]) -> halving.Rungs:
    """One rung of all of them."""
    goodness = yield settings
    return settings[max(range(len(settings)), key=goodness.__getitem__)]


def on_validation(result: Result) -> float:
    """The monitor after the best epoch; NaN if it has a number after none."""
    good = _goodness(result)
    sign = 1 if monitor_mode(result.params.get("monitor", "AUC")) == "max" else -1
    return sign * good if math.isfinite(good) else math.nan


def _goodness(result: Result) -> float:
    """Of the best epoch, more is better; -inf if the monitor has a number after none."""
    found = [{name: math.nan if one is None else one for name, one in of["metrics"].items()} for of in result.history]
    return max((halving.goodness(result.params, metrics) for metrics in found), default=-math.inf)
