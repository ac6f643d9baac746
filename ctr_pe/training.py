"""One training run: a model, a data set, an encoding and a seed in; metrics and scores out."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ctr_pe.checks import check_encoding, check_params, model_class
from ctr_pe.data.dataset import Dataset, open_dataset
from ctr_pe.data.loader import BatchLoader
from ctr_pe.errors import UserError, nearest
from ctr_pe.evaluation import evaluate
from ctr_pe.fields import group_params

PROTOCOLS = {
    # what is trained on, what selects the epoch
    "heldout": (("train",), "valid"),
    "paper": (("train", "valid"), "test"),
}
Progress = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Run:
    """One training run. Equal runs give equal results, whatever else the machine does.

    ``protocol``: ``heldout`` trains on train and selects the epoch on valid; ``paper`` trains on train + valid and
    selects on test. ``params``: hyper-parameters under FuxiCTR's names. ``threads``: of this run; another number may
    change the last bits of the results. ``weights``: a file for those of the best epoch.
    """

    model: str
    dataset: Path
    pe: str
    seed: int
    protocol: str = "heldout"
    params: Mapping[str, Any] = field(default_factory=dict)
    gpu: int = -1
    threads: int = 1
    weights: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """``metrics`` on test, of the ``epoch`` (from 1) that was best on the selecting split; ``scores`` float32, one per
    test row in file order; ``seconds`` of training and evaluation; ``parameters`` of the model; ``auxiliary`` losses
    by name, means over the batches of the last epoch."""

    metrics: dict[str, float]
    epoch: int
    seconds: float
    scores: npt.NDArray[np.float32]
    parameters: int
    auxiliary: Mapping[str, float] = field(default_factory=dict)


def train(run: Run, progress: Progress | None = None) -> Outcome:
    """Train and evaluate on test.

    Args:
        progress: called with ``{"epoch", "batch", "batches"}`` now and then, and with ``{"epoch", "valid"}`` after
            each epoch, valid being the metrics that select.

    Raises:
        UserError: a bad data set, hyper-parameter, encoding or protocol, or weights that cannot be written.
    """
    if run.protocol not in PROTOCOLS:
        raise UserError(f"protocol '{run.protocol}' is unknown: {nearest(run.protocol, PROTOCOLS)}")
    start = time.perf_counter()
    torch.set_num_threads(run.threads)
    dataset = open_dataset(str(run.dataset))
    with tempfile.TemporaryDirectory(prefix="ctr-pe-") as folder:
        model = build_model(run, dataset, folder)
        feature_map, params = model.feature_map, run.params
        train_splits, select_split = PROTOCOLS[run.protocol]
        batch_size = int(params.get("batch_size", 1024))
        paths = [dataset.split(split) for split in train_splits]
        train_rows = BatchLoader(feature_map, paths, split="train", batch_size=batch_size, shuffle=True, seed=run.seed)
        select_rows = BatchLoader(feature_map, dataset.split(select_split), split="valid", batch_size=batch_size)
        test_rows = BatchLoader(feature_map, dataset.split("test"), split="test", batch_size=batch_size)

        reported = _Reporting(train_rows, model, progress)
        torch.manual_seed(run.seed + 1)  # dropout has a stream of its own, the same for every encoding
        model.fit(reported, epochs=int(params.get("epochs", 10)), validation_data=select_rows)
        labels, scores, groups = model.outputs(test_rows)
        if run.weights is not None:
            _keep(model, run.weights)
    metrics = tuple(name for name in ("gAUC", "AUC", "logloss") if name != "gAUC" or groups is not None)
    return Outcome(
        metrics=evaluate(labels, scores, groups, metrics),
        epoch=model.best_epoch,
        seconds=time.perf_counter() - start,
        scores=scores.astype(np.float32),
        parameters=sum(p.numel() for p in model.parameters()),
        auxiliary=model.auxiliary,
    )


def build_model(run: Run, dataset: Dataset, folder: str) -> Any:
    """The run's model with its initial weights, which depend on the seed; those of the backbone on nothing else."""
    params = {key: value for key, value in run.params.items() if key not in ("position_encoding", "model_root")}
    embedding_dim = int(params.get("embedding_dim", 64))
    torch.manual_seed(run.seed)
    np.random.seed(run.seed % 2**32)  # noqa: NPY002  FuxiCTR's pretrained embeddings draw from it
    return model_class(run.model)(
        dataset.feature_map(embedding_dim),
        model_id=f"{run.model}-{run.pe}",
        gpu=run.gpu,
        model_root=folder,
        position_encoding=run.pe,
        **group_params(dataset.groups),
        **params,
    )


def _keep(model: Any, file: Path) -> None:
    """Write the model's weights: all or nothing, also when two processes write the same file."""
    partial = file.with_suffix(f".{os.getpid()}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as stream:
            torch.save(model.state_dict(), stream)
        partial.replace(file)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None


class _Reporting:
    """The training batches, with a word to ``progress`` about every 1 % of an epoch and after each evaluation."""

    def __init__(self, rows: BatchLoader, model: Any, progress: Progress | None) -> None:
        self.rows, self.progress, self.epoch = rows, progress, 0
        if progress is not None:
            checkpoint = model.checkpoint_and_earlystop

            def report(logs: Mapping[str, float], *args: Any, **kwargs: Any) -> None:
                progress({"epoch": self.epoch, "valid": dict(logs)})
                checkpoint(logs, *args, **kwargs)

            model.checkpoint_and_earlystop = report

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.epoch += 1
        every = max(1, len(self) // 100)
        for index, batch in enumerate(self.rows):
            if self.progress is not None and index % every == 0:
                self.progress({"epoch": self.epoch, "batch": index, "batches": len(self)})
            yield batch


__all__ = ["PROTOCOLS", "Outcome", "Run", "build_model", "check_encoding", "check_params", "model_class", "train"]
