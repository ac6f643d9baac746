"""The main job: train models with several encodings over several seeds, keep every result, print one table."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctr_pe.errors import UserError, nearest

if TYPE_CHECKING:
    import argparse

    from ctr_pe.benchmark.runner import Job, Train
    from ctr_pe.benchmark.store import Store
    from ctr_pe.data.dataset import Dataset

# Keys that a benchmark sets itself, and what to say instead of --set.
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


def main(args: argparse.Namespace, stand_in: Train | None = None) -> int:
    """``ctr-pe benchmark``. Prints the tables and writes them beside the store.

    Args:
        args: model, pe: lists of names; dataset, repeats, seed, protocol, out, jobs, threads, gpu, set, data_root.
        stand_in: used in place of ``ctr_pe.training.train``; importable in another process.

    Returns:
        Exit code: 0, 1 if runs failed, 130 after Ctrl-C.

    Raises:
        UserError: a name, value, data set or store that cannot be used; nothing has been trained then.
    """
    store: Store | None = None
    jobs: Sequence[Job] = ()
    try:
        from ctr_pe.benchmark.runner import run_all
        from ctr_pe.benchmark.store import Store
        from ctr_pe.training import train

        _check_names(args)
        dataset = find_dataset(args.dataset, args.data_root, args.protocol)
        configs = _configs(args, dataset)
        out = Path(args.out or Path("results") / f"{dataset.dataset_id}-{args.protocol}")
        store = Store(out)
        jobs = _jobs(args, configs, dataset)
        workers = _workers(args, len(jobs))
        _keep_rows(store, dataset)
        for notice in store.notices:
            _say(notice)
        grid = f"{', '.join(configs)} × {', '.join(_unique(args.pe))} × {args.repeats} seed{'s' * (args.repeats > 1)}"
        _say(f"{dataset.dataset_id}: {grid} = {len(jobs)} runs, {workers} at once; results in {out}")
        failed = run_all(jobs, store, stand_in or train, workers)
        _write_tables(store, jobs)
    except KeyboardInterrupt:
        done = 0 if store is None else len({job.key for job in jobs} & store.read().keys())
        _say(f"stopped: {done} of {len(jobs)} runs are stored; repeat the same command to run what is missing")
        return 130
    if failed:
        _say(f"{failed} of {len(jobs)} runs failed; repeat the same command to try them again")
    return 1 if failed else 0


def _check_names(args: argparse.Namespace) -> None:
    """What can be checked without a data set."""
    from ctr_pe.config import parse_overrides
    from ctr_pe.training import PROTOCOLS, check_encoding, check_params

    for option, least in {"repeats": 1, "threads": 1, "jobs": 1, "seed": 0}.items():
        value = getattr(args, option)
        if value is not None and value < least:
            raise UserError(f"--{option} {value}: at least {least}")
    if not args.pe or not args.model:
        raise UserError("--pe and --model need at least one name each")
    for pe in args.pe:
        check_encoding(pe)
    if args.protocol not in PROTOCOLS:
        raise UserError(f"protocol '{args.protocol}' is unknown: {nearest(args.protocol, PROTOCOLS)}")
    for key in parse_overrides(args.set):
        if key in OWN_KEYS:
            raise UserError(f"--set {key}: {OWN_KEYS[key]}")
    for model in args.model:
        check_params(model, parse_overrides(args.set))
    if "none" not in args.pe:
        _say("'none' is not in --pe: without it there is nothing to compare with, and the table has no differences")


def _configs(args: argparse.Namespace, dataset: Dataset) -> dict[str, dict[str, Any]]:
    """Hyper-parameters of each model asked for."""
    from ctr_pe.config import model_params, parse_overrides
    from ctr_pe.training import check_params

    configs = {}
    overrides = parse_overrides(args.set)
    for model in _unique(args.model):
        params = model_params(model, dataset.dataset_id, overrides)
        configs[model] = {key: value for key, value in params.items() if key not in OWN_KEYS}
        check_params(model, configs[model])
    return configs


def find_dataset(name: str, root: Path | None, protocol: str) -> Dataset:
    """The data set, with the splits that the protocol needs; the built-in one is generated on first use."""
    from ctr_pe.data.dataset import data_root, open_dataset
    from ctr_pe.training import PROTOCOLS

    built_in = data_root(root) / "synthetic"
    if name == "synthetic" and not built_in.exists():
        from ctr_pe.data.synthetic import generate

        _say(f"generating the built-in data set in {built_in}")
        dataset = generate(built_in)
    else:
        dataset = open_dataset(name, root)
    train_on, select_on = PROTOCOLS[protocol]
    for split in (*train_on, select_on, "test"):
        dataset.split(split)
    return dataset


def _jobs(args: argparse.Namespace, configs: dict[str, dict[str, Any]], dataset: Dataset) -> list[Job]:
    """The grid, seed by seed, so that a benchmark that was stopped holds complete comparisons."""
    from ctr_pe.benchmark.runner import Job
    from ctr_pe.benchmark.store import Key, hash_of
    from ctr_pe.training import Run

    jobs = []
    for seed in range(args.seed, args.seed + args.repeats):
        for model, params in configs.items():
            for pe in _unique(args.pe):
                run = Run(model, dataset.path, pe, seed, args.protocol, params, args.gpu, args.threads)
                key = Key(model, dataset.dataset_id, args.protocol, hash_of(params), dataset.data_hash, pe, seed)
                jobs.append(Job(run, key))
    return jobs


def _workers(args: argparse.Namespace, runs: int) -> int:
    """Processes at once: as asked, else the cores shared out, and one on a GPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    default = 1 if args.gpu >= 0 else max(1, cores // args.threads)
    return min(args.jobs or default, runs)


def _keep_rows(store: Store, dataset: Dataset) -> None:
    """Labels and users of the test rows, for the bootstrap. Without users every row stands for itself."""
    import polars as pl

    frame = pl.read_parquet(dataset.split("test"), columns=[dataset.label, *filter(None, [dataset.group_id])])
    labels = frame[dataset.label].to_numpy()
    users = frame[dataset.group_id] if dataset.group_id else pl.int_range(len(frame), eager=True)
    store.save_rows(dataset.data_hash, labels, users.to_numpy())


def _write_tables(store: Store, jobs: Sequence[Job]) -> None:
    """table.md and table.csv of everything in the store; what was asked for also on the terminal."""
    from ctr_pe.benchmark.tables import as_csv, as_markdown, as_text, make_tables

    tables = make_tables(store)
    asked = {tuple(str(part) for part in job.key[:5]) for job in jobs}
    for table in tables:
        if table.identity in asked:
            print(f"\n{as_text(table)}")
    for name, text in {"table.md": as_markdown(tables), "table.csv": as_csv(tables)}.items():
        try:
            (store.path / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"{store.path / name}: {error.strerror}") from None
    if tables:
        print(f"\n{store.path}: table.md, table.csv, results.jsonl (one line per run)", flush=True)


def _unique(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


__all__ = ["main"]
