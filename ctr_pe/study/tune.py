"""Search of hyper-parameters by Optuna, chosen on the validation rows; the best one's test metrics are reported.

The study is a file: a search that was stopped continues, and several processes may add trials to it. The first trial
has the model's own settings for the data set, as far as the space has them. Trials are trained one after another in
this process, or several at once by an executor (:mod:`ctr_pe.study.executors`): then the study is a journal, in which
the processes that train say how far their trials are. :mod:`ctr_pe.study.halving` is the search of small budgets.
"""

from __future__ import annotations

import csv
import inspect
import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ctr_pe import training
from ctr_pe.config.schema import ExperimentSection, check
from ctr_pe.data.dataset import Dataset
from ctr_pe.evaluation.metrics import monitor_mode, monitored
from ctr_pe.models.sections import check_names, check_params, model_class, unread
from ctr_pe.pe import check_encodings, encoding_class, options_of
from ctr_pe.study import executors
from ctr_pe.study.benchmark import find_dataset, refuse_own_keys, run_params
from ctr_pe.study.estimate import measure
from ctr_pe.study.executors.executor import Executor, Progress, Resources
from ctr_pe.study.rendering import between
from ctr_pe.study.runner import Job, Train, explained
from ctr_pe.study.store import RunKey, hash_of
from ctr_pe.training import Outcome, Run
from ctr_pe.training.dry_build import param_problems
from ctr_pe.utils import distributed, loggers
from ctr_pe.utils.devices import check_gpu
from ctr_pe.utils.errors import Diverged, UserError, progress, say, shown
from ctr_pe.utils.files import file_errors, json_text

try:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import FrozenTrial, TrialState
except ImportError:
    raise UserError("ctr-pe tune needs Optuna: pip install 'ctr_pe[tune]'") from None

STUDY, JOURNAL = "study.db", "study.journal"
EXPID = "best"  # the section of best.yaml
POSITION_DIMS, HEADS, DROPOUTS = [16, 32, 64], [1, 2, 4, 8], [0.0, 0.1, 0.2, 0.3]


@dataclass(frozen=True)
class Search:
    """``params`` are fixed; ``space`` has for each searched key a list of values, or {low, high, log} of a number."""

    model: str
    pe: str
    dataset: Dataset
    params: Mapping[str, Any]
    space: Mapping[str, Any]
    seed: int = 0
    threads: int = 1
    gpu: int = -1
    track: str | None = None

    @property
    def name(self) -> str:
        """Of its study."""
        return f"{self.model}-{self.pe}-{self.dataset.dataset_id}"


@dataclass(frozen=True)
class TrialRun(Run):
    """The run of a trial, by its number in the study."""

    trial: int = -1


def tune(
    search: Search,
    trials: int,
    out: Path,
    train: Train | None = None,
    keep: Callable[..., None] | None = None,
    as_json: bool = False,
    executor: str = "local",
    jobs: int | None = None,
) -> int:
    """Search until the study in ``out`` has ``trials`` trials; report the best there and on the terminal.

    Args:
        train: replaces ``ctr_pe.training.train`` in tests.
        keep: called with a folder in ``out/models`` and what ``Run.keep`` gets, to write a trial's model there; that
            of the best trial stays.
        as_json: the best trial on the terminal as JSON.
        executor: where trials are trained, as :func:`ctr_pe.study.executors.check`.
        jobs: trials at once; None for one in this process, or as many as another executor has room for.

    Returns:
        Exit code: 0, or 130 after Ctrl-C.

    Raises:
        UserError: ``out`` has a study of another search, the training of every trial diverged, or an executor cannot be
            used or has given up a trial.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # this module prints its own lines
    executors.check(executor)
    by_executor = executor != "local" or jobs is not None
    study = _study(search, out, JOURNAL if by_executor else STUDY)
    search = replace(search, track=loggers.below(out, search.track))
    opened: Executor | None = None

    def objective(trial: optuna.Trial) -> float:
        return _run(search, trial, train or training.train, keep and partial(keep, _model(out, trial.number)))

    progress(
        f"{search.model} with {search.pe} on {search.dataset.dataset_id}: {', '.join(search.space)}; study in {out}"
    )
    if done := len(_finished(study)):
        progress(f"{done} of {trials} trials are there already")
    try:
        if by_executor and done < trials:
            resources = Resources(jobs, search.threads, search.gpu)
            trainer = TrialTraining(train or training.train, out / JOURNAL, study.study_name)
            opened = executors.open_executor(executor, trainer, resources, out)
        if train is None and done < trials:
            own: dict[str, Any] = {
                "seed": search.seed,
                "params": search.params,
                "gpu": search.gpu,
                "threads": search.threads,
            }
            seconds = measure(Run(search.model, search.dataset.path, search.pe, **own)).seconds
            left = (trials - done) / (min(opened.workers, trials - done) if opened else 1)
            time = between(*(part * left for part in seconds))
            progress(f"estimated time: {time} (measured steps, extrapolated; less as trials are pruned)")
        if opened:
            _run_by(opened, study, search, trials, out, keep)
        while len(_finished(study)) < trials:  # other processes may add to the same study
            study.optimize(objective, n_trials=1, callbacks=[lambda _, trial: progress(_line(trial))])
            _keep_best(study, out)
    except KeyboardInterrupt:
        say(f"stopped: {len(_finished(study))} of {trials} trials are stored; repeat the same command to go on")
        return 130
    finally:
        if opened:
            opened.close()
    if all(trial.state is TrialState.PRUNED for trial in _finished(study)):
        raise UserError(f"{out}: the training of every trial diverged: another --space")
    _report(search, study, out, as_json)
    return 0


def plan(
    model: str,
    pe: str,
    dataset: str,
    root: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    given: Mapping[str, Any] | None = None,
    **how: Any,
) -> Search:
    """The search of a model's packaged configuration with ``overrides``.

    Its space is ``position_dim`` if the encoding has one, heads and dropout rates if the model has them, as far as the
    model can be built with them; ``given`` adds, replaces, or with None removes. ``how``: other fields of Search.

    Raises:
        UserError: an unknown name, an invalid value, or nothing to search.
    """
    distributed.refuse("tune")
    overrides, given = overrides or {}, given or {}
    refuse_own_keys("--set", overrides)
    refuse_own_keys("--space", given)
    check_encodings(pe)
    check(ExperimentSection, {key: how[key] for key in ("gpu", "seed") if key in how})
    check_gpu(how.get("gpu", -1))
    loggers.check(how.get("track"))
    params = run_params(model, Path(dataset).name, overrides)
    check_params(model, params)
    check_names(model, given)
    if line := unread(model, [pe], overrides, overrides):
        say(f"--set: {model}: {line}")
    search = Search(model, pe, find_dataset(dataset, root, "heldout"), params, {}, **how)
    return replace(search, space=_space(search, given))


def _space(search: Search, given: Mapping[str, Any]) -> dict[str, Any]:
    cls = model_class(search.model)
    keys = {
        name for base in cls.__mro__ if "__init__" in vars(base) for name in inspect.signature(base.__init__).parameters
    }
    space: dict[str, Any] = {}
    links = [cls.native if link == "native" else link for link in search.pe.split("+")]
    if any("position_dim" in options_of(encoding_class(link)) for link in links if isinstance(link, str)):
        space["position_dim"] = POSITION_DIMS
    if "num_heads" in keys:
        fits = [heads for heads in HEADS if not _problems(search, {"num_heads": heads})]
        if len(fits) < len(HEADS):
            say(f"num_heads: only {', '.join(map(str, fits))} divide the items of {search.dataset.dataset_id}")
        space["num_heads"] = fits
    space |= {key: DROPOUTS for key in sorted(keys) if key.endswith("dropout")}
    space = {key: value for key, value in {**space, **given}.items() if value is not None}
    for key in given.keys() & space.keys():
        values = space[key]
        if isinstance(values, dict) and {"low", "high"} <= values.keys() <= {"low", "high", "log"}:
            low, high, log = values["low"], values["high"], values.get("log", False)
            numbers = all(type(one) in (int, float) and math.isfinite(one) for one in (low, high))
            if not numbers or type(log) is not bool or low > high or (log and low <= 0):
                form = "{low: 1e-4, high: 1e-2, log: true}, low not above high, and above 0 with log"
                raise UserError(f"--space {key} must be {form}, got {shown(values)}")
            values = [low, high]
        elif not isinstance(values, list) or not values:
            raise UserError(f"--space {key}: write a list of values, or {{low: 1e-4, high: 1e-2, log: true}}")
        for value in values:
            if found := _problems(search, {key: value}):
                raise UserError(f"--space {key}: {found[0]}")
    if not space:
        raise UserError("nothing to search: name hyper-parameters with --space KEY=[values]")
    return space


def _problems(search: Search, changes: Mapping[str, Any]) -> list[str]:
    path = search.dataset.path
    own = {"model": search.model, "dataset_id": path.name, "position_encoding": search.pe, "monitor": "AUC"}
    return list(param_problems({**search.params, **changes, **own}, path.parent))


def _study(search: Search, out: Path, file: str) -> optuna.Study:
    with file_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    if (out / (other := STUDY if file == JOURNAL else JOURNAL)).exists():
        how = "without" if other == STUDY else "with"
        raise UserError(f"{out}: its study, {other}, was begun {how} --executor or --jobs: go on so, or another --out")
    fixed = {key: value for key, value in search.params.items() if key not in search.space}
    searched = {"fixed": fixed, "space": search.space, "data": search.dataset.data_hash, "pe": search.pe}
    identity = hash_of(searched | {"seed": search.seed} | ({"device": "cuda"} if search.gpu >= 0 else {}))
    study = optuna.create_study(
        storage=_journal(out / JOURNAL) if file == JOURNAL else f"sqlite:///{out / STUDY}",
        study_name=search.name,
        direction="minimize" if monitor_mode(search.params.get("monitor", "AUC")) == "min" else "maximize",
        pruner=_pruner(),
        load_if_exists=True,
    )
    if study.user_attrs.setdefault("identity", identity) != identity:
        raise UserError(f"{out}: a study of other hyper-parameters, data, seed or space: choose another --out")
    study.set_user_attr("identity", identity)
    if not study.trials:
        given = {key: search.params[key] for key in search.space if key in search.params}
        written = {key: _written(value, search.space[key]) for key, value in given.items()}
        study.enqueue_trial({key: one for key, one in written.items() if one is not None})
    # With the same seed after a restart, the sampler would draw the first trials again.
    study.sampler = optuna.samplers.TPESampler(seed=search.seed + len(study.trials), constant_liar=file == JOURNAL)
    return study


def _journal(file: Path) -> JournalStorage:
    """A storage that several machines may write to."""
    return JournalStorage(JournalFileBackend(str(file)))


def _pruner() -> optuna.pruners.BasePruner:
    return optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=1)


def _model(out: Path, trial: int) -> Path:
    return out / "models" / f"trial-{trial}"


def _keep_best(study: optuna.Study, out: Path) -> None:
    """Remove the models of finished trials other than the best."""
    finished = _finished(study)
    if any(trial.state is TrialState.COMPLETE for trial in finished):
        for number in {trial.number for trial in finished} - {study.best_trial.number}:
            shutil.rmtree(_model(out, number), ignore_errors=True)


def _run(search: Search, trial: optuna.Trial, train: Train, keep: Callable[..., None] | None) -> float:
    """Train a trial: the monitor's best value on the validation rows."""
    run = _run_of(search, trial, keep)
    try:
        outcome = train(run, Reported(trial, run))
    except Diverged as error:
        say(f"trial {trial.number} {error}")
        raise optuna.TrialPruned from None
    return _record(trial, run, outcome)


def _run_of(search: Search, trial: optuna.Trial, keep: Callable[..., None] | None, **more: Any) -> TrialRun:
    """With what the study suggests for it."""
    chosen = {key: _suggest(trial, key, choices) for key, choices in search.space.items()}
    trial.set_user_attr("params", chosen)
    how: dict[str, Any] = {"gpu": search.gpu, "threads": search.threads, "track": search.track, **more}
    how |= {"params": {**search.params, **chosen}, "keep": keep, "trial": trial.number}
    return TrialRun(search.model, search.dataset.path, search.pe, search.seed, "heldout", **how)


def _record(trial: optuna.Trial, run: Run, outcome: Outcome) -> float:
    """What the study keeps of a training that has ended, and its value."""
    trial.set_user_attr("test", outcome.metrics)
    trial.set_user_attr("epoch", outcome.epoch)
    monitor = run.params.get("monitor", "AUC")
    best = min if monitor_mode(monitor) == "min" else max
    return float(best(trial.storage.get_trial(trial._trial_id).intermediate_values.values()))


class Reported:
    """Tells the study what came of each evaluation; raises TrialPruned if the trial is not to go on. The process that
    trains a trial calls it."""

    def __init__(self, trial: optuna.Trial, run: Run) -> None:
        self.trial, self.monitor = trial, run.params.get("monitor", "AUC")

    def __call__(self, state: Mapping[str, Any]) -> None:
        if "valid" in state:
            value = monitored(self.monitor, state["valid"])
            if math.isfinite(value):
                self.trial.report(value, state["evaluation"])
            if self.trial.should_prune():
                raise optuna.TrialPruned


@dataclass(frozen=True)
class TrialTraining:
    """Trains a trial of the study in ``journal``, wherever an executor does: a trial that falls behind the others ends
    without metrics."""

    train: Train
    journal: Path
    study: str

    def __call__(self, run: Run, progress: Progress) -> Outcome:
        assert isinstance(run, TrialRun)
        study = optuna.load_study(study_name=self.study, storage=_journal(self.journal), pruner=_pruner())
        trial = next(one for one in study.get_trials(deepcopy=False) if one.number == run.trial)
        reported = Reported(optuna.Trial(study, trial._trial_id), run)

        def both(state: Mapping[str, Any]) -> None:
            progress(state)
            reported(state)

        try:
            return self.train(run, both)
        except optuna.TrialPruned:
            return Outcome({}, epoch=0, seconds=0.0, scores=np.zeros(0, np.float32), parameters=0)


def _run_by(
    executor: Executor,
    study: optuna.Study,
    search: Search,
    trials: int,
    out: Path,
    keep: Callable[..., None] | None,
) -> None:
    """Train trials by an executor until the study has enough.

    Raises:
        UserError: a trial has failed; the traceback of an error that is not the user's is in a file.
    """
    running: dict[int, optuna.Trial] = {}
    try:
        while True:
            while len(running) < executor.workers and len(_finished(study)) + len(running) < trials:
                trial = study.ask()
                state = out / "states" / f"trial-{trial.number}"
                run = _run_of(search, trial, keep and partial(keep, _model(out, trial.number)), resume=state)
                key = RunKey(search.model, search.dataset.dataset_id, "heldout", "", "", search.pe, trial.number)
                running[trial.number] = trial
                executor.submit(Job(run, key))
            if not running:
                return
            for job, kind, content in executor.messages():
                if kind == "progress":
                    continue
                trial = running[job.key.seed]
                if kind in ("failed", "died"):
                    raise UserError(f"trial {trial.number} failed: {explained(job, out, *content)}")
                if kind == "diverged":
                    say(f"trial {trial.number} {content[0]}")
                if kind == "done" and content.metrics:
                    ended = study.tell(trial, _record(trial, job.run, content))
                else:
                    ended = study.tell(trial, state=TrialState.PRUNED)
                del running[trial.number]
                if job.run.resume is not None:
                    job.run.resume.unlink(missing_ok=True)
                progress(_line(ended))
                _keep_best(study, out)
    except BaseException:
        executor.close()
        for trial in running.values():
            study.tell(trial, state=TrialState.FAIL)
        raise


def _suggest(trial: optuna.Trial, key: str, choices: Any) -> Any:
    if isinstance(choices, dict):
        low, high, log = choices["low"], choices["high"], bool(choices.get("log", False))
        if isinstance(low, int) and isinstance(high, int):
            return trial.suggest_int(key, low, high, log=log)
        return trial.suggest_float(key, low, high, log=log)
    named = {json.dumps(value): value for value in choices}  # the study stores no lists
    return named[str(trial.suggest_categorical(key, list(named)))]


def _written(value: Any, choices: Any) -> Any:
    """A value as the study has it; None if the choices do not have it."""
    if isinstance(choices, dict):
        return value if isinstance(value, (int, float)) and choices["low"] <= value <= choices["high"] else None
    return json.dumps(value) if json.dumps(value) in map(json.dumps, choices) else None


def _finished(study: optuna.Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))


def _line(trial: FrozenTrial) -> str:
    chosen = " ".join(f"{key}={value}" for key, value in trial.user_attrs.get("params", {}).items())
    if "epoch" not in trial.user_attrs:
        return f"trial {trial.number}: pruned after epoch {max(trial.intermediate_values, default=0)}: {chosen}"
    return f"trial {trial.number}: {trial.value:.6f} at epoch {trial.user_attrs['epoch']}: {chosen}"


def _report(search: Search, study: optuna.Study, out: Path, as_json: bool) -> None:
    """The best trial on the terminal, as text or JSON, and, as a model config, in ``best.yaml``; all of them in
    ``trials.csv``."""
    best = study.best_trial
    chosen, test = best.user_attrs["params"], best.user_attrs["test"]
    in_words = "  ".join(f"{name} {value:.6f}" for name, value in test.items())
    count = len(_finished(study))
    text = f"# Trial {best.number} of {count}: {best.value:.6f} on the validation rows; test: {in_words}\n"
    text += f"# python model_zoo/run_expid.py --config {out / 'best.yaml'} --expid {EXPID}\n"
    path = search.dataset.path
    own: dict[str, Any] = {"model": search.model, "dataset_id": path.name, "data_root": str(path.parent)}
    own |= {"position_encoding": search.pe, "seed": search.seed, "gpu": search.gpu}
    section = {EXPID: {**own, **search.params, **chosen}}
    (out / "best.yaml").write_text(text + yaml.safe_dump(section, sort_keys=False), "utf-8")
    with open(out / "trials.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["trial", "state", "valid", "epoch", *[f"test_{name}" for name in test], *chosen])
        for trial in _finished(study):
            found, state = trial.user_attrs, trial.state.name.lower()
            metrics = [found.get("test", {}).get(name) for name in test]
            values = [found["params"][key] for key in chosen]
            writer.writerow([trial.number, state, trial.value, found.get("epoch"), *metrics, *values])
    if as_json:
        found = {"trials": count, "best": best.number, "validation": best.value, "test": test, "params": chosen}
        print(json_text(found | {"out": out}), end="", flush=True)
        return
    print(f"best of {count} trials on the validation rows: trial {best.number}, {best.value:.6f}")
    print(f"test: {in_words}")
    print(" ".join(f"--set '{key}={json.dumps(value)}'" for key, value in chosen.items()))
    model = [str(_model(out, best.number).relative_to(out))] if _model(out, best.number).is_dir() else []
    kept = STUDY if (out / STUDY).exists() else JOURNAL
    print(f"{out}: {', '.join(['best.yaml', 'trials.csv', kept, *model])}", flush=True)
