"""One run: a model, data, an encoding, a seed and parameters in; metrics, scores and the history of the epochs out.

``ctr-pe benchmark``, ``ctr-pe tune``, ``run_expid.py`` and scripts of your own all train through :func:`train`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ctr_pe.config.field_groups import field_value, group_params
from ctr_pe.config.yaml import model_params, next_item_params
from ctr_pe.data.dataset import Dataset
from ctr_pe.evaluation import evaluate
from ctr_pe.evaluation.metrics import without_groups
from ctr_pe.fuxictr.library import training_settings
from ctr_pe.models.sections import check_other_model, model_class, prefixes, registered_name, task_of
from ctr_pe.training.catalogue import check_task, give_catalogue
from ctr_pe.training.checkpoint import Checkpoint
from ctr_pe.training.deterministic import deterministic
from ctr_pe.training.loop import Epoch, Progress, fit
from ctr_pe.training.scoring import score
from ctr_pe.training.source import DataSource, check_monitor
from ctr_pe.training.weights import save
from ctr_pe.utils import devices, distributed, loggers
from ctr_pe.utils.errors import UserError, nearest
from ctr_pe.utils.files import scratch_folder

# What is trained on, and what selects the epoch.
PROTOCOLS = {"heldout": (("train",), "valid"), "paper": (("train", "valid"), "test")}


OF_RUN = {"model", "dataset_id", "position_encoding", "seed", "model_root", "debug_mode"}
"""Keys of a configuration that a :class:`Run` has fields for, or that say nothing of the training."""


@dataclass(frozen=True)
class Run:
    """One training run. Equal runs give equal results, whatever else the machine does.

    ``model``: a name of ``ctr-pe list``, or a subclass of RankModel. ``dataset``: the directory of one, or any source.
    ``pe``: an encoding, or one per field group. ``protocol``: ``heldout`` trains on train and selects the epoch on
    valid; ``paper`` trains on train + valid and selects on test. ``params``: all other hyper-parameters under FuxiCTR's
    names; without any, those of the model's packaged configuration, as in ``ctr-pe benchmark`` and ``CTRRanker``; with
    ``model_root`` the checkpoint stays there. ``threads``: of this run; another number may change the last bits of the
    results; 0 leaves it as it is. ``weights``: a file for those of the best epoch. ``keep``: called at the end with the
    model, this run, its source and the outcome; ``start``: called before the first step with the model and its source,
    to give it other weights than random ones; functions that can be pickled, if the run is to train in another process.
    ``track``: as the option ``--track``, see :mod:`ctr_pe.utils.loggers`; also a key of the parameters.
    ``resume``: a file for the state after each epoch, from which an equal run goes on if this process is killed; who
    has stored the outcome removes it.
    """

    model: str | type
    dataset: Path | DataSource
    pe: Any
    seed: int
    protocol: str = "heldout"
    params: Mapping[str, Any] = field(default_factory=dict)
    gpu: int = -1
    threads: int = 1
    weights: Path | None = None
    keep: Callable[[Any, Run, DataSource, Outcome], None] | None = None
    track: str | None = None
    start: Callable[[Any, DataSource], None] | None = None
    resume: Path | None = None

    def __post_init__(self) -> None:
        if not self.params:
            dataset = self.dataset.dataset_id if isinstance(self.dataset, DataSource) else self.dataset.name
            object.__setattr__(self, "params", default_params(self.model, dataset))


def default_params(model: str | type, dataset_id: str) -> dict[str, Any]:
    """The hyper-parameters of a model's packaged configuration that a :class:`Run` has no field for."""
    if isinstance(model, type) and task_of(model) == "next-item":
        params = next_item_params(registered_name(model), dataset_id)
    else:
        params = model_params(model, dataset_id)
    return {name: value for name, value in params.items() if name not in OF_RUN}


@dataclass(frozen=True)
class Outcome:
    """``metrics`` on test (none without test rows), of the ``epoch`` (from 1) that was best on the selecting split;
    ``scores`` float32, one per test row in file order, of a next-item model the rank of the row's item; ``seconds`` of
    training and evaluation; ``parameters`` of the model; ``auxiliary`` losses by name, means over the batches of the
    last epoch; ``valid``: metrics on the selecting split; ``history`` of the epochs; ``processor``: the name of the one
    it was trained on."""

    metrics: dict[str, float]
    epoch: int
    seconds: float
    scores: npt.NDArray[np.float32]
    parameters: int
    auxiliary: Mapping[str, float] = field(default_factory=dict)
    valid: Mapping[str, float] = field(default_factory=dict)
    history: tuple[Epoch, ...] = ()
    processor: str = ""


def train(run: Run, progress: Progress | None = None) -> Outcome:
    """Train and evaluate on test.

    ``progress``: as in :func:`~ctr_pe.training.fit`. Raises UserError for a bad data set, hyper-parameter, encoding,
    device or protocol, or weights that cannot be written; with the parameter ``deterministic``, for an operation that
    has no such form.

    In processes that ``torchrun`` has started, each trains on its share of every batch, all have the outcome, and the
    first writes the files and is told of the ``progress``.
    """
    if run.protocol not in PROTOCOLS:
        raise UserError(f"protocol '{run.protocol}' is unknown: {nearest(run.protocol, PROTOCOLS)}")
    track = run.track or run.params.get("track")
    with distributed.process_group(), deterministic(bool(run.params.get("deterministic"))):
        first = distributed.is_first()
        with loggers.watching(track if first else None, _name(run), lambda: _described(run)) as watch:
            return _train(run, progress if first else None, watch)


def _name(run: Run) -> str:
    """For trackers: what differs between runs in words, all else as a hash."""
    facts = json.dumps([str(run.dataset), run.protocol, dict(run.params)], sort_keys=True, default=str)
    digest = hashlib.blake2b(facts.encode(), digest_size=4).hexdigest()
    return f"{model_class(run.model).__name__}-{run.pe}-{run.seed}-{digest}"


def _described(run: Run) -> dict[str, Any]:
    dataset = run.dataset.dataset_id if isinstance(run.dataset, DataSource) else run.dataset.name
    own = {"model": model_class(run.model).__name__, "dataset": dataset, "position_encoding": run.pe, "seed": run.seed}
    return {**run.params, **own, "protocol": run.protocol, "threads": run.threads, "gpu": run.gpu}


def _train(run: Run, progress: Progress | None, watch: loggers.Watch | None) -> Outcome:
    start = time.perf_counter()
    if run.threads > 0:
        torch.set_num_threads(run.threads)
    source, params = DataSource.of(run.dataset), {**run.params, "seed": run.seed}
    # All that the state of a training depends on, but the code.
    facts = [_described(run), source.dataset and source.dataset.data_hash, distributed.processes()]
    identity = json.dumps(facts, sort_keys=True, default=str)
    run = replace(run, gpu=distributed.rank_gpu(run.gpu))
    if distributed.processes() > 1 and not hasattr(model_class(run.model), "build_encoding"):
        raise UserError(f"{model_class(run.model).__name__}: only models of ctr_pe train in several processes")
    with scratch_folder() as scratch:
        model = build_model(run, source, params.get("model_root") or scratch)
        if run.start is not None:
            run.start(model, source)
        train_on, select_on = PROTOCOLS[run.protocol]
        selecting, features = source.files.get(select_on, ""), model.feature_map
        check_monitor(selecting, features.labels[0], features.group_id, training_settings(model).monitor)
        model.count_parameters()  # into the log
        rows = source.batches(model.feature_map, train_on, params, train=True)
        validation = source.batches(model.feature_map, [select_on], params)
        # Dropout has a stream of its own, the same for every encoding.
        torch.manual_seed(distributed.rank_seed(run.seed + 1))
        checkpoint = None if run.resume is None else Checkpoint(run.resume, identity)
        epochs = int(params.get("epochs", 10))
        fitted = fit(model, rows, validation, epochs, progress=progress, watch=watch, checkpoint=checkpoint)
        metrics, scores = {}, np.zeros(0)
        if "test" in source.files:
            rows = source.batches(model.feature_map, ["test"], params)
            if hasattr(model, "measure"):
                metrics, scores, counts = model.measure(rows, model.validation_metrics)
                logging.info("Test: %s", ", ".join(f"{what} {count:,}" for what, count in counts.items()))
            else:
                found = score(model, rows)
                names = [name for name in model.validation_metrics if name != "gAUC" or found.groups is not None]
                metrics, scores = evaluate(found.labels, found.scores, found.groups, names, found.weights), found.scores
            if watch is not None:
                watch.evaluated("test", metrics)
        if run.weights is not None and distributed.is_first():
            save(model, run.weights)
    outcome = Outcome(
        metrics=metrics,
        epoch=fitted.best.number,
        seconds=fitted.before + time.perf_counter() - start,
        scores=scores.astype(np.float32),
        parameters=sum(p.numel() for p in model.parameters()),
        auxiliary=fitted.history[-1].auxiliary,
        valid=fitted.best.metrics,
        history=fitted.history,
        processor=devices.name_of(model.device),
    )
    if run.keep is not None and distributed.is_first():
        run.keep(model, run, source, outcome)
    return outcome


def build_model(run: Run, data: Dataset | DataSource, folder: str | Path) -> Any:
    """The run's model with its initial weights, which depend on the seed; those of the backbone on nothing else.

    Field groups are the data set's where the parameters name none. Checkpoints go below ``folder``.
    """
    source, cls = DataSource.of(data), model_class(run.model)
    check_task(cls, source.dataset)
    feature_map = source.feature_map({"embedding_dim": 64, **run.params})
    if not feature_map.group_id and (problem := next(without_groups(run.params), None)):
        raise UserError(problem)
    params: dict[str, Any] = {"model_id": _name(run), **run.params}
    params |= {"gpu": run.gpu, "model_root": folder, "position_encoding": run.pe}
    named = all(field_value(params, key, prefixes(cls)) for key in ("target_field", "sequence_field"))
    if source.dataset is not None and not named:
        fields = group_params(source.dataset.groups)
        params |= {**fields, "age_field": params.get("age_field") or fields["age_field"]}
    check_other_model(cls, feature_map, params)
    torch.manual_seed(run.seed)
    np.random.seed(run.seed % 2**32)  # noqa: NPY002  FuxiCTR's pretrained embeddings draw from it
    model = cls(feature_map, **params)
    if hasattr(model, "set_catalogue"):
        give_catalogue(model, source)
    return model
