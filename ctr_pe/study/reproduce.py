"""``ctr-pe reproduce``: rows of a suite beside the published figures, what is stored of ours, the command that makes
them, and the time that it takes on this machine."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from ctr_pe.config.yaml import packaged_yaml, parse_yaml
from ctr_pe.data.dataset import Dataset, open_dataset
from ctr_pe.data.published.sets import SETS
from ctr_pe.evaluation.metrics import METRICS
from ctr_pe.study import estimate
from ctr_pe.study.benchmark import (
    Request,
    find_dataset,
    jobs_of,
    plan,
    processes,
    protocol_of,
    published_figures,
    run_params,
)
from ctr_pe.study.estimate import Estimate, PlannedRuns
from ctr_pe.study.rendering import Table, between
from ctr_pe.study.store import FILE, Result, RunKey, Store, hash_of
from ctr_pe.study.suite import Cell, Suite
from ctr_pe.study.tables import mean_columns, reading_notes
from ctr_pe.utils.devices import check_gpu, name_of
from ctr_pe.utils.errors import UserError, counted, nearest, progress
from ctr_pe.utils.files import scratch_folder

SHARES = {"amazonelectronics_x1": 0.01, "kuaivideo_x1": 0.003}
"""Of a published set that is not there so much is generated in its form, a few batches, to measure steps on."""
STORES = (Path("results"), Path("benchmark/results"))
"""Folders below which stored runs are looked for."""


@dataclass(frozen=True)
class SuiteRow:
    """Of the table. ``figures``: published, by metric; ``ours``: runs with the suite's settings, by seed; ``missing``:
    how many of its runs the command would make."""

    cell: Cell
    dataset_id: str
    figures: Mapping[str, float]
    ours: Mapping[int, Result]
    missing: int


def wanted(name: str, rows: Sequence[str], request: Request) -> Request:
    """The benchmark of the rows, which are models, of the suite ``name``, whose words hyphens may join.

    Raises:
        UserError: no such suite or row.
    """
    known = [suite.replace("_", "-") for suite in packaged_yaml("benchmark")]
    if name.replace("_", "-") not in known:
        raise UserError(f"{name}: no such table: {nearest(name.replace('_', '-'), known)}")
    request = replace(request, suite=name.replace("-", "_"), published=True)
    models = {cell.model for cell in plan(request)[1]}
    for row in rows:
        if row not in models:
            raise UserError(f"--row {row}: not in {name}: {nearest(row, models)}")
    return replace(request, models=list(rows) or None)


def command(request: Request) -> str:
    """What a shell runs for it."""
    given: dict[str, Any] = {"--suite": request.suite, "--dataset": request.dataset, "--repeats": request.repeats}
    given |= {"--model": request.models, "--pe": request.encodings, "--out": request.out, "--jobs": request.jobs}
    given |= {"--threads": request.threads if request.threads != Request.threads else None}
    given |= {"--gpu": request.gpu if request.gpu >= 0 else None, "--data-root": request.data_root}
    words = [
        word
        for option, value in given.items()
        if value is not None
        for word in (option, ",".join(value) if isinstance(value, list) else str(value))
    ]
    return shlex.join(["ctr-pe", "benchmark", *words])


def reproduction(request: Request, stores: Sequence[Path] = STORES) -> Table:
    """A row per cell of the request: published, ours, and how long the runs take that are missing. Trains nothing but
    the few steps that it measures.

    Args:
        request: of :func:`wanted`.
        stores: folders below which runs of ours are looked for, beside the request's own.
    """
    suite, cells = plan(request)
    out = request.out or Path("results") / str(request.suite)
    own = _runs([out])
    every = {**_runs(stores), **own}
    notes, rows, datasets = list[str](), list[SuiteRow](), dict[str, Dataset | None]()
    for name in dict.fromkeys(cell.dataset for cell in cells):
        try:
            datasets[name] = find_dataset(name, request.data_root, suite.protocol)
        except UserError as error:
            datasets[name] = None
            how = f"`ctr-pe data fetch {name}` fetches it" if name in SETS else str(error)
            notes.append(f"The data set {name} is not there: {how}.")
    for cell in cells:
        dataset = datasets[cell.dataset]
        dataset_id = dataset.dataset_id if dataset else Path(cell.dataset).name
        protocol = protocol_of(dataset) if dataset else _protocol(dataset_id)
        params = run_params(cell.model, dataset_id, cell.overrides, suite.task)
        like = (cell.model, dataset_id, suite.protocol, hash_of(params), cell.pe)
        ours, stored = ({key.seed: run for key, run in of.items() if (*key[:4], key.pe) == like} for of in (every, own))
        seeds = range(request.seed, request.seed + suite.seeds)
        figures = published_figures(suite, cell, dataset_id, protocol)
        rows.append(SuiteRow(cell, dataset_id, figures, ours, sum(seed not in stored for seed in seeds)))
    planned, about = _times(request, suite, rows, datasets)
    return _table(request, suite, rows, planned, [*notes, *about])


def _runs(folders: Sequence[Path]) -> dict[RunKey, Result]:
    """All runs in the stores below the folders."""
    found: dict[RunKey, Result] = {}
    for place in sorted({file.parent for folder in folders for file in folder.rglob(FILE)}):
        with contextlib.suppress(UserError):  # the file of another program
            found |= Store(place).read()
    return found


def _protocol(dataset_id: str) -> str:
    """Of the packaged recipe of this name; empty without one."""
    recipes = packaged_yaml("recipe")
    return str(parse_yaml(recipes[dataset_id], dataset_id)["protocol"]) if dataset_id in recipes else ""


def _times(
    request: Request, suite: Suite, rows: Sequence[SuiteRow], datasets: Mapping[str, Dataset | None]
) -> tuple[list[PlannedRuns], list[str]]:
    """The missing runs with the time of one, from recorded runs on this processor or from measured steps; and notes
    about where it comes from.

    Steps are measured once per model and data set, with one encoding: encodings differ less than machines do."""
    processor, notes = name_of(check_gpu(request.gpu)), dict[str, None]()
    measured: dict[tuple[str, str], Estimate | None] = {}
    planned = []
    with scratch_folder() as folder:
        for row in rows:
            how = (processor, request.threads, request.gpu >= 0)
            alike = [run.seconds for run in row.ours.values() if (run.processor, run.threads, run.gpu >= 0) == how]
            place = (row.cell.dataset, row.cell.model)
            if row.missing and not alike and place not in measured:
                measured[place] = _measured(request, suite, row, datasets[row.cell.dataset], folder, notes)
            found = Estimate(mean(alike), 0.0, (1, 1), (0, 0)) if alike else measured.get(place)
            planned.append(PlannedRuns(row.cell, row.missing, found))
            if row.missing and alike:
                notes["time: the mean of the recorded runs on this processor."] = None
    return planned, list(notes)


def _measured(
    request: Request, suite: Suite, row: SuiteRow, dataset: Dataset | None, folder: Path, notes: dict[str, None]
) -> Estimate | None:
    """Of a few steps on the data set, or on a small one that is generated in its form; None where neither can be."""
    share = 1.0
    if dataset is None:
        if row.dataset_id not in SHARES:
            return None
        dataset, share = _stand_in(row.dataset_id, folder), SHARES[row.dataset_id]
        note = f"on {100 * share:g} % of {row.dataset_id}'s rows, generated in its form, scaled up"
    else:
        note = f"on {row.dataset_id}"
    progress(f"measuring steps of {row.cell.model} with {row.cell.pe} {note}")
    job = jobs_of(request, suite, row.cell, dataset, Store(folder / "store"))[0]
    one = estimate.measure(job.run)
    notes[f"time: from a few steps of {row.cell.model} with {row.cell.pe}, measured {note}."] = None
    steps, batches = ((round(low / share), round(high / share)) for low, high in (one.steps, one.batches))
    return replace(one, steps=steps, batches=batches)


def _stand_in(name: str, folder: Path) -> Dataset:
    """A small data set of the form of a published one."""
    from ctr_pe.data.published.download import fetch
    from ctr_pe.data.published.generate import generate

    if not (folder / f"{name}_generated").exists():
        generate(name, folder / "files" / name, SHARES[name])
        fetch(name, folder, folder / "files" / name)
    return open_dataset(f"{name}_generated", folder)


def _table(
    request: Request, suite: Suite, rows: Sequence[SuiteRow], planned: Sequence[PlannedRuns], notes: Sequence[str]
) -> Table:
    click = suite.task == "click"
    lines, cells = list[dict[str, Any]](), list[dict[str, str | None]]()
    for row, of_row in zip(rows, planned, strict=True):
        cell, shown = row.cell, {key: str(value) for key, value in row.cell.shown.items()}
        low, high = of_row.estimate.seconds if of_row.estimate and row.missing else (math.nan, math.nan)
        measured = dict.fromkeys(name for run in row.ours.values() for name in run.metrics)
        metrics = list(METRICS) if click else list({**row.figures, **measured})
        line: dict[str, Any] = {"dataset": row.dataset_id, "model": cell.model, "pe": cell.pe, **shown}
        for metric in metrics:
            line |= {f"{metric}_published": row.figures.get(metric, math.nan), **mean_columns(row.ours, metric)}
        line |= {"seeds": len(row.ours), "missing": row.missing, "seconds_least": low, "seconds_most": high}
        lines.append(line)
        texts = {
            title: " / ".join(
                f"{line[metric + kind]:.4f}" if click else f"{metric} {line[metric + kind]:.4f}"
                for metric in metrics
                if not math.isnan(line[metric + kind])
            )
            for title, kind in {"published": "_published", "ours": "_mean"}.items()
        }
        cells.append(
            {
                "data set": row.dataset_id,
                "model": cell.model,
                "encoding": cell.pe,
                "varied": " ".join(f"{key}={value}" for key, value in shown.items()) or None,
                **{title: text or None for title, text in texts.items()},
                "seeds": str(len(row.ours)) if row.ours else None,
                "missing": str(row.missing),
                "time of a run": between(low, high) if high > 0 else None,
            }
        )
    left, at_once = [one for one in planned if one.runs], processes(request)
    low, high = estimate.total(left, at_once)
    unknown = sum(one.runs for one in left if not one.estimate)
    time = f"{between(low, high)}, {at_once} at once; less if training stops early" if high else "not known"
    about = [f"Time of the missing runs: {time if left else 'none, for all are there'}."]
    about += [f"Of {counted(unknown, 'run')} the time is not known."] * (high > 0 and unknown > 0)
    for name in dict.fromkeys(row.dataset_id for row in rows) if click else ():
        beside = any(row.figures for row in rows if row.dataset_id == name)
        about += [note for note in reading_notes(name, suite.protocol, beside) if note not in about]
    what = "published and ours: gAUC / AUC / logloss. " if click else ""
    about += [f"{what}ours: means over the seeds that are stored, of runs with the settings of the suite."]
    title = f"{suite.title}, protocol {suite.protocol}, {counted(suite.seeds, 'seed')}"
    return Table(title, lines, cells, [*about, *notes])
