"""The models of a picture: those of a benchmark's store, before and after training, or new ones."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ctr_pe.config.yaml import model_params, next_item_params
from ctr_pe.data.loader import BatchLoader
from ctr_pe.data.synthetic.built_in import DEFAULT
from ctr_pe.models.sections import check_params, model_class
from ctr_pe.pe import check_encodings
from ctr_pe.sequence.batch import JaggedBatch
from ctr_pe.study.benchmark import find_dataset, refuse_own_keys, run_params
from ctr_pe.study.next_item import of_next_items
from ctr_pe.study.store import Result, Store
from ctr_pe.training import Run, build_model, load
from ctr_pe.utils.errors import UserError, nearest
from ctr_pe.utils.files import scratch_folder

if TYPE_CHECKING:
    from ctr_pe.data.dataset import Dataset


SEEDS = 5
"""Of new models, as many as a benchmark trains."""


@dataclass(frozen=True)
class Wanted:
    """The models to draw: with ``store``, the runs of a benchmark with these values, before and after training; else
    new ones. ``seed``: of the one run per encoding; by default all seeds of the store that all encodings have, else the
    first SEEDS. ``params``: hyper-parameters under FuxiCTR's names."""

    encodings: Sequence[str]
    store: Path | None = None
    model: str | None = None
    dataset: str | None = None
    seed: int | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    data_root: Path | None = None


@dataclass(frozen=True)
class Drawn:
    """One run of the encoding ``pe``: with ``weights`` and ``result`` if it is from a store. ``left_out``: runs of
    other seeds that are there and not drawn."""

    pe: str
    run: Run
    dataset: Dataset
    weights: Path | None = None
    result: Result | None = None
    left_out: int = 0

    @cached_property
    def before(self) -> Any:
        """The model before training."""
        with scratch_folder() as folder:
            return build_model(self.run, self.dataset, folder)

    @cached_property
    def after(self) -> Any:
        """The model after training. Raises UserError if the file holds other weights."""
        assert self.weights is not None
        model = replace(self).before
        load(model, self.weights)
        return model


def drawn(wanted: Wanted) -> tuple[Dataset, list[Drawn]]:
    """The runs to draw, encoding by encoding and seed by seed, and their data set.

    Raises:
        UserError: an unknown name, a store without the run or its weights, a data set that is missing or different.
    """
    for pe in wanted.encodings:
        check_encodings(pe)
    if wanted.model is not None:
        model_class(wanted.model)
    if wanted.store is None:
        return _fresh(wanted)
    store = Store(wanted.store)
    by_pe = [_choose(wanted, store, pe) for pe in wanted.encodings]
    _refuse_differing(f"{wanted.store}: the runs", [result for results in by_pe for result in results])
    common = set.intersection(*({result.seed for result in results} for results in by_pe))
    if not common:
        raise UserError(f"{wanted.store}: no seed at which {', '.join(wanted.encodings)} were all run")
    lacking = [one for of_pe in by_pe for one in of_pe if one.seed in common and not store.weights(one.key).exists()]
    seeds = common - {result.seed for result in lacking}
    if not seeds:
        one = min(lacking, key=lambda result: result.seed)
        runs = [replace(one, pe=pe, dataset=wanted.dataset or one.dataset) for pe in wanted.encodings]
        more = ("--keep-weights", "--out", f"{wanted.store}-weights")
        name, again = f"{one.model} {one.pe} seed {one.seed}", benchmark_command(runs, *more, root=wanted.data_root)
        raise UserError(f"{wanted.store}: the run of {name} was stored without weights: `{again}` makes them")
    first = by_pe[0][0]
    dataset = find_dataset(wanted.dataset or first.dataset, wanted.data_root, first.protocol)
    if dataset.data_hash != first.data_hash:
        raise UserError(f"{dataset.path}: not the data that the runs in {wanted.store} were trained on")
    found = []
    for of_pe in by_pe:
        for result in sorted((one for one in of_pe if one.seed in seeds), key=lambda one: one.seed):
            run = Run(result.model, dataset.path, result.pe, result.seed, result.protocol, result.params)
            left_out = len(of_pe) - len(seeds) if result.seed == min(seeds) else 0
            found.append(Drawn(result.pe, run, dataset, store.weights(result.key), result, left_out))
    return dataset, found


def some_requests(dataset: Dataset, model: Any, rows: int, longest: bool = False) -> JaggedBatch:
    """A random batch of test rows, the same at each call; ``longest``: those with the longest histories instead."""
    loader = BatchLoader(model.feature_map, dataset.split("test"), split="valid", batch_size=rows, shuffle=True)
    if not longest:
        return next(iter(loader))
    history = dataset.scan("test").select(model.groups[0].history[0]).collect().to_series()
    return loader.batch(np.argsort(-history.list.len().to_numpy().astype(np.int64), kind="stable")[:rows])


def _fresh(wanted: Wanted) -> tuple[Dataset, list[Drawn]]:
    model = wanted.model or "DIN"
    refuse_own_keys("--set", wanted.params)
    check_params(model, wanted.params)
    dataset = find_dataset(wanted.dataset or DEFAULT, wanted.data_root, "heldout")
    params = run_params(model, dataset.dataset_id, wanted.params)
    seeds = range(SEEDS) if wanted.seed is None else [wanted.seed]
    runs = [Run(model, dataset.path, pe, seed, params=params) for pe in wanted.encodings for seed in seeds]
    return dataset, [Drawn(str(run.pe), run, dataset) for run in runs]


def _choose(wanted: Wanted, store: Store, pe: str) -> list[Result]:
    """The runs of one encoding that match ``wanted``; they differ only in their seeds."""
    left = list(store.read().values())
    if not left:
        raise UserError(f"{wanted.store}: no results of a benchmark: `{_command(wanted)}` makes them")
    dataset = None if wanted.dataset is None else Path(wanted.dataset).name
    choice = {"model": wanted.model, "dataset": dataset, "pe": pe, "seed": wanted.seed}
    choice |= {f"set {key}": as_text(value) for key, value in wanted.params.items()}
    for option, value in choice.items():
        there = {_value(result, option) for result in left}
        if value is not None and str(value) not in there:
            what = f"with encoding '{pe}'" if option == "pe" else f"with {_flag(option, value)}"
            of = f"of '{pe}' " if option.startswith("set ") else ""
            raise UserError(f"{wanted.store}: no run {of}{what}: {nearest(value, there)}")
        left = [result for result in left if value is None or _value(result, option) == str(value)]
    _refuse_differing(f"{wanted.store}: the runs of '{pe}'", left, {key for result in left for key in result.params})
    return left


def _refuse_differing(runs: str, results: Sequence[Result], params: Iterable[str] = ()) -> None:
    """Refuse runs of different models, data or hyper-parameters ``params``."""
    for option in ("model", "dataset", "protocol", "data_hash", *(f"set {key}" for key in sorted(params))):
        values = sorted({_value(result, option) for result in results})
        if len(values) > 1:
            how = "a --run DIR with only one" if option in ("protocol", "data_hash") else f"with {_flag(option, '…')}"
            raise UserError(f"{runs} differ in {option.removeprefix('set ')} ({', '.join(values)}): choose {how}")


def _value(result: Result, option: str) -> str:
    """What a run has for an option; ``set KEY`` is a hyper-parameter."""
    kind, _, key = option.partition(" ")
    return as_text(result.params.get(key)) if kind == "set" else str(getattr(result, option))


def _flag(option: str, value: object) -> str:
    return f"--{option}{'=' if option.startswith('set ') else ' '}{value}"


def _command(wanted: Wanted) -> str:
    """The benchmark that makes the runs and keeps their weights."""
    options: dict[str, Any] = {"model": wanted.model, "pe": ",".join(wanted.encodings), "dataset": wanted.dataset}
    options |= {"seed": wanted.seed, "repeats": 1, "data-root": wanted.data_root}
    words = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    words += [word for key, value in wanted.params.items() for word in ("--set", f"{key}={as_text(value)}")]
    return shlex.join(["ctr-pe", "benchmark", *words, "--keep-weights", "--out", str(wanted.store)])


def benchmark_command(results: Collection[Result], *more: str, root: Path | None = None) -> str:
    """``ctr-pe benchmark`` for results that differ only in encoding and seed, with ``more`` options at the end."""
    first = next(iter(results))
    seeds = [result.seed for result in results]
    ranked = of_next_items(results)
    words = ["ctr-pe", "benchmark", *["--task", "next-item"] * ranked, "--model", first.model]
    words += ["--pe", ",".join(dict.fromkeys(result.pe for result in results))]
    words += ["--dataset", first.dataset, *([] if ranked else ["--protocol", first.protocol])]
    words += ["--seed", str(min(seeds))] * (min(seeds) > 0) + ["--repeats", str(max(seeds) - min(seeds) + 1)]
    words += ["--threads", str(first.threads)] * (first.threads != 1) + ["--gpu", str(first.gpu)] * (first.gpu >= 0)
    usual = (next_item_params if ranked else model_params)(first.model, first.dataset)
    for key, value in first.params.items():
        if key not in usual or as_text(usual[key]) != as_text(value):
            words += ["--set", f"{key}={as_text(value)}"]
    words += [] if root is None else ["--data-root", str(root)]
    return shlex.join([*words, *more])


def as_text(value: Any) -> str:
    """A value as ``--set KEY=VALUE`` takes it."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
