"""A stand-in for ``ctr_pe.training.train`` that worker processes can import: quick, seeded, and faulty on demand."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ctr_pe.evaluation import evaluate
from ctr_pe.study.executors.local import LocalExecutor
from ctr_pe.study.runner import Job, run_all
from ctr_pe.study.store import Result, RunKey, Store, hash_of
from ctr_pe.utils.errors import Diverged, UserError

ROWS, USERS = 300, 40
STRENGTH = {"none": 0.3, "naive": 0.3, "rope": 0.5, "cope": 0.5, "cape": 3.0}
BEST_RATE = {"none": 1e-2, "cape": 1e-3}


@dataclass(frozen=True)
class Run:
    model: str
    pe: str
    seed: int
    params: Mapping[str, Any] = field(default_factory=dict)
    gpu: int = -1
    threads: int = 1


@dataclass(frozen=True)
class Epoch:
    number: int
    steps: int
    loss: float
    metrics: dict[str, float]
    seconds: float
    auxiliary: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    metrics: dict[str, float]
    epoch: int
    seconds: float
    scores: npt.NDArray[np.float32]
    parameters: int
    auxiliary: Mapping[str, float] = field(default_factory=dict)
    history: tuple[Epoch, ...] = ()
    processor: str = "made up"


def rows_of_test() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    random = np.random.default_rng(0)
    return random.integers(0, 2, ROWS), random.integers(0, USERS, ROWS)


def scores_of(pe: str, seed: int) -> npt.NDArray[np.float32]:
    labels, _ = rows_of_test()
    random = np.random.default_rng([seed, *pe.encode()])
    logits = STRENGTH[pe] * labels + random.normal(size=ROWS)
    return (1 / (1 + np.exp(-logits))).astype(np.float32)


def train(run: Run, progress: Callable[[Mapping[str, Any]], None]) -> Outcome:
    """params: ``log`` a file that gets a line per start, ``sleep`` seconds, ``fail`` encoding -> how."""
    if "log" in run.params:
        with open(run.params["log"], "a") as log:
            log.write(f"{run.pe} {run.seed}\n")
    for batch in range(2):
        progress({"epoch": 1, "batch": batch, "batches": 2})
        time.sleep(run.params.get("sleep", 0) / 2)
    progress({"epoch": 1, "valid": {"gAUC": 0.5}})
    match run.params.get("fail", {}).get(run.pe):
        case "user":
            raise UserError("no such column")
        case "diverge":
            raise Diverged("diverged in epoch 1, batch 2: the loss is nan")
        case "error":
            raise RuntimeError("first line\nsecond line")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
    labels, users = rows_of_test()
    scores = scores_of(run.pe, run.seed)
    epochs = tuple(Epoch(epoch, 2 * epoch, 0.7 - 0.1 * epoch, {"gAUC": 0.5}, 0.05) for epoch in (1, 2))
    return Outcome(evaluate(labels, scores, users), 2, 0.1, scores, 1000, history=epochs)


def train_on_data_set(run: Any, progress: Callable[[Mapping[str, Any]], None]) -> Outcome:
    """The same for a real ``Run``: random scores for the test rows of its data set."""
    train(run, progress)
    import polars as pl

    rows = pl.read_parquet(Path(run.dataset) / "test.parquet", columns=["label", "user_id"])
    scores = np.random.default_rng([run.seed, *run.pe.encode()]).random(len(rows), dtype=np.float32)
    return Outcome(evaluate(rows["label"].to_numpy(), scores, rows["user_id"].to_numpy()), 1, 0.1, scores, 10)


def jobs_of(
    pes: Sequence[str] = ("none", "cape"),
    seeds: int = 2,
    model: str = "DIN",
    dataset: str = "made_up",
    protocol: str = "heldout",
    **params: Any,
) -> list[Job]:
    return [
        Job(
            cast(Any, Run(model, pe, seed, params)),
            RunKey(model, dataset, protocol, hash_of(params), "d" * 32, pe, seed),
        )
        for seed in range(1, seeds + 1)
        for pe in pes
    ]


def result_of(key: RunKey, **changes: Any) -> Result:
    """What the runner would store for a key."""
    labels, users = rows_of_test()
    facts: dict[str, Any] = {
        "metrics": evaluate(labels, scores_of(key.pe, key.seed), users),
        "epoch": 2,
        "revision": "abc",
        "versions": {"ctr_pe": "0.1.0"},
        "seconds": 0.1,
        "threads": 1,
        "parameters": 1000,
        "finished": "2025-01-01T00:00:00+00:00",
    }
    return Result(**key._asdict(), **(facts | changes))


def fill(store: Store, jobs: Sequence[Job]) -> None:
    """Store made-up runs without processes."""
    store.save_rows("d" * 32, *rows_of_test())
    for job in jobs:
        finished = f"2025-01-01T00:00:00.{len(store.read()):06}+00:00"
        store.append(result_of(job.key, finished=finished), scores_of(job.key.pe, job.key.seed))


def append_many(folder: str, first_seed: int, count: int) -> None:
    """One of several processes that write to the same store."""
    store = Store(Path(folder))
    for job in jobs_of(["none"], first_seed + count - 1)[first_seed - 1 :]:
        store.append(result_of(job.key), scores_of("none", job.key.seed))


def run_in_background(folder: str, seeds: int, workers: int, sleep: float = 0.3) -> None:
    """For tests that kill it from outside."""
    path = Path(folder)
    run_all(
        jobs_of(seeds=seeds, sleep=sleep, log=str(path.with_suffix(".log"))), Store(path), LocalExecutor(train, workers)
    )  # type: ignore[arg-type]


def train_by_rate(run: Any, progress: Callable[[Mapping[str, Any]], None]) -> Outcome:
    """Random scores for the test rows; on the validation rows an encoding is the better the nearer its learning rate is
    to its ``BEST_RATE``, and one above .5 diverges."""
    rate = run.params["learning_rate"]
    if rate > 0.5:
        raise Diverged("diverged in epoch 1, batch 2: the loss is nan")
    outcome = train_on_data_set(run, progress)
    valid = 0.9 - abs(math.log10(rate / BEST_RATE[run.pe])) / 10
    epochs = [Epoch(1, 2, 0.7, {"gAUC": valid}, 0.05), Epoch(2, 4, 0.6, {"gAUC": valid - 0.2}, 0.05)]
    return dataclasses.replace(outcome, history=(*epochs, Epoch(3, 6, 0.5, {"gAUC": math.nan}, 0.05)))
