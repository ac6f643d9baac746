"""``ctr-pe benchmark``: train models with several encodings over several seeds, keep every result, print one table."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctr_pe.errors import UserError, counted, nearest, say

if TYPE_CHECKING:
    from ctr_pe.data.dataset import Dataset
    from ctr_pe.study.runner import Job, Train
    from ctr_pe.study.store import Store
    from ctr_pe.study.suite import Cell, Suite

# Keys that a benchmark sets itself, and what the error recommends.
OWN_KEYS = {
    "position_encoding": "use --pe",
    "model": "use --model",
    "dataset_id": "use --dataset",
    "seed": "use --seed",
    "gpu": "use --gpu",
    "debug_mode": "a benchmark has none",
    "target_field": "the data set decides it",
    "sequence_field": "the data set decides it",
    "age_field": "the data set decides it",
    "model_id": "the benchmark decides it",
    "model_root": "checkpoints live in a temporary folder",
}


@dataclass(frozen=True)
class Request:
    """What to run: every model with every encoding, or a suite.

    ``models`` and ``encodings`` select cells of a suite; ``dataset``, ``repeats``, ``protocol`` and ``params`` replace
    its values. None means the suite's value; without a suite, DIN with none and cape on the built-in data, five seeds,
    heldout.

    ``params``: hyper-parameters under FuxiCTR's names. ``out``: directory of results and tables. ``jobs``: runs at
    once, None for one per core. ``threads``: per run. ``gpu``: -1 for the CPU. ``data_root``: directory of data sets.
    """

    suite: str | None = None
    models: Sequence[str] | None = None
    encodings: Sequence[str] | None = None
    dataset: str | None = None
    repeats: int | None = None
    protocol: str | None = None
    seed: int = 0
    params: Mapping[str, Any] = field(default_factory=dict)
    out: Path | None = None
    jobs: int | None = None
    threads: int = 1
    gpu: int = -1
    data_root: Path | None = None
    keep_weights: bool = False


@dataclass(frozen=True)
class Plan:
    """What is run: every cell at every seed. ``folder``: default directory of the results below results/."""

    cells: tuple[Cell, ...]
    protocol: str
    seeds: tuple[int, ...]
    title: str
    folder: str | None = None
    suite: Suite | None = None


def run(request: Request, stand_in: Train | None = None) -> int:
    """Train what the store does not have yet; print the tables and write them beside the store.

    Args:
        request: what to run.
        stand_in: used in place of ``ctr_pe.training.train``; importable in another process.

    Returns:
        Exit code: 0, 1 if runs failed, 130 after Ctrl-C.

    Raises:
        UserError: a name, value, data set, suite or store that cannot be used; nothing has been trained then.
    """
    store: Store | None = None
    jobs: list[Job] = []
    try:
        from ctr_pe.study.runner import run_all
        from ctr_pe.study.store import Store
        from ctr_pe.training import train

        plan = _plan(request)
        names = dict.fromkeys(cell.dataset for cell in plan.cells)
        datasets = {name: find_dataset(name, request.data_root, plan.protocol) for name in names}
        first = next(iter(datasets.values())).dataset_id
        configs = _configs(plan, datasets)
        out = Path(request.out or Path("results") / (plan.folder or f"{first}-{plan.protocol}"))
        store = Store(out)
        by_cell = {
            cell: _jobs(request, plan, cell, configs[cell], datasets[cell.dataset], store) for cell in plan.cells
        }
        # Seed by seed, so that a benchmark that is stopped has complete comparisons.
        jobs = [job for of_seed in zip(*by_cell.values(), strict=True) for job in of_seed]
        workers = _workers(request, len(jobs))
        for dataset in datasets.values():
            keep_rows(store, dataset)
        for notice in store.notices:
            say(notice)
        named = f"{first}: " if plan.suite is None else ""
        say(f"{named}{plan.title} = {len(jobs)} runs, {workers} at once; results in {out}")
        if lacking := _without_weights(store, jobs):
            say(f"{lacking} there already, without weights, and not run again: another --out has them all with weights")
        failed = run_all(jobs, store, stand_in or train, workers)
        _write_tables(store, jobs, plan, by_cell)
    except KeyboardInterrupt:
        done = 0 if store is None else len({job.key for job in jobs} & store.read().keys())
        say(f"stopped: {done} of {len(jobs)} runs are stored; repeat the same command to run what is missing")
        return 130
    if failed:
        say(f"{failed} of {len(jobs)} runs failed; repeat the same command to try them again")
    return 1 if failed else 0


def _plan(request: Request) -> Plan:
    """The plan of a request, checked as far as possible without a data set."""
    from ctr_pe.checks import check_encoding, check_params
    from ctr_pe.model_zoo.keys import check_gpu
    from ctr_pe.study.suite import Grid, Suite, cells, load_suite
    from ctr_pe.training import PROTOCOLS

    check_gpu(request.gpu)
    for option, least in {"repeats": 1, "threads": 1, "jobs": 1, "seed": 0}.items():
        value = getattr(request, option)
        if value is not None and value < least:
            raise UserError(f"--{option} {value}: at least {least}")
    refuse_own_keys("--set", request.params)
    if request.suite is None:
        models = list(dict.fromkeys(["DIN"] if request.models is None else request.models))
        encodings = list(dict.fromkeys(["none", "cape"] if request.encodings is None else request.encodings))
        if not models or not encodings:
            raise UserError("--pe and --model need at least one name each")
        for pe in encodings:
            check_encoding(pe)
        for model in models:
            check_params(model, request.params)
        grid = Grid(models=models, encodings=encodings, datasets=[request.dataset or "synthetic"])
        suite = Suite(title=f"{', '.join(models)} × {', '.join(encodings)}", grids=[grid])
    else:
        suite = load_suite(request.suite)
    found = cells(suite, request.dataset, request.params)
    narrowed = {"model": request.models, "pe": request.encodings}
    for option, names in narrowed.items():
        known = {getattr(cell, option) for cell in found}
        for asked in names or []:
            if asked not in known:
                raise UserError(f"--{option} {asked}: not in suite '{request.suite}': {nearest(asked, known)}")
    found = [
        cell for cell in found if all(getattr(cell, option) in names for option, names in narrowed.items() if names)
    ]
    repeats, protocol = request.repeats or suite.seeds, request.protocol or suite.protocol
    if protocol not in PROTOCOLS:
        raise UserError(f"protocol '{protocol}' is unknown: {nearest(protocol, PROTOCOLS)}")
    if "none" not in [cell.pe for cell in found]:
        say("'none' is not in --pe: without it there is nothing to compare with, and the table has no differences")
    seeds = tuple(range(request.seed, request.seed + repeats))
    count = counted(repeats, "seed")
    if request.suite is None:
        return Plan(tuple(found), protocol, seeds, f"{suite.title} × {count}")
    title = f"{suite.title}: {len(found)} cells × {count}"
    return Plan(tuple(found), protocol, seeds, title, Path(request.suite).stem, suite)


def _configs(plan: Plan, datasets: Mapping[str, Dataset]) -> dict[Cell, dict[str, Any]]:
    """Hyper-parameters of each cell."""
    from ctr_pe.checks import check_params, param_problems

    configs = {}
    for cell in plan.cells:
        dataset = datasets[cell.dataset]
        configs[cell] = run_params(cell.model, dataset.dataset_id, cell.overrides)
        check_params(cell.model, configs[cell])
        if plan.suite is not None:  # hundreds of runs: a model that cannot be built is reported before the first
            own = {"model": cell.model, "dataset_id": dataset.path.name, "position_encoding": cell.pe}
            given = {**configs[cell], **own, "train_data": str(dataset.split("train"))}
            for problem in param_problems(given, dataset.path.parent):
                raise UserError(f"{plan.suite.title}: {cell}: {problem}")
    return configs


def refuse_own_keys(option: str, params: Mapping[str, Any]) -> None:
    """Raises UserError for a key that the benchmark sets itself; ``option`` is the one that gave it."""
    for key in params.keys() & OWN_KEYS.keys():
        raise UserError(f"{option} {key}: {OWN_KEYS[key]}")


def run_params(model: str, dataset_id: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A model's packaged configuration with ``overrides``, without the keys that the benchmark sets itself."""
    from ctr_pe.config import model_params

    params = model_params(model, dataset_id, overrides)
    return {key: value for key, value in params.items() if key not in OWN_KEYS}


def find_dataset(name: str, root: Path | None, protocol: str) -> Dataset:
    """The data set, with the splits that the protocol needs; a built-in one is generated on first use."""
    from ctr_pe.data.built_in import BUILT_IN, generate_built_in
    from ctr_pe.data.dataset import data_root, open_dataset
    from ctr_pe.training import PROTOCOLS

    path = data_root(root) / name
    if name in BUILT_IN and not path.exists():
        say(f"generating the built-in data set in {path}")
        dataset = generate_built_in(path)
    else:
        dataset = open_dataset(name, root)
    train_on, select_on = PROTOCOLS[protocol]
    for split in (*train_on, select_on, "test"):
        dataset.split(split)
    return dataset


def _jobs(
    request: Request, plan: Plan, cell: Cell, params: Mapping[str, Any], dataset: Dataset, store: Store
) -> list[Job]:
    """The cell's runs, one per seed."""
    from ctr_pe.study.runner import Job
    from ctr_pe.study.store import Key, device_of, hash_of
    from ctr_pe.training import Run

    made, digest = [], hash_of(params)
    varied = " ".join(f"{key}={value}" for key, value in cell.varied)
    for seed in plan.seeds:
        hashes = (digest, dataset.data_hash)
        key = Key(cell.model, dataset.dataset_id, plan.protocol, *hashes, cell.pe, seed, device_of(request.gpu))
        weights = store.weights(key) if request.keep_weights else None
        how = (plan.protocol, params, request.gpu, request.threads, weights)
        made.append(Job(Run(cell.model, dataset.path, cell.pe, seed, *how), key, varied))
    return made


def _without_weights(store: Store, jobs: Sequence[Job]) -> int:
    """How many finished runs lack the weights that the request wants."""
    done = store.read()
    return sum(job.key in done for job in jobs if job.run.weights is not None and not job.run.weights.exists())


def _workers(request: Request, runs: int) -> int:
    """Processes at once: ``jobs``, else as many as the cores have threads for, or one on a GPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    default = 1 if request.gpu >= 0 else max(1, cores // request.threads)
    return min(request.jobs or default, runs)


def keep_rows(store: Store, dataset: Dataset) -> None:
    """Store labels, users and history lengths of the test rows, for the bootstrap and the report, and how many rows
    the splits have. Without users every row is a user of its own."""
    import numpy as np
    import polars as pl

    if store.about(dataset.data_hash).keys() >= {"lengths", "splits"}:
        return
    history = dataset.groups[0].history[0]
    frame = pl.read_parquet(dataset.split("test"), columns=[dataset.label, history, *filter(None, [dataset.group_id])])
    labels = frame[dataset.label].to_numpy()
    users = frame[dataset.group_id] if dataset.group_id else pl.int_range(len(frame), eager=True)
    real = frame.select(pl.col(history).list.eval(pl.element() != 0).list.sum().fill_null(0)).to_series()
    lengths = real.clip(upper_bound=dataset.max_len).cast(pl.Int32).to_numpy()
    splits = np.array([dataset.rows.get(split, 0) for split in ("train", "valid", "test")])
    store.save_rows(dataset.data_hash, labels, users.to_numpy(), lengths=lengths, splits=splits)


def _write_tables(store: Store, jobs: Sequence[Job], plan: Plan, by_cell: Mapping[Cell, Sequence[Job]]) -> None:
    """Write table.md, table.csv, table.tex and the forest plot of everything in the store, and the suite's tables;
    print those of the request."""
    from ctr_pe.study import suite_tables
    from ctr_pe.study.forest import write_forest
    from ctr_pe.study.latex import as_latex
    from ctr_pe.study.rendering import as_markdown, as_text
    from ctr_pe.study.tables import as_csv, make_tables

    tables = make_tables(store)
    files = {"table.md": as_markdown(tables), "table.csv": as_csv(tables), "table.tex": as_latex(tables)}
    if plan.suite is None:
        asked = {(*job.key[:5], job.key.device) for job in jobs}
        for table in tables:
            if table.identity in asked:
                print(f"\n{as_text(table)}")
    else:
        keys = {cell: [job.key for job in of_cell] for cell, of_cell in by_cell.items()}
        grids = suite_tables.make(plan.suite, plan.protocol, store, keys)
        print("\n" + "\n\n".join(as_text(grid) for grid in grids))
        files |= {"suite.md": as_markdown(grids), "suite.csv": suite_tables.as_csv(grids)}
    for name, text in files.items():
        try:
            (store.path / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"{store.path / name}: {error.strerror}") from None
    if tables:
        written = [*files, *write_forest(store, tables)]
        print(f"\n{store.path}: {', '.join(written)}, results.jsonl (one line per run)", flush=True)
