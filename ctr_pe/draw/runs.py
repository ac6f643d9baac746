"""The models of a picture: those of a benchmark's store, before and after training, or new ones."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ctr_pe.checks import check_encoding, check_params, model_class
from ctr_pe.config import model_params
from ctr_pe.data.loader import BatchLoader
from ctr_pe.errors import UserError, nearest
from ctr_pe.study.benchmark import find_dataset, refuse_own_keys, run_params
from ctr_pe.study.store import Result, Store
from ctr_pe.training import Run, build_model

if TYPE_CHECKING:
    from ctr_pe.data.dataset import Dataset

OPTIONS = ("model", "dataset", "protocol", "data_hash")
"""The runs of one picture agree in these."""


@dataclass(frozen=True)
class Wanted:
    """The models to draw: with ``store``, the runs of a benchmark with these values, before and after training; else
    new ones. ``params``: hyper-parameters under FuxiCTR's names."""

    encodings: Sequence[str]
    store: Path | None = None
    model: str | None = None
    dataset: str | None = None
    seed: int | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    data_root: Path | None = None


@dataclass(frozen=True)
class Drawn:
    """A model with one encoding ``before`` training, and ``after`` it if the run is from a store."""

    run: Run
    before: Any
    after: Any = None
    result: Result | None = None

    @property
    def pe(self) -> str:
        """The encoding's name."""
        return str(self.run.pe)


def drawn(wanted: Wanted) -> tuple[Dataset, list[Drawn]]:
    """The models, in the order of the encodings, and their data set.

    Raises:
        UserError: an unknown name, a store without the run or its weights, a data set that is missing or different.
    """
    for pe in wanted.encodings:
        check_encoding(pe)
    if wanted.model is not None:
        model_class(wanted.model)
    if wanted.store is None:
        return _fresh(wanted)
    store = Store(wanted.store)
    by_pe = [_choose(wanted, store, pe) for pe in wanted.encodings]
    if differing := _differing([result for results in by_pe for result in results]):
        raise UserError(f"{wanted.store}: the runs {_ask(differing)}")
    common = set.intersection(*({result.seed for result in results} for results in by_pe))
    if not common:
        raise UserError(f"{wanted.store}: no seed at which {', '.join(wanted.encodings)} were all run")
    results = [next(result for result in results if result.seed == min(common)) for results in by_pe]
    files = [_weights(wanted, store, result) for result in results]
    first = results[0]
    dataset = find_dataset(wanted.dataset or first.dataset, wanted.data_root, first.protocol)
    if dataset.data_hash != first.data_hash:
        raise UserError(f"{dataset.path}: not the data that the runs in {wanted.store} were trained on")
    found = []
    for result, file in zip(results, files, strict=True):
        run = Run(result.model, dataset.path, result.pe, result.seed, result.protocol, result.params)
        found.append(Drawn(run, _build(run, dataset), _trained(run, dataset, file), result))
    return dataset, found


def some_requests(dataset: Dataset, model: Any, rows: int) -> dict[str, torch.Tensor]:
    """A random batch of test rows, the same at each call."""
    file = dataset.split("test")
    batch: dict[str, torch.Tensor] = next(
        iter(BatchLoader(model.feature_map, file, split="valid", batch_size=rows, shuffle=True))
    )
    return batch


def _fresh(wanted: Wanted) -> tuple[Dataset, list[Drawn]]:
    model, overrides = wanted.model or "DIN", wanted.params
    refuse_own_keys("--set", overrides)
    check_params(model, overrides)
    dataset = find_dataset(wanted.dataset or "synthetic", wanted.data_root, "heldout")
    params = run_params(model, dataset.dataset_id, overrides)
    runs = [Run(model, dataset.path, pe, wanted.seed or 0, params=params) for pe in wanted.encodings]
    return dataset, [Drawn(run, _build(run, dataset)) for run in runs]


def _choose(wanted: Wanted, store: Store, pe: str) -> list[Result]:
    """The runs of one encoding that match ``wanted``; they differ only in their seeds."""
    every = list(store.read().values())
    if not every:
        command = ["ctr-pe", "benchmark", "--pe", ",".join(wanted.encodings)]
        for option in ("model", "dataset"):
            if getattr(wanted, option) is not None:
                command += [f"--{option}", getattr(wanted, option)]
        command += ["--repeats", "1", "--keep-weights", "--out", str(wanted.store)]
        raise UserError(f"{wanted.store}: no results of a benchmark: `{shlex.join(command)}` makes them")
    left = every
    dataset = None if wanted.dataset is None else Path(wanted.dataset).name
    for option, value in (("model", wanted.model), ("dataset", dataset), ("pe", pe), ("seed", wanted.seed)):
        there = {getattr(result, option) for result in left}
        if value is not None and value not in there:
            what = f"--{option} {value}" if option != "pe" else f"encoding '{value}'"
            raise UserError(f"{wanted.store}: no run with {what}: {nearest(value, there)}")
        left = [result for result in left if value in (None, getattr(result, option))]
    for key, value in wanted.params.items():
        there = {_text(result.params.get(key)) for result in left}
        if _text(value) not in there:
            raise UserError(
                f"{wanted.store}: no run of '{pe}' with --set {key}={_text(value)}: {nearest(value, there)}"
            )
        left = [result for result in left if _text(result.params.get(key)) == _text(value)]
    if differing := _differing(left, params=True):
        raise UserError(f"{wanted.store}: the runs of '{pe}' {_ask(differing)}")
    return left


def _differing(results: Sequence[Result], params: bool = False) -> dict[str, set[str]]:
    """Option -> values, if the runs differ in it; with ``params`` also hyper-parameters, as ``set KEY``."""
    values = {option: {str(getattr(result, option)) for result in results} for option in OPTIONS}
    for key in sorted({key for result in results for key in result.params} if params else ()):
        values[f"set {key}"] = {_text(result.params.get(key)) for result in results}
    return {option: found for option, found in values.items() if len(found) > 1}


def _ask(differing: Mapping[str, set[str]]) -> str:
    option, values = next(iter(differing.items()))
    choices = ", ".join(sorted(values))
    if option in ("protocol", "data_hash"):
        return f"differ in {option} ({choices}): choose a --run DIR with only one"
    equals = "=" if option.startswith("set ") else " "
    return f"differ in {option.removeprefix('set ')} ({choices}): choose with --{option}{equals}…"


def _weights(wanted: Wanted, store: Store, result: Result) -> Path:
    file = store.weights(result.key)
    if not file.exists():
        name, again = f"{result.model} {result.pe} seed {result.seed}", _command(wanted, result)
        raise UserError(f"{wanted.store}: the run of {name} was stored without weights: `{again}` makes them")
    return file


def _command(wanted: Wanted, result: Result) -> str:
    """The command that repeats a run and keeps its weights."""
    command = ["ctr-pe", "benchmark", "--model", result.model, "--pe", ",".join(wanted.encodings)]
    command += ["--dataset", wanted.dataset or result.dataset, "--protocol", result.protocol]
    command += ["--seed", str(result.seed), "--repeats", "1"]
    usual = model_params(result.model, result.dataset)
    for key, value in result.params.items():
        if key not in usual or _text(usual[key]) != _text(value):
            command += ["--set", f"{key}={_text(value)}"]
    if wanted.data_root is not None:
        command += ["--data-root", str(wanted.data_root)]
    return shlex.join([*command, "--keep-weights", "--out", f"{wanted.store}-weights"])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _build(run: Run, dataset: Dataset) -> Any:
    with tempfile.TemporaryDirectory(prefix="ctr-pe-") as folder:
        return build_model(run, dataset, folder)


def _trained(run: Run, dataset: Dataset, file: Path) -> Any:
    model = _build(run, dataset)
    try:
        model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    except Exception as error:  # torch raises many kinds for a damaged file
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{file}: not the weights of this model ({type(error).__name__}: {reason})") from None
    return model
