"""``ctr-pe tune``: hyper-parameters by Optuna, chosen on the validation rows; the best one's test metrics are reported.

The study is a file, so a search that was stopped goes on where it was, and several processes may work on one.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctr_pe.errors import UserError

if TYPE_CHECKING:
    import argparse

    import optuna

    from ctr_pe.data.dataset import Dataset
    from ctr_pe.training import Outcome, Run

    Train = Callable[[Run, Callable[[Mapping[str, Any]], None]], Outcome]

STUDY = "study.db"
POSITION_DIMS, HEADS, DROPOUTS = [16, 32, 64], [1, 2, 4, 8], [0.0, 0.1, 0.2, 0.3]


def main(args: argparse.Namespace, stand_in: Train | None = None) -> int:
    """``ctr-pe tune``.

    Args:
        args: model, pe, dataset, trials, out, space, set, seed, threads, gpu, data_root.
        stand_in: used in place of ``ctr_pe.training.train``.

    Raises:
        UserError: Optuna is not installed, a value that nothing takes, or a study of another search in ``out``.
    """
    try:
        import optuna
    except ImportError:
        raise UserError("ctr-pe tune needs Optuna: pip install 'ctr_pe[tune]'") from None
    from ctr_pe.study import find_dataset
    from ctr_pe.training import train

    optuna.logging.set_verbosity(optuna.logging.ERROR)  # what is to be said is said here
    params = _params(args)
    dataset = find_dataset(args.dataset, args.data_root, "heldout")
    space = search_space(args, params, dataset)
    out = Path(args.out or Path("results") / f"tune-{args.model}-{args.pe}-{dataset.dataset_id}")
    study = _study(args, params, dataset, space, out)
    objective = _Objective(args, params, dataset, space, stand_in or train)
    _say(f"{args.model} with {args.pe} on {dataset.dataset_id}: {', '.join(space)}; study in {out}")
    if done := len(_finished(study)):
        _say(f"{done} of {args.trials} trials are there already")
    try:
        while len(_finished(study)) < args.trials:  # other processes may add to the same study
            study.optimize(objective, n_trials=1, callbacks=[lambda _, trial: _say(_line(trial))])
    except KeyboardInterrupt:
        done = len(_finished(study))
        _say(f"stopped: {done} of {args.trials} trials are stored; repeat the same command to go on")
        return 130
    _report(args, study, out)
    return 0


def search_space(args: argparse.Namespace, params: Mapping[str, Any], dataset: Dataset) -> dict[str, Any]:
    """What is searched: key -> list of values, or {low, high, log} of a number.

    ``position_dim`` if the encoding has one, heads and dropout rates if the model has them, as far as the model can be
    built with them; ``--space`` adds, replaces, or with null removes.

    Raises:
        UserError: a value of ``--space`` that the model does not take.
    """
    from ctr_pe.config import parse_overrides
    from ctr_pe.training import model_class

    cls = model_class(args.model)
    keys = {name for base in cls.__mro__ if "__init__" in vars(base) for name in inspect.signature(base).parameters}
    space: dict[str, Any] = {}
    if "position_dim" in _encoding_options(args.pe, cls):
        space["position_dim"] = POSITION_DIMS
    if "num_heads" in keys:
        fits = [heads for heads in HEADS if not _problems(args, params, dataset, {"num_heads": heads})]
        if len(fits) < len(HEADS):
            _say(f"num_heads: only {', '.join(map(str, fits))} divide the items of {dataset.dataset_id}")
        space["num_heads"] = fits
    space |= {key: DROPOUTS for key in sorted(keys) if key.endswith("dropout")}
    given = parse_overrides(args.space)
    space = {key: value for key, value in {**space, **given}.items() if value is not None}
    for key in given.keys() & space.keys():
        values = space[key]
        if isinstance(values, dict):
            if not {"low", "high"} <= values.keys() <= {"low", "high", "log"}:
                raise UserError(f"--space {key}: write a list of values, or {{low: 1e-4, high: 1e-2, log: true}}")
            values = [values["low"], values["high"]]
        elif not isinstance(values, list) or not values:
            raise UserError(f"--space {key}: write a list of values, or {{low: 1e-4, high: 1e-2, log: true}}")
        for value in values:
            if found := _problems(args, params, dataset, {key: value}):
                raise UserError(f"--space {key}: {found[0]}")
    if not space:
        raise UserError("nothing to search: name hyper-parameters with --space KEY=[values]")
    return space


def _params(args: argparse.Namespace) -> dict[str, Any]:
    from ctr_pe.config import model_params, parse_overrides
    from ctr_pe.study import OWN_KEYS
    from ctr_pe.training import check_encoding, check_params

    overrides = parse_overrides(args.set)
    for key in {**overrides, **parse_overrides(args.space)}:
        if key in OWN_KEYS:
            raise UserError(f"{key}: {OWN_KEYS[key]}")
    check_encoding(args.pe)
    params = model_params(args.model, Path(args.dataset).name, overrides)
    params = {key: value for key, value in params.items() if key not in OWN_KEYS}
    check_params(args.model, {**params, **parse_overrides(args.space)})
    return params


def _encoding_options(pe: str, cls: Any) -> set[str]:
    import importlib

    from ctr_pe.pe import REGISTRY

    options: set[str] = set()
    for link in pe.split("+"):
        link = cls.native if link == "native" and isinstance(cls.native, str) else link
        if link in REGISTRY:
            module, _, name = REGISTRY[link].partition(":")
            options |= inspect.signature(getattr(importlib.import_module(module), name)).parameters.keys()
    return options


def _problems(
    args: argparse.Namespace, params: Mapping[str, Any], dataset: Dataset, changes: Mapping[str, Any]
) -> list[str]:
    from ctr_pe.checks import param_problems

    own = {"model": args.model, "dataset_id": dataset.path.name, "position_encoding": args.pe, "monitor": "AUC"}
    return list(param_problems({**params, **changes, **own}, dataset.path.parent))


def _study(
    args: argparse.Namespace, params: Mapping[str, Any], dataset: Dataset, space: Mapping[str, Any], out: Path
) -> optuna.Study:
    import optuna

    from ctr_pe.study.store import hash_of

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out}: {error.strerror}") from None
    fixed = {key: value for key, value in params.items() if key not in space}
    identity = hash_of({"fixed": fixed, "space": space, "data": dataset.data_hash, "pe": args.pe, "seed": args.seed})
    study = optuna.create_study(
        storage=f"sqlite:///{out / STUDY}",
        study_name=f"{args.model}-{args.pe}-{dataset.dataset_id}",
        direction="minimize" if params.get("monitor_mode") == "min" else "maximize",
        pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=1),
        load_if_exists=True,
    )
    if study.user_attrs.setdefault("identity", identity) != identity:
        raise UserError(f"{out}: a study of other hyper-parameters, data, seed or space: choose another --out")
    study.set_user_attr("identity", identity)
    # A sampler that began again at the same seed would draw the first trials a second time.
    study.sampler = optuna.samplers.TPESampler(seed=args.seed + len(study.trials))
    return study


class _Objective:
    """One trial: the monitor's best value on the validation rows."""

    def __init__(
        self,
        args: argparse.Namespace,
        params: Mapping[str, Any],
        dataset: Dataset,
        space: Mapping[str, Any],
        train: Train,
    ) -> None:
        self.args, self.params, self.dataset, self.space, self.train = args, params, dataset, space, train
        monitor = params.get("monitor", "AUC")
        self.weights: dict[str, float] = monitor if isinstance(monitor, dict) else {monitor: 1.0}
        self.better = min if params.get("monitor_mode") == "min" else max

    def __call__(self, trial: optuna.Trial) -> float:
        import optuna

        from ctr_pe.training import Run

        args, values = self.args, []
        chosen = {key: _suggest(trial, key, choices) for key, choices in self.space.items()}
        trial.set_user_attr("params", chosen)

        def progress(state: Mapping[str, Any]) -> None:
            if "valid" in state:
                value = sum(weight * state["valid"][name] for name, weight in self.weights.items())
                values.append(value)
                if math.isfinite(value):
                    trial.report(value, state["epoch"])
                if trial.should_prune():
                    raise optuna.TrialPruned

        run = Run(
            args.model,
            self.dataset.path,
            args.pe,
            args.seed,
            "heldout",
            {**self.params, **chosen},
            args.gpu,
            args.threads,
        )
        outcome = self.train(run, progress)
        trial.set_user_attr("test", outcome.metrics)
        trial.set_user_attr("epoch", outcome.epoch)
        return float(self.better(value for value in values if math.isfinite(value)))


def _suggest(trial: optuna.Trial, key: str, choices: Any) -> Any:
    if isinstance(choices, dict):
        low, high, log = choices["low"], choices["high"], bool(choices.get("log", False))
        if isinstance(low, int) and isinstance(high, int):
            return trial.suggest_int(key, low, high, log=log)
        return trial.suggest_float(key, low, high, log=log)
    named = {json.dumps(value): value for value in choices}  # the study stores no lists
    return named[str(trial.suggest_categorical(key, list(named)))]


def _finished(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))


def _line(trial: optuna.trial.FrozenTrial) -> str:
    chosen = _written(trial.user_attrs.get("params", {}))
    if "epoch" not in trial.user_attrs:
        return f"trial {trial.number}: pruned after epoch {max(trial.intermediate_values, default=0)}: {chosen}"
    return f"trial {trial.number}: {trial.value:.6f} at epoch {trial.user_attrs['epoch']}: {chosen}"


def _report(args: argparse.Namespace, study: optuna.Study, out: Path) -> None:
    """The best trial on the terminal and in ``best.yaml``; all of them in ``trials.csv``."""
    import csv

    import yaml

    best = study.best_trial
    chosen, test = best.user_attrs["params"], best.user_attrs["test"]
    report = {
        "model": args.model,
        "position_encoding": args.pe,
        "dataset": args.dataset,
        "trial": best.number,
        "params": chosen,
        "valid": best.value,
        "test": test,
    }
    (out / "best.yaml").write_text(yaml.safe_dump(report, sort_keys=False), encoding="utf-8")
    with open(out / "trials.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["trial", "state", "valid", "epoch", *[f"test_{name}" for name in test], *chosen])
        for trial in _finished(study):
            found = trial.user_attrs
            metrics = [found.get("test", {}).get(name, "") for name in test]
            values = [found["params"][key] for key in chosen]
            value = "" if trial.value is None else trial.value
            writer.writerow([trial.number, trial.state.name.lower(), value, found.get("epoch", ""), *metrics, *values])
    print(f"best of {len(_finished(study))} trials on the validation rows: trial {best.number}, {best.value:.6f}")
    print("test: " + "  ".join(f"{name} {value:.6f}" for name, value in test.items()))
    print(" ".join(f"--set '{key}={json.dumps(value)}'" for key, value in chosen.items()))
    print(f"{out}: best.yaml, trials.csv, {STUDY}", flush=True)


def _written(params: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in params.items())


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


__all__ = ["main", "search_space"]
