"""``ctr-pe benchmark``: train models with several encodings over several seeds, keep every result, print one table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from ctr_pe.config.schema import ExperimentSection, check, valid
from ctr_pe.config.yaml import load_json, model_params, next_item_params, packaged_yaml, parse_yaml
from ctr_pe.data.dataset import Dataset
from ctr_pe.data.description import description
from ctr_pe.data.root import REPORT
from ctr_pe.data.synthetic.built_in import DEFAULT, open_or_generate
from ctr_pe.evaluation.metrics import METRICS
from ctr_pe.models.sections import check_names, check_params, model_class, origins, unread
from ctr_pe.pe import check_encodings
from ctr_pe.study import estimate, executors, halving, next_item, runner, trials
from ctr_pe.study.differences import settings
from ctr_pe.study.executors.executor import Executor, Resources
from ctr_pe.study.halving import SEARCHED
from ctr_pe.study.marks import beside_published
from ctr_pe.study.rendering import Table, between, show, texts, write_texts
from ctr_pe.study.runner import Job, Train
from ctr_pe.study.store import Result, RunKey, Store, hash_of, repair
from ctr_pe.study.suite import OWN_KEYS, Cell, Grid, Suite, Task, cells, load_suite
from ctr_pe.study.tables import make_suite_tables, make_tables, published, write_files
from ctr_pe.study.trials import Trials
from ctr_pe.training import PROTOCOLS, Run, train
from ctr_pe.training.dry_build import param_problems
from ctr_pe.training.source import check_monitor
from ctr_pe.utils import distributed, loggers
from ctr_pe.utils.devices import check_gpu
from ctr_pe.utils.errors import UserError, counted, nearest, progress, say

PUBLISHED = {"click": "cape_table2", "next-item": next_item.PUBLISHED}
"""Task -> the file of ``config/published`` whose figures stand beside ours."""
DEFAULT_MODEL = {"click": "DIN", "next-item": "SASRec"}


@dataclass(frozen=True)
class Request:
    """What to run: every model with every encoding, or a suite.

    ``task``: ``click`` or ``next-item`` (:mod:`ctr_pe.study.next_item`), of a suite its own; what models names mean.
    ``models`` and ``encodings`` select cells of a suite; ``dataset``, ``repeats``, ``protocol``, ``params``, ``tune``
    replace its values. None means the suite's value; without a suite, DIN with none and cape on the built-in set
    ``DEFAULT``, five seeds, heldout.

    ``params``: hyper-parameters under FuxiCTR's names. ``tune``: several values each, of which every cell takes the
    combination that is best on the validation rows, or how many settings every cell searches, as in ``CTRRanker``
    (:mod:`ctr_pe.study.trials`). ``out``: directory of results and
    tables. ``executor``: where runs are trained (:mod:`ctr_pe.study.executors`). ``jobs``: runs at once, None for as
    many as there is room for. ``threads``: per run. ``gpu``: -1 for the CPU. ``data_root``:
    directory of data sets. ``keep``: called with a folder below ``out`` and what ``Run.keep`` gets, to write the model
    there. ``track``: a tracker (:mod:`ctr_pe.utils.loggers`), TensorBoard's in ``out`` unless it names a directory.
    ``dry_run``: only the plan and an estimate of its time. ``repair``: first set aside lines of results.jsonl that are
    no results. ``format``: of the tables that are printed, ``text`` or one of
    :data:`ctr_pe.study.rendering.FORMATS`; ``published``: with columns of published figures.
    """

    suite: str | None = None
    task: str | None = None
    models: Sequence[str] | None = None
    encodings: Sequence[str] | None = None
    dataset: str | None = None
    repeats: int | None = None
    protocol: str | None = None
    seed: int = 0
    params: Mapping[str, Any] = field(default_factory=dict)
    tune: Mapping[str, Any] | int | str | None = None
    out: Path | None = None
    executor: str = "local"
    jobs: int | None = None
    threads: int = 1
    gpu: int = -1
    data_root: Path | None = None
    keep_weights: bool = False
    keep: Callable[..., None] | None = None
    track: str | None = None
    dry_run: bool = False
    repair: bool = False
    format: str = "text"
    published: bool = False


def run(request: Request, stand_in: Train | None = None) -> int:
    """Train what the store does not have yet; print the tables and write them beside the store. A dry run prints what
    would be trained.

    Args:
        request: what to run.
        stand_in: used in place of ``ctr_pe.training.train``; importable in another process.

    Returns:
        Exit code: 0, 1 if runs failed or, in a dry run, would fail before their first step, 130 after Ctrl-C.

    Raises:
        UserError: a name, value, data set, suite or store that cannot be used; nothing has been trained then.
    """
    stages: dict[Store, Sequence[Job]] = {}
    executor: Executor | None = None
    trainer = stand_in or train
    try:
        suite, rows = plan(request)
        task = suite.task
        names = dict.fromkeys(cell.dataset for cell in rows)
        datasets = {name: find_dataset(name, request.data_root, suite.protocol) for name in names}
        if request.published:
            _refuse_unpublished(suite, rows, datasets)
        first = next(iter(datasets.values())).dataset_id
        folder = Path(request.suite).stem if request.suite else f"{first}-{suite.protocol}"
        out = request.out or Path("results") / folder
        if request.repair:
            say(repair(out))
        store = Store(out)
        tuning = _tuning(request, suite, rows, datasets, out)

        def jobs_of_rows() -> dict[Cell, list[Job]]:
            """Of those that tune something once their trials are there."""
            found = tuning.rungs
            chosen = [found[row][1] if row in found else row for row in rows]
            return {cell: jobs_of(request, suite, cell, datasets[cell.dataset], store) for cell in chosen}

        by_cell = jobs_of_rows()
        stages = {tuning.store: tuning.jobs, store: _seed_by_seed(by_cell)}
        for one, of_stage in stages.items():
            for notice in one.notices:
                say(notice)
            _refuse_other_classes(one, of_stage, one.read())
        for model in dict.fromkeys(row.model for row in rows):
            if line := unread(model_class(model, task), {row.pe: None for row in rows}, request.params, request.params):
                say(f"--set: {model}: {line}")
        _refuse_what_cannot_be_monitored(stages, datasets)
        _say_what_has_no_baseline([job.key for job in stages[store]], store.read())
        trials_by_cell, searched = tuning.by_cell, len(tuning.jobs)
        if task == "click" and (request.suite or (stand_in is None and not request.dry_run)):
            _refuse_unbuildable(suite.title, [*trials_by_cell, *by_cell], datasets)
        if not request.dry_run:
            executor = executors.open_executor(request.executor, trainer, _resources(request), out)
        workers = min(processes(request) if executor is None else executor.workers, sum(map(len, stages.values())))
        title = f"{suite.title}: {len(rows)} cells" if request.suite else f"{first}: {suite.title}"
        title += f" × {counted(suite.seeds, 'seed')} = {len(stages[store])} runs"
        title += f" after {counted(searched, 'trial')}" * bool(searched)
        title += f" of {rows[0].search} settings per row" * bool(rows[0].search)
        if not request.dry_run:
            progress(f"{title}, {workers} at once; results in {store.path}")
        done = {*tuning.done, *store.read()}
        measured = stand_in is None or request.dry_run
        planned = estimate.measure_all({**trials_by_cell, **by_cell}, done) if measured else []
        if request.dry_run:
            heading = f"Dry run. {title}"
            if not planned:
                (print if request.format == "text" else progress)(f"{heading}: all are there already")
            tables = [estimate.plan_table(f"{heading}, {workers} at once", planned, workers)] if planned else []
            show(tables, request.format, lead="")
            return int(any(one.problem for one in planned))
        if task != "click" and (problem := next((one for one in planned if one.problem), None)):
            raise UserError(f"{problem.cell}: {problem.problem}")
        if any(one.estimate for one in planned):
            time = between(*estimate.total(planned, workers))
            how = f"{estimate.STEPS} measured steps of each model and encoding, extrapolated"
            progress(f"estimated time: {time} ({how}; less if training stops early)")
        assert executor is not None  # this is no dry run
        # No figure on test rows, by which one could choose
        figures: dict[str, Any] = {"figures": lambda result: {"validation": trials.on_validation(result)}}
        while to_do := tuning.to_do:
            runner.run_all(to_do, tuning.store, executor, **figures)
            if missing := len({job.key for job in to_do} - tuning.done.keys()):
                say(f"{missing} of {searched} trials failed; repeat the same command to try them again")
                return 1
            by_cell = jobs_of_rows()
            stages |= {tuning.store: tuning.jobs, store: _seed_by_seed(by_cell)}
        _say_what_is_not_kept(request, store, stages[store])
        for dataset in datasets.values():
            keep_rows(store, dataset)
        failed = runner.run_all(stages[store], store, executor)
        of_suite = suite if request.suite or tuning.rows else None
        if task == "click":
            tables, files = _write_tables(store, of_suite, by_cell, tuning)
        else:
            tables, files = _write_next_item_tables(store, of_suite, by_cell, datasets)
        if request.published:
            tables = [beside_published(table) for table in tables]
        show(tables, request.format)
        if files:
            line = f"{store.path}: {', '.join(files)}, results.jsonl (one line per run)"
            print(f"\n{line}", flush=True) if request.format == "text" else progress(line)
    except KeyboardInterrupt:
        finished = sum(len({job.key for job in of_stage} & one.read().keys()) for one, of_stage in stages.items())
        every = sum(map(len, stages.values()))
        say(f"stopped: {finished} of {every} runs are stored; repeat the same command to run what is missing")
        return 130
    finally:
        if executor is not None:
            executor.close()
    if failed:
        say(f"{failed} of {len(stages[store])} runs failed; repeat the same command to try them again")
    return 1 if failed else 0


def processes(request: Request) -> int:
    """How many runs train at once on this machine, if there are enough."""
    return _resources(request).at_once()


def _resources(request: Request) -> Resources:
    return Resources(request.jobs, request.threads, request.gpu)


def plan(request: Request) -> tuple[Suite, list[Cell]]:
    """The suite of a request, with its number of seeds and protocol, and the cells to run, checked as far as possible
    without a data set."""
    distributed.refuse("benchmark")
    executors.check(request.executor)
    loggers.check(request.track)
    check(ExperimentSection, {"gpu": request.gpu, "seed": request.seed})
    check_gpu(request.gpu)
    for option in ("repeats", "threads", "jobs"):
        value = getattr(request, option)
        if value is not None and value < 1:
            raise UserError(f"--{option} {value}: at least 1")
    refuse_own_keys("--set", request.params)
    tune = request.tune if isinstance(request.tune, Mapping) else {}
    refuse_own_keys("--tune", tune)
    for key, values in tune.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"--tune {key}: write a list of values, such as [1e-3, 3e-3]")
        if key in request.params:
            raise UserError(f"--tune {key}: it is in --set too")
    if request.suite is None:
        task = valid("--task", Task, request.task or "click")
        if task != "click" and request.dataset is None:
            raise UserError(f"--task {task} needs --dataset: one of `ctr-pe data build --protocol leave-one-out`")
        models = [DEFAULT_MODEL[task]] if request.models is None else list(dict.fromkeys(request.models))
        encodings = ["none", "cape"] if request.encodings is None else list(dict.fromkeys(request.encodings))
        if not models or not encodings:
            raise UserError("--pe and --model need at least one name each")
        for pe in encodings:
            check_encodings(pe)
        for model in models:
            check_params(model_class(model, task), request.params)
            check_names(model_class(model, task), tune)
        grid = Grid(models=models, encodings=encodings, datasets=[DEFAULT])
        suite = Suite(title=f"{', '.join(models)} × {', '.join(encodings)}", task=task, grids=[grid])
    else:
        suite = load_suite(request.suite)
        if request.task not in (None, suite.task):
            raise UserError(f"--task {request.task}: suite '{request.suite}' is of task {suite.task}")
    search = 0 if isinstance(request.tune, Mapping) else halving.budget(request.tune)
    every = cells(suite, request.dataset, request.params, tune)
    for cell in every if search else ():
        for key in [*cell.tune, *(key for key in cell.varied if key in SEARCHED)]:
            raise UserError(f"--tune {request.tune}: the suite has values of '{key}' of its own: --tune '{key}=[…]'")
    found = every = [replace(cell, search=search) for cell in every]
    for option, names in {"model": request.models, "pe": request.encodings}.items():
        known = {getattr(cell, option) for cell in every}
        for name in names or []:
            if name not in known:
                raise UserError(f"--{option} {name}: not in suite '{request.suite}': {nearest(name, known)}")
        found = [cell for cell in found if not names or getattr(cell, option) in names]
    protocol = request.protocol or suite.protocol
    if suite.task != "click" and protocol != "heldout":
        raise UserError(f"protocol '{protocol}': task {suite.task} has heldout alone: the epoch is chosen on valid")
    if protocol not in PROTOCOLS:
        raise UserError(f"protocol '{protocol}' is unknown: {nearest(protocol, PROTOCOLS)}")
    return suite.model_copy(update={"seeds": request.repeats or suite.seeds, "protocol": protocol}), found


def refuse_own_keys(option: str, params: Mapping[str, Any]) -> None:
    """Raises UserError for a key that the benchmark sets itself; ``option`` is the one that gave it."""
    for key in params.keys() & OWN_KEYS.keys():
        raise UserError(f"{option} {key}: {OWN_KEYS[key]}")


def run_params(
    model: str, dataset_id: str, overrides: Mapping[str, Any] | None = None, task: str = "click"
) -> dict[str, Any]:
    """A model's packaged configuration with ``overrides``, without the keys that the benchmark sets itself. Metrics
    other than the default ones are measured beside these, which tables are made of."""
    if task == "next-item":
        params = next_item_params(model, dataset_id, overrides)
        return {key: value for key, value in params.items() if key not in OWN_KEYS}
    params = model_params(model, dataset_id, overrides)
    named = params.get("metrics")
    if isinstance(named, list) and not {*map(str, named)} <= {*METRICS}:
        params["metrics"] = list(dict.fromkeys([*METRICS, *named]))
    return {key: value for key, value in params.items() if key not in OWN_KEYS}


def find_dataset(name: str, root: Path | None, protocol: str) -> Dataset:
    """The data set, with the splits that the protocol needs; a built-in one is generated on first use."""
    dataset = open_or_generate(name, root)
    train_on, select_on = PROTOCOLS[protocol]
    for split in (*train_on, select_on, "test"):
        dataset.split(split)
    return dataset


def jobs_of(request: Request, suite: Suite, cell: Cell, dataset: Dataset, store: Store) -> list[Job]:
    """The cell's runs, one per seed, with hyper-parameters that were checked."""
    params = run_params(cell.model, dataset.dataset_id, cell.overrides, suite.task)
    cls = model_class(cell.model, suite.task)
    check_params(cls, params)
    jobs, code = [], hash_of(runner.made_by())
    varied = " ".join(f"{key}={value}" for key, value in cell.shown.items())
    device = "cuda" if request.gpu >= 0 else "cpu"
    for seed in range(request.seed, request.seed + suite.seeds):
        same: dict[str, Any] = {"pe": cell.pe, "protocol": suite.protocol, "seed": seed}
        hashes: dict[str, Any] = {"config_hash": hash_of(params), "data_hash": dataset.data_hash}
        key = RunKey(**same, **hashes, model=cell.model, dataset=dataset.dataset_id, device=device)
        run = Run(
            **same,
            model=cell.model if suite.task == "click" else cls,
            dataset=dataset.path,
            params=params,
            gpu=request.gpu,
            threads=request.threads,
            weights=store.weights(key) if request.keep_weights else None,
            keep=partial(request.keep, store.model(key)) if request.keep else None,
            track=loggers.below(store.path, request.track),
            resume=store.state(key, code),
        )
        jobs.append(Job(run, key, varied))
    return jobs


def _tuning(request: Request, suite: Suite, rows: Sequence[Cell], datasets: Mapping[str, Dataset], out: Path) -> Trials:
    """Those of the rows that tune something."""
    store = Store(out / trials.FOLDER)
    request = replace(request, seed=trials.SEED, keep_weights=False, keep=None)
    suite = suite.model_copy(update={"seeds": 1, "protocol": "heldout"})

    def params(row: Cell) -> dict[str, Any]:
        return run_params(row.model, datasets[row.dataset].dataset_id, row.overrides, suite.task)

    @cache
    def job(trial: Cell) -> Job:
        return jobs_of(request, suite, trial, datasets[trial.dataset], store)[0]

    return Trials(store, [row for row in rows if row.tune or row.search], params, job)


def _seed_by_seed(by_cell: Mapping[Cell, Sequence[Job]]) -> list[Job]:
    """So that a benchmark that is stopped has complete comparisons."""
    return [job for of_seed in zip(*by_cell.values(), strict=True) for job in of_seed]


def _say_what_has_no_baseline(keys: Sequence[RunKey], done: Iterable[RunKey]) -> None:
    """Of a model and data set without runs of ``none``, neither to be made nor there already."""
    compared = {(key.model, key.dataset) for key in (*keys, *done) if key.pe == "none"}
    for model, dataset in dict.fromkeys((key.model, key.dataset) for key in keys):
        if (model, dataset) not in compared:
            say(f"{model} on {dataset}: no runs of 'none', so its table has no differences: add none to --pe")


def _say_what_is_not_kept(request: Request, store: Store, jobs: Sequence[Job]) -> None:
    """Runs that are there already are not trained again for their weights or models."""
    stored = [job.key for job in jobs if job.key in store.read()]
    wanted = {"weights": request.keep_weights and store.weights, "models": request.keep and store.model}
    for what, path in wanted.items():
        if path and (lacking := sum(not path(key).exists() for key in stored)):
            there = f"{lacking} there already, without {what}, and not run again"
            say(f"{there}: another --out has them all with {what}")


def _refuse_unbuildable(title: str, found: Sequence[Cell], datasets: Mapping[str, Dataset]) -> None:
    """A model that cannot be built is reported before the first run."""
    for cell in found:
        dataset = datasets[cell.dataset]
        given = run_params(cell.model, dataset.dataset_id, cell.overrides)
        given |= {"model": cell.model, "dataset_id": dataset.path.name, "position_encoding": cell.pe}
        for problem in param_problems({**given, "train_data": str(dataset.split("train"))}, dataset.path.parent):
            raise UserError(f"{title}: {cell}: {problem}")


def _refuse_what_cannot_be_monitored(stages: Mapping[Store, Sequence[Job]], datasets: Mapping[str, Dataset]) -> None:
    """Of rows that cannot select an epoch it is said once, not by every run."""
    of_path, checked = {dataset.path: dataset for dataset in datasets.values()}, list[Any]()
    for run in [job.run for jobs in stages.values() for job in jobs]:
        assert isinstance(run.dataset, Path)
        dataset = of_path[run.dataset]
        file, user = dataset.split(PROTOCOLS[run.protocol][1]), run.params.get("group_id") or dataset.group_id
        wanted = (str(file), dataset.label, user, run.params.get("monitor", "AUC"))
        if wanted not in checked:
            check_monitor(*wanted)
            checked.append(wanted)


def _refuse_other_classes(store: Store, jobs: Sequence[Job], done: Mapping[RunKey, Result]) -> None:
    """A name may have become another package's since its runs were stored."""
    for key in [job.key for job in jobs if job.key in done]:
        then, now = done[key].origins, origins(key.model, key.pe)
        for name in then.keys() & now.keys():
            if then[name].split()[0] != now[name].split()[0]:
                what = f"its runs of '{name}' are of {then[name]}, now {now[name]}"
                raise UserError(f"{store.path}: {what}: another --out")


def keep_rows(store: Store, dataset: Dataset) -> None:
    """Store labels, users and history lengths of the test rows, for the tables and the report, how many rows the
    splits have, the click rate of the training rows, and what columns there are. Without users every row is a user of
    its own."""
    if store.about(dataset.data_hash).keys() >= {"lengths", "splits", "click_rate", "description"}:
        return
    history = dataset.groups[0].history[0]
    frame = pl.read_parquet(dataset.split("test"), columns=[dataset.label, history, *filter(None, [dataset.group_id])])
    users = frame[dataset.group_id] if dataset.group_id else pl.int_range(len(frame), eager=True)
    store.save_rows(
        dataset.data_hash,
        frame[dataset.label].to_numpy(),
        users.to_numpy(),
        lengths=frame[history].list.len().clip(upper_bound=dataset.max_len).cast(pl.Int32).to_numpy(),
        splits=np.array([dataset.rows.get(split, 0) for split in ("train", "valid", "test")]),
        description=np.array(json.dumps(description(dataset))),
        click_rate=pl.scan_parquet(dataset.split("train")).select(pl.col(dataset.label).mean()).collect().item(),
        **({"next_item": np.array(True)} if dataset.task == "next-item" else {}),
    )


def _write_next_item_tables(
    store: Store, suite: Suite | None, by_cell: Mapping[Cell, Sequence[Job]], datasets: Mapping[str, Dataset]
) -> tuple[list[Table], list[str]]:
    """The same of next-item runs."""
    keys = {cell: [job.key for job in jobs] for cell, jobs in by_cell.items()}
    protocols = {dataset.dataset_id: protocol_of(dataset) for dataset in datasets.values()}
    return next_item.write_tables(store, suite, keys, protocols), ["table.md", "table.csv", "table.tex"]


def protocol_of(dataset: Dataset) -> str:
    """By which a log was made into a data set; empty if its report does not say."""
    recipe = load_json(dataset.path / REPORT).get("recipe")
    return str(recipe.get("protocol", "")) if isinstance(recipe, dict) else ""


def _write_tables(
    store: Store, suite: Suite | None, by_cell: Mapping[Cell, Sequence[Job]], tuning: Trials
) -> tuple[list[Table], list[str]]:
    """Write the tables of everything in the store, of the suite and of its trials: those of the request, and the names
    of the files."""
    keys = {cell: [job.key for job in jobs] for cell, jobs in by_cell.items()}
    requested = {key.setting for of_cell in keys.values() for key in of_cell}
    found = settings(store)
    notes = [tuning.note()] if tuning.rows else []
    of_suite = [] if suite is None else make_suite_tables(suite, store, keys, notes)
    of_request = [table for setting in found if setting.key.setting in requested for table in make_tables(setting)]
    files = write_files(store, found, of_suite)
    if tuning.rows:
        files += [f"{trials.FOLDER}/{name}" for name in write_texts(tuning.store.path, texts([tuning.table()]))]
    return of_suite or of_request, files if found else []


def stored_tables(store: Store, root: Path | None = None) -> list[Table]:
    """The tables of everything in a store, without training.

    Args:
        root: directory of data sets; where one of next items is not there, its table is without its protocol and the
            published figures.
    """
    tables = []
    for setting in settings(store):
        key = setting.key
        if not next_item.of_next_items(setting.results):
            tables += make_tables(setting)
            continue
        try:
            protocol = protocol_of(find_dataset(key.dataset, root, key.protocol))
        except UserError:
            protocol = ""
        tables.append(next_item.setting_table(store, key.setting, setting.runs, setting.failed, protocol))
    return tables


def _refuse_unpublished(suite: Suite, rows: Sequence[Cell], datasets: Mapping[str, Dataset]) -> None:
    """Raises UserError where no figure is published of any row."""
    for row in rows:
        dataset = datasets[row.dataset]
        if published_figures(suite, row, dataset.dataset_id, protocol_of(dataset)):
            return
    names = [", ".join(dict.fromkeys(getattr(row, of) for row in rows)) for of in ("model", "dataset")]
    known = parse_yaml(packaged_yaml("published")[suite.published or PUBLISHED[suite.task]], "config/published")
    raise UserError(f"--published: nothing is published of {names[0]} on {names[1]}: {nearest(names[1], known)}")


def published_figures(suite: Suite, row: Cell, dataset_id: str, protocol: str) -> Mapping[str, float]:
    """Metric -> the figure that is published of a row, where nothing is varied; empty where none is. ``protocol``: by
    which the log was made into the data set."""
    if row.varied:
        return {}
    if suite.task == "click":
        return published(dataset_id, row.model, suite.published or PUBLISHED["click"]).get(row.pe, {})
    found: Mapping[str, Any] = next_item.published(dataset_id, protocol, row.model)["figures"]
    return dict(found.get(row.pe, {}))
