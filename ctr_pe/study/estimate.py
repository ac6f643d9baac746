"""How long a benchmark takes: a few real steps of each model and encoding on its data, extrapolated."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from ctr_pe.fuxictr.library import training_settings
from ctr_pe.study.rendering import Table, between
from ctr_pe.study.runner import Job
from ctr_pe.study.store import RunKey
from ctr_pe.study.suite import Cell
from ctr_pe.training import PROTOCOLS, Run, build_model
from ctr_pe.training.source import DataSource
from ctr_pe.utils.allocator import give_back
from ctr_pe.utils.engines import in_a_line
from ctr_pe.utils.errors import counted, progress
from ctr_pe.utils.files import scratch_folder

STEPS = 3
"""Steps that are measured, after one that is not: it allocates memory."""
FEW = 8
"""More cells than these take so long to measure that a line says what is going on."""
LONGEST = 5.0
"""Seconds after which no third step of a model is measured."""


@dataclass(frozen=True)
class Estimate:
    """Of one run. ``step``, ``batch``: seconds of a training step, and of scoring a batch of validation or test rows.
    ``steps``, ``batches``: how many of them at the least, if no evaluation is better than the first, and at the most,
    if training does not stop early."""

    step: float
    batch: float
    steps: tuple[int, int]
    batches: tuple[int, int]

    @property
    def seconds(self) -> tuple[float, float]:
        """At the least and at the most."""
        least, most = (
            self.step * steps + self.batch * batches for steps, batches in zip(self.steps, self.batches, strict=True)
        )
        return least, most


@dataclass(frozen=True)
class PlannedRuns:
    """The runs of one cell that are not stored yet, and how long one takes, or why it cannot be run."""

    cell: Cell
    runs: int
    estimate: Estimate | None = None
    problem: str = ""


def measure(run: Run) -> Estimate:
    """Train a few steps of a run, on rows that it would train on, and score a few batches.

    Raises UserError for what :func:`ctr_pe.training.train` refuses.
    """
    source, params, threads = DataSource.of(run.dataset), {**run.params, "seed": run.seed}, torch.get_num_threads()
    train_on, select_on = PROTOCOLS[run.protocol]
    try:
        torch.set_num_threads(run.threads or threads)
        with torch.random.fork_rng(), scratch_folder() as folder:
            model = build_model(run, source, folder)
            rows = source.batches(model.feature_map, train_on, params, train=True)
            valid, test = (source.batches(model.feature_map, [split], params) for split in (select_on, "test"))
            model.train()
            step = _median_seconds(model.train_step, rows, model)
            model.eval()
            with torch.inference_mode():
                batch = _median_seconds(model.forward, valid, model)
    finally:
        torch.set_num_threads(threads)
    most = int(params.get("epochs", 10)) * len(rows)
    settings = training_settings(model)
    every = settings.eval_steps or len(rows)
    steps = (min(most, every * (1 + settings.early_stop_patience)), most)
    least_batches, most_batches = (number // every * len(valid) + len(test) for number in steps)
    return Estimate(step, batch, steps, (least_batches, most_batches))


def measure_all(by_cell: Mapping[Cell, Sequence[Job]], done: Container[RunKey]) -> list[PlannedRuns]:
    """The cells that have runs to do, measured; a cell that cannot be run has its problem, in one line."""
    to_do = {cell: [job for job in jobs if job.key not in done] for cell, jobs in by_cell.items()}
    to_do = {cell: jobs for cell, jobs in to_do.items() if jobs}
    if len(to_do) > FEW:
        progress(f"measuring {STEPS} steps of each of {len(to_do)} cells")
    found = []
    for cell, jobs in to_do.items():
        try:
            found.append(PlannedRuns(cell, len(jobs), measure(jobs[0].run)))
        except Exception as error:  # as in a worker: it ends this cell's runs and no others
            found.append(PlannedRuns(cell, len(jobs), problem=in_a_line(error)))
    give_back()  # a worker needs as much again
    return found


def total(planned: Iterable[PlannedRuns], workers: int) -> tuple[float, float]:
    """Seconds of all runs, at the least and at the most, ``workers`` at once; without those that cannot be run."""
    known = [(one.runs, one.estimate.seconds) for one in planned if one.estimate]

    def of_all(end: int) -> float:
        longest = max((seconds[end] for _, seconds in known), default=0.0)
        return max(longest, sum(runs * seconds[end] for runs, seconds in known) / max(1, workers))

    return of_all(0), of_all(1)


def plan_table(title: str, planned: Sequence[PlannedRuns], workers: int) -> Table:
    """What would be run, a row per cell."""
    varied = dict.fromkeys(name for one in planned for name in one.cell.shown)
    several = len({one.cell.dataset for one in planned}) > 1
    cells: list[dict[str, str | None]] = []
    for one in planned:
        cell, estimate, values = one.cell, one.estimate, one.cell.shown
        cells.append(
            {
                "model": cell.model,
                **{name: str(values[name]) if name in values else None for name in varied},
                "encoding": cell.pe,
                "data set": cell.dataset if several else None,
                "runs": str(one.runs),
                "step": f"{1000 * estimate.step:,.3g} ms" if estimate else None,
                "steps": " to ".join(f"{steps:,}" for steps in sorted(set(estimate.steps))) if estimate else None,
                "time of a run": between(*estimate.seconds) if estimate else None,
            }
        )
    low, high = total(planned, workers)
    notes = [
        f"Estimated time: {between(low, high)} for {counted(sum(one.runs for one in planned), 'run')}, {workers} at "
        f"once. step: median of {STEPS} training steps on these data, each alone on its cores; side by side they may "
        "take longer. steps: at the least, if no evaluation is better than the first, and at the most.",
        *[f"{one.cell} cannot be run: {one.problem}" for one in planned if one.problem],
    ]
    return Table(title, [], cells, notes)


def _median_seconds(call: Callable[[Any], Any], batches: Iterable[Any], model: Any) -> float:
    """Of one call on a batch; the first call does not count, unless there is no other."""
    seconds: list[float] = []
    for batch in islice(batches, 1 + STEPS):
        began = time.perf_counter()
        call(batch)
        if model.device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - began)
        if len(seconds) > 1 and sum(seconds) > LONGEST:
            break
    return statistics.median(seconds[1:] or seconds)
